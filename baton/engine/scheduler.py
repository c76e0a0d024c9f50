"""Decides what the next step runs: which sequences, which of their tokens, under a token budget.

One idea carries all of it: computed tokens catch up with known tokens. A long prompt catches up in
chunks, a cached prefix has caught up before it starts, a preempted sequence starts over, and a
decoding one is always one token behind. (After vLLM v1's scheduler.) Decoding sequences all get
their token; the others share a chunk (`ChunkBudget`) in order of priority, which never changes, so
that no sequence starves. Rows that are left are for proposed tokens. A step so has at most
`chunk_tokens + max_batch` rows. Torch-free; moves block numbers, never bytes.

A prompt whose log-probabilities are wanted needs logits of every row, which bounds it to
`SCORED_ROWS` a step, and computes every position: it takes nothing from the prefix cache.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from operator import itemgetter

from baton.engine.block_manager import BlockManager
from baton.engine.sequence import UNKNOWN, Sequence
from baton.engine.speculative import Proposer

SCORED_ROWS = 128  # of prompts, in a step: their logits are 80 MB with a vocabulary of 150,000


_SEQUENCE_OF = itemgetter(2)


class SequenceQueue:
    """Sequences in order of priority; of equals the one that came first.

    Only iteration looks at every sequence, so that removing hundreds at once is cheap. A sequence's
    priority does not change while it is here.
    """

    def __init__(self) -> None:
        self.tokens = 0  # pending ones, counted when their sequences were added
        self._entries: list[tuple[float, int, Sequence, int]] = []  # (*order, it, pending tokens)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return map(_SEQUENCE_OF, self._entries)

    @property
    def first(self) -> Sequence:
        """The one that goes first."""
        return self._entries[0][2]

    @property
    def last(self) -> Sequence:
        """The one that goes last."""
        return self._entries[-1][2]

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in."""
        insort(self._entries, (*sequence.order, sequence, sequence.num_pending))
        self.tokens += sequence.num_pending

    def discard(self, sequence: Sequence) -> bool:
        """Removes a sequence; whether it was here."""
        at = bisect_left(self._entries, sequence.order)
        if at == len(self._entries) or self._entries[at][2] is not sequence:
            return False
        self.tokens -= self._entries.pop(at)[3]
        return True


class ScheduledSequence:
    """Tokens [start, start + count) of one sequence; the last ones may be proposed.

    proposed: guesses behind the known tokens; `count` includes them · samples: whether the last
    token known is one of these, so that a new one is sampled.
    """

    __slots__ = ("count", "proposed", "samples", "sequence", "start")

    def __init__(
        self, sequence: Sequence, start: int, count: int, proposed: tuple[int, ...] = ()
    ) -> None:
        self.sequence, self.start, self.count, self.proposed = sequence, start, count, proposed
        self.samples = start + count == len(sequence.tokens) + len(proposed)

    @property
    def scored(self) -> range:
        """The positions whose logits tell the log-probability of the prompt's next token."""
        sequence = self.sequence
        if sequence.num_scored is None:
            return range(0)
        end = min(self.start + self.count, sequence.prompt_tokens - 1)
        return range(max(self.start, sequence.num_scored), end)


@dataclass
class ScheduledStep:
    """What one step runs: single-token rows first, then chunks.

    prompts: those whose sequences have not sampled a token here · exclusive: the only sequence
    shares no step, so that nothing is in flight with it.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    prompts: list[ScheduledSequence] = field(default_factory=list)
    exclusive: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the step's batch."""
        if not self.has_chunks:
            return len(self.sequences)
        return sum(item.count for item in self.sequences)

    def sort(self) -> None:
        """Puts single tokens first."""
        self.sequences.sort(key=lambda item: item.count > 1)  # stable

    @property
    def has_chunks(self) -> bool:
        """Whether some sequence has several rows."""
        return bool(self.sequences) and self.sequences[-1].count > 1

    @property
    def num_proposed(self) -> int:
        """How many of them are proposed tokens."""
        return sum(len(item.proposed) for item in self.sequences) if self.has_chunks else 0

    @property
    def num_chunk_tokens(self) -> int:
        """How many of them belong to chunks of prompts."""
        if not self.has_chunks:
            return 0
        return sum(item.count for item in self.sequences if item.count > 1 + len(item.proposed))


