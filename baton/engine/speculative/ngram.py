"""Guesses the next tokens of a sequence from its own text, where guessing pays (prompt lookup).

A guess is what followed the last time that the sequence's last few tokens occurred in it. Guesses
are computed in the same step as the last known token, and what the sampler draws at each position
is compared with them (`verify`): a step then yields as many tokens as guesses were right, and one
more. Why that changes no token: a token is a function of the logits, the settings, the tokens so
far and the position, randomness included (`baton.engine.sampling.randomness`), so what is drawn
behind a
guess that was right is what would have been drawn a step later. There is nothing to correct, as
there is where a draft model's distribution takes part; and where kernels give a row the same bits
in whatever batch or chunk, tokens are the same as without drafts, greedy or drawn.

**How much is drafted.** A further row makes a step longer by a share that grows with the rows that
the step has anyway: next to nothing for one stream, whose step waits for memory, and as much as any
row for many, whose step waits for arithmetic. That share is the row's price, learned from the steps
that ran (`RowCost`). The chance that a guess is right is followed for each sequence and each length
of the text that was found again, and needs no drafts: the first guess is compared with the token
drawn in every step, drafted or not. A sequence drafts one more token as long as that adds more to
what a step yields than to what it takes. So drafts shorten and stop by themselves where guesses are
wrong or steps are full, and come back once guesses are right again, without a draft to try it.

Source: A. Saxena, "Prompt Lookup Decoding", 2023. Torch-free; knows no block and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTHS = (4, 3, 2)  # of the text that has to be found again; the longest is looked for first
MOST_PLACES = 1 << 15  # remembered for each sequence, twice over: about 8 MiB at most
CATCH_UP_TOKENS = 1024  # read in one step, so that a long prompt stalls nobody: less than a ms


class Drafter:
    """Guesses for one sequence, whose tokens only ever grow. Engine thread only."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # text -> where it was followed
        self._older_places: dict[tuple[int, ...], int] = {}
        self._read = 1  # tokens before this one are known as text that something follows
        self._chances = {length: _Chance() for length in LENGTHS}
        self._found = 0  # the length that the guess below rests on
        self._guess: tuple[int, ...] = ()

    def draft(self, tokens: Sequence[int], most: int, price: float) -> tuple[int, ...]:
        """Up to `most` guesses of what follows `tokens`, as many as pay at that price of a row.

        `learn` is to be told what was drawn.
        """
        self._read_up_to(tokens)
        length, place = self._find(tokens)
        if not length or most < 1:
            self._guess = ()
            return ()
        count = worthwhile(self._chances[length].value, price, most)
        self._found, self._guess = length, _continued(tokens, place, max(1, count))
        return self._guess[:count]

    def learn(self, drawn: Sequence[int]) -> None:
        """Compares the last guess, drafted or not, with the tokens that came of that step.

        They end with the first that is not its guess: what was guessed behind it was not tried.
        """
        for guessed, token in zip(self._guess, drawn, strict=False):
            self._chances[self._found].add(guessed == token)
        self._guess = ()

    def _read_up_to(self, tokens: Sequence[int]) -> None:
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

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
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
    """The share of guesses that were right; older ones count less and less."""

    _KEPT = 15 / 16  # of what is known, from one guess to the next

    def __init__(self) -> None:
        self._tried, self._right = 4.0, 2.0  # as good as nothing is known, and it is worth a try

    @property
    def value(self) -> float:
        return self._right / self._tried

    def add(self, right: bool) -> None:
        self._tried = self._tried * self._KEPT + 1
        self._right = self._right * self._KEPT + right


class RowCost:
    """What drafts add to a step's time: the usual at first, then what is seen of it here.

    Steps are told apart by their rows without drafts. Through the times of each kind a straight
    line is laid over the drafts that each sequence had; as long as they hardly differ in that,
    which tells nothing, the line is as steep as is usual.
    """

    USUAL_FREE_ROWS = 16  # as many rows take as long as the first one's wait for memory
    MOST_ROWS = 64  # in steps that are looked at; drafts do not pay with more

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """A step of so many rows, and of drafts besides, has run."""
        if 0 < rows <= self.MOST_ROWS and seconds > 0:
            line = self._lines.get(rows)
            if line is None:
                line = self._lines[rows] = _Line(self._usual(rows))
            line.add(drafts / rows, seconds)

    def price(self, rows: int) -> float:
        """By what share of its time a step of `rows` rows grows if each brings a draft more."""
        line = self._lines.get(rows)
        return line.price if line is not None else self._usual(rows)

    def _usual(self, rows: int) -> float:
        return rows / (rows + self.USUAL_FREE_ROWS)


class _Line:
    """Seconds over drafts for each sequence; older steps count less and less."""

    _KEPT = 0.99  # of what is known, from one step to the next
    _DOUBT = 20.0  # how many steps one draft apart the usual price counts as
    _LONGEST = 2.0  # times what was to be expected; more is the machine's doing, not the drafts'
    _LEAST = 0.25  # of the usual price: noise can make times look flat

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._weight = self._drafts = self._seconds = 0.0  # means of the latter two
        self._var = self._cov = 0.0  # sums

    def add(self, drafts: float, seconds: float) -> None:
        """Takes in a step."""
        if self._weight:
            at_mean, there = 1 + self.price * self._drafts, 1 + self.price * drafts
            seconds = min(seconds, self._LONGEST * self._seconds * there / at_mean)
        self._weight = self._weight * self._KEPT + 1
        off, late = drafts - self._drafts, seconds - self._seconds
        self._drafts += off / self._weight
        self._seconds += late / self._weight
        self._var = self._var * self._KEPT + off * (drafts - self._drafts)
        self._cov = self._cov * self._KEPT + off * (seconds - self._seconds)

    @property
    def price(self) -> float:
        """The line's rise for a draft, as a share of what a step without drafts takes."""
        usual = self._seconds * self._usual / (1 + self._usual * self._drafts)
        rise = (self._cov + self._DOUBT * usual) / (self._var + self._DOUBT)
        without = max(self._seconds - rise * self._drafts, self._seconds / 100)
        return min(max(rise / without, self._usual * self._LEAST), 1.0)


@dataclass(frozen=True)
class Drafting:
    """An engine's setting: how many drafts a sequence may have in a step, and what rows cost."""

    most: int
    max_context: int  # in tokens; drafts behind it would be of no use
    costs: RowCost = field(default_factory=RowCost)


def worthwhile(chance: float, price: float, most: int) -> int:
    """How many drafts make the most tokens in the time, each right with `chance` if those before
    it are, each `price` of a step long.

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


def verify(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of `drawn` are the sequence's: up to and with the first that is not its draft.

    `drawn` has one token more than `draft`: the one behind the last known token, then those behind
    each draft.
    """
    assert len(drawn) == len(draft) + 1, "a token is drawn behind each draft"
    for right, (guessed, token) in enumerate(zip(draft, drawn, strict=False)):
        if guessed != token:
            return right + 1
    return len(drawn)


def _continued(tokens: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `place` on; past the end what was taken is repeated."""
    taken = list(tokens[place : place + count])
    while len(taken) < count:
        taken.append(taken[len(taken) - (len(tokens) - place)])
    return tuple(taken)
