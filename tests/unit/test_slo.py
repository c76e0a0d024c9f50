"""Classes of service: what is written, and what counts as kept."""

import math

import pytest

from baton.errors import ConfigError
from baton.slo import Slo, parse_all


def test_what_is_written():
    assert Slo.parse("ttft=0.5,tpot=0.05") == Slo("default", 0.5, 0.05, math.inf)
    assert Slo.parse("batch: ttft=10, e2e=60") == Slo("batch", 10, math.inf, 60)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "speed=1", "a:", ":ttft=1",
     "a b:ttft=1", "ttft=1,ttft=2", "ttft=1,", "a:b:ttft=1"],
)  # fmt: skip
def test_what_is_refused(text):
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


def test_names_are_unique():
    assert [slo.name for slo in parse_all(("ttft=1", "fast:ttft=0.1"))] == ["default", "fast"]
    with pytest.raises(ConfigError, match="default twice"):
        parse_all(("ttft=1", "tpot=1"))


def test_all_targets_must_be_met():
    slo = Slo("x", ttft_s=1.0, tpot_s=0.1)
    assert slo.met(1.0, 0.1, 1e9)
    assert not slo.met(1.01, 0.1, 2.0)
    assert not slo.met(1.0, 0.11, 2.0)
    assert not Slo("x", e2e_s=5.0).met(0.1, 0.1, 5.1)
