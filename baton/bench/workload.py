"""The requests of a run, from a trace or generated; determined by the seed."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from baton.bench import trace_workload
from baton.bench.request import Demand, RequestOptions
from baton.bench.trace_workload import Scale
from baton.config import options
from baton.config.options import option, part
from baton.config.slo import Slo
from baton.errors import ConfigError

_FORMS = "512, 100-200, lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MOST"
_SALT_SHIFT = 128  # bits, above the seeds of parts
_PREFIX_SEED, _PROMPT_SEED = 1 << 80, 1 << 96  # above the seeds of traces


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1: uniform between `low` and `high`.

    With a `sigma` it is lognormal with the median `low`, truncated at `high` if larger.
    """

    low: int
    high: int
    sigma: float = 0.0  # of the logarithm

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses "512", "100-200", "lognormal:512,0.8" or "lognormal:512,0.8,4096".

        Raises ConfigError.
        """
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
            low = int(match[1])
            lengths = cls(low, int(match[2] or low))
        elif match := re.fullmatch(r"lognormal:(\d+),(\d+(?:\.\d+)?)(?:,(\d+))?", text):
            lengths = cls(int(match[1]), int(match[3] or match[1]), float(match[2]))
        else:
            raise ConfigError(f"{text!r} is no length in tokens: write {_FORMS}")
        if text.startswith("lognormal") and not lengths.sigma:
            raise ConfigError(f"{text!r}: equal lengths are written as {lengths.low}")
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
    """An open loop (`rate`, or a trace's times) or, with `concurrency`, a closed loop.

    It ends after `count` requests, after `duration_s`, or with the trace.
    """

    GROUP: ClassVar[str] = "load"
    rate: float = option(1.0, "--rate R", "requests per second", least=1e-6, most=1e6)
    concurrency: int = option(
        0, "--concurrency N", "requests in flight, instead of a rate (default: open loop)", least=1
    )
    # Gaps are gamma-distributed of this shape: their variance is 1/shape of a Poisson process's.
    burstiness: float = option(
        1.0, "--burstiness B", "shape of arrivals: 1 is Poisson, less burstier, more steadier",
        least=1e-3, most=1e6,
    )  # fmt: skip
    duration_s: float = option(
        0.0,
        "--duration S",
        "time in which requests are started (default: 30, unless --count or --trace)",
        least=1e-3,
        most=1e6,
    )
    count: int = option(0, "--count N", "number of requests (default: until --duration)", least=1)
    prompt_lengths: Lengths = option(
        Lengths(256, 256), "--prompt-tokens LENGTHS", f"{_FORMS} (default: 256)", Lengths.parse
    )
    output_lengths: Lengths = option(
        Lengths(64, 64), "--output-tokens LENGTHS", f"{_FORMS} (default: 64)", Lengths.parse
    )
    shared_prefix: int = option(
        0, "--shared-prefix TOKENS", "length of a common prefix of generated prompts (default: 0)"
    )
    prefixes: int = option(1, "--prefixes N", "number of different shared prefixes", least=1)
    seed: int = option(
        0, "--seed N", "seed of the requests (default: random, so that no cache has them)"
    )
    salt: int = 0  # changes prompts, not their lengths and times
    trace: Path | None = option(
        None, "--trace FILE", "replay a Mooncake JSONL or an Azure CSV trace", group="trace"
    )
    scale: Scale = part(Scale)

    def __post_init__(self) -> None:
        options.check(self)

    def demands(self) -> Iterator[Demand]:
        """The requests in order of time; endless if only the duration limits them.

        Raises ConfigError if there are none.
        """
        demands = (
            iter(trace_workload.demands(self.trace, self.scale))
            if self.trace
            else self._generated()
        )
        if self.duration_s and not self.concurrency:
            demands = itertools.takewhile(lambda demand: demand.at_s < self.duration_s, demands)
        demands = itertools.islice(demands, self.count or None)
        if (first := next(demands, None)) is None:
            raise ConfigError("no request arrives in that time: raise --duration or --rate")
        return map(self.salted, itertools.chain((first,), demands))

    def at(self, value: float) -> Workload:
        """This workload at another rate, or a trace at another rate scale."""
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
        """The request with other tokens for each seed and salt."""
        base = (self.seed << 32 | self.salt) << _SALT_SHIFT
        return replace(demand, parts=tuple((base + seed, n) for seed, n in demand.parts))

    def _generated(self) -> Iterator[Demand]:
        # Two generators: lengths do not depend on the rate.
        arrivals, sizes = random.Random(self.seed), random.Random(self.seed + 1)  # noqa: S311
        times: Iterator[float] = itertools.repeat(0.0)
        if not self.concurrency:
            shape = self.burstiness
            gap_s = partial(arrivals.gammavariate, shape, 1 / (self.rate * shape))
            times = itertools.accumulate(iter(gap_s, None))
        for at_s in times:
            parts = [(sizes.getrandbits(60), self.prompt_lengths.sample(sizes))]
            if self.shared_prefix:
                prefix = _PREFIX_SEED + sizes.randrange(self.prefixes)
                parts.insert(0, (prefix, self.shared_prefix))
            yield Demand(at_s, tuple(parts), self.output_lengths.sample(sizes))


@dataclass(frozen=True)
class Interference:
    """Long prompts, one at the start of each period of the window. Lengths are tokens."""

    prompt: int = 2048
    output: int = 8
    every_s: float = 6.0
    periods: int = 4
    ramp_s: float = 4.0  # for all streams to start, before the window

    @classmethod
    def parse(cls, text: str) -> Interference:
        """Parses "2048,6": tokens, and seconds between prompts. Raises ConfigError."""
        tokens, _, every_s = text.partition(",")
        form = r"[1-9]\d*(,\d*\.?\d+)?"
        if not re.fullmatch(form, text) or not float(every_s or cls.every_s):
            raise ConfigError(f"{text!r}: write TOKENS,SECONDS, as 2048,6")
        return cls(int(tokens), every_s=float(every_s or cls.every_s))

    @property
    def window_s(self) -> tuple[float, float]:
        """Start and end of the measured periods, in seconds after the start."""
        return self.ramp_s, self.ramp_s + self.periods * self.every_s

    def prompts(self, workload: Workload) -> Iterator[Demand]:
        """The long prompts, which differ from the workload's."""
        for number in range(self.periods):
            at_s = self.ramp_s + number * self.every_s
            parts = ((_PROMPT_SEED + number, self.prompt),)
            yield workload.salted(Demand(at_s, parts, self.output))


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(map(float, text.split(",")))
    for rate in rates:
        Workload(rate=rate)  # raises ConfigError before anything is measured
    return rates


@dataclass(frozen=True)
class Settings:
    """Settings of `baton bench serve`."""

    GROUP: ClassVar[str] = "measuring"
    workload: Workload = part(Workload)
    target: tuple[str, RequestOptions] = ("", RequestOptions())  # the server's URL first
    sweep: Sequence[float] = option(
        (),
        "--sweep R,R,...",
        "measure these rates (with --trace: rate scales) in turn",
        _rates,
        group="load",
    )
    interference: Interference | None = None
    slo: Slo | None = option(
        None, "--slo LIMITS", "limits of goodput in seconds: ttft=0.5,tpot=0.05,e2e=10", Slo.parse
    )
    warm_up: int | None = option(
        None, "--warm-up N", "unmeasured requests at first (default: 4, or --concurrency)", int
    )
    output: Path | None = option(None, "--output DIR", "write report.json and requests.jsonl", Path)

    def __post_init__(self) -> None:
        options.check(self)
