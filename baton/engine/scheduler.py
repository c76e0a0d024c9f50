"""The scheduler: which sequences run in the next step, and how many of their tokens.

There are no phases: in every step, computed tokens catch up with known tokens. A long prompt
catches up in chunks, a cached prefix has caught up before it starts, a preempted sequence starts
over, and a decoding sequence is always one token behind. (After vLLM v1's scheduler.) All decoding
sequences get their token; the others share a chunk (`ChunkBudget`) in order of priority, which
never changes, so that no sequence starves. Remaining rows are for proposed tokens. A step has at
most `chunk_tokens + max_batch` rows, and those that `StateBlockManager`'s sequences compute again.
Torch-free; it handles block numbers, never bytes.

A prompt whose log-probabilities are wanted needs logits of every row, so that at most `SCORED_ROWS`
of it run in a step, and computes every position, so that it does not use the prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.sequence import UNKNOWN, Sequence
from baton.engine.sequence_queue import SequenceQueue
from baton.engine.speculative.proposer import Proposer
from baton.engine.state_cache import StateBlockManager, plan_checkpoints, take_checkpoint
from baton.kv_groups import NO_BLOCK, held

SCORED_ROWS = 128  # a step: their logits are 80 MB with a vocabulary of 150,000


class ScheduledSequence:
    """Tokens [start, start + count) of one sequence, which a step computes.

    proposed: guessed tokens after the known ones, counted in `count` · samples: whether the step
    reaches the last known token, and so samples a new one.
    """

    __slots__ = ("count", "proposed", "samples", "sequence", "start")

    def __init__(
        self, sequence: Sequence, start: int, count: int, proposed: tuple[int, ...] = ()
    ) -> None:
        self.sequence, self.start, self.count, self.proposed = sequence, start, count, proposed
        self.samples = start + count == len(sequence.tokens) + len(proposed)

    @property
    def scored(self) -> range:
        """The positions whose logits give the log-probability of the prompt's next token."""
        sequence = self.sequence
        if sequence.num_scored is None:
            return range(0)
        end = min(self.start + self.count, sequence.prompt_tokens - 1)
        return range(max(self.start, sequence.num_scored), end)


