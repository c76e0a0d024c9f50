"""n-gram proposer: proposes a sequence's next tokens from its own text (prompt lookup).

A proposal is what followed the previous occurrence of the sequence's last few tokens. The cost of a
further row is learned from step durations (`RowCost`), and the acceptance rate is tracked for each
sequence and n-gram length, also without proposals. A token is proposed only if it adds
proportionally more tokens to a step than time: proposals stop where they are wrong or steps are
full.

Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from baton.engine.sequence import Sequence
from baton.engine.speculative import Proposer

LENGTHS = (4, 3, 2)  # of n-grams, in the order of their look-up
MAX_NGRAMS = 1 << 15  # of a sequence's index, of which there are two: about 8 MiB at most
CATCH_UP_TOKENS = 1024  # indexed in one step, in less than a ms


class NgramProposer(Proposer):
    """Proposes by n-grams."""

    def __init__(self, most: int, max_context: int) -> None:
        super().__init__(most, max_context)
        self.costs = RowCost()
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(
        self, sequences: list[Sequence], limits: list[int], rows: int
    ) -> list[tuple[int, ...]]:
        price = self.costs.price(rows)
        return [
            self._indexes.setdefault(sequence, NgramIndex()).propose(sequence.tokens, limit, price)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def learn(self, sequence: Sequence, sampled: Tokens[int]) -> None:
        if index := self._indexes.get(sequence):
            index.learn(sampled)

    def record_step(self, rows: int, proposed: int, seconds: float) -> None:
        self.costs.record_step(rows, proposed, seconds)


class NgramIndex:
    """The n-grams of a sequence, and the acceptance rates of its proposals."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # n-gram → position after its last occurrence
        self._older_places: dict[tuple[int, ...], int] = {}
        self._indexed = 1  # n-grams that end before this position are indexed
        self._rates = {length: _AcceptanceRate() for length in LENGTHS}
        self._found = 0  # n-gram length of the last proposal
        self._proposed: tuple[int, ...] = ()

    def propose(self, tokens: Tokens[int], most: int, price: float) -> tuple[int, ...]:
        """Up to `most` tokens after `tokens`, as many as are worth the price of a row.

        `learn` is to be called with the sampled tokens.
        """
        self._index_tokens(tokens)
        length, place = self._find(tokens)
        if not length or most < 1:
            self._proposed = ()
            return ()
        count = worthwhile(self._rates[length].value, price, most)
        self._found, self._proposed = length, _continued(tokens, place, max(1, count))
        return self._proposed[:count]

    def learn(self, sampled: Tokens[int]) -> None:
        """Updates acceptance rates with the last proposal, computed or not, and sampled tokens.

        sampled: ends with the first token that was not proposed.
        """
        for proposed, token in zip(self._proposed, sampled, strict=False):
            self._rates[self._found].add(proposed == token)
        self._proposed = ()

    def _index_tokens(self, tokens: Tokens[int]) -> None:
        """Indexes n-grams before the last token, which nothing follows yet."""
        first, end = self._indexed, min(len(tokens), self._indexed + CATCH_UP_TOKENS)
        reach = LENGTHS[0]
        for at in range(first, end):
            suffix = tuple(tokens[max(0, at - reach) : at])
            for length in LENGTHS:
                if length <= at:
                    self._places[suffix[-length:]] = at
        self._indexed = max(first, end)
        if len(self._places) > MAX_NGRAMS:
            self._older_places, self._places = self._places, {}

    def _find(self, tokens: Tokens[int]) -> tuple[int, int]:
        """(length, position) of the longest n-gram at the end that occurred before, or (0, 0)."""
        suffix = tuple(tokens[-LENGTHS[0] :])
        for length in LENGTHS:
            if length > len(suffix):
                continue
            ngram = suffix[-length:]
            place = self._places.get(ngram) or self._older_places.get(ngram)
            if place:
                return length, place
        return 0, 0