class ChunkBudget:
    """How many tokens of prompts a step computes: about as many as the last ones did in `seconds`.

    At most `most`, which memory is planned for, and at first and at least `least`, fewer of which
    take as long. The rate is tokens over seconds, and in both a step counts less with each later
    one: so a long step weighs more than a short one, and chunks behind a long context, which take
    longer, are shorter at once.
    """

    _KEPT = 0.8  # of what is known, from one step to the next
    _MEASURED = 32  # tokens of prompts; fewer say little of the rate

    def __init__(self, max_tokens: int, seconds: float = 0.060, min_tokens: int = 64) -> None:
        self.max_tokens = max_tokens
        self._seconds, self._min_tokens = seconds, min_tokens
        self._rows = self._took_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second; 0 before any was measured."""
        return self._rows / self._took_s if self._took_s else 0.0

    @property
    def tokens(self) -> int:
        """Of the next step."""
        return min(self.max_tokens, max(self._min_tokens, int(self.tokens_per_s * self._seconds)))

    def estimate_s(self, step: ScheduledStep) -> float:
        """How long a step with chunks takes at this rate; 0 for others, or if none was measured."""
        return (
            step.num_tokens / self.tokens_per_s
            if step.num_chunk_tokens and self.tokens_per_s
            else 0.0
        )

    def record_step(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if step.num_chunk_tokens >= self._MEASURED:
            self._rows = self._rows * self._KEPT + step.num_tokens
            self._took_s = self._took_s * self._KEPT + seconds


class Scheduler:
    """Owns the queues and the batch. Used by the engine thread only."""

    def __init__(
        self,
        blocks: BlockManager,
        chunk: ChunkBudget,
        max_batch: int,
        proposer: Proposer | None = None,
    ) -> None:
        self.blocks = blocks
        self.chunk = chunk
        self.max_batch = max_batch
        self.running = SequenceQueue()
        self.ready = SequenceQueue()  # have all their blocks, and one token to compute
        self.holding = SequenceQueue()  # have all their blocks, and several tokens to compute
        self.waiting = SequenceQueue()  # need blocks
        self.preemptions = 0
        self.virtual_lag_s = 0.0  # by which the clock is ahead of the virtual time of prompts
        self._proposer = proposer
        self._arrivals = itertools.count(1)
        self._exclusive: list[Sequence] = []  # those that share no step
        self._last_was_exclusive = False  # when the last one had a step

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet."""
        return len(self.waiting) + len(self.holding) + len(self.ready)

    @property
    def queue_tokens(self) -> int:
        """Tokens known and not yet computed, over all sequences."""
        queued = self.waiting.tokens + self.holding.tokens + self.ready.tokens
        return queued + sum([len(one.tokens) - one.num_computed for one in self.running])

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; one that holds blocks already keeps them.

        Those do not queue behind one that needs blocks: it might wait for theirs, for ever.
        """
        sequence.arrival = next(self._arrivals)
        if sequence.exclusive:
            self._exclusive.append(sequence)
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
        if not (sequence.block_ids or sequence.scores):
            sequence.block_ids = blocks.get_computed_blocks(
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

    def schedule(self) -> ScheduledStep:
        """The next step. Decoding sequences go first, so that no prompt delays a stream's token."""
        step = ScheduledStep()
        self._decode(step)
        decoding = len(step.sequences)
        self._catch_up(step, self.chunk.tokens)
        if len(step.sequences) > decoding:
            step.sort()
        if self._proposer is not None:
            self._propose(step, self.chunk.max_tokens - step.num_chunk_tokens, self._proposer)
            step.sort()
        if self._exclusive:
            self._separate_exclusive(step)
        return step

    def update_after_launch(self, step: ScheduledStep) -> None:
        """A step is being computed: its tokens count as computed, and what each sequence samples
        has a place, `UNKNOWN`. One that ends or parks with that token leaves the batch.

        How many proposed tokens are right is not known, so that none counts.
        """
        for work in step.sequences:
            sequence = work.sequence
            if sequence.dropped:  # with a token that came after the launch
                continue
            assert sequence.num_computed == work.start, "work ran twice or out of order"
            sequence.num_computed += work.count - len(work.proposed)
            if not work.samples:
                continue
            tokens = sequence.tokens
            if len(tokens) < sequence.limit:
                tokens.append(UNKNOWN)
                sequence.new_tokens += 1
                sequence.awaits_token = True
            if len(tokens) >= sequence.limit:
                self.remove(sequence)

    @property
    def needs_every_token(self) -> bool:
        """Whether `update_after_landing` needs to know of every token."""
        return self._proposer is not None

    def update_after_landing(self, work: ScheduledSequence, sampled: Tokens[int] = ()) -> int:
        """Records that a sequence's rows have been computed; returns how many of its tokens are.

        Of `sampled`, which the sequence has appended by now, all but the last were proposed. The KV
        of rejected proposals is in slots that the next step writes again.
        """
        sequence = work.sequence
        if scored := work.scored:
            sequence.num_scored = scored.stop
        if len(sampled) > 1:
            sequence.num_computed += len(sampled) - 1
        end = work.start + work.count - len(work.proposed) + max(0, len(sampled) - 1)
        # One that was preempted meanwhile has computed less.
        self.cache_blocks(sequence, work.start, min(end, sequence.num_computed))
        if self._proposer is not None:
            self._proposer.learn(sequence, sampled)
        return end

    def record_step(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long.

        While prompts are computed, virtual time advances with each one that is done, as it does in
        the router's fair queueing, by what that counts for it. By the clock a long prompt's virtual
        finish time would pass before it is computed, and no short one could overtake it any more.
        """
        self.chunk.record_step(step, seconds)
        prompts = step.prompts
        if prompts and all(item.sequence.prompt_s for item in prompts):
            self.virtual_lag_s += seconds - sum(i.sequence.prompt_s for i in prompts if i.samples)
        if self._proposer is not None:
            proposed = step.num_proposed
            self._proposer.record_step(step.num_tokens - proposed, proposed, seconds)

    def cache_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Shares the full blocks that KV of positions [start, end) completes, if it is verified."""
        if sequence.unverified:
            return
        size = self.blocks.block_size
        for index in range(start // size, end // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            block_hash = sequence.hash_of(index, size)
            parent = sequence.parent_hash(index)
            self.blocks.cache_block(sequence.block_ids[index], block_hash, parent, tokens)

    def _separate_exclusive(self, step: ScheduledStep) -> None:
        """Leaves one sequence that shares no step in the step, or all others, in turns."""
        self._exclusive = [one for one in self._exclusive if one.exclusive and not one.dropped]
        alone = [work for work in step.sequences if work.sequence.exclusive]
        if not alone:
            return
        step.exclusive = self._last_was_exclusive = (
            len(alone) == len(step.sequences) or not self._last_was_exclusive
        )
        kept = (
            alone[:1] if step.exclusive else [w for w in step.sequences if not w.sequence.exclusive]
        )
        sequences = {id(work.sequence) for work in kept}
        step.sequences = kept
        step.prompts = [work for work in step.prompts if id(work.sequence) in sequences]

    def _decode(self, step: ScheduledStep) -> None:
        """Plans the running sequences that are one token behind.

        Sequences preempted meanwhile come after all that are planned already.
        """
        size = self.blocks.block_size
        for sequence in list(self.running):
            known, start = len(sequence.tokens), sequence.num_computed
            if known - start != 1:
                continue
            # One without blocks was preempted a moment ago.
            blocks = sequence.block_ids
            if known > len(blocks) * size and not (blocks and self._make_room(sequence)):
                continue
            work = ScheduledSequence(sequence, start, 1)
            step.sequences.append(work)
            if not sequence.new_tokens:
                step.prompts.append(work)

    def _catch_up(self, step: ScheduledStep, budget: int) -> None:
        """Plans `budget` tokens of all others by priority, admitting new ones to the batch.

        The ready ones are one token behind, and take nothing of the budget. The first waiting one
        that finds no blocks is not passed by others that need some: they could starve it.
        """
        behind = SequenceQueue()  # running ones with several tokens to compute; they have blocks
        for sequence in self.running:
            if len(sequence.tokens) - sequence.num_computed > 1:
                behind.add(sequence)
        groups, scored = [behind, self.ready, self.holding, self.waiting], SCORED_ROWS
        while groups := [group for group in groups if group]:
            group = min(groups, key=lambda group: group.first.order)
            sequence = group.first
            room = 1 if group is self.ready else min(budget, scored if sequence.scores else budget)
            full = group is not behind and len(self.running) >= self.max_batch
            if room <= 0 or full or (group is self.waiting and not self.reserve(sequence)):
                groups.remove(group)
                continue
            group.discard(sequence)
            if group is not behind:
                self.running.add(sequence)
            count = _append(step, sequence, room)
            budget -= 0 if group is self.ready else count
            scored -= count if sequence.scores else 0

    def _propose(self, step: ScheduledStep, budget: int, proposer: Proposer) -> None:
        """Adds proposed tokens to decoding sequences, as far as budget and blocks allow.

        A step that computes a prompt, too, has so many rows that a further one hardly ever pays.
        """
        decoding = [
            at for at, work in enumerate(step.sequences) if work.count == 1 and work.samples
        ]
        sequences = [step.sequences[at].sequence for at in decoding]
        limits = [min(budget, proposer.limit(sequence)) for sequence in sequences]
        drafts = proposer.propose(sequences, limits, step.num_tokens)
        for at, sequence, draft in zip(decoding, sequences, drafts, strict=True):
            count = len(draft)
            if sequence.grammar is not None:
                sequence.grammar.advance(sequence.tokens, sequence.num_tokens)
                count = sequence.grammar.accepts(draft)
            count = self._slots_behind(sequence, min(count, budget))
            if count:
                start = step.sequences[at].start
                step.sequences[at] = ScheduledSequence(sequence, start, 1 + count, draft[:count])
                budget -= count

    def _slots_behind(self, sequence: Sequence, count: int) -> int:
        """Finds slots for up to `count` tokens behind the known ones; how many there are.

        New blocks are taken only while every running sequence could get one, so that a guess never
        makes a sequence lose its blocks.
        """
        blocks = self.blocks
        room = len(sequence.block_ids) * blocks.block_size - sequence.num_tokens
        missing = -(-(count - room) // blocks.block_size)
        if missing > 0 and blocks.num_available >= missing + len(self.running):
            self._grow(sequence, count)
            return count
        return min(room, count)

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
        """Grows a running sequence, preempting the last ones; False if it was one of them."""
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


def _append(step: ScheduledStep, sequence: Sequence, budget: int) -> int:
    count = min(sequence.num_pending, budget)
    step.sequences.append(ScheduledSequence(sequence, sequence.num_computed, count))
    if not sequence.new_tokens:
        step.prompts.append(step.sequences[-1])
    return count
