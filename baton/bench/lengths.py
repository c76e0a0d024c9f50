"""How long prompts and outputs are: fixed, evenly spread between two bounds, or lognormal."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from baton.errors import ConfigError

_FORMS = "512, 100-200, lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MOST"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1 each; `sigma` is set for a lognormal one.

    Of that, `low` is the median and `high`, if it is more, the longest: what is drawn beyond it is
    cut to it.
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

    def draw(self, dice: random.Random) -> int:
        """One length."""
        if self.sigma:
            drawn = max(1, round(dice.lognormvariate(math.log(self.low), self.sigma)))
            return min(drawn, self.high) if self.high > self.low else drawn
        return dice.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.sigma:
            most = f",{self.high}" if self.high > self.low else ""
            return f"lognormal:{self.low},{self.sigma:g}{most}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
