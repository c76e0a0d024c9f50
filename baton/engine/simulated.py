"""A simulated forward pass: it takes the time of a model, computes nothing, and checks the KV.

It replaces `runner.Runner`; scheduler, block manager, prefix cache, handoff and everything above
are the real ones. A token's slot holds a hash of all tokens up to it, and a step that finds
anything else there fails, unless it is received KV that is not verified yet. What comes from
elsewhere is compared in full when it is first read; after that, each step compares one block of one
sequence in turn. The next token depends only on all tokens, settings, seed and position, by logits
made from the hash and the real sampler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from baton.block_hash import root_hash
from baton.config import SimulatedSpeed
from baton.engine.kernels.torch.row_quantization import is_quantized, split_rows
from baton.engine.runner import (
    Launch,
    SampledTokens,
    StepOutput,
    StepRunner,
    one_each,
    sample_rows,
    tokens_by_sequence,
)
from baton.engine.sampling.logprobs import PromptLogprobs, TokenLogprobs, compute_logprobs
from baton.engine.sampling.randomness import splitmix64
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import InternalError
from baton.kv_groups import KvGroups

Words = npt.NDArray[np.uint64]

_FAVOURITES = 8  # tokens with high logits in each row
_BEST_LOGIT = 12.0


class SimulatedRunner(StepRunner):
    """Runs steps over a pool in memory, of the shape that `KvLayout` has."""

    def __init__(
        self,
        speed: SimulatedSpeed,
        pool: torch.Tensor,
        sampler: Sampler,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """windows: of each group of layers, as of `KvGroups`."""
        super().__init__(pool, sampler)
        self._speed = speed
        self._slots = _Slots(pool, KvGroups(windows, pool.shape[4]))
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()
        self._steps = 0

    def run(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        return self.launch(step).output.by_id(step)

    def launch(self, step: ScheduledStep) -> Launch:
        """Computes a step in the simulated time.

        Raises InternalError when a block does not hold what its sequence wrote there.
        """
        launch, began = Launch(step), time.monotonic()
        ends = began + self._duration_s(step)
        self._steps += 1
        rows = [_Row(scheduled, self._history(scheduled.sequence)) for scheduled in step.sequences]
        decoding, others = list[_Row](), list[_Row]()
        for row in rows:
            (decoding if row.continues else others).append(row)
        for row in others:
            self._compute(*row)
        self._decode(decoding)
        launch.output = self._sample_step(step, rows)
        if (rest_s := ends - time.monotonic()) > 0:
            time.sleep(rest_s)
        return launch

    def _duration_s(self, step: ScheduledStep) -> float:
        decoding = [one for one in step.sequences if one.count - len(one.proposed) == 1]
        context_tokens = sum([one.start for one in decoding])
        attended = 0.0
        if step.has_chunks:
            chunks = [one for one in step.sequences if one.count - len(one.proposed) > 1]
            attended = sum(one.count * (one.start + one.count / 2) for one in chunks)
        prompt_tokens = step.num_tokens - len(decoding)
        return self._speed.step_s(prompt_tokens, len(decoding), context_tokens, attended)

    def _history(self, sequence: Sequence) -> _History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(sequence.cache_salt)
        return history

    def _decode(self, rows: list[_Row]) -> None:
        """Computes one token of each of these sequences, after a check of one block of one.

        Checking all blocks in every step would take longer than the steps that are simulated.
        """
        if not rows:
            return
        turn, at = divmod(self._steps, len(rows))
        size = self._slots.block_size
        scheduled, history = rows[at]
        first = turn % max(1, -(-scheduled.start // size)) * size
        end = min(first + size, scheduled.start)
        self._check(scheduled, history, first, end)
        starts = [row.scheduled.start for row in rows]
        tokens = [row.scheduled.sequence.tokens[row.scheduled.start] for row in rows]
        before, roots = (
            np.array(words, np.uint64)
            for words in zip(*[(row.history.last, row.history.root) for row in rows], strict=True)
        )
        positions = np.array(starts)
        sums = before + _terms(np.array(tokens, np.uint64), positions)
        kv, count = splitmix64(sums ^ roots), self._slots.num_groups
        for group in range(count):
            blocks = [
                row.scheduled.sequence.block_ids[start // size * count + group]
                for row, start in zip(rows, starts, strict=True)
            ]
            self._slots.write(np.array(blocks), positions % size, kv, group)
        for row, total in zip(rows, sums.tolist(), strict=True):
            row.history.append(total)

    def _compute(self, scheduled: ScheduledSequence, history: _History) -> None:
        """Checks the KV before these tokens, then writes theirs."""
        sequence, start, size = scheduled.sequence, scheduled.start, self._slots.block_size
        end = start + scheduled.count
        # Like a model, it computes from wrong KV, too. Once verified, all of it is checked.
        if not sequence.unverified:
            # What was written here is checked one block a step in turn.
            here = start == history.computed_here
            first = self._steps % max(1, -(-start // size)) * size if here else 0
            self._check(scheduled, history, first, min(first + size, start) if here else start)
            # Unless proposed tokens are accepted:
            history.computed_here = end - len(scheduled.proposed)
        tokens = [*sequence.tokens, *scheduled.proposed] if scheduled.proposed else sequence.tokens
        kv = history.kv(tokens, start, end)
        for group in range(self._slots.num_groups):
            self._slots.write(*self._slots.of(sequence.block_ids, start, len(kv), group), kv, group)

    def _check(self, scheduled: ScheduledSequence, history: _History, start: int, end: int) -> None:
        """Compares the slots of positions [start, end), as far as windows reach. Raises
        InternalError."""
        sequence, slots = scheduled.sequence, self._slots
        for group, first in enumerate(slots.groups.first_blocks(scheduled.start)):
            begin = max(start, first * slots.block_size)
            if begin >= end:
                continue
            kv = history.kv(sequence.tokens, begin, end)
            wrong = slots.first_wrong(sequence.block_ids, begin, kv, group)
            if wrong is not None:
                block = slots.of(sequence.block_ids, wrong, 1, group)[0][0]
                raise InternalError(
                    f"sequence {sequence.seq_id}: block {block} does not hold the KV of token "
                    f"{wrong}"
                )

    def _sample_step(self, step: ScheduledStep, computed: list[_Row]) -> StepOutput:
        scheduled = step.sequences
        if not step.has_chunks and all(
            one.samples and one.sequence.num_scored is None for one in scheduled
        ):
            rows = [row for one in scheduled for row in sample_rows(one)]
            hashes = np.array([row.history.last for row in computed], np.uint64)
            return one_each(scheduled, self._sample(rows, hashes))
        sampling = [row for row in computed if row.scheduled.samples]
        pairs = [(row.history, one) for row in sampling for one in sample_rows(row.scheduled)]
        hashes = np.array([history.hashes(one.token_ids)[-1] for history, one in pairs], np.uint64)
        sampled = self._sample([one for _, one in pairs], hashes)
        found = tokens_by_sequence(
            [row.scheduled for row in sampling], sampled, self._prompts(computed)
        )
        for row in sampling:
            sequence = row.scheduled.sequence
            new = found[sequence.seq_id].token_ids
            row.history.accept(sequence.num_tokens, len(new) - 1)
        return StepOutput(found)

    def _prompts(self, computed: list[_Row]) -> dict[str, PromptLogprobs]:
        found = {}
        for scheduled, history in computed:
            if scored := scheduled.scored:
                sequence, tokens = scheduled.sequence, scheduled.sequence.tokens
                hashes = history.hashes(tokens)[scored.start : scored.stop]
                targets = tokens[scored.start + 1 : scored.stop + 1]
                logits = torch.from_numpy(self._logits(self._favourites(hashes)))
                found[sequence.seq_id] = compute_logprobs(
                    logits, targets, sequence.params.prompt_logprobs or 0
                )
        return found

    def _sample(self, rows: list[SampleRow], hashes: Words) -> Sampled:
        """Samples rows; hashes: `[rows]`, of all tokens of each."""
        favourites = self._favourites(hashes)
        # The first favourite is the sampler's choice, without making logits.
        token_ids = favourites[:, 0].tolist()
        logprobs = list[TokenLogprobs | None]([None] * len(rows))
        rest = [at for at, row in enumerate(rows) if not (row.greedy and row.plain)]
        if rest:
            logits = torch.from_numpy(self._logits(favourites[rest]))
            sampled = self.sampler.sample(logits, [rows[at] for at in rest])
            for at, token_id, one in zip(rest, sampled.token_ids, sampled.logprobs, strict=True):
                token_ids[at], logprobs[at] = token_id, one
        return Sampled(token_ids, logprobs)

    def _logits(self, favourites: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """`[rows, vocab]`: high for the favourites, and 0 for all other tokens."""
        logits = np.zeros((len(favourites), self.sampler.vocab_size), np.float32)
        heights = _BEST_LOGIT - np.arange(_FAVOURITES, dtype=np.float32)
        np.maximum.at(logits, (np.arange(len(favourites))[:, None], favourites), heights)
        return logits

    def _favourites(self, hashes: Words) -> npt.NDArray[np.int64]:
        """`[rows, _FAVOURITES]` tokens, from hashes `[rows]` of all tokens before."""
        words = splitmix64(np.add.outer(hashes, np.arange(1, _FAVOURITES + 1, dtype=np.uint64)))
        return (words % np.uint64(self.sampler.vocab_size)).astype(np.int64)


class _Row(NamedTuple):
    """A sequence of a step, and its history."""

    scheduled: ScheduledSequence
    history: _History

    @property
    def continues(self) -> bool:
        """Whether one token follows what the last step computed here."""
        scheduled, history = self
        start = scheduled.start
        return scheduled.count == 1 and start == history.computed_here == history.known > 0


class _History:
    """Hashes of one sequence: for each position, of all tokens up to it.

    They are independent of the salt: sums of a hash of each token and its position.
    """

    def __init__(self, salt: str) -> None:
        self.root = root_hash(salt)
        self.known = 0  # tokens with hashes
        self.last = 0  # the last one's hash
        self.computed_here = 0  # where the last step ended
        self._hashes: Words = np.zeros(2048, np.uint64)

    def append(self, last: int) -> None:
        """Adds the hash of one more token, which was computed here."""
        self._reserve(self.known + 1)
        self._hashes[self.known] = self.last = last
        self.known += 1
        self.computed_here += 1

    def accept(self, known: int, right: int) -> None:
        """Keeps hashes of accepted proposals. known: tokens before them · right: how many."""
        if self.known > known + right:
            self.known = known + right
            self.last = int(self._hashes[self.known - 1])
        self.computed_here += right

    def hashes(self, tokens: Tokens[int]) -> Words:
        """`[tokens]`"""
        known, count = self.known, len(tokens)
        if count > known:
            self._reserve(count)
            terms = _terms(np.array(tokens[known:], np.uint64), np.arange(known, count))
            self._hashes[known:count] = np.uint64(self.last) + np.cumsum(terms)
            self.known, self.last = count, int(self._hashes[count - 1])
        return self._hashes[:count]

    def kv(self, tokens: Tokens[int], start: int, end: int) -> Words:
        """The KV of positions [start, end), as words; it differs for each salt."""
        hashes = self._hashes if end <= self.known else self.hashes(tokens)
        return splitmix64(hashes[start:end] ^ np.uint64(self.root))

    def _reserve(self, count: int) -> None:
        if count > len(self._hashes):
            self._hashes = np.resize(self._hashes, 2 * count)


def _terms(tokens: Words, positions: npt.NDArray[np.int64]) -> Words:
    """Each token's term in the hashes of its position and all later ones."""
    return splitmix64(tokens + (positions.astype(np.uint64) << np.uint64(32)))