class _AcceptanceRate:
    """The share of accepted tokens, with exponentially decaying weights."""

    _KEPT = 15 / 16  # decay of weights a token

    def __init__(self) -> None:
        self._tried, self._accepted = 4.0, 2.0  # a prior of one half, with little weight

    @property
    def value(self) -> float:
        return self._accepted / self._tried

    def add(self, accepted: bool) -> None:
        self._tried = self._tried * self._KEPT + 1
        self._accepted = self._accepted * self._KEPT + accepted


class RowCost:
    """The cost of proposed tokens in step time: a default at first, then measured.

    For each number of rows without proposed tokens, a line is fitted to step durations over the
    proposed tokens a sequence; while these hardly vary, it keeps the default slope.
    """

    USUAL_FREE_ROWS = 16  # rows whose arithmetic takes as long as reading the weights
    MAX_ROWS = 64  # of measured steps; with more, proposals are not worth their cost

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def record_step(self, rows: int, proposed: int, seconds: float) -> None:
        """Records a step's duration. rows: without proposed tokens · proposed: their number."""
        if 0 < rows <= self.MAX_ROWS and seconds > 0:
            line = self._lines.get(rows)
            if line is None:
                line = self._lines[rows] = _Line(self._usual(rows))
            line.add(proposed / rows, seconds)

    def price(self, rows: int) -> float:
        """The share by which a step of `rows` rows gets longer with one more row for each."""
        line = self._lines.get(rows)
        return line.price if line is not None else self._usual(rows)

    def _usual(self, rows: int) -> float:
        return rows / (rows + self.USUAL_FREE_ROWS)


class _Line:
    """A line of seconds over proposed tokens a sequence, fitted with decaying weights."""

    _KEPT = 0.99  # decay of weights a step
    _PRIOR_STEPS = 20.0  # weight of the default price, in steps that are one token apart
    _MAX_RATIO = 2.0  # to the expected duration; longer steps have another cause
    _MIN_RATIO = 0.25  # to the default price: noise can make durations look constant

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._weight = self._proposed = self._seconds = 0.0  # means of the latter two
        self._var = self._cov = 0.0  # sums

    def add(self, proposed: float, seconds: float) -> None:
        """Adds a step to the fit."""
        if self._weight:
            at_mean, there = 1 + self.price * self._proposed, 1 + self.price * proposed
            seconds = min(seconds, self._MAX_RATIO * self._seconds * there / at_mean)
        self._weight = self._weight * self._KEPT + 1
        off, late = proposed - self._proposed, seconds - self._seconds
        self._proposed += off / self._weight
        self._seconds += late / self._weight
        self._var = self._var * self._KEPT + off * (proposed - self._proposed)
        self._cov = self._cov * self._KEPT + off * (seconds - self._seconds)

    @property
    def price(self) -> float:
        """The slope as a share of the duration without proposed tokens."""
        usual = self._seconds * self._usual / (1 + self._usual * self._proposed)
        rise = (self._cov + self._PRIOR_STEPS * usual) / (self._var + self._PRIOR_STEPS)
        without = max(self._seconds - rise * self._proposed, self._seconds / 100)
        return min(max(rise / without, self._usual * self._MIN_RATIO), 1.0)


def worthwhile(chance: float, price: float, most: int) -> int:
    """The number of proposed tokens that maximises tokens a second.

    chance: that a token is accepted if those before it are · price: the share by which each makes
    the step longer. A token is worth it if it raises the expected tokens of a step, 1 without
    proposals, by a greater factor than its duration.
    """
    tokens = time = probability = 1.0
    for count in range(most):
        probability *= chance
        if probability * time <= price * tokens:
            return count
        tokens += probability
        time += price
    return most


def _continued(tokens: Tokens[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `place` on; past the end those are repeated."""
    taken = list(tokens[place : place + count])
    while len(taken) < count:
        taken.append(taken[len(taken) - (len(tokens) - place)])
    return tuple(taken)
