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
from baton.sampling import SamplingParams
from baton.structured_output import GrammarMatcher

# Tokens `[rows]`, on the device of their logits; from a CPU as an array.
Chosen = Tensor | npt.NDArray[np.int64]

# Below this a temperature is 0, as in vLLM: dividing by it would overflow.
GREEDY_BELOW = 1e-5

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
        alone = params.max_tokens > 0 and params.logprobs is None
        return alone and not (self.adjusted or params.structured_output)


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

        Raises InternalError when a sampled row's logits are not numbers or nothing is allowed.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows))
        if not rows:
            return Sampled([], [])
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
        # Only now is a device waited for, when all groups' work is there.
        token_ids: list[int] = [token_id for some in chosen for token_id in some.tolist()]
        if len(groups) > 1:
            order = itertools.chain.from_iterable(groups.values())
            by_row = dict(zip(order, token_ids, strict=True))
            token_ids = [by_row[i] for i in range(len(rows))]
        if max(token_ids) >= self.vocab_size:
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return Sampled(token_ids, _logprobs(logits, rows, token_ids))

    def _masked(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """A copy of `logits` in which each row's grammar leaves the tokens that may follow.

        On a GPU the host computes the masks, a bit for each token, while the step runs.
        """
        on_cpu = logits.device.type == "cpu"
        words = torch.full(
            (len(rows), -(-self.vocab_size // 32)), -1, dtype=torch.int32, pin_memory=not on_cpu
        )
        for row, mask in zip(rows, words.numpy(), strict=True):
            if row.grammar is not None:
                self._allow(row, row.grammar, mask)
        if on_cpu:  # torch.where takes twice as long, and ten times where allowed ones are mixed
            added = _SCORES.take(words.numpy().view(np.uint8), axis=0).reshape(len(rows), -1)
            return logits + torch.from_numpy(added[:, : self.vocab_size])
        allowed = _unpacked(words.to(logits.device, non_blocking=True), self.vocab_size)
        return torch.where(allowed, logits, -torch.inf)

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

    def _adjust(self, logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
        """Applies bias, min_tokens and penalties to `logits`, in place.

        Only the entries that change are touched, as indices into the flattened `logits`, gathered
        on the host and changed in a few operations; those of a row are distinct, so that reading,
        changing and writing them back is exact.
        """
        bias: list[np.ndarray] = []  # [2, n] each: flat index, value
        forbidden: list[int] = []
        penalties: list[np.ndarray] = []  # [3, n] each: flat index, repetition, subtracted
        for i, row in enumerate(rows):
            params, first = row.params, i * self.vocab_size
            if added := params.logit_bias:
                flat = np.fromiter(added, np.float64, len(added)) + first
                bias.append(np.stack([flat, np.fromiter(added.values(), np.float64, len(added))]))
            not_now = self._forbidden(row)
            if params.allowed_token_ids:
                left = params.allowed_token_ids - not_now or params.allowed_token_ids
                allowed = torch.tensor(sorted(left), device=logits.device)
                kept = logits[i, allowed]
                logits[i] = -torch.inf
                logits[i, allowed] = kept
            elif len(not_now) < self.vocab_size:
                forbidden.extend(first + token_id for token_id in not_now)
            subtracts = params.frequency_penalty or params.presence_penalty
            if params.repetition_penalty != 1.0 or subtracts:
                seen, *factors = _penalties(row)
                penalties.append(np.stack([seen + first, *factors]))
        flat_logits = logits.view(-1)
        if bias:
            where, values = _columns(bias, logits.device)
            flat_logits[where.long()] += values.float()
        if forbidden:
            flat_logits[torch.tensor(forbidden, device=logits.device)] = -torch.inf
        if penalties:
            where, repetition, subtracted = _columns(penalties, logits.device)
            found = flat_logits[where.long()]
            factor = repetition.float()
            found = torch.where(found > 0, found / factor, found * factor)
            flat_logits[where.long()] = found - subtracted.float()
        return logits

    def _forbidden(self, row: SampleRow) -> set[int]:
        """What would end a row before min_tokens, or complete a bad word in its output.

        It gives way where nothing else is left: a row always gets a token.
        """
        params, found = row.params, set[int]()
        if row.output_tokens < params.min_tokens and row.grammar is None:
            # End-of-sequence is masked even with ignore_eos, as in vLLM.
            found |= self._eos_token_ids | params.stop_token_ids
        output = row.token_ids[row.prompt_tokens :] if params.bad_words else ()
        for *before, last in params.bad_words:
            if not before or list(output[-len(before) :]) == before:
                found.add(last)
        return found


def _unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 words `[rows, words]` as bools `[rows, vocab_size]`, the lowest bit first."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()


def _penalties(row: SampleRow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, repetition, what is subtracted): repetition counts the prompt, too."""
    params, kept = row.params, row.counts or TokenCounts()
    seen, counts = kept.of(row.token_ids, row.prompt_tokens, row.proposed)
    if params.repetition_penalty == 1.0:
        seen, counts = seen[counts > 0], counts[counts > 0]
    subtracted = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    return seen, np.full(len(seen), params.repetition_penalty), subtracted


def _columns(parts: list[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    # One copy to the device; float64 holds flat indices exactly up to 2**53.
    return torch.from_numpy(np.concatenate(parts, 1)).to(device).unbind(0)


def _take(logits: Tensor, which: list[int], *, copy: bool = False) -> Tensor:
    """The rows in `which`; `logits` itself when that is all of them and no copy is asked for."""
    if len(which) == logits.shape[0] and not copy:
        return logits
    return logits.index_select(0, torch.tensor(which, device=logits.device))


def _likeliest(logits: Tensor) -> Chosen:
    """The likeliest token of each row `[rows]`; of equals the one with the lowest id."""
    if logits.device.type == "cpu":
        # With vector instructions: five times as fast as torch, which has none for this.
        likeliest: Chosen = logits.numpy().argmax(1)
        return likeliest
    return logits.argmax(1)


def _sample(logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
    """One token for each row `[rows]`, by the number that belongs to its seed and position."""
    params = [row.params for row in rows]
    numbers = randomness.uniform([one.seed for one in params], [len(row.token_ids) for row in rows])
    if logits.device.type == "cpu":
        return filters.sample_on_cpu(logits.numpy(), params, numbers)
    uniform = torch.from_numpy(numbers).to(logits.device)
    weights = filters.weigh(logits, filters.settings_of(params, logits.shape[1]))
    return filters.sample(weights, uniform)


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], token_ids: list[int]
) -> list[TokenLogprobs | None]:
    """Log-probabilities for the rows that asked for them."""
    result: list[TokenLogprobs | None] = [None] * len(rows)
    which = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not which:
        return result
    logprobs = _take(logits, which).log_softmax(1)
    chosen_ids = torch.tensor([token_ids[i] for i in which], device=logits.device)
    chosen = logprobs.gather(1, chosen_ids[:, None])[:, 0].tolist()
    width = min(max(rows[i].params.logprobs or 0 for i in which), logits.shape[1])
    best = logprobs.topk(width)
    for i, logprob, values, ids in zip(
        which, chosen, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        # Of equals the lowest id is first, as in a greedy choice.
        found = (top for top in zip(ids, values, strict=True) if top[1] > -torch.inf)
        ranked = sorted(found, key=lambda top: (-top[1], top[0]))
        top = tuple(ranked[: rows[i].params.logprobs])
        result[i] = TokenLogprobs(token_ids[i], logprob, top)
    return result
