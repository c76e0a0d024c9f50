"""Decides what the next step runs: which sequences, which of their tokens, under a token budget.

One idea carries all of it: computed tokens catch up with known tokens. A long prompt catches up in
chunks, a cached prefix has caught up before it starts, a preempted sequence starts over, and a
decoding one is always exactly one token behind. (After vLLM v1's scheduler.) Torch-free; moves
block numbers, never bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.engine.blocks import BlockPool
from baton.engine.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one sequence."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the last known one, so that a new one is drawn."""
        return self.start + self.count == self.sequence.num_tokens


@dataclass
class Plan:
    """What one step runs: single-token rows first, then chunks."""

    work: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the step's batch."""
        return sum(item.count for item in self.work)


class Planner:
    """Owns the queue and the batch. Used by the engine thread only."""

    def __init__(self, blocks: BlockPool, chunk_tokens: int, max_batch: int) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.holding: deque[Sequence] = deque()  # like waiting, but with all their blocks already
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet."""
        return len(self.waiting) + len(self.holding)

    @property
    def queue_tokens(self) -> int:
        """Tokens known and not yet computed, over all sequences."""
        return sum(s.num_pending for s in (*self.waiting, *self.holding, *self.running))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; one that holds blocks already keeps them.

        Those go first: waiting behind one that needs blocks, they could keep it waiting for ever.
        """
        (self.holding if sequence.block_ids else self.waiting).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of queue and batch; its blocks stay with it."""
        for group in (self.running, self.holding, self.waiting):
            if sequence in group:
                group.remove(sequence)

    def reserve(self, sequence: Sequence, extra_tokens: int = 0) -> bool:
        """Gives a sequence blocks for its known tokens and some more, cached ones first.

        False, and nothing held, when there are not enough.
        """
        blocks = self.blocks
        if not sequence.block_ids:
            sequence.block_ids = blocks.match(sequence.tokens, sequence.cache_salt)
            sequence.num_computed = len(sequence.block_ids) * blocks.block_size
            if not sequence.preemptions:
                sequence.num_cached = sequence.num_computed
        if self._grow(sequence, extra_tokens):
            return True
        self.free(sequence)
        return False

    def free(self, sequence: Sequence) -> None:
        """Gives up a sequence's blocks; what it computed is computed no more."""
        self.blocks.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0

    def plan(self) -> Plan:
        """The next step. Decoding sequences go first, so that no prompt delays a stream's token."""
        plan = Plan()
        budget = self._chunk_tokens
        for sequence in self._by_pending():
            if budget == 0 or sequence not in self.running:  # preempted while planning
                continue
            if not self._make_room(sequence):
                continue
            budget -= self._append(plan, sequence, budget)
        while budget and len(self.running) < self._max_batch:
            queue = self.holding or self.waiting
            if not queue or not self.reserve(queue[0]):
                break
            sequence = queue.popleft()
            self.running.append(sequence)
            budget -= self._append(plan, sequence, budget)
        plan.work.sort(key=lambda work: work.count > 1)  # stable: single tokens first
        return plan

    def advance(self, work: Work) -> None:
        """Work has run: its tokens are computed, and full blocks may be shared from now on."""
        sequence, size = work.sequence, self.blocks.block_size
        assert sequence.num_computed == work.start, "work ran twice or out of order"
        sequence.num_computed += work.count
        self.publish(sequence, work.start // size)

    def publish(self, sequence: Sequence, first_block: int) -> None:
        """Shares the verified full blocks from `first_block` on."""
        size = self.blocks.block_size
        for index in range(first_block, sequence.num_computed // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            block_hash = sequence.hash_of(index, size)
            parent = sequence.parent_hash(index)
            self.blocks.publish(sequence.block_ids[index], block_hash, parent, tokens)

    def _by_pending(self) -> Iterator[Sequence]:
        yield from [s for s in self.running if s.num_pending == 1]
        yield from [s for s in self.running if s.num_pending > 1]

    def _append(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_pending, budget)
        plan.work.append(Work(sequence, sequence.num_computed, count))
        return count

    def _grow(self, sequence: Sequence, extra_tokens: int = 0) -> bool:
        """Adds blocks until all known tokens, and `extra_tokens` more, have a slot."""
        slots = sequence.num_tokens + extra_tokens
        missing = -(-slots // self.blocks.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        blocks = self.blocks.allocate(missing)
        if blocks is None:
            return False
        sequence.block_ids += blocks
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """Grows a running sequence, preempting the youngest ones; False if it was one of them."""
        while not self._grow(sequence):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
