"""The engine: what other threads ask of its thread (`loop.py`), as commands that return futures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from baton.engine.adapters import LoraAdapter
from baton.engine.loop import EngineLoop
from baton.engine.sequence import Sequence
from baton.engine.step_report import Load
from baton.errors import Overloaded, Stale
from baton.kv_groups import NO_BLOCK, held

P = ParamSpec("P")
T = TypeVar("T")

# Reserved, waiting and running sequences for each place in the batch. Without a bound, sequences
# whose KV has come would pile up and wait too long for their next token.
SEQUENCES_PER_PLACE = 2
RETRY_S = 0.2  # advised when there is no room: room comes whenever a sequence ends


@dataclass(frozen=True)
class Reserved:
    """Blocks held for a sequence (`Sequence.handoff_blocks`); those of its first `num_cached`
    tokens are filled.

    started: it runs already, and needs no `resume`.
    """

    num_cached: int
    block_ids: tuple[int, ...]
    started: bool


@dataclass(eq=False, frozen=True)
class UnverifiedKv:
    """KV of `num_tokens` on which a sequence runs before it is verified.

    Its blocks, the sequence's `block_ids` from entry `first` on, are held until then. start: its
    first position.
    """

    sequence: Sequence
    num_tokens: int
    start: int
    first: int
    block_ids: list[int]


def _command(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[Engine, P], Future[T]]:
    """Makes a method run on the engine thread: see `Engine.submit`."""

    @functools.wraps(method)
    def submit(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return engine.submit(lambda: method(engine, *args, **kwargs))

    return submit


class Engine(EngineLoop):
    """Runs sequences until they finish. Commands are thread-safe and return futures."""

    @_command
    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Fails with Overloaded if the pool could never hold it."""
        self._register(sequence)
        self._scheduler.add(sequence)

    @_command
    def reserve(self, sequence: Sequence, start_tokens: int = 0) -> Reserved:
        """Holds blocks for a sequence that `resume` starts later.

        start_tokens: a sequence with at most this many tokens left to compute starts at once. Fails
        with Overloaded when there is no room now.
        """
        most = SEQUENCES_PER_PLACE * self._scheduler.max_batch
        if len(self._sequences) >= most:
            raise Overloaded(f"all {most} places for sequences are taken", RETRY_S)
        if self._scheduler.lacks_blocks:
            raise Overloaded("sequences that run here wait for KV blocks", RETRY_S)
        self._register(sequence)
        self._scheduler.use_cache(sequence)
        starts = self._scheduler.num_to_compute(sequence) <= start_tokens
        sequence.awaits_kv = not starts
        if not self._scheduler.reserve(sequence, extra_tokens=1):
            self._unregister(sequence)
            raise Overloaded(
                f"{sequence.num_tokens} tokens do not fit: {self._blocks.num_available} of "
                f"{self._blocks.num_blocks} KV blocks are available",
                RETRY_S,
            )
        blocks = sequence.handoff_blocks(sequence.num_tokens, self._blocks.block_size)
        reserved = Reserved(sequence.num_computed, tuple(blocks), starts)
        if starts:
            self._scheduler.add(sequence)
        else:
            # The writers are other processes, which are not ordered with steps that run here.
            self._runner.wait_for_writes(held(blocks))
        return reserved

    @_command
    def resume(
        self, seq_id: str, num_computed: int, token_id: int, verified: bool = True
    ) -> UnverifiedKv:
        """Starts a reserved sequence, whose KV is complete up to `num_computed`, with `token_id`.

        Unverified KV has to be followed by `accept` or `discard`; no block is cached before.
        """
        sequence = self._find(seq_id)
        assert num_computed == sequence.num_tokens, "a handoff covers every known token"
        start, first = sequence.num_computed, self._entry(sequence.num_computed)
        kv = UnverifiedKv(sequence, num_computed, start, first, sequence.block_ids[first:])
        if verified:
            self._scheduler.cache_blocks(sequence, start, num_computed)
        else:
            self._blocks.hold(held(kv.block_ids))
            sequence.unverified = True
        sequence.num_computed = num_computed
        sequence.awaits_kv = False
        sequence.num_scored = None  # scored by the worker that computed the KV
        sequence.tokens.append(token_id)
        sequence.new_tokens += 1
        self._scheduler.add(sequence)
        return kv

    @_command
    def accept(self, kv: UnverifiedKv) -> None:
        """The KV is verified: its blocks, and those computed meanwhile, can be cached."""
        sequence = kv.sequence
        sequence.unverified = False
        if not sequence.dropped:
            end = sequence.num_computed - sequence.awaits_token  # without a step in flight
            self._scheduler.cache_blocks(sequence, kv.start, end)
        else:
            sequence.block_ids = [NO_BLOCK] * kv.first + kv.block_ids
            self._scheduler.cache_blocks(sequence, kv.start, kv.num_tokens)
            sequence.block_ids = []
        self._blocks.release(kv.block_ids)

    @_command
    def discard(self, kv: UnverifiedKv) -> None:
        """The KV is not what was sent: zeroes its blocks and ends its sequence."""
        sequence, wrong = kv.sequence, kv.block_ids
        if not sequence.dropped:
            later = sequence.block_ids[kv.first :]
            if later[: len(wrong)] == wrong:  # it was not preempted
                wrong = later  # what was computed from wrong KV is wrong, too
            self._drop(sequence)
        self._runner.zero_blocks(held(wrong))
        self._blocks.release(kv.block_ids)

    @_command
    def pause(self, seq_id: str) -> None:
        """Takes a sequence out of the batch; it keeps its blocks until `release`.

        Ignores unknown ids.
        """
        if sequence := self._sequences.get(seq_id):
            self._scheduler.remove(sequence)

    @_command
    def release(self, seq_id: str, quarantine_from: int | None = None) -> list[int]:
        """Ends a sequence in any state and frees its blocks; unknown ids are ignored.

        Blocks of positions from `quarantine_from` on are quarantined instead, and returned for
        `end_quarantine`.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return []
        quarantined: list[int] = []
        if quarantine_from is not None:
            first = self._entry(quarantine_from)
            quarantined = held(sequence.block_ids[first:]) + sequence.state_blocks
            sequence.block_ids, sequence.state_blocks = sequence.block_ids[:first], []
            self._blocks.quarantine(quarantined)
        if sequence.awaits_kv:
            first = self._entry(sequence.num_computed)
            self._runner.zero_blocks(held(sequence.block_ids[first:]))
        self._drop(sequence)
        return quarantined

    @_command
    def end_quarantine(self, blocks: list[int]) -> None:
        """Zeroes and frees quarantined blocks, whose writers have ended."""
        self._runner.zero_blocks(blocks)
        self._blocks.end_quarantine(blocks)

    @_command
    def load(self) -> Load:
        return self._load()

    @_command
    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Makes an adapter usable. Fails with Overloaded, InvalidRequest when there is no slot."""
        slot = self._adapters.add(adapter.identity)
        try:
            self._runner.write_lora(slot, adapter)
        except BaseException:
            self._adapters.remove(adapter.identity)
            raise

    @_command
    def retire_adapter(self, identity: str) -> Future[None]:
        """Gives an adapter to no further sequence; the result is done once none uses it."""
        return self._adapters.retire(identity)

    @_command
    def keep_adapter(self, identity: str) -> int:
        """Undoes `retire_adapter`; the number of sequences that use the adapter."""
        return self._adapters.keep(identity)

    @_command
    def remove_adapter(self, identity: str) -> None:
        """Frees the slot of a retired adapter that no sequence uses."""
        self._adapters.remove(identity)

    def _register(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sequences, "sequence ids are unique"
        step_tokens = self._scheduler.chunk.max_tokens
        needed = self._blocks.groups.most_blocks(sequence.num_tokens + 1, step_tokens)
        if needed > self._blocks.num_blocks:
            raise Overloaded(
                f"the sequence needs {needed} KV blocks and the pool has {self._blocks.num_blocks}"
            )
        if sequence.adapter:
            sequence.lora_slot = self._adapters.acquire(sequence.adapter)
        self._sequences[sequence.seq_id] = sequence
        sequence.priority -= self._scheduler.virtual_lag_s
        params = sequence.params
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        sequence.ends = eos | params.stop_token_ids if params.stop_token_ids else eos
        sequence.limit = sequence.num_tokens + sequence.tokens_left(self._max_context)

    def _entry(self, position: int) -> int:
        """Where blocks of a position that begins a block are in `Sequence.block_ids`."""
        return position // self._blocks.block_size * len(self._blocks.groups)

    def _find(self, seq_id: str) -> Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise Stale(f"sequence {seq_id} is not on this engine")
        return sequence
