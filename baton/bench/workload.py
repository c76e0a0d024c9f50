"""Which requests a run sends: from a trace, or made up; the same for the same seed."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.bench import trace
from baton.bench.request import Demand
from baton.bench.trace import Scale
from baton.errors import ConfigError

_FORMS = "512, 100-200, lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MOST"
_SALT_SHIFT = 128  # above the seeds of parts
_PREFIX_SEED, _PROMPT_SEED = 1 << 80, 1 << 96  # apart from those of prompts' own parts


def arrival_times_s(
    kind: str, rate: float, burstiness: float, rng: random.Random
) -> Iterator[float]:
    """Endless times after the start with `rate` arrivals a second on average.

    "bursty" draws gaps from a gamma distribution of shape `burstiness`: 1 is a Poisson process,
    smaller is burstier (the gaps' variance is 1/burstiness of a Poisson process's).
    """
    gap_s: Callable[[], float] = {
        "poisson": lambda: rng.expovariate(rate),
        "bursty": lambda: rng.gammavariate(burstiness, 1 / (rate * burstiness)),
        "constant": lambda: 1 / rate,
    }[kind]
    return itertools.accumulate(iter(gap_s, None))


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1 each: even between `low` and `high`.

    With a `sigma` it is lognormal with the median `low`, cut at `high` if that is more.
    """

    low: int
    high: int
    sigma: float = 0.0  # of the logarithm

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "512", "100-200", "lognormal:512,0.8" or "lognormal:512,0.8,4096".

        Raises ConfigError.
        """
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low = int(match[1])
            lengths = cls(low, int(match[2] or low))
        elif match := re.fullmatch(r"lognormal:(\d+),(\d+(?:\.\d+)?)(?:,(\d+))?", text):
            lengths = cls(int(match[1]), int(match[3] or match[1]), float(match[2]))
        else:
            raise ConfigError(f"{text!r} is no length in tokens: write {_FORMS}")
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{text!r}: lengths are 1 or more, the smaller bound first")
        return lengths

    def sample(self, rng: random.Random) -> int:
        if self.sigma:
            length = max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))
            return min(length, self.high) if self.high > self.low else length
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.sigma:
            most = f",{self.high}" if self.high > self.low else ""
            return f"lognormal:{self.low},{self.sigma:g}{most}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Workload:
    """An open loop (`rate`, or a trace's times) or a closed one (`concurrency`).

    `count` or `duration_s` ends it; a trace may end before either.
    """

    rate: float = 0.0  # requests a second; 0 with `concurrency` and for a trace's own times
    concurrency: int = 0  # requests at a time; 0: an open loop
    arrivals: str = "poisson"
    burstiness: float = 1.0
    count: int = 0
    duration_s: float = 0.0
    prompt_lengths: Lengths = Lengths(256, 256)
    output_lengths: Lengths = Lengths(64, 64)
    shared_prefix: int = 0  # tokens that prompts have in common, in addition to their own
    prefixes: int = 1  # how many different ones there are
    trace: Path | None = None
    scale: Scale = field(default_factory=Scale)
    seed: int = 0
    salt: int = 0  # another one makes other prompts of the same lengths at the same times

    def demands(self) -> Iterator[Demand]:
        """Its requests in order of time; endless where only the clock ends them."""
        demands = iter(trace.demands(self.trace, self.scale)) if self.trace else self._generated()
        if self.duration_s and not self.concurrency:
            demands = itertools.takewhile(lambda demand: demand.at_s < self.duration_s, demands)
        return map(self.salted, itertools.islice(demands, self.count or None))

    def blocks(self, number: int) -> list[tuple[Iterator[Demand], float]]:
        """The same requests in so many consecutive runs, each with its own clock.

        For each its demands and, where the clock ends it, after how many seconds nothing more is
        begun (else 0). Raises ConfigError when there is no request.
        """
        if self.concurrency and self.duration_s and not self.count:
            endless = self.demands()
            return [(endless, self.duration_s / number)] * number
        demands = list(self.demands())
        if not demands:
            raise ConfigError("no request arrives in that time: raise --duration or --rate")
        if self.concurrency:
            limit_s = self.duration_s / number
            return [(iter(demands[i::number]), limit_s) for i in range(number)]
        block_s = (self.duration_s or demands[-1].at_s + 1e-9) / number
        blocks: list[list[Demand]] = [[] for _ in range(number)]
        for demand in demands:
            i = min(int(demand.at_s / block_s), number - 1)
            blocks[i].append(replace(demand, at_s=demand.at_s - i * block_s))
        return [(iter(block), 0.0) for block in blocks]

    def at(self, value: float) -> Workload:
        """This workload at another rate; of a trace, at another rate scale."""
        if self.trace:
            return replace(self, scale=replace(self.scale, rate=value))
        return replace(self, rate=value)

    @property
    def label(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if self.trace:
            return f"{self.scale.rate:g}x trace"
        return f"{self.rate:g} req/s"

    def salted(self, demand: Demand) -> Demand:
        """The same sizes in other words for each seed and salt."""
        base = (self.seed << 32 | self.salt) << _SALT_SHIFT
        return replace(demand, parts=tuple((base + seed, n) for seed, n in demand.parts))

    def _generated(self) -> Iterator[Demand]:
        # Two generators: sizes stay the same when the rate changes.
        arrivals, sizes = random.Random(self.seed), random.Random(self.seed + 1)  # noqa: S311
        times: Iterator[float] = itertools.repeat(0.0)
        if not self.concurrency:
            times = arrival_times_s(self.arrivals, self.rate, self.burstiness, arrivals)
        for at_s in times:
            parts = [(sizes.getrandbits(60), self.prompt_lengths.sample(sizes))]
            if self.shared_prefix:
                prefix = _PREFIX_SEED + sizes.randrange(self.prefixes)
                parts.insert(0, (prefix, self.shared_prefix))
            yield Demand(at_s, tuple(parts), self.output_lengths.sample(sizes))


@dataclass(frozen=True)
class Interference:
    """Long prompts, one at the beginning of each period of the window. Lengths are tokens."""

    prompt: int = 2048
    output: int = 8
    every_s: float = 6.0
    periods: int = 4
    ramp_s: float = 4.0  # before the window, until all streams run

    @property
    def window_s(self) -> tuple[float, float]:
        """Begin and end of what counts, seconds after the start: whole periods."""
        return self.ramp_s, self.ramp_s + self.periods * self.every_s

    def prompts(self, workload: Workload) -> Iterator[Demand]:
        """None of them is one of the workload's own."""
        for number in range(self.periods):
            at_s = self.ramp_s + number * self.every_s
            parts = ((_PROMPT_SEED + number, self.prompt),)
            yield workload.salted(Demand(at_s, parts, self.output))