class _Slots:
    """The pool's elements as words of 64 bits or, where rows do not divide so, of 16.

    Their type does not matter, and scales are not written.
    """

    def __init__(self, pool: torch.Tensor, groups: KvGroups) -> None:
        self.groups, self.num_groups = groups, len(groups)
        elements = split_rows(pool)[0] if is_quantized(pool.dtype) else pool
        halves = elements.view(torch.int16).numpy()
        word = np.dtype(np.uint16 if halves.shape[-1] % 4 else np.uint64)
        self._words = halves.view(word)
        _, layers, sides, heads, size, width = self._words.shape
        self.block_size = size
        self._hash_words = 8 // word.itemsize  # of each hash
        self._repeated = np.arange(width) % self._hash_words
        # Groups, K and V, heads and layers differ, so that a mix-up is noticed.
        places = np.arange(1, self.num_groups * layers * sides * heads + 1, dtype=np.uint16)
        self._places = np.repeat(places, word.itemsize // 2).view(word)
        self._places = self._places.reshape(self.num_groups, layers, sides, heads, 1)

    def write(
        self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], kv: Words, group: int
    ) -> None:
        self._words[blocks, :, :, :, slots] = self._content(kv, group)

    def first_wrong(self, blocks: list[int], start: int, kv: Words, group: int) -> int | None:
        """The first position from `start` on whose slot has other content, or None."""
        rows, slots = self.of(blocks, start, len(kv), group)
        differs = self._words[rows, :, :, :, slots] != self._content(kv, group)
        if not differs.any():
            return None
        return start + int(differs.any((1, 2, 3, 4)).argmax())

    def of(
        self, blocks: list[int], start: int, count: int, group: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """A group's block and slot of each position of a sequence, from `start` on."""
        at = np.arange(start, start + count)
        first, groups = start // self.block_size, self.num_groups
        end = -(-(start + count) // self.block_size)
        needed = np.array(blocks[first * groups + group : end * groups : groups], np.int64)
        return needed[at // self.block_size - first], at % self.block_size

    def _content(self, kv: Words, group: int) -> npt.NDArray[Any]:
        """`[tokens, layers, 2, kv_heads, words]`."""
        words = kv.view(self._words.dtype).reshape(len(kv), self._hash_words)[:, self._repeated]
        content: npt.NDArray[Any] = words[:, None, None, None, :] ^ self._places[group]
        return content
