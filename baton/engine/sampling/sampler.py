"""Turns logits into tokens: penalties, filters and sampling, vectorised over the rows.

The order is vLLM's, with Hugging Face's place for min-p: the grammar's mask, of what it leaves the
log-probabilities; allowed tokens, logit bias, min_tokens mask and bad words, repetition, frequency
and presence penalties; then, unless the row is greedy, temperature, top-k, top-p, min-p.
A row's token depends on its logits, its tokens and its settings alone, never on its batch: rows
that need more than an argmax are worked on apart, and randomness is keyed by (seed, position).

Knows no sequence, block or phase; prefill, decode and `--local` call it alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.sampling import filters, randomness
from baton.engine.sequence import TokenCounts
from baton.errors import InternalError
from baton.generation.sampling_params import SamplingParams
from baton.generation.structured_output import GrammarMatcher

Chosen = npt.NDArray[np.int64]

# Below this a temperature is 0, as in vLLM: dividing by it would overflow.
GREEDY_BELOW = 1e-5
# Of a row that is sampled on a device: temperature (0: greedy), top-k (0: off), top-p, min-p.
NUM_SETTINGS = 4

# What each byte of a mask adds to the logits of its eight tokens, the lowest bit's first.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SCORES = np.where(_BITS, np.float32(0), np.float32(-np.inf))


class SampleRow(NamedTuple):
    """One sequence that wants its next token. `token_ids` is prompt and output so far.

    counts: the sequence's, which spare counting its tokens again in every step.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_tokens: int  # how many of token_ids are the caller's prompt
    proposed: int = 0  # how many of them, the last, are guesses
    counts: TokenCounts | None = None
    grammar: GrammarMatcher | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, whichever worker generated them."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def adjusted(self) -> bool:
        """Whether the row's logits are changed before a token is chosen."""
        return self.params.has_penalties or self.output_tokens < self.params.min_tokens

    @property
    def plain(self) -> bool:
        """Whether its logits are taken as they are, for a token alone; stays so as it grows."""
        params = self.params
        return params.logprobs is None and not (
            self.adjusted or params.structured_output or params.reasoning
        )


class Adjustments(NamedTuple):
    """Tokens of a row whose logits are changed, each once, in no order; all `[n]`.

    biases: what is added, float32 · times: how often each is in the output, 0 if it is in the
    prompt alone, -1 if penalties do not count it.
    """

    ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    times: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the tokens that the row's grammar allows.

    Under the model alone: before any other setting.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True)
