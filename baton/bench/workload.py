"""Which requests a run sends: from a trace, or made up; the same for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.bench import arrivals, trace
from baton.bench.demand import Demand
from baton.bench.lengths import Lengths
from baton.bench.trace import Scale
from baton.errors import ConfigError

_PROMPT, _OUTPUT = Lengths(256, 256), Lengths(64, 64)
_SALT_SHIFT = 128  # above the seeds of parts
_PREFIX_SEED = 1 << 80  # apart from the seeds of prompts' own parts


@dataclass(frozen=True)
class Workload:
    """What is asked, in an open loop (`rate`, or a trace's times) or a closed one (`concurrency`).

    `count` or `duration_s` ends it; a trace may end before either.
    """

    rate: float = 0.0  # requests a second; 0 with `concurrency` and for a trace's own times
    concurrency: int = 0  # requests at a time; 0: an open loop
    arrivals: str = "poisson"
    burstiness: float = 1.0
    count: int = 0
    duration_s: float = 0.0
    prompt_lengths: Lengths = _PROMPT
    output_lengths: Lengths = _OUTPUT
    shared_prefix: int = 0  # tokens that prompts have in common, in addition to their own
    prefixes: int = 1  # how many different ones there are
    trace: Path | None = None
    scale: Scale = field(default_factory=Scale)
    seed: int = 0
    salt: int = 0  # another one makes other prompts of the same lengths at the same times

    def demands(self) -> Iterator[Demand]:
        """Its requests in order of time; endless where only the clock ends them."""
        found = self._recorded() if self.trace else self._made_up()
        if self.duration_s and not self.concurrency:
            found = itertools.takewhile(lambda demand: demand.at_s < self.duration_s, found)
        return map(self._salted, itertools.islice(found, self.count or None))

    def blocks(self, number: int) -> list[tuple[Iterator[Demand], float]]:
        """The same requests in so many consecutive runs, each with its own clock.

        For each its demands and, where the clock ends it, after how many seconds nothing more is
        begun (else 0).
        """
        if self.concurrency and self.duration_s and not self.count:
            every = self.demands()
            return [(every, self.duration_s / number)] * number
        demands = list(self.demands())
        if not demands:
            raise ConfigError("no request arrives in that time: raise --duration or --rate")
        if self.concurrency:
            limit_s = self.duration_s / number
            return [(iter(demands[i::number]), limit_s) for i in range(number)]
        whole_s = self.duration_s or demands[-1].at_s + 1e-9
        return [(iter(block), 0.0) for block in _cut(demands, whole_s / number, number)]

    def at(self, value: float) -> Workload:
        """This workload at another rate; of a trace, at another rate scale."""
        if self.trace:
            return replace(self, scale=replace(self.scale, rate=value))
        return replace(self, rate=value)

    @property
    def label(self) -> str:
        """What drives it, in few words."""
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if self.trace:
            return f"{self.scale.rate:g}x trace"
        return f"{self.rate:g} req/s"

    def _salted(self, demand: Demand) -> Demand:
        apart = (self.seed << 32 | self.salt) << _SALT_SHIFT
        parts = tuple((apart + part, length) for part, length in demand.parts)
        return replace(demand, parts=parts)

    def _recorded(self) -> Iterator[Demand]:
        assert self.trace is not None
        return iter(trace.demands(self.trace, self.scale))

    def _made_up(self) -> Iterator[Demand]:
        # Two dice: sizes stay the same when the rate changes.
        dice, sizes = (random.Random(seed) for seed in (self.seed, self.seed + 1))  # noqa: S311
        times: Iterator[float] = itertools.repeat(0.0)
        if not self.concurrency:
            times = arrivals.times_s(self.arrivals, self.rate, self.burstiness, dice)
        for at_s in times:
            yield Demand(at_s, self._parts(sizes), self.output_lengths.draw(sizes))

    def _parts(self, dice: random.Random) -> tuple[tuple[int, int], ...]:
        own = (dice.getrandbits(60), self.prompt_lengths.draw(dice))
        if not self.shared_prefix:
            return (own,)
        return ((_PREFIX_SEED + dice.randrange(self.prefixes), self.shared_prefix), own)


def _cut(demands: list[Demand], block_s: float, number: int) -> list[list[Demand]]:
    blocks: list[list[Demand]] = [[] for _ in range(number)]
    for demand in demands:
        place = min(int(demand.at_s / block_s), number - 1)
        blocks[place].append(demand.later(-place * block_s))
    return blocks
