"""Which requests are sent and when: rates, lengths, prefixes, seeds, and two servers in turns."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from baton.bench.request import Demand, IdRange, text_of
from baton.bench.workload import ARRIVALS, Lengths, Workload, arrival_times_s
from baton.errors import ConfigError

IDS = IdRange(100, 4000)


def gaps(kind: str, rate: float, burstiness: float = 1.0) -> list[float]:
    """Many gaps between arrivals."""
    times = islice(arrival_times_s(kind, rate, burstiness, random.Random(7)), 20_000)
    return [later - earlier for earlier, later in pairwise(times)]


class TestArrivals:
    @pytest.mark.parametrize("kind", ARRIVALS)
    def test_the_mean_gap_is_one_over_the_rate(self, kind: str) -> None:
        assert statistics.mean(gaps(kind, 8.0, 0.25)) == pytest.approx(1 / 8, rel=0.06)

    def test_how_gaps_vary(self) -> None:
        """The standard deviation over the mean: 0, 1, and 1 / sqrt(burstiness)."""

        def variation(kind: str, burstiness: float = 1.0) -> float:
            found = gaps(kind, 8.0, burstiness)
            return statistics.stdev(found) / statistics.mean(found)

        assert variation("constant") == pytest.approx(0, abs=1e-6)
        assert variation("poisson") == pytest.approx(1, rel=0.05)
        assert variation("bursty", 0.25) == pytest.approx(2, rel=0.08)


class TestLengths:
    @pytest.mark.parametrize(
        "text", ["512", "100-200", "lognormal:512,0.8", "lognormal:512,0.8,900"]
    )
    def test_they_are_written_as_they_are_read(self, text: str) -> None:
        assert str(Lengths.parse(text)) == text

    @pytest.mark.parametrize(
        "text", ["", "0", "-3", "20-10", "lognormal:5", "lognormal:0,1", "lognormal:9,1,8", "x"]
    )
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match="length"):
            Lengths.parse(text)

    def test_distributions(self) -> None:
        rng = random.Random(1)

        def drawn(text: str) -> list[int]:
            return [Lengths.parse(text).sample(rng) for _ in range(4000)]

        assert set(drawn("7")) == {7}
        even = drawn("10-20")
        assert set(even) == set(range(10, 21))
        lognormal = drawn("lognormal:500,0.5")
        assert statistics.median(lognormal) == pytest.approx(500, rel=0.06)
        assert statistics.mean(lognormal) == pytest.approx(500 * 2.718**0.125, rel=0.06)
        assert min(drawn("lognormal:1,2")) >= 1
        cut = drawn("lognormal:500,0.5,600")
        assert max(cut) == 600 and statistics.median(cut) == pytest.approx(500, rel=0.06)


class TestDemand:
    def test_equal_parts_are_equal_tokens_and_only_they(self) -> None:
        one = Demand(0.0, ((1, 20), (2, 10)), 5).prompt(IDS)
        other = Demand(1.0, ((1, 20), (3, 10)), 5).prompt(IDS)
        assert one[:20] == other[:20] and one[20:] != other[20:]
        assert len(one) == Demand(0.0, ((1, 20), (2, 10)), 5).prompt_tokens == 30
        assert all(100 <= token_id < 4000 for token_id in one)

    def test_a_part_that_is_cut_short_begins_like_the_whole(self) -> None:
        whole = Demand(0.0, ((7, 64),), 5).prompt(IDS)
        assert all(Demand(0.0, ((7, n),), 5).prompt(IDS) == whole[:n] for n in range(1, 64))

    def test_text_has_a_word_for_each_token(self) -> None:
        assert len(text_of(range(500)).split()) == 500
        assert text_of([1, 2, 3]) == text_of([1, 2, 3]) != text_of([1, 2, 4])


class TestWorkload:
    def test_a_rate_for_a_while(self) -> None:
        found = list(Workload(rate=50, duration_s=40).demands())
        assert 1700 < len(found) < 2300  # of 2000, more than six standard deviations
        assert found[-1].at_s < 40
        assert [d.at_s for d in found] == sorted(d.at_s for d in found)

    def test_a_count(self) -> None:
        assert len(list(Workload(rate=5, count=12).demands())) == 12
        assert len(list(Workload(concurrency=3, count=12).demands())) == 12
        assert len(list(Workload(rate=5, count=1000, duration_s=2).demands())) < 50

    def test_the_same_seed_is_the_same_load(self) -> None:
        load = Workload(rate=9, count=30, prompt_lengths=Lengths(5, 99), seed=4)
        assert list(load.demands()) == list(load.demands())
        other = list(replace(load, seed=5).demands())
        assert [d.at_s for d in other] != [d.at_s for d in load.demands()]
        assert not {d.parts for d in other} & {d.parts for d in load.demands()}

    def test_another_salt_changes_the_words_alone(self) -> None:
        load = Workload(rate=9, count=30, prompt_lengths=Lengths(5, 99))
        pairs = zip(load.demands(), replace(load, salt=1).demands(), strict=True)
        for one, other in pairs:
            assert (one.at_s, one.prompt_tokens, one.new_tokens) == (
                other.at_s, other.prompt_tokens, other.new_tokens,
            )  # fmt: skip
            assert one.prompt(IDS) != other.prompt(IDS)

    def test_another_rate_keeps_the_sizes(self) -> None:
        load = Workload(rate=9, count=30, prompt_lengths=Lengths(5, 99))
        sizes = [d.prompt_tokens for d in load.demands()]
        assert [d.prompt_tokens for d in load.at(2.0).demands()] == sizes
        assert load.at(2.0).label == "2 req/s"

    def test_prompts_share_prefixes(self) -> None:
        load = Workload(rate=9, count=40, shared_prefix=8, prefixes=3)
        prompts = [d.prompt(IDS) for d in load.demands()]
        assert len({tuple(prompt[:8]) for prompt in prompts}) == 3
        assert len({tuple(prompt[8:]) for prompt in prompts}) == 40
        assert {len(prompt) for prompt in prompts} == {264}

    def test_blocks_of_an_open_loop_are_the_same_requests(self) -> None:
        load = Workload(rate=20, duration_s=8, prompt_lengths=Lengths(5, 99))
        blocks = [list(demands) for demands, _ in load.blocks(4)]
        assert all(0 <= d.at_s < 2 for block in blocks for d in block)
        whole = [d.later(2.0 * i) for i, block in enumerate(blocks) for d in block]
        assert [d.parts for d in whole] == [d.parts for d in load.demands()]
        times = [d.at_s for d in load.demands()]
        assert [d.at_s for d in whole] == pytest.approx(times)

    def test_blocks_of_a_closed_loop(self) -> None:
        counted = Workload(concurrency=2, count=10).blocks(4)
        assert sorted(len(list(demands)) for demands, _ in counted) == [2, 2, 3, 3]
        timed = Workload(concurrency=2, duration_s=8).blocks(4)
        assert [limit_s for _, limit_s in timed] == [2, 2, 2, 2]
        assert next(timed[0][0]) != next(timed[1][0])  # each block goes on behind the one before

    def test_an_empty_load_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no request arrives"):
            Workload(rate=1e-6, duration_s=1).blocks(1)

    def test_a_trace_is_replayed(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        rows = [f"2024-05-10 00:00:{s:02d}.5,{100 + s},{s + 1}" for s in range(10)]
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        load = Workload(trace=path).at(2.0)
        assert load.label == "2x trace"
        assert [d.at_s for d in load.demands()] == [s / 2 for s in range(10)]
        assert [d.new_tokens for d in replace(load, duration_s=2.0).demands()] == [1, 2, 3, 4]
