"""Every sequence on an engine, in whatever state, and whether another may be admitted."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.planner import Planner
from baton.engine.runner import StepRunner
from baton.engine.sequence import Sequence
from baton.errors import Overloaded, Stale


@dataclass(frozen=True)
class Reserved:
    """Blocks held for a sequence: those of the first `num_cached` tokens are filled already."""

    num_cached: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """The engine's load after a step."""

    queue_tokens: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_quarantined: int
    steps: int
    preemptions: int


# Reserved, waiting and running sequences for each place in the batch. Without a bound, sequences
# whose KV has come would pile up and wait too long for their next token.
SEQUENCES_PER_PLACE = 2
RETRY_S = 0.2  # advised when there is no room: room comes whenever a sequence ends


class SequenceTable:
    """Sequences by id, from the moment they are accepted until their blocks are freed.

    `Engine` documents each method. Engine thread only.
    """

    def __init__(self, planner: Planner, runner: StepRunner) -> None:
        self._planner = planner
        self._runner = runner
        self._blocks = planner.blocks
        self._sequences: dict[str, Sequence] = {}

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def holds(self, sequence: Sequence) -> bool:
        """Whether this very sequence is here, and not another of its id."""
        return self._sequences.get(sequence.seq_id) is sequence

    def add(self, sequence: Sequence) -> None:
        self._accept(sequence)
        self._planner.add(sequence)

    def reserve(self, sequence: Sequence) -> Reserved:
        self._check_room()
        self._accept(sequence)
        if not self._planner.reserve(sequence, extra_tokens=1):
            del self._sequences[sequence.seq_id]
            raise Overloaded(
                f"{sequence.num_tokens} tokens do not fit: {self._blocks.num_available} of "
                f"{self._blocks.num_blocks} KV blocks are available",
                RETRY_S,
            )
        # Others write there, and know nothing of steps that run here.
        self._runner.wait_for_writes(sequence.block_ids)
        sequence.awaits_kv = True
        return Reserved(sequence.num_computed, tuple(sequence.block_ids))

    def start_reserved(self, seq_id: str) -> None:
        sequence = self._find(seq_id)
        sequence.awaits_kv = False
        self._planner.add(sequence)

    def resume(self, seq_id: str, num_computed: int, token_id: int) -> None:
        sequence = self._find(seq_id)
        assert num_computed == sequence.num_tokens, "a handoff covers every known token"
        self._planner.publish(sequence, sequence.num_computed, num_computed)
        sequence.num_computed = num_computed
        sequence.awaits_kv = False
        sequence.tokens.append(token_id)
        sequence.new_tokens += 1
        self._planner.add(sequence)

    def halt(self, seq_id: str) -> None:
        if sequence := self._sequences.get(seq_id):
            self._planner.remove(sequence)

    def release(self, seq_id: str, quarantine_from: int | None) -> list[int]:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return []
        quarantined: list[int] = []
        if quarantine_from is not None:
            quarantined = sequence.block_ids[quarantine_from:]
            sequence.block_ids = sequence.block_ids[:quarantine_from]
            self._blocks.quarantine(quarantined)
        if sequence.awaits_kv:
            first = sequence.num_computed // self._blocks.block_size
            self._runner.scrub(sequence.block_ids[first:])
        self.drop(sequence)
        return quarantined

    def readmit(self, blocks: list[int]) -> None:
        self._runner.scrub(blocks)
        self._blocks.readmit(blocks)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its blocks."""
        self._planner.remove(sequence)
        self._planner.free(sequence)
        del self._sequences[sequence.seq_id]

    def load(self, steps: int) -> Load:
        """The load now, after so many steps."""
        blocks, planner = self._blocks, self._planner
        return Load(
            planner.queue_tokens, len(planner.running), planner.num_waiting, blocks.num_blocks,
            blocks.num_free, blocks.num_cached, blocks.num_held, blocks.num_quarantined,
            steps, planner.preemptions,
        )  # fmt: skip

    def _accept(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sequences, "sequence ids are unique"
        needed = -(-(sequence.num_tokens + 1) // self._blocks.block_size)
        if needed > self._blocks.num_blocks:
            raise Overloaded(
                f"the sequence needs {needed} KV blocks and the pool has {self._blocks.num_blocks}"
            )
        self._sequences[sequence.seq_id] = sequence

    def _check_room(self) -> None:
        """Raises Overloaded while the sequences that are here have too little room themselves."""
        most = SEQUENCES_PER_PLACE * self._planner.max_batch
        if len(self._sequences) >= most:
            raise Overloaded(f"all {most} places for sequences are taken", RETRY_S)
        if self._planner.waiting:  # preempted ones; newcomers must not take the blocks they need
            raise Overloaded("sequences that run here wait for KV blocks", RETRY_S)

    def _find(self, seq_id: str) -> Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise Stale(f"sequence {seq_id} is not on this engine")
        return sequence
