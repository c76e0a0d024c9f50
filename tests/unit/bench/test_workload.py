"""Which requests are sent and when: rates, lengths, prefixes, seeds."""

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.bench.request import Demand, text_of
from baton.bench.workload import Interference, Lengths, Workload
from baton.errors import ConfigError

IDS = range(100, 4000)
LOAD = Workload(rate=9, count=30, prompt_lengths=Lengths(5, 99))


@pytest.mark.parametrize(("burstiness", "variation"), [(1e6, 0.0), (1.0, 1.0), (0.25, 2.0)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness, variation):
    """Gaps' standard deviation over their mean: 1 / sqrt(burstiness)."""
    load = Workload(rate=8, burstiness=burstiness, seed=7, count=20_000)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(load.demands())]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.06)
    assert statistics.stdev(gaps) / mean == pytest.approx(variation, rel=0.08, abs=2e-3)


@pytest.mark.parametrize(
    ("text", "median", "mean", "low", "high"),
    [
        ("7", 7, 7, 7, 7),
        ("10-20", 15, 15, 10, 20),
        ("lognormal:500,0.5", 500, 500 * 2.718**0.125, 1, 10**6),
        ("lognormal:500,0.5,600", 500, 470, 1, 600),
        ("lognormal:1,2", 1, 8.2, 1, 10**6),
    ],
)
def test_lengths_are_drawn_as_they_are_written(text, median, mean, low, high):
    lengths, rng = Lengths.parse(text), random.Random(1)
    assert str(lengths) == text
    sampled = [lengths.sample(rng) for _ in range(4000)]
    assert low <= min(sampled) and max(sampled) <= high
    assert statistics.median(sampled) == pytest.approx(median, rel=0.06)
    assert statistics.mean(sampled) == pytest.approx(mean, rel=0.08)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-3", "20-10", "lognormal:5", "lognormal:0,1", "lognormal:9,1,8", "x"),
        *("lognormal:260,0,2000", "lognormal:9,0.0"),
    ],
)
def test_other_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("text", "prompt", "every_s"),
    [
        *(("2048,6", 2048, 6), ("2048,6.0", 2048, 6), ("2048,10.0", 2048, 10), ("9", 9, 6)),
        *(("9,1.0", 9, 1), ("9,0.5", 9, 0.5), ("9,.25", 9, 0.25)),
    ],
)
def test_interference_is_tokens_and_seconds(text, prompt, every_s):
    assert Interference.parse(text) == Interference(prompt=prompt, every_s=every_s)


@pytest.mark.parametrize(
    "text", ["", "0,1", "-1,1", "9,", "9,0", "9,0.0", "9,-1", "9,inf", "9,nan", "9,1,1", "x,1"]
)
def test_other_interference_is_refused(text):
    with pytest.raises(ConfigError, match="write TOKENS,SECONDS"):
        Interference.parse(text)


def test_equal_parts_are_equal_tokens_and_a_shorter_part_is_a_prefix():
    one = Demand(0.0, ((1, 20), (2, 10)), 5)
    other = Demand(1.0, ((1, 20), (3, 10)), 5).prompt(IDS)
    prompt = one.prompt(IDS)
    assert prompt[:20] == other[:20] and prompt[20:] != other[20:]
    assert len(prompt) == one.prompt_tokens == 30
    assert all(100 <= token_id < 4000 for token_id in prompt)
    assert all(Demand(0.0, ((1, n),), 5).prompt(IDS) == prompt[:n] for n in range(1, 20))
    assert len(text_of(range(500)).split()) == 500
    assert text_of([1, 2, 3]) == text_of([1, 2, 3]) != text_of([1, 2, 4])
    load = Workload(rate=9, count=40, shared_prefix=8, prefixes=3)
    prompts = [d.prompt(IDS) for d in load.demands()]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 3
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} == {264}


def test_a_count_or_a_duration_ends_a_load():
    found = list(Workload(rate=50, duration_s=40).demands())
    assert 1700 < len(found) < 2300  # of 2000, more than six standard deviations
    times = [d.at_s for d in found]
    assert times == sorted(times) and times[-1] < 40
    assert len(list(Workload(rate=5, count=12).demands())) == 12
    assert len(list(Workload(concurrency=3, count=12).demands())) == 12
    assert len(list(Workload(rate=5, count=1000, duration_s=2).demands())) < 50
    with pytest.raises(ConfigError, match="no request arrives"):
        Workload(rate=1e-6, duration_s=1).demands()


def test_seed_salt_and_rate_change_what_they_should():
    demands = list(LOAD.demands())
    assert demands == list(LOAD.demands())
    seeded, salted, slower = (
        list(load.demands()) for load in (replace(LOAD, seed=5), replace(LOAD, salt=1), LOAD.at(2))
    )
    assert [d.at_s for d in seeded] != [d.at_s for d in demands]
    assert not {d.parts for d in seeded} & {d.parts for d in demands}
    for one, other in zip(demands, salted, strict=True):  # other words, nothing else
        assert (one.at_s, one.prompt_tokens, one.new_tokens) == (
            other.at_s, other.prompt_tokens, other.new_tokens,
        )  # fmt: skip
        assert one.prompt(IDS) != other.prompt(IDS)
    assert [d.prompt_tokens for d in slower] == [d.prompt_tokens for d in demands]
    assert LOAD.at(2).label == "2 req/s"
