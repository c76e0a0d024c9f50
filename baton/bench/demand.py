"""What is asked of a server, and when. Prompts are told by seeds: a long run is a small list."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdRange:
    """Token ids that prompts are made of: `first` up to, not including, `end`."""

    first: int = 1000
    end: int = 4000


@dataclass(frozen=True, slots=True)
class Demand:
    """One request to be. Prompts that begin with equal parts share that prefix, token for token."""

    at_s: float  # after the start of its run
    parts: tuple[tuple[int, int], ...]  # (seed, tokens) each
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.parts)

    def prompt(self, ids: IdRange) -> list[int]:
        """Its token ids."""
        prompt: list[int] = []
        span = ids.end - ids.first
        for seed, length in self.parts:
            prompt += [word % span + ids.first for word in _words(seed, length)]
        return prompt

    def later(self, by_s: float) -> Demand:
        """The same at another time."""
        return Demand(self.at_s + by_s, self.parts, self.new_tokens)


def text_of(ids: Sequence[int]) -> str:
    """A text of about as many tokens, the same for the same ids: one short word each."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)


def _words(seed: int, length: int) -> array[int]:
    # Four bytes a token: what is drawn for a shorter part begins what is drawn for a longer one.
    return array("I", random.Random(seed).randbytes(length * 4))  # noqa: S311


# Common English words, one token each in most vocabularies.
_TEXT = (
    "the of and to in is was for on that with as his they be at one have this from or had by hot "
    "but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make "
    "thing see him two has look more day could go come did my no most who over know water than "
    "call first people may down side been now find any new work part take get place made live "
    "where after back little only round man year came show every good me give our under name very "
    "through just form much great think say help low line before turn cause same mean differ move "
    "right boy old too does tell sentence set three want air well also play small end put home"
)
_WORDS = tuple(_TEXT.split())
