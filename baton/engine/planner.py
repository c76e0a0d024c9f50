"""Decides what the next step runs: which sequences, which of their tokens, under a token budget.

One idea carries all of it: computed tokens catch up with known tokens. A long prompt catches up in
chunks, a cached prefix has caught up before it starts, a preempted sequence starts over, and a
decoding one is always exactly one token behind. (After vLLM v1's scheduler.) Those that are one
token behind all get their token, whatever the budget: the batch bounds them. The others share the
budget of a step, earliest due first, so that a short prompt overtakes a long one between two chunks
and, because no due ever changes, nobody is overtaken for ever. What budget is left when everybody
has had a turn goes to drafts, guesses of the tokens behind the last known ones. A step so has at
most `chunk_tokens + max_batch` rows. Torch-free; moves block numbers, never bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from baton.engine.blocks import BlockPool
from baton.engine.due import DueQueue
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import Drafter, Drafting


@dataclass(frozen=True)
class Work:
    """Tokens [start, start + count) of one sequence, the last of which may be drafts."""

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()  # tokens guessed behind the known ones; `count` includes them

    @property
    def samples(self) -> bool:
        """Whether the last known token is one of these, so that a new one is drawn."""
        return self.start + self.count == self.sequence.num_tokens + len(self.draft)


@dataclass
class Plan:
    """What one step runs: single-token rows first, then chunks.

    joining: single tokens of newcomers that will be in the next plan, if not in this one. Only
    planners that look ahead leave some there, for runners that are ahead of them.
    """

    work: list[Work] = field(default_factory=list)
    joining: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the step's batch."""
        return sum(item.count for item in self.work)

    @property
    def num_drafts(self) -> int:
        """How many of them are guesses."""
        return sum(len(item.draft) for item in self.work)

    def join(self) -> None:
        """Takes newcomers in now."""
        self.work += self.joining
        self.joining = []