class Sampled:
    """What `sample` chose, in the order of its rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def finish_reason(
    row: SampleRow, eos_token_ids: frozenset[int], max_context: int
) -> Literal["stop", "length"] | None:
    """Why a sequence ends with the token that was just appended to `row.token_ids`, if it does.

    The one rule of prefill and decode. End-of-sequence (unless ignore_eos) and stop tokens count
    once min_tokens output tokens exist, the new one included, and always behind a grammar, which
    was at its end; max_tokens counts from the caller's prompt, whatever was retried; `max_context`
    counts prompt and output. A stop beats a length.
    """
    params, new_token = row.params, row.token_ids[-1]
    ends = new_token in params.stop_token_ids or (
        new_token in eos_token_ids and not params.ignore_eos
    )
    if ends and (row.output_tokens >= params.min_tokens or params.structured_output):
        return "stop"
    if row.output_tokens >= params.max_tokens or len(row.token_ids) >= max_context:
        return "length"
    return None


class Sampler:
    """Samples for one model. Stateless: safe to share, and equal on every worker."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """The next token of each row. `logits` is `[rows, vocab]` float32 and is not changed.

        Those of a GPU are copied first (torch's own kernels compute there). Raises InternalError
        when a sampled row's logits are not numbers or nothing is allowed.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows))
        if not rows:
            return Sampled([], [])
        logits = logits.cpu()
        if any(row.grammar for row in rows):
            logits = self._masked(logits, rows)
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row.adjusted, row.greedy), []).append(i)
        chosen = []
        for (adjusted, greedy), which in groups.items():
            some, of = _take(logits, which, copy=adjusted), [rows[i] for i in which]
            if adjusted:
                self._adjust(some, of)
            chosen.append(_likeliest(some) if greedy else _sample(some, of))
        token_ids: list[int] = [token_id for some in chosen for token_id in some.tolist()]
        if len(groups) > 1:
            order = itertools.chain.from_iterable(groups.values())
            by_row = dict(zip(order, token_ids, strict=True))
            token_ids = [by_row[i] for i in range(len(rows))]
        if max(token_ids) >= self.vocab_size:
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return Sampled(token_ids, _logprobs(logits, rows, token_ids))

    def _masked(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """A copy of `logits` in which each row's grammar leaves the tokens that may follow."""
        words = self.masks(rows)
        # torch.where takes twice as long, and ten times where allowed ones are mixed.
        added = _SCORES.take(words.view(np.uint8), axis=0).reshape(len(rows), -1)
        return logits + torch.from_numpy(added[:, : self.vocab_size])

    def masks(self, rows: Sequence[SampleRow]) -> npt.NDArray[np.int32]:
        """What each row's grammar allows, a bit for each token: `[rows, words]`."""
        words = np.full((len(rows), -(-self.vocab_size // 32)), -1, np.int32)
        for row, mask in zip(rows, words, strict=True):
            if row.grammar is not None:
                self._allow(row, row.grammar, mask)
        return words

    def _allow(self, row: SampleRow, grammar: GrammarMatcher, mask: npt.NDArray[np.int32]) -> None:
        """Writes what may follow a row; what ends it before min_tokens only if nothing else may."""
        known = len(row.token_ids) - row.proposed
        grammar.advance(row.token_ids, known)
        grammar.fill(mask, row.token_ids[known:])
        if row.output_tokens >= row.params.min_tokens:
            return
        later = mask.view(np.uint32).copy()
        for token_id in self._eos_token_ids | row.params.stop_token_ids:
            later[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if later.any():
            mask[:] = later.view(np.int32)

    def _adjust(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Applies what changes logits to `logits`, in place: to what changes alone."""
        for x, row in zip(logits.numpy(), rows, strict=True):
            if allowed := list(row.params.allowed_token_ids):
                kept = x[allowed]
                x.fill(-np.inf)
                x[allowed] = kept
            ids, biases, times = self.adjustments(row)
            params, new = row.params, x[ids] + biases
            factor = np.float32(params.repetition_penalty)
            new = np.where(times < 0, new, np.where(new > 0, new / factor, new * factor))
            subtracted = times.clip(0) * params.frequency_penalty
            subtracted += (times > 0) * params.presence_penalty
            x[ids] = new - subtracted.astype(np.float32)

    def adjustments(self, row: SampleRow) -> Adjustments:
        """What changes of the tokens that are allowed."""
        params, added = row.params, dict(row.params.logit_bias)
        added |= dict.fromkeys(self._forbidden(row), -np.inf)
        ids = times = np.empty(0, np.int64)
        repeats = params.repetition_penalty != 1.0  # which counts the prompt, too
        if repeats or params.frequency_penalty or params.presence_penalty:
            counts = row.counts or TokenCounts()
            ids, times = counts.of(row.token_ids, row.prompt_tokens, row.proposed)
            if not repeats:
                ids, times = ids[times > 0], times[times > 0]
        biases = np.zeros(len(ids), np.float32)
        if added:
            others = np.fromiter(added, np.int64, len(added))
            values = np.fromiter(added.values(), np.float32, len(added))
            _, here, there = np.intersect1d(ids, others, assume_unique=True, return_indices=True)
            biases[here] = values[there]
            ids = np.concatenate([ids, np.delete(others, there)])
            biases = np.concatenate([biases, np.delete(values, there)])
            times = np.concatenate([times, np.full(len(added) - len(there), -1)])
        return Adjustments(ids, biases, times)

    def allowed(self, rows: Sequence[SampleRow]) -> npt.NDArray[np.int32] | None:
        """The tokens that each row's settings allow, as `masks` has them; None where all are."""
        if not any(row.params.allowed_token_ids for row in rows):
            return None
        words = np.full((len(rows), -(-self.vocab_size // 32)), -1, np.int32)
        for row, mask in zip(rows, words, strict=True):
            if row.params.allowed_token_ids:
                bits = np.zeros(32 * len(mask), np.bool_)
                bits[list(row.params.allowed_token_ids)] = True
                mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return words

    def _forbidden(self, row: SampleRow) -> set[int]:
        """What would end a row before min_tokens, or complete a bad word in its output.

        Nothing where nothing else is left: a row always gets a token.
        """
        params, found = row.params, set[int]()
        if row.output_tokens < params.min_tokens and row.grammar is None:
            # End-of-sequence is masked even with ignore_eos, as in vLLM.
            found |= self._eos_token_ids | params.stop_token_ids
        output = row.token_ids[row.prompt_tokens :] if params.bad_words else ()
        for *before, last in params.bad_words:
            if not before or list(output[-len(before) :]) == before:
                found.add(last)
        if params.allowed_token_ids:
            return found if params.allowed_token_ids - found else set()
        return found if len(found) < self.vocab_size else set()


def _take(logits: Tensor, which: list[int], *, copy: bool = False) -> Tensor:
    """The rows in `which`; `logits` itself when that is all of them and no copy is asked for."""
    if len(which) == logits.shape[0] and not copy:
        return logits
    return logits.index_select(0, torch.tensor(which))


def _likeliest(logits: Tensor) -> Chosen:
    """The likeliest token of each row `[rows]`, of equals the lowest id.

    As `filters.sample`: one beyond the vocabulary where a row's logits are not numbers.
    """
    rows = logits.numpy()
    # With vector instructions: five times as fast as torch, which has none for this.
    chosen: Chosen = rows.argmax(1)  # of what is no number, if there is any
    chosen[~np.isfinite(rows[np.arange(len(rows)), chosen])] = rows.shape[1]
    return chosen


def _sample(logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
    """One token for each row `[rows]`, by the number that belongs to its seed and position."""
    return filters.sample(logits.numpy(), [row.params for row in rows], random_numbers(rows))


def random_numbers(rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
    """In [0, 1), by a row's seed and the position of its next token; `[rows]`."""
    seeds = [row.params.seed for row in rows]
    return randomness.uniform(seeds, [len(row.token_ids) for row in rows])


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], token_ids: list[int]
) -> list[TokenLogprobs | None]:
    """Log-probabilities for the rows that asked for them."""
    result: list[TokenLogprobs | None] = [None] * len(rows)
    which = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not which:
        return result
    logprobs = _take(logits, which).log_softmax(1)
    chosen_ids = torch.tensor([token_ids[i] for i in which])
    chosen = logprobs.gather(1, chosen_ids[:, None])[:, 0].tolist()
    width = min(max(rows[i].params.logprobs or 0 for i in which), logits.shape[1])
    best = logprobs.topk(width)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for i, logprob, top in zip(which, chosen, tops, strict=True):
        result[i] = token_logprobs(token_ids[i], logprob, *top, rows[i].params.logprobs or 0)
    return result


def token_logprobs(
    token_id: int, logprob: float, top_ids: Sequence[int], top: Sequence[float], wanted: int
) -> TokenLogprobs:
    """Of the likeliest tokens those that are wanted; of equals the lowest id is first."""
    found = (pair for pair in zip(top_ids, top, strict=True) if pair[1] > -np.inf)
    ranked = sorted(found, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, logprob, tuple(ranked[:wanted]))
