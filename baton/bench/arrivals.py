"""When requests arrive in an open loop: whatever became of those before."""

from __future__ import annotations

import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "constant", "bursty")


def times_s(kind: str, rate: float, burstiness: float, dice: random.Random) -> Iterator[float]:
    """Endless times after the start with `rate` arrivals a second on average.

    "bursty" draws gaps from a gamma distribution of shape `burstiness`: 1 is a Poisson process,
    smaller is burstier (the gaps' variance is 1/burstiness of a Poisson process's).
    """
    at_s = 0.0
    while True:
        at_s += _gap_s(kind, rate, burstiness, dice)
        yield at_s


def _gap_s(kind: str, rate: float, burstiness: float, dice: random.Random) -> float:
    if kind == "poisson":
        return dice.expovariate(rate)
    if kind == "bursty":
        return dice.gammavariate(burstiness, 1 / (rate * burstiness))
    assert kind == "constant", kind
    return 1 / rate
