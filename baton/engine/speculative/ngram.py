"""Proposes the next tokens of a sequence from its own text, where that pays (prompt lookup).

A proposal is what followed the last time that the sequence's last few tokens occurred in it.
A further row makes a step longer by a price that is learned from the steps that ran (`RowCost`),
and the chance that a token is accepted is tracked for each sequence and length of the text found
again, also without speculation. One more token is proposed as long as that adds more to what a step
yields than to what it takes: where proposals are wrong or steps are full, they stop by themselves.

Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from baton.engine.sequence import Sequence
from baton.engine.speculative import Proposer

LENGTHS = (4, 3, 2)  # of the text that has to be found again; the longest is looked for first
MOST_PLACES = 1 << 15  # remembered for each sequence, twice over: about 8 MiB at most
CATCH_UP_TOKENS = 1024  # read in one step, which takes less than a ms


class NgramProposer(Proposer):
    """Proposals from sequences' own text."""

    def __init__(self, most: int, max_context: int) -> None:
        super().__init__(most, max_context)
        self.costs = RowCost()
        self._texts: WeakKeyDictionary[Sequence, Text] = WeakKeyDictionary()

    def propose(
        self, sequences: list[Sequence], limits: list[int], rows: int
    ) -> list[tuple[int, ...]]:
        price = self.costs.price(rows)
        return [
            self._texts.setdefault(sequence, Text()).propose(sequence.tokens, limit, price)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def learn(self, sequence: Sequence, sampled: Tokens[int]) -> None:
        if text := self._texts.get(sequence):
            text.learn(sampled)

    def took(self, rows: int, proposed: int, seconds: float) -> None:
        self.costs.took(rows, proposed, seconds)


class Text:
    """One sequence's text, and how often what followed there was right."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # text -> where it was followed
        self._older_places: dict[tuple[int, ...], int] = {}
        self._read = 1  # tokens before this one are known as text that something follows
        self._chances = {length: _Chance() for length in LENGTHS}
        self._found = 0  # the length that the proposal below rests on
        self._proposed: tuple[int, ...] = ()

    def propose(self, tokens: Tokens[int], most: int, price: float) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `tokens`, as many as pay at that price of a row.

        Call `learn` with what was sampled.
        """
        self._read_up_to(tokens)
        length, place = self._find(tokens)
        if not length or most < 1:
            self._proposed = ()
            return ()
        count = worthwhile(self._chances[length].value, price, most)
        self._found, self._proposed = length, _continued(tokens, place, max(1, count))
        return self._proposed[:count]

    def learn(self, sampled: Tokens[int]) -> None:
        """Compares the last proposal, computed or not, with the tokens that came of that step.

        They end with the first that was not proposed: what was proposed behind it was not tried.
        """
        for proposed, token in zip(self._proposed, sampled, strict=False):
            self._chances[self._found].add(proposed == token)
        self._proposed = ()

    def _read_up_to(self, tokens: Tokens[int]) -> None:
        """Remembers each text before the last token; nothing follows that one yet."""
        first, end = self._read, min(len(tokens), self._read + CATCH_UP_TOKENS)
        reach = LENGTHS[0]
        for at in range(first, end):
            behind = tuple(tokens[max(0, at - reach) : at])
            for length in LENGTHS:
                if length <= at:
                    self._places[behind[-length:]] = at
        self._read = max(first, end)
        if len(self._places) > MOST_PLACES:
            self._older_places, self._places = self._places, {}

    def _find(self, tokens: Tokens[int]) -> tuple[int, int]:
        """(length, place) of the longest end of `tokens` that occurred before; (0, 0) of none."""
        behind = tuple(tokens[-LENGTHS[0] :])
        for length in LENGTHS:
            if length > len(behind):
                continue
            end = behind[-length:]
            place = self._places.get(end) or self._older_places.get(end)
            if place:
                return length, place
        return 0, 0


class _Chance:
    """The share of accepted tokens; older ones count less and less."""

    _KEPT = 15 / 16  # of what is known, from one token to the next

    def __init__(self) -> None:
        self._tried, self._right = 4.0, 2.0  # as good as nothing is known, and it is worth a try

    @property
    def value(self) -> float:
        return self._right / self._tried

    def add(self, right: bool) -> None:
        self._tried = self._tried * self._KEPT + 1
        self._right = self._right * self._KEPT + right


class RowCost:
    """What proposed tokens add to a step's time: the usual at first, then what is measured.

    Steps are grouped by their rows without proposed ones. In each group a straight line is fitted
    to the times over the tokens proposed for each sequence; as long as these hardly differ, the
    line keeps the usual slope.
    """

    USUAL_FREE_ROWS = 16  # as many rows take as long as the first one's wait for memory
    MOST_ROWS = 64  # in steps that are measured; speculation does not pay with more

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def took(self, rows: int, proposed: int, seconds: float) -> None:
        """A step of so many rows, and of proposed ones besides, has run."""
        if 0 < rows <= self.MOST_ROWS and seconds > 0:
            line = self._lines.get(rows)
            if line is None:
                line = self._lines[rows] = _Line(self._usual(rows))
            line.add(proposed / rows, seconds)

    def price(self, rows: int) -> float:
        """By what share of its time a step of `rows` rows grows with one more for each."""
        line = self._lines.get(rows)
        return line.price if line is not None else self._usual(rows)

    def _usual(self, rows: int) -> float:
        return rows / (rows + self.USUAL_FREE_ROWS)


class _Line:
    """Seconds over proposed tokens for each sequence; older steps count less and less."""

    _KEPT = 0.99  # of what is known, from one step to the next
    _DOUBT = 20.0  # how many steps one token apart the usual price counts as
    _LONGEST = 2.0  # times what was to be expected; more has another cause
    _LEAST = 0.25  # of the usual price: noise can make times look flat

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._weight = self._proposed = self._seconds = 0.0  # means of the latter two
        self._var = self._cov = 0.0  # sums

    def add(self, proposed: float, seconds: float) -> None:
        """Takes in a step."""
        if self._weight:
            at_mean, there = 1 + self.price * self._proposed, 1 + self.price * proposed
            seconds = min(seconds, self._LONGEST * self._seconds * there / at_mean)
        self._weight = self._weight * self._KEPT + 1
        off, late = proposed - self._proposed, seconds - self._seconds
        self._proposed += off / self._weight
        self._seconds += late / self._weight
        self._var = self._var * self._KEPT + off * (proposed - self._proposed)
        self._cov = self._cov * self._KEPT + off * (seconds - self._seconds)

    @property
    def price(self) -> float:
        """The line's slope, as a share of what a step without proposed tokens takes."""
        usual = self._seconds * self._usual / (1 + self._usual * self._proposed)
        rise = (self._cov + self._DOUBT * usual) / (self._var + self._DOUBT)
        without = max(self._seconds - rise * self._proposed, self._seconds / 100)
        return min(max(rise / without, self._usual * self._LEAST), 1.0)


def worthwhile(chance: float, price: float, most: int) -> int:
    """How many proposed tokens give the most tokens in the time: each is right with `chance` if
    those before it are, and makes the step longer by `price`.

    One is worth it if it raises a step's tokens, 1 at first, by a greater factor than its time.
    """
    tokens = time = right = 1.0
    for count in range(most):
        right *= chance
        if right * time <= price * tokens:
            return count
        tokens += right
        time += price
    return most


def _continued(tokens: Tokens[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `place` on; past the end what was taken is repeated."""
    taken = list(tokens[place : place + count])
    while len(taken) < count:
        taken.append(taken[len(taken) - (len(tokens) - place)])
    return tuple(taken)
