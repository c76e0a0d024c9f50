"""What is asked and when. Prompts are told by seeds, so that a long run fits a small message."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FIRST_ID, _IDS = 16, 4000  # token ids that every model here knows and none treats apart


@dataclass(frozen=True)
class Arrival:
    """One request. Prompts that begin with the same parts share that prefix, token for token."""

    at_s: float  # after the start of the run
    parts: tuple[tuple[int, int], ...]  # (seed, tokens) each
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.parts)

    def prompt(self) -> list[int]:
        """Its token ids."""
        ids: list[int] = []
        for seed, length in self.parts:
            # In steps of four bytes what is drawn for a shorter part begins a longer one's.
            drawn = array("H", random.Random(seed).randbytes((length + 1) // 2 * 4))
            ids += [word % _IDS + _FIRST_ID for word in drawn[:length]]
        return ids


@dataclass(frozen=True)
class Load:
    """A run of one generator: arrivals on time, or so many at once (`concurrency`) for a while."""

    target: str
    arrivals: Sequence[Arrival]
    concurrency: int = 0  # 0: each arrival at its time, whatever became of those before
    seconds: float = 0.0  # with `concurrency`: nothing is begun after that
    timeout_s: float = 120.0  # of a request
    ttft_target_ms: int = 0  # 0: the router's
    api_key: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the generator's process."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Load:
        """What `to_json` made."""
        arrivals = [
            Arrival(a["at_s"], tuple((s, n) for s, n in a["parts"]), a["new_tokens"])
            for a in value["arrivals"]
        ]
        return cls(**{**value, "arrivals": arrivals})


@dataclass(frozen=True)
class Mix:
    """Sizes of requests, evenly spread between two bounds each."""

    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]

    def arrivals(self, rate: float, seconds: float, seed: int) -> list[Arrival]:
        """Poisson arrivals with prompts that share nothing, the same for the same seed."""
        dice = random.Random(seed)
        at_s, found = dice.expovariate(rate), []
        while at_s < seconds:
            parts = ((dice.getrandbits(60), dice.randint(*self.prompt_tokens)),)
            found.append(Arrival(at_s, parts, dice.randint(*self.new_tokens)))
            at_s += dice.expovariate(rate)
        return found
