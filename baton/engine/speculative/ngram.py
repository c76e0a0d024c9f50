"""n-gram proposer: proposes a sequence's next tokens from its own text (prompt lookup).

A proposal is what followed the previous occurrence of the sequence's last few tokens. The
acceptance rate is tracked for each sequence and n-gram length, also without proposals.

Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from baton.engine.sequence import Sequence
from baton.engine.speculative.cost import AcceptanceRate, RowCost, worthwhile
from baton.engine.speculative.proposer import Proposer

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
        self._rates = {length: AcceptanceRate() for length in LENGTHS}
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


def _continued(tokens: Tokens[int], place: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `place` on; past the end those are repeated."""
    taken = list(tokens[place : place + count])
    while len(taken) < count:
        taken.append(taken[len(taken) - (len(tokens) - place)])
    return tuple(taken)