class Planner:
    """Owns the queue and the batch. Used by the engine thread only."""

    def __init__(
        self,
        blocks: BlockPool,
        chunk_tokens: int,
        max_batch: int,
        drafting: Drafting | None = None,
        lookahead: int = 0,
    ) -> None:
        """lookahead: slots that decoding sequences get beforehand, for tokens behind the known."""
        self.blocks = blocks
        self.drafting = drafting
        self.max_batch = max_batch
        self.running = DueQueue()
        self.ready = DueQueue()  # have all their blocks, and one token to compute
        self.holding = DueQueue()  # have all their blocks, and several tokens to compute
        self.waiting = DueQueue()  # need blocks
        self.preemptions = 0
        self._chunk_tokens = chunk_tokens
        self._lookahead = lookahead
        self._arrivals = itertools.count(1)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet."""
        return len(self.waiting) + len(self.holding) + len(self.ready)

    @property
    def queue_tokens(self) -> int:
        """Tokens known and not yet computed, over all sequences."""
        queued = self.waiting.tokens + self.holding.tokens + self.ready.tokens
        return queued + sum(sequence.num_pending for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; one that holds blocks already keeps them.

        Those do not queue behind one that needs blocks: it might wait for theirs, for ever.
        """
        sequence.arrival = next(self._arrivals)
        if not sequence.block_ids:
            self.waiting.add(sequence)
        else:
            (self.ready if sequence.num_pending == 1 else self.holding).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of queue and batch; its blocks stay with it."""
        for group in (self.running, self.ready, self.holding, self.waiting):
            if group.discard(sequence):
                return

    def reserve(self, sequence: Sequence, extra_tokens: int = 0) -> bool:
        """Gives a sequence blocks for its known tokens and some more, cached ones first.

        False, and nothing held, when there are not enough.
        """
        blocks = self.blocks
        if not sequence.block_ids:
            sequence.block_ids = blocks.match(
                sequence.tokens, sequence.cache_salt, sequence.block_hashes
            )
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
        running = set(self.running) if self._lookahead else set()
        self._decode(plan)
        budget = self._catch_up(plan, self._chunk_tokens)
        if self.drafting is not None:
            self._draft(plan, budget, self.drafting)
        if self._lookahead:
            self._look_ahead(plan, running)
        plan.work.sort(key=lambda work: work.count > 1)  # stable: single tokens first
        return plan

    def advance(self, work: Work, drawn: Tokens[int] = ()) -> None:
        """Work has run: its tokens are computed, and full blocks may be shared from now on.

        Of `drawn`, which the sequence has got by it and knows by now, all but the last stood in the
        draft. The KV of what else stood there is in slots that the next step writes again.
        """
        sequence, size = work.sequence, self.blocks.block_size
        assert sequence.num_computed == work.start, "work ran twice or out of order"
        sequence.num_computed += work.count - len(work.draft) + max(0, len(drawn) - 1)
        assert sequence.num_computed <= sequence.num_tokens, "only known tokens are computed"
        self.publish(sequence, work.start // size)
        if sequence.drafter is not None:
            sequence.drafter.learn(drawn)

    def ran(self, plan: Plan, seconds: float) -> None:
        """A step took so long."""
        if self.drafting is not None:
            drafts = plan.num_drafts
            self.drafting.costs.took(plan.num_tokens - drafts, drafts, seconds)

    def publish(self, sequence: Sequence, first_block: int) -> None:
        """Shares the verified full blocks from `first_block` on."""
        size = self.blocks.block_size
        for index in range(first_block, sequence.num_computed // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            block_hash = sequence.hash_of(index, size)
            parent = sequence.parent_hash(index)
            self.blocks.publish(sequence.block_ids[index], block_hash, parent, tokens)

    def _decode(self, plan: Plan) -> None:
        """Plans the running sequences that are one token behind.

        Who is preempted meanwhile is due later than all that are planned already.
        """
        for sequence in [s for s in self.running if s.num_pending == 1]:
            # One without blocks was preempted a moment ago.
            if sequence.block_ids and self._make_room(sequence):
                _append(plan, sequence, 1)

    def _catch_up(self, plan: Plan, budget: int) -> int:
        """Plans all others, earliest due first, and takes new ones into the batch on the way; what
        is left of the budget.

        Those who are ready are one token behind, and take nothing of the budget. The first of the
        waiting that finds no blocks is not passed by others that need some: they could keep it out
        for ever.
        """
        behind = self._behind()
        groups = [behind, self.ready, self.holding, self.waiting]
        while groups := [group for group in groups if group]:
            group = min(groups, key=lambda group: group.first.turn)
            sequence = group.first
            room = 1 if group is self.ready else budget
            full = group is not behind and len(self.running) >= self.max_batch
            if room <= 0 or full or (group is self.waiting and not self.reserve(sequence)):
                groups.remove(group)
                continue
            group.discard(sequence)
            if group is not behind:
                self.running.add(sequence)
            count = _append(plan, sequence, room)
            budget -= 0 if group is self.ready else count
        return budget

    def _draft(self, plan: Plan, budget: int, drafting: Drafting) -> None:
        """Adds drafts to those who are one token behind, where they pay, budget and blocks allow.

        A step that computes a prompt, too, has so many rows that a further one hardly ever pays.
        """
        if not plan.work:
            return
        price = drafting.costs.price(plan.num_tokens)
        for at, work in enumerate(plan.work):
            sequence = work.sequence
            if work.count > 1 or not work.samples:
                continue
            # One token is drawn behind the last draft.
            left = sequence.tokens_left(drafting.max_context) - 1
            if (most := min(drafting.most, budget, left)) < 1:
                continue
            if sequence.drafter is None:
                sequence.drafter = Drafter()
            draft = sequence.drafter.draft(sequence.tokens, most, price)
            if draft := draft[: self._room_behind(sequence, len(draft))]:
                plan.work[at] = Work(sequence, work.start, 1 + len(draft), draft)
                budget -= len(draft)

    def _look_ahead(self, plan: Plan, running: set[Sequence]) -> None:
        """Lets a runner compute the next step before it is planned.

        Those who decode get slots for the tokens that they do not know yet, where blocks abound.
        Who comes to a step of single tokens may wait for the next one, which he can be part of.
        """
        for work in plan.work:
            if work.count == 1 and work.samples:
                self._room_behind(work.sequence, self._lookahead)
        if all(work.count == 1 for work in plan.work):
            staying = [work for work in plan.work if work.sequence in running]
            if staying:
                plan.joining = [work for work in plan.work if work.sequence not in running]
                plan.work = staying

    def _room_behind(self, sequence: Sequence, count: int) -> int:
        """Finds slots for up to `count` tokens behind the known ones; how many there are.

        New blocks are taken only while everybody who runs could get one, so that a guess never
        makes a sequence lose its blocks.
        """
        blocks = self.blocks
        room = len(sequence.block_ids) * blocks.block_size - sequence.num_tokens
        missing = -(-(count - room) // blocks.block_size)
        if missing > 0 and blocks.num_available >= missing + len(self.running):
            self._grow(sequence, count)
            return count
        return min(room, count)

    def _behind(self) -> DueQueue:
        """Running sequences with several tokens to compute; they have blocks for all of them."""
        behind = DueQueue()
        for sequence in self.running:
            if sequence.num_pending > 1:
                behind.add(sequence)
        return behind

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
        """Grows a running sequence, preempting those due last; False if it was one of them."""
        while not self._grow(sequence):
            victim = self.running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.discard(sequence)
        self.free(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)


def _append(plan: Plan, sequence: Sequence, budget: int) -> int:
    count = min(sequence.num_pending, budget)
    plan.work.append(Work(sequence, sequence.num_computed, count))
    return count
