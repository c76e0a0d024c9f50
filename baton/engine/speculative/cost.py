"""What a proposed token is worth: how often it is accepted, and how much longer steps get by it.

The cost of a further row is learned from step durations (`RowCost`), the acceptance rate from
proposals and sampled tokens. A token is proposed only if it adds proportionally more tokens to a
step than time (`worthwhile`): proposals stop where they are wrong or steps are full.
"""

from __future__ import annotations


class AcceptanceRate:
    """The share of accepted tokens, with exponentially decaying weights."""

    _KEPT = 15 / 16  # decay of weights a token

    def __init__(self, prior: float = 0.5) -> None:
        self._tried, self._accepted = 4.0, 4.0 * prior  # with little weight

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

    def seconds(self, rows: int) -> float:
        """The duration of a step of `rows` rows without proposals; 0 before any was measured."""
        line = self._lines.get(rows)
        return line.without if line is not None else 0.0

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
        least = self._usual * self._MIN_RATIO
        return min(max(self._rise / self.without, least), 1.0)

    @property
    def without(self) -> float:
        """The duration without proposed tokens, in seconds."""
        return max(self._seconds - self._rise * self._proposed, self._seconds / 100)

    @property
    def _rise(self) -> float:
        """The slope, in seconds."""
        usual = self._seconds * self._usual / (1 + self._usual * self._proposed)
        return (self._cov + self._PRIOR_STEPS * usual) / (self._var + self._PRIOR_STEPS)


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