@dataclass
class ScheduledStep:
    """What one step runs: first sequences with one row, then those with several.

    prompts: sequences that have not sampled a token here · exclusive: the only sequence shares no
    step, so that no other step may be in flight · decode_rows: maximum number of known rows of a
    decoding sequence.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    prompts: list[ScheduledSequence] = field(default_factory=list)
    exclusive: bool = False
    decode_rows: int = 1

    @property
    def num_tokens(self) -> int:
        if not self.has_chunks:
            return len(self.sequences)
        return sum(item.count for item in self.sequences)

    def sort(self) -> None:
        self.sequences.sort(key=lambda item: item.count > 1)  # stable

    @property
    def has_chunks(self) -> bool:
        """Whether some sequence has several rows."""
        return bool(self.sequences) and self.sequences[-1].count > 1

    @property
    def num_proposed(self) -> int:
        return sum(len(item.proposed) for item in self.sequences) if self.has_chunks else 0

    @property
    def num_chunk_tokens(self) -> int:
        if not self.has_chunks:
            return 0
        known = ((item.count, item.count - len(item.proposed)) for item in self.sequences)
        return sum(count for count, rows in known if rows > self.decode_rows)

    @property
    def num_chunks(self) -> int:
        """Sequences with rows of a prompt, or of what they have to compute again."""
        rows, found = self.decode_rows, self.sequences if self.prompts or self.has_chunks else ()
        return sum(
            i.start < i.sequence.prompt_tokens or i.count - len(i.proposed) > rows for i in found
        )


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
        self._states = blocks if isinstance(blocks, StateBlockManager) else None
        self.chunk = chunk
        self.max_batch = max_batch
        self.running = SequenceQueue()
        self.ready = SequenceQueue()  # with blocks, and one token to compute
        self.holding = SequenceQueue()  # with blocks, and several tokens to compute
        self.waiting = SequenceQueue()  # without blocks
        self.preemptions = 0
        self._found_no_blocks = False  # the first waiting sequence, when last asked
        self.virtual_lag_s = 0.0  # seconds by which virtual time is behind the clock
        self._proposer = proposer
        # Rows of a decoding sequence, without proposals: a state keeps none of those, so accepted
        # ones are computed again with the token after them.
        self._decode_rows = 1 + (proposer.most if proposer and self._states else 0)
        self._arrivals = itertools.count(1)
        self._exclusive: list[Sequence] = []  # sequences that share no step for now
        self._last_was_exclusive = False  # whether one of those had the last step

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch yet."""
        return len(self.waiting) + len(self.holding) + len(self.ready)

    @property
    def queue_tokens(self) -> int:
        queued = self.waiting.tokens + self.holding.tokens + self.ready.tokens
        return queued + sum([len(one.tokens) - one.num_computed for one in self.running])

    @property
    def lacks_blocks(self) -> bool:
        """Whether waiting sequences need blocks that newcomers must not take: one was preempted, or
        the last step found no blocks for the first. One that waits for its turn alone needs none.
        """
        waiting = self.waiting
        return bool(waiting) and (self._found_no_blocks or any(one.preemptions for one in waiting))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, with the blocks that it may hold.

        A sequence with blocks does not queue behind one that needs some, which might wait for its
        blocks forever.
        """
        sequence.arrival = next(self._arrivals)
        if sequence.exclusive:
            self._exclusive.append(sequence)
        if not sequence.block_ids:
            self.waiting.add(sequence)
        else:
            (self.ready if sequence.num_pending == 1 else self.holding).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from queues and batch; it keeps its blocks."""
        for group in (self.running, self.ready, self.holding, self.waiting):
            if group.discard(sequence):
                return

    def use_cache(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those of its cached prefix."""
        if sequence.block_ids or sequence.scores:
            return
        blocks = self.blocks
        sequence.block_ids = blocks.get_computed_blocks(
            sequence.tokens, sequence.cache_salt, sequence.block_hashes
        )
        if self._states:
            plan_checkpoints(self._states, sequence)
        self._count_cached(sequence)

    def _count_cached(self, sequence: Sequence) -> None:
        blocks = self.blocks
        sequence.num_computed = len(sequence.block_ids) // len(blocks.groups) * blocks.block_size
        if not sequence.preemptions:
            sequence.num_cached = sequence.num_computed

    def reserve(self, sequence: Sequence, extra_tokens: int = 0) -> bool:
        """Gives a sequence blocks for its known tokens and `extra_tokens`, cached ones first.

        With windows, only as many as the next chunk needs; all if its KV comes from elsewhere.
        Returns False, with no block held, when there are not enough.
        """
        self.use_cache(sequence)
        has_state = not self._states or self._begin_state(self._states, sequence)
        if not has_state or not self._grow(sequence, extra_tokens):
            self.free(sequence)
            return False
        if self._states and sequence.num_computed and not sequence.awaits_kv:
            end = sequence.block_hashes[sequence.num_computed // self.blocks.block_size - 1]
            if not self._states.load_state(end, sequence.state_blocks):  # its own blocks evicted it
                self.free(sequence)
                return self.reserve(sequence, extra_tokens)
        return True

    def num_to_compute(self, sequence: Sequence) -> int:
        """Tokens that a sequence with cached blocks only computes, unless KV and state come in."""
        return sequence.num_tokens - (
            sequence.checkpoint if self._states else sequence.num_computed
        )

    def _begin_state(self, states: StateBlockManager, sequence: Sequence) -> bool:
        """Gives a sequence blocks for its state, and leaves it the KV before that, if it computes
        the rest here."""
        if not sequence.awaits_kv:
            kept = sequence.checkpoint // states.block_size
            states.release(sequence.block_ids[kept:])
            sequence.block_ids = sequence.block_ids[:kept]
            self._count_cached(sequence)
        sequence.state_blocks = states.allocate_state() or []
        return bool(sequence.state_blocks)

    def free(self, sequence: Sequence) -> None:
        """Releases a sequence's blocks, so that none of its tokens is computed any more."""
        self.blocks.release([*sequence.block_ids, *sequence.state_blocks])
        sequence.block_ids, sequence.state_blocks = [], []
        sequence.num_computed = sequence.num_slots = 0

    def schedule(self) -> ScheduledStep:
        """The next step: all decoding sequences, then chunks of prompts, then proposed tokens."""
        step = ScheduledStep(decode_rows=self._decode_rows)
        self._decode(step)
        num_decodes = len(step.sequences)
        self._catch_up(step, self.chunk.tokens if num_decodes else self.chunk.alone_tokens)
        if len(step.sequences) != num_decodes or self.blocks.groups.slide:
            step.sort()
        if self._proposer is not None:
            self._propose(step, self.chunk.max_tokens - step.num_chunk_tokens, self._proposer)
            step.sort()
        if self._exclusive:
            self._separate_exclusive(step)
        return step

    def update_after_launch(self, step: ScheduledStep) -> None:
        """Counts a launched step's tokens as computed, and appends `UNKNOWN` for each sampled one.

        A sequence that ends or pauses with that token leaves the batch. Proposed tokens do not
        count: how many will be accepted is not known.
        """
        for scheduled in step.sequences:
            sequence = scheduled.sequence
            if sequence.dropped:  # by a step that landed after this one was launched
                continue
            assert sequence.num_computed == scheduled.start, "rows are computed once, in order"
            sequence.num_computed += scheduled.count - len(scheduled.proposed)
            if not scheduled.samples:
                continue
            tokens = sequence.tokens
            if len(tokens) < sequence.limit:
                tokens.append(UNKNOWN)
                sequence.new_tokens += 1
                sequence.awaits_token = True
            if len(tokens) >= sequence.limit:
                self.remove(sequence)

    def takes_checkpoint(self, step: ScheduledStep) -> bool:
        """Whether states are copied when a step has landed, before another step changes them."""
        if self._states is None:
            return False
        wants, work = self._states.wants_checkpoint, step.sequences
        return any(wants(one.sequence, one.start + one.count, one.samples) for one in work)

    @property
    def needs_every_token(self) -> bool:
        """Whether `update_after_landing` has to be called for every token."""
        return self._proposer is not None

    def update_after_landing(self, scheduled: ScheduledSequence, sampled: Tokens[int] = ()) -> int:
        """Caches the blocks that landed rows filled; returns how many tokens are computed.

        sampled: new tokens, already appended; all but the last were proposals. The KV of rejected
        proposals is in slots that the next step writes again.
        """
        sequence = scheduled.sequence
        if scored := scheduled.scored:
            sequence.num_scored = scored.stop
        accepted = 0 if self._states else max(0, len(sampled) - 1)
        sequence.num_computed += accepted
        end = scheduled.start + scheduled.count - len(scheduled.proposed) + accepted
        # A sequence that was preempted meanwhile has fewer computed tokens.
        self.cache_blocks(sequence, scheduled.start, min(end, sequence.num_computed))
        if self._proposer is not None:
            self._proposer.learn(sequence, sampled)
        return end

    def record_step(self, step: ScheduledStep, seconds: float) -> None:
        """Records the duration of a step.

        While prompts are computed, virtual time advances with each prompt that is completed, by its
        `prompt_s`, as in the router's fair queueing. By the clock, a long prompt's virtual finish
        time would pass before it is computed, and no short prompt could overtake it any more.
        """
        self.chunk.record_step(step, seconds)
        prompts = step.prompts
        if prompts and all(item.sequence.prompt_s for item in prompts):
            self.virtual_lag_s += seconds - sum(i.sequence.prompt_s for i in prompts if i.samples)
        if self._proposer is not None:
            proposed = step.num_proposed
            self._proposer.record_step(step.num_tokens - proposed, proposed, seconds)

    def cache_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Caches the full blocks that verified KV of positions [start, end) completes."""
        if sequence.unverified:
            return
        if self._states:
            take_checkpoint(self._states, sequence, end)
            return
        size, count = self.blocks.block_size, len(self.blocks.groups)
        for index in range(start // size, end // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            block_hash = sequence.hash_of(index, size)
            parent = sequence.parent_hash(index)
            blocks = sequence.block_ids[index * count : (index + 1) * count]
            for group, block in enumerate(blocks):
                if block != NO_BLOCK:
                    self.blocks.cache_block(block, block_hash, parent, tokens, group)

    def uncache(self, sequence: Sequence) -> list[int]:
        """Removes from the prefix cache what a sequence computed; returns the blocks that it alone
        holds."""
        if self._states:
            self._states.drop_checkpoints(sequence.block_hashes)
        return self.blocks.uncache(held(sequence.block_ids))

    def _separate_exclusive(self, step: ScheduledStep) -> None:
        """Leaves either one exclusive sequence in the step, or all others, in turns."""
        self._exclusive = [one for one in self._exclusive if one.exclusive and not one.dropped]
        alone = [scheduled for scheduled in step.sequences if scheduled.sequence.exclusive]
        if not alone:
            return
        step.exclusive = self._last_was_exclusive = (
            len(alone) == len(step.sequences) or not self._last_was_exclusive
        )
        kept = (
            alone[:1] if step.exclusive else [w for w in step.sequences if not w.sequence.exclusive]
        )
        sequences = {id(scheduled.sequence) for scheduled in kept}
        step.sequences = kept
        step.prompts = [
            scheduled for scheduled in step.prompts if id(scheduled.sequence) in sequences
        ]

    def _decode(self, step: ScheduledStep) -> None:
        """Schedules the running sequences that are one token behind, or as many as proposals.

        A sequence that is preempted here comes after all that are scheduled already.
        """
        for sequence in list(self.running):
            known, start = len(sequence.tokens), sequence.num_computed
            if not 1 <= known - start <= self._decode_rows:
                continue
            # A sequence without blocks was preempted in this loop.
            is_short = known > sequence.num_slots
            if is_short and not (sequence.block_ids and self._make_room(sequence)):
                continue
            step.sequences.append(ScheduledSequence(sequence, start, known - start))
            if not sequence.new_tokens:
                step.prompts.append(step.sequences[-1])

    def _catch_up(self, step: ScheduledStep, budget: int) -> None:
        """Schedules `budget` tokens of all other sequences by priority, admitting new ones.

        Ready sequences are one token behind, and use none of the budget. The first waiting sequence
        that finds no blocks is not overtaken by others that need some, which could starve it. One
        that lacks only rows to score is, since it has the rows of a later step.
        """
        behind = SequenceQueue()  # running sequences with several tokens to compute
        for sequence in self.running:
            if len(sequence.tokens) - sequence.num_computed > self._decode_rows:
                behind.add(sequence)
        groups, scored = [behind, self.ready, self.holding, self.waiting], SCORED_ROWS
        passed = list[tuple[SequenceQueue, Sequence]]()  # for lack of rows to score
        self._found_no_blocks = False
        while groups := [group for group in groups if group]:
            group = min(groups, key=lambda group: group.first.order)
            sequence = group.first
            room = 1 if group is self.ready else min(budget, scored if sequence.scores else budget)
            full = group is not behind and len(self.running) >= self.max_batch
            if room <= 0 < budget and not full:
                passed.append((group, sequence))
                group.discard(sequence)
                continue
            if room > 0 and not full and group is self.waiting:
                self._found_no_blocks = not self.reserve(sequence)
            if room <= 0 or full or (group is self.waiting and self._found_no_blocks):
                groups.remove(group)
                continue
            group.discard(sequence)
            if group is not behind:
                self.running.add(sequence)
            if not self._has_slots(step, sequence, room, behind):
                continue
            count = _append(step, sequence, room)
            budget -= 0 if group is self.ready else count
            scored -= count if sequence.scores else 0
        for group, sequence in passed:
            group.add(sequence)

    def _propose(self, step: ScheduledStep, budget: int, proposer: Proposer) -> None:
        """Adds proposed tokens to decoding sequences, as far as budget and blocks allow."""
        decoding = [
            at
            for at, scheduled in enumerate(step.sequences)
            if scheduled.count <= self._decode_rows and scheduled.samples
        ]
        sequences = [step.sequences[at].sequence for at in decoding]
        limits = [min(budget, proposer.limit(sequence)) for sequence in sequences]
        drafts = proposer.propose(sequences, limits, step.num_tokens)
        for at, sequence, draft in zip(decoding, sequences, drafts, strict=True):
            count = len(draft)
            if sequence.grammar is not None:
                sequence.grammar.advance(sequence.tokens, sequence.num_tokens)
                count = sequence.grammar.accepts(draft)
            count = self._reserve_slots(sequence, min(count, budget))
            if count:
                start, known = step.sequences[at].start, step.sequences[at].count
                proposed = draft[:count]
                step.sequences[at] = ScheduledSequence(sequence, start, known + count, proposed)
                budget -= count

    def _reserve_slots(self, sequence: Sequence, count: int) -> int:
        """Makes slots for up to `count` tokens after the known ones; returns how many there are.

        Allocates blocks only while every running sequence could get one, so that a proposal never
        causes a preemption.
        """
        blocks = self.blocks
        room = sequence.num_slots - sequence.num_tokens
        missing = -(-(count - room) // blocks.block_size) * len(blocks.groups)
        if missing > 0 and blocks.num_available >= missing + len(self.running):
            self._grow(sequence, count)
            return count
        return min(room, count)

    def _grow(self, sequence: Sequence, extra_tokens: int = 0) -> bool:
        """Allocates blocks until all known tokens and `extra_tokens` have slots."""
        size, groups = self.blocks.block_size, self.blocks.groups
        needed = -(-(sequence.num_tokens + extra_tokens) // size)
        if groups.slide:
            return self._slide(sequence, needed)
        places = range(len(sequence.block_ids), needed * len(groups))
        if places:
            blocks = self.blocks.allocate(len(places), [at % len(groups) for at in places])
            if blocks is None:
                return False
            sequence.block_ids += blocks
        sequence.num_slots = len(sequence.block_ids) // len(groups) * size
        return True

    def _slide(self, sequence: Sequence, needed: int) -> bool:
        """Releases blocks behind windows, and allocates those of the next tokens: in groups with a
        window as many as a step can compute, or all of those whose KV comes from elsewhere."""
        groups, size = self.blocks.groups, self.blocks.block_size
        ids, ahead, position = list(sequence.block_ids), needed, sequence.num_tokens
        if not sequence.awaits_kv:
            position = sequence.num_computed
            ahead = min(needed, -(-(position + self.chunk.max_tokens + 1) // size))
        behind = [] if sequence.unverified else groups.behind(ids, position)
        self.blocks.release([ids[at] for at in behind])
        for at in behind:
            ids[at] = NO_BLOCK
        sequence.block_ids = ids
        missing = groups.missing(ids, position, ahead, needed)
        blocks = self.blocks.allocate(len(missing), [at % len(groups) for at in missing])
        if blocks is None:
            return False
        ids += [NO_BLOCK] * (needed * len(groups) - len(ids))
        for at, block in zip(missing, blocks, strict=True):
            ids[at] = block
        sequence.num_slots = max(ahead * size, sequence.num_slots)
        return True

    def _has_slots(
        self, step: ScheduledStep, sequence: Sequence, tokens: int, behind: SequenceQueue
    ) -> bool:
        """Makes slots for the next tokens of a running sequence, where windows need some.

        Sequences that are preempted for it leave the step. Returns False if it is one of them.
        """
        if min(sequence.num_computed + tokens, sequence.num_tokens) <= sequence.num_slots:
            return True
        made = self._make_room(sequence)
        step.sequences = [one for one in step.sequences if one.sequence.block_ids]
        step.prompts = [one for one in step.prompts if one.sequence.block_ids]
        for preempted in [one for one in behind if not one.block_ids]:
            behind.discard(preempted)
        return made

    def _make_room(self, sequence: Sequence) -> bool:
        """Grows a running sequence by preempting the last ones; False if it was one of them."""
        while not self._grow(sequence):
            victim = self.running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.discard(sequence)
        sequence.preemptions += 1  # first: other threads read it after the blocks
        self.preemptions += 1
        self.free(sequence)
        self.waiting.add(sequence)


def _append(step: ScheduledStep, sequence: Sequence, budget: int) -> int:
    count, start = min(sequence.num_pending, budget), sequence.num_computed
    for end in sequence.checkpoints:
        if start < end < start + count:
            count = end - start
            break
    step.sequences.append(ScheduledSequence(sequence, start, count))
    if not sequence.new_tokens:
        step.prompts.append(step.sequences[-1])
    return count
