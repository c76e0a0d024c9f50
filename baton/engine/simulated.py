"""A simulated forward pass: it takes the time of a model, computes nothing, and checks the KV.

It replaces `runner.Runner`; scheduler, block manager, prefix cache, handoff and everything above
are the real ones. A token's slot holds a hash of all tokens up to it, and a step that finds
anything else there fails, unless it is received KV that is not verified yet. The next token depends
only on all tokens, settings, seed and position, by logits made from the hash and the real sampler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from baton.block_hash import root_hash
from baton.config import SimulatedSpeed
from baton.engine.kernels.torch.row_quantization import is_quantized, split_rows
from baton.engine.runner import SampledTokens, StepRunner, sample_rows, tokens_by_sequence
from baton.engine.sampling.prompt_logprobs import PromptLogprobs, compute_logprobs
from baton.engine.sampling.randomness import splitmix64
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow, TokenLogprobs
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import InternalError

Words = npt.NDArray[np.uint64]

_FAVOURITES = 8  # tokens with high logits in each row
_BEST_LOGIT = 12.0


class SimulatedRunner(StepRunner):
    """Runs steps over a pool `[blocks, layers, 2, kv_heads, block_size, head_size]` in memory."""

    def __init__(self, speed: SimulatedSpeed, pool: torch.Tensor, sampler: Sampler) -> None:
        super().__init__(pool, sampler)
        self._speed = speed
        self._slots = _Slots(pool)
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()
        self._steps = 0

    def run(self, step: ScheduledStep) -> dict[str, SampledTokens]:
        """A token for each sequence that samples, by its id, after the simulated time.

        Raises InternalError when a block does not hold what its sequence wrote there.
        """
        sequences = sum(
            scheduled.count - len(scheduled.proposed) == 1 for scheduled in step.sequences
        )
        ends = time.monotonic() + self._speed.step_s(step.num_tokens - sequences, sequences)
        self._steps += 1
        for scheduled in step.sequences:
            self._compute(scheduled)
        sampled = self._sample_work(step.sequences)
        time.sleep(max(0.0, ends - time.monotonic()))
        return sampled

    def _compute(self, scheduled: ScheduledSequence) -> None:
        """Checks the KV before these tokens, then writes theirs."""
        sequence = scheduled.sequence
        history = self._histories.setdefault(sequence, _History(sequence.cache_salt))
        first, last = 0, scheduled.start
        if scheduled.start == history.computed_here:
            # One block a step in turn: checking a long context in every step would take too long.
            size = self._slots.block_size
            first = self._steps % max(1, -(-scheduled.start // size)) * size
            last = min(first + size, scheduled.start)
        end = scheduled.start + scheduled.count
        # Like a model, it computes from wrong KV, too. Once verified, all of it is checked.
        if not sequence.unverified:
            self._check(sequence, history, first, last)
            history.computed_here = end - len(
                scheduled.proposed
            )  # unless proposed tokens are accepted
        tokens = [*sequence.tokens, *scheduled.proposed] if scheduled.proposed else sequence.tokens
        kv = history.kv(tokens, scheduled.start, end)
        self._slots.write(sequence.block_ids, scheduled.start, kv)

    def _check(self, sequence: Sequence, history: _History, start: int, end: int) -> None:
        """Compares the slots of positions [start, end)."""
        kv = history.kv(sequence.tokens, start, end)
        wrong = self._slots.first_wrong(sequence.block_ids, start, kv)
        if wrong is not None:
            block = sequence.block_ids[wrong // self._slots.block_size]
            raise InternalError(
                f"sequence {sequence.seq_id}: block {block} does not hold the KV of token {wrong}"
            )

    def _sample_work(self, scheduled: list[ScheduledSequence]) -> dict[str, SampledTokens]:
        sampling = [item for item in scheduled if item.samples]
        rows = [(item.sequence, row) for item in sampling for row in sample_rows(item)]
        sampled = tokens_by_sequence(sampling, self._sample(rows), self._prompts(scheduled))
        for item in sampling:
            new = sampled[item.sequence.seq_id].token_ids
            self._histories[item.sequence].accept(item.sequence.num_tokens, len(new) - 1)
        return sampled

    def _prompts(self, scheduled: list[ScheduledSequence]) -> dict[str, PromptLogprobs]:
        found = {}
        for item in scheduled:
            if scored := item.scored:
                sequence, tokens = item.sequence, item.sequence.tokens
                params, count = sequence.params, sequence.prompt_tokens
                rows = [(sequence, SampleRow(params, tokens[: at + 1], count)) for at in scored]
                targets = tokens[scored.start + 1 : scored.stop + 1]
                logits = torch.from_numpy(self._logits(rows))
                found[sequence.seq_id] = compute_logprobs(
                    logits, targets, params.prompt_logprobs or 0
                )
        return found

    def _sample(self, rows: list[tuple[Sequence, SampleRow]]) -> Sampled:
        token_ids, logprobs = [0] * len(rows), list[TokenLogprobs | None]([None] * len(rows))
        rest = []
        for at, (sequence, row) in enumerate(rows):
            if row.greedy and row.plain:  # the sampler's choice, without making logits
                token_ids[at] = int(self._favourites(sequence, row)[0])
            else:
                rest.append(at)
        logits = torch.from_numpy(self._logits([rows[at] for at in rest]))
        sampled = self.sampler.sample(logits, [rows[at][1] for at in rest])
        for at, token_id, one in zip(rest, sampled.token_ids, sampled.logprobs, strict=True):
            token_ids[at], logprobs[at] = token_id, one
        return Sampled(token_ids, logprobs)

    def _logits(self, rows: list[tuple[Sequence, SampleRow]]) -> npt.NDArray[np.float32]:
        """`[rows, vocab]`: a few favourites, and 0 for all other tokens."""
        logits = np.zeros((len(rows), self.sampler.vocab_size), np.float32)
        heights = _BEST_LOGIT - np.arange(_FAVOURITES, dtype=np.float32)
        for scores, (sequence, row) in zip(logits, rows, strict=True):
            np.maximum.at(scores, self._favourites(sequence, row), heights)
        return logits

    def _favourites(self, sequence: Sequence, row: SampleRow) -> npt.NDArray[np.int64]:
        hashes = self._histories[sequence].hashes(row.token_ids)
        words = splitmix64(hashes[-1] + np.arange(1, _FAVOURITES + 1, dtype=np.uint64))
        return (words % np.uint64(self.sampler.vocab_size)).astype(np.int64)


@dataclass
class _History:
    """Hashes of one sequence: for each position, of all tokens up to it."""

    salt: str
    computed_here: int = 0  # where the last step ended
    _hashes: Words = field(default_factory=lambda: np.zeros(2048, np.uint64))
    _known: int = 0

    def accept(self, known: int, right: int) -> None:
        """Keeps hashes of accepted proposals. known: tokens before them · right: how many."""
        self._known = min(self._known, known + right)
        self.computed_here += right

    def hashes(self, tokens: Tokens[int]) -> Words:
        """`[tokens]`, independent of the salt: sums of a hash of each token and its position."""
        known, count = self._known, len(tokens)
        if count > len(self._hashes):
            self._hashes = np.resize(self._hashes, 2 * count)
        if count > known:
            places = np.arange(known, count, dtype=np.uint64) << np.uint64(32)
            terms = splitmix64(np.array(tokens[known:], np.uint64) + places)
            before = self._hashes[known - 1] if known else np.uint64(0)
            self._hashes[known:count] = before + np.cumsum(terms)
            self._known = count
        return self._hashes[:count]

    def kv(self, tokens: Tokens[int], start: int, end: int) -> Words:
        """The KV of positions [start, end), as words; it differs for each salt."""
        return splitmix64(self.hashes(tokens)[start:end] ^ np.uint64(root_hash(self.salt)))


class _Slots:
    """The pool's elements as 16-bit words, whatever their type; scales are not written."""

    def __init__(self, pool: torch.Tensor) -> None:
        elements = split_rows(pool)[0] if is_quantized(pool.dtype) else pool
        self._words = elements.view(torch.int16).numpy().view(np.uint16)
        _, layers, sides, heads, size, width = self._words.shape
        self.block_size = size
        self._quarter = np.arange(width) % 4  # a hash has four words
        # K and V, heads and layers differ, so that a mix-up is noticed.
        places = np.arange(1, layers * sides * heads + 1, dtype=np.uint16)
        self._places = places.reshape(layers, sides, heads, 1)

    def write(self, blocks: list[int], start: int, kv: Words) -> None:
        """Writes the slots of a sequence from position `start` on."""
        rows, slots = self._where(blocks, start, len(kv))
        self._words[rows, :, :, :, slots] = self._content(kv)

    def first_wrong(self, blocks: list[int], start: int, kv: Words) -> int | None:
        """The first position from `start` on whose slot has other content, or None."""
        rows, slots = self._where(blocks, start, len(kv))
        differs = self._words[rows, :, :, :, slots] != self._content(kv)
        wrong = differs.any((1, 2, 3, 4)).nonzero()[0]
        return start + int(wrong[0]) if wrong.size else None

    def _where(
        self, blocks: list[int], start: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and slot of each position."""
        at = np.arange(start, start + count)
        first = start // self.block_size
        needed = np.array(blocks[first : -(-(start + count) // self.block_size)], np.int64)
        return needed[at // self.block_size - first], at % self.block_size

    def _content(self, kv: Words) -> npt.NDArray[np.uint16]:
        """`[tokens, layers, 2, kv_heads, words]`."""
        words = kv.view(np.uint16).reshape(len(kv), 4)[:, self._quarter]
        return words[:, None, None, None, :] ^ self._places
