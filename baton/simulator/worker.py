"""A simulated worker: the engine's rules for batches, chunks and blocks, without tokens.

It keeps the rules of `baton.engine.scheduler`, and uses the engine's own block manager and chunk
budget. Only events cost time here: as long as the same sequences decode and no prompt is computed,
all steps until the first of them ends are one event. What routers and other workers ask for happens
between two steps, as on an engine's thread.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.config import SimulatedSpeed
from baton.engine.block_manager import BlockManager
from baton.engine.busy_share import BusyShare
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import SEQUENCES_PER_PLACE
from baton.simulator.prompt import Prompt
from baton.v1 import worker_pb2

_SMOOTHING = 0.2  # of the mean step time that workers report

Then = Callable[[], None]


@dataclass(frozen=True)
class WorkerSpec:
    """What every worker of a simulated fleet is like."""

    speed: SimulatedSpeed
    num_blocks: int
    block_size: int = 16
    max_batch: int = 64
    chunk_tokens: int = 2048
    chunk_s: float = 0.06
    token_bytes: int = 0
    max_context: int = 1 << 20


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """A request on one worker, which computes its prompt, decodes it, or both.

    priority: earliest first, on the loop's clock · prompt_s: advance of virtual time ·
    new_tokens: to be sampled here · on_token: called at the first one, unless another worker
    samples that · on_end: called at the last one · hands_over: whether its blocks are kept until
    `release`, after its first token.
    """

    prompt: Prompt
    priority: float
    prompt_s: float
    new_tokens: int
    on_token: Then
    on_end: Then
    hands_over: bool = False
    arrival: int = 0
    num_tokens: int = field(init=False)  # known
    num_computed: int = 0
    num_cached: int = 0  # of its prompt, when it came
    block_ids: list[int] = field(default_factory=list)
    in_batch: bool = False
    is_registered: bool = False  # it counts among its worker's sequences
    has_token: bool = False
    last_token_at: float = 0.0  # of one that waits for its next one
    since: int = 0  # worker's step at which it began to decode
    end_step: int = 0  # worker's step with its last token

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt)

    @property
    def order(self) -> tuple[float, int]:
        return self.priority, self.arrival

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed


@dataclass(slots=True)
class _Steps:
    """Steps that run now, with the same sequences."""

    began: float
    count: int
    step_s: float  # of each
    chunks: list[tuple[SimulatedSequence, int]]  # prompts and how many of their tokens
    num_chunk_tokens: int
    num_decoding: int

    @property
    def num_tokens(self) -> int:
        return self.num_chunk_tokens + self.num_decoding


@dataclass(slots=True)
class WorkerTotals:
    """What a worker has done."""

    busy_s: float = 0.0
    steps: int = 0
    sequence_steps: int = 0  # sum over the steps of their decoding sequences
    prompt_tokens: int = 0  # computed
    generated: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


class SimulatedWorker:
    """One worker. Its methods that change anything take effect between two steps."""

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        on_change: Then,
        on_gap: Callable[[float, int], None],
    ) -> None:
        """`on_change`: called where its load has changed; `on_gap`: with the time between two
        tokens of a stream, and how many streams had it."""
        self.name, self.spec = name, spec
        self.totals = WorkerTotals()
        # One token a block: a prompt has one number for each block.
        self.blocks = BlockManager(spec.num_blocks, 1)
        self.chunk = ChunkBudget(spec.chunk_tokens, spec.chunk_s)
        self._loop = asyncio.get_running_loop()
        self._on_change, self._on_gap = on_change, on_gap
        self._commands: list[Then] = []
        self._steps: _Steps | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrivals = itertools.count(1)
        # Prompts, and sequences that were handed over and wait for a place in the batch; by order.
        self._prompts: list[tuple[float, int, SimulatedSequence]] = []
        self._ready: list[tuple[float, int, SimulatedSequence]] = []
        self._decoding: dict[SimulatedSequence, None] = {}
        self._ends: list[tuple[int, int, SimulatedSequence]] = []  # heap; some have left
        self._context = 0  # tokens of decoding sequences
        self._own_blocks = 0  # of decoding sequences, from before they decoded
        self._grown: list[int] = []  # blocks of all decoding sequences for their outputs
        # Those that have not run since their last token, which came from a prompt or a handoff.
        self._joined: dict[SimulatedSequence, None] = {}
        self._pushes = itertools.count()
        self._num_sequences = 0  # also reserved ones
        self._no_blocks = False  # for the first prompt without, when last asked
        self._lag_s = 0.0  # of virtual time behind the clock, as of the engine's scheduler
        self._step_ms = 0.0
        self._prompt_share = BusyShare()

    # What others ask for, between two steps.

    def add(self, sequence: SimulatedSequence) -> None:
        """Queues a prompt."""

        def run() -> None:
            self._register(sequence)
            self._queue(sequence)

        self._submit(run)

    def reserve(
        self,
        sequence: SimulatedSequence,
        start_tokens: int,
        answer: Callable[[bool | None], None],
    ) -> None:
        """Reserves blocks; `answer` gets whether the sequence has started, or None without room.

        It starts with at most `start_tokens` left to compute.
        """

        def run() -> None:
            full = self._num_sequences >= SEQUENCES_PER_PLACE * self.spec.max_batch
            without = [one for _, _, one in self._prompts if not one.block_ids]
            # As `Scheduler.lacks_blocks`; those that have a token were preempted.
            lacks = bool(without) and (self._no_blocks or any(one.has_token for one in without))
            if full or lacks or not self._reserve(sequence, 1):
                answer(None)
                return
            self._register(sequence)
            if starts := sequence.num_pending <= start_tokens:
                self._queue(sequence)
            answer(starts)

        self._submit(run)

    def resume(self, sequence: SimulatedSequence, last_token_at: float) -> None:
        """A reserved sequence has its KV and its first token, which came at that time."""

        def run() -> None:
            self._cache(sequence, sequence.num_computed, sequence.num_tokens)
            sequence.num_computed = sequence.num_tokens
            sequence.num_tokens += 1
            self._wait_for_next(sequence, last_token_at)

        self._submit(run)

    def release(self, sequence: SimulatedSequence) -> None:
        """Ends a sequence that has been handed over, or will not be."""

        self._submit(lambda: self._unregister(sequence))

    def drop(self, sequence: SimulatedSequence) -> None:
        """Ends a sequence wherever it is; one that was refused or has ended is left alone."""

        def run() -> None:
            if not sequence.is_registered:
                return
            entry = (*sequence.order, sequence)
            for queue in (self._prompts, self._ready):
                if entry in queue:
                    queue.remove(entry)
            if sequence in self._decoding:
                self._stop_decoding(sequence)
            self._joined.pop(sequence, None)
            self._unregister(sequence)

        self._submit(run)

    def _submit(self, command: Then) -> None:
        self._commands.append(command)
        if (steps := self._steps) is None:
            if self._timer is None:
                self._timer = self._loop.call_at(self._loop.time(), self._boundary)
        elif steps.count > 1:  # it happens at the end of the step that runs now
            passed = math.ceil((self._loop.time() - steps.began) / steps.step_s - 1e-9)
            count = max(1, min(steps.count, passed))
            if count < steps.count:
                steps.count = count
                assert self._timer is not None
                self._timer.cancel()
                when = steps.began + count * steps.step_s
                self._timer = self._loop.call_at(when, self._boundary)

    # Steps

    def _boundary(self) -> None:
        """Between two steps: what ran has ended, commands are run, and the next steps begin."""
        self._timer = None
        if (steps := self._steps) is not None:
            self._steps = None
            self._land(steps)
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        self._schedule()
        self._on_change()

    def _schedule(self) -> None:
        """Begins the next steps, if there is anything to run."""
        while self._ready and self._num_running < self.spec.max_batch:
            self._decode(self._ready.pop(0)[2])
        chunks = self._chunks() if self._prompts else []
        room = self._room_steps() if self._decoding else 0
        num_decoding = len(self._decoding)  # some may have been preempted
        if not (chunks or num_decoding):
            return
        count, prompt_tokens, attended = 1, 0, 0.0
        for one, tokens in chunks:
            prompt_tokens += tokens
            attended += tokens * (one.num_computed + tokens / 2)
        if not chunks:
            count = max(1, min(self._next_end() - self.totals.steps, room))
        context = self._context + num_decoding * (count - 1) / 2  # on average
        step_s = self.spec.speed.step_s(prompt_tokens, num_decoding, context, attended)
        now = self._loop.time()
        self._steps = _Steps(now, count, step_s, chunks, prompt_tokens, num_decoding)
        self._timer = self._loop.call_at(now + count * step_s, self._boundary)

    def _next_end(self) -> int:
        """The step in which the first decoding sequence ends."""
        while True:
            end_step, _, sequence = self._ends[0]
            if sequence in self._decoding and sequence.end_step == end_step:
                return end_step
            heapq.heappop(self._ends)

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + sum([one.in_batch for _, _, one in self._prompts])

    def _chunks(self) -> list[tuple[SimulatedSequence, int]]:
        """The prompts of the next step, by order, and how many of their tokens are computed."""
        budget = self.chunk.tokens if self._decoding else self.chunk.alone_tokens
        chunks, running, self._no_blocks = [], self._num_running, False
        for _, _, one in self._prompts:
            if budget <= 0:
                break
            if not one.in_batch and running >= self.spec.max_batch:
                continue
            if not one.block_ids and (self._no_blocks or not self._reserve(one)):
                self._no_blocks = True  # others that need some do not overtake it
                continue
            running += not one.in_batch
            one.in_batch = True
            tokens = min(one.num_pending, budget)
            chunks.append((one, tokens))
            budget -= tokens
        return chunks

    def _land(self, steps: _Steps) -> None:
        """Counts what steps have computed."""
        totals, count, num_decoding = self.totals, steps.count, steps.num_decoding
        totals.steps += count
        totals.busy_s += count * steps.step_s
        totals.prompt_tokens += steps.num_chunk_tokens
        if num_decoding:
            self._count_gaps(steps)
            self._context += num_decoding * count
            totals.generated += num_decoding * count
            totals.sequence_steps += num_decoding * count
            self._grow()
        if steps.chunks:
            self.chunk.record_step(steps, steps.step_s)
            self._prompt_share.add(
                self._loop.time(), max(0.0, steps.step_s - self._step_ms / 1e3 * bool(num_decoding))
            )
        else:
            weight = (1 - _SMOOTHING) ** count if self._step_ms else 0.0
            self._step_ms = self._step_ms * weight + steps.step_s * 1e3 * (1 - weight)
        ended_s = 0.0
        for sequence, tokens in steps.chunks:
            ended_s += self._computed(sequence, tokens)
        if steps.chunks and all(sequence.prompt_s for sequence, _ in steps.chunks):
            self._lag_s += steps.step_s - ended_s
        while self._ends and self._ends[0][0] <= totals.steps:
            end_step, _, sequence = heapq.heappop(self._ends)
            if sequence in self._decoding and sequence.end_step == end_step:
                self._stop_decoding(sequence)
                self._end(sequence)
        totals.peak_blocks = max(totals.peak_blocks, self.blocks.num_held)

    def _count_gaps(self, steps: _Steps) -> None:
        """Counts the times between tokens; for a sequence that came, since its last one."""
        came = [one for one in self._joined if one in self._decoding] if self._joined else []
        for sequence in came:
            del self._joined[sequence]
            self._on_gap(steps.began + steps.step_s - sequence.last_token_at, 1)
        self._on_gap(steps.step_s, steps.num_decoding * steps.count - len(came))

    def _computed(self, sequence: SimulatedSequence, tokens: int) -> float:
        """Counts a chunk; returns the virtual time by which a completed prompt advances it."""
        start, again, now = sequence.num_computed, sequence.has_token, self._loop.time()
        sequence.num_computed += tokens
        self._cache(sequence, start, sequence.num_computed)
        if sequence.num_pending:
            return 0.0
        self._prompts.remove((*sequence.order, sequence))
        sequence.in_batch = False
        self.totals.generated += 1
        sequence.num_tokens += 1
        sequence.new_tokens -= 1
        if again:
            self._joined.pop(sequence, None)
            self._on_gap(now - sequence.last_token_at, 1)
        else:
            sequence.has_token = True
            sequence.on_token()
        if sequence.new_tokens:
            self._wait_for_next(sequence, now)
        elif not sequence.hands_over:
            self._end(sequence)
        return 0.0 if again else sequence.prompt_s

    def _wait_for_next(self, sequence: SimulatedSequence, last_token_at: float) -> None:
        sequence.has_token, sequence.last_token_at = True, last_token_at
        self._joined[sequence] = None
        self._queue(sequence)

    def _end(self, sequence: SimulatedSequence) -> None:
        self._unregister(sequence)
        sequence.on_end()

    # Decoding sequences: their contexts and blocks are counted in sum.

    def _decode(self, sequence: SimulatedSequence) -> None:
        self._decoding[sequence] = None
        sequence.since = self.totals.steps
        sequence.end_step = self.totals.steps + sequence.new_tokens
        heapq.heappush(self._ends, (sequence.end_step, next(self._pushes), sequence))
        self._context += sequence.num_tokens
        self._own_blocks += len(sequence.block_ids)

    def _stop_decoding(self, sequence: SimulatedSequence) -> None:
        del self._decoding[sequence]
        sampled = self.totals.steps - sequence.since
        sequence.num_tokens += sampled
        sequence.new_tokens -= sampled
        self._context -= sequence.num_tokens
        self._own_blocks -= len(sequence.block_ids)
        self._grow()

    @property
    def _blocks_missing(self) -> float:
        """Blocks that decoding sequences need beyond those they came with; each has half a block
        that is not filled, on average."""
        whole = self._context / self.spec.block_size + len(self._decoding) / 2
        return max(0.0, whole - self._own_blocks)

    def _grow(self) -> None:
        """Takes or gives back blocks for outputs, as far as there are any."""
        more = math.ceil(self._blocks_missing) - len(self._grown)
        if more > 0:
            self._grown += self.blocks.allocate(min(more, self.blocks.num_available)) or []
        elif more < 0:
            self.blocks.release(self._grown[more:])
            del self._grown[more:]

    def _room_steps(self) -> int:
        """Steps for which there are blocks; the last sequences are preempted if there are none."""
        while True:
            rest = self.blocks.num_available + len(self._grown) - self._blocks_missing
            steps = int(rest * self.spec.block_size / len(self._decoding))
            if steps > 0 or len(self._decoding) == 1:
                return max(1, steps)
            self._preempt(max(self._decoding, key=lambda sequence: sequence.order))

    def _preempt(self, sequence: SimulatedSequence) -> None:
        self._stop_decoding(sequence)
        self.totals.preemptions += 1
        if sequence not in self._joined:
            self._joined[sequence], sequence.last_token_at = None, self._loop.time()
        self._free(sequence)
        self._queue(sequence)

    # Blocks

    def _register(self, sequence: SimulatedSequence) -> None:
        sequence.priority -= self._lag_s
        sequence.is_registered = True
        self._num_sequences += 1

    def _unregister(self, sequence: SimulatedSequence) -> None:
        self._free(sequence)
        sequence.is_registered = False
        self._num_sequences -= 1

    def _queue(self, sequence: SimulatedSequence) -> None:
        sequence.arrival = sequence.arrival or next(self._arrivals)
        queue = self._ready if sequence.has_token and sequence.block_ids else self._prompts
        insort(queue, (*sequence.order, sequence))

    def _reserve(self, sequence: SimulatedSequence, extra_tokens: int = 0) -> bool:
        """Takes blocks for a sequence's known tokens and further ones, cached ones first."""
        prompt, size = sequence.prompt, self.spec.block_size
        found = self.blocks.get_computed_blocks(prompt.units, "", prompt.hashes)
        needed = -(-(sequence.num_tokens + extra_tokens) // size)
        rest = self.blocks.allocate(max(0, needed - len(found)))
        if rest is None:
            self.blocks.release(found)
            return False
        sequence.block_ids = found + rest
        sequence.num_computed = len(found) * size
        if not sequence.has_token:
            sequence.num_cached = sequence.num_computed
        return True

    def _cache(self, sequence: SimulatedSequence, start: int, end: int) -> None:
        """Caches full blocks of the prompt; outputs are not, as no trace says who repeats them."""
        prompt, size = sequence.prompt, self.spec.block_size
        first, last = start // size, min(end // size, len(prompt.blocks))
        if first >= last:
            return
        hashes, blocks = prompt.leading_hashes(last), prompt.blocks
        parent = prompt.parent_of(first)
        for index in range(first, last):
            block_hash = hashes[index]
            self.blocks.cache_block(sequence.block_ids[index], block_hash, parent, (blocks[index],))
            parent = block_hash

    def _free(self, sequence: SimulatedSequence) -> None:
        self.blocks.release(sequence.block_ids)
        sequence.block_ids, sequence.num_computed = [], 0

    @property
    def prefill_share(self) -> float:
        """The share of its time that it spends on prompts, which falls with time."""
        return self._prompt_share.share(self._loop.time())

    def load(self) -> worker_pb2.Load:
        """What it reports to routers: between two changes only the prefill share changes."""
        queued = in_batch = 0
        for _, _, one in self._prompts:
            queued += one.num_tokens - one.num_computed
            in_batch += one.in_batch
        num_ready, num_decoding, totals = len(self._ready), len(self._decoding), self.totals
        return worker_pb2.Load(
            queue_tokens=queued + num_ready + num_decoding,
            running=num_decoding + in_batch,
            waiting=num_ready + len(self._prompts) - in_batch,
            blocks_total=self.spec.num_blocks,
            blocks_free=self.blocks.num_free,
            blocks_cached=self.blocks.num_cached,
            blocks_held=self.blocks.num_held,
            prefill_tokens_per_s=self.chunk.tokens_per_s,
            step_ms=self._step_ms,
            steps=totals.steps,
            preemptions=totals.preemptions,
            tokens_computed=totals.prompt_tokens + totals.generated,
            tokens_generated=totals.generated,
            chunk_tokens=self.chunk.tokens,
            prefill_share=self.prefill_share,
        )
