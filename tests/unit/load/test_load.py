"""The load experiments' own parts: a wrong figure or an unfair baseline would go unnoticed."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from load.arrivals import Arrival, Load, Mix
from load.baseline_router import POLICIES, picker
from load.driving import drive
from load.outcomes import REFUSED, Outcome, Run, hit_ratio, percentile
from load.trace import Scale, arrivals, reusable

from router.fleet.snapshot import Snapshot
from tests.unit.router.snapshots import fleet, needs, worker


class TestArrivals:
    """What is asked and when."""

    def test_equal_parts_are_equal_tokens_and_only_they(self) -> None:
        one = Arrival(0.0, ((1, 20), (2, 10)), 5).prompt()
        other = Arrival(1.0, ((1, 20), (3, 10)), 5).prompt()
        assert one[:20] == other[:20]
        assert one[20:] != other[20:]
        assert len(one) == Arrival(0.0, ((1, 20), (2, 10)), 5).prompt_tokens == 30

    def test_a_part_that_is_cut_short_begins_like_the_whole(self) -> None:
        whole = Arrival(0.0, ((7, 64),), 5).prompt()
        for length in range(1, 64):
            assert Arrival(0.0, ((7, length),), 5).prompt() == whole[:length]

    def test_no_two_of_many_prompts_share_a_block(self) -> None:
        begun = {tuple(a.prompt()[:8]) for a in Mix((8, 8), (1, 1)).arrivals(500.0, 20.0, seed=1)}
        assert len(begun) == len(Mix((8, 8), (1, 1)).arrivals(500.0, 20.0, seed=1))

    def test_poisson_arrivals_keep_rate_and_bounds(self) -> None:
        found = Mix((10, 20), (1, 3)).arrivals(50.0, 40.0, seed=3)
        assert 1700 < len(found) < 2300  # of 2000, five standard deviations
        assert all(10 <= a.prompt_tokens <= 20 and 1 <= a.new_tokens <= 3 for a in found)
        assert len({a.parts for a in found}) == len(found)
        assert [a.at_s for a in found] == sorted(a.at_s for a in found)

    def test_a_load_survives_its_journey(self) -> None:
        load = Load("h:1", Mix((10, 20), (1, 3)).arrivals(5.0, 4.0, seed=1), 4, 9.0, api_key="k")
        assert Load.from_json(json.loads(json.dumps(load.to_json()))) == load


class TestTrace:
    """A trace scaled down keeps its shape."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        rows = [(0, 1000, 80, [1, 2]), (3000, 1100, 80, [1, 2, 3]), (3000, 600, 8, [4, 2])]
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows))
        return path

    def test_lengths_times_and_shared_prefixes(self, file: Path) -> None:
        found = arrivals(file, Scale(length=8, rate=2, first=0, count=9, max_tokens=1000))
        assert [a.prompt_tokens for a in found] == [125, 138, 75]
        assert [a.new_tokens for a in found] == [10, 10, 2]
        assert [a.at_s for a in found] == [0.0, 1.5, 2.25]
        first, second, third = (a.prompt() for a in found)
        assert first[:64] == second[:64] and second[:64] != third[:64]
        # The second shares one whole block; of the next, the first request had a part only.
        assert reusable(found) == pytest.approx(64 / (125 + 138 + 75))

    def test_a_slice_and_a_limit(self, file: Path) -> None:
        (only,) = arrivals(file, Scale(length=1, rate=1, first=1, count=1, max_tokens=600))
        assert (only.at_s, only.prompt_tokens, only.new_tokens) == (0.0, 600, 80)


class TestFigures:
    """Percentiles and what they are made of."""

    def test_percentiles_are_values_that_occurred(self) -> None:
        values = [float(n) for n in range(200, 0, -1)]
        assert [percentile(values, p) for p in (0, 50, 99, 99.9, 100)] == [1, 100, 198, 200, 200]
        assert math.isnan(percentile([], 50))

    def test_the_hit_ratio_counts_tokens_not_requests(self) -> None:
        done = [Outcome(0, prompt_tokens=900, cached_tokens=0), Outcome(0, prompt_tokens=100)]
        done[1].cached_tokens = 100
        assert hit_ratio(done) == pytest.approx(0.1)

    def test_a_run_survives_its_journey(self) -> None:
        run = Run([Outcome(0.5, ttft_s=0.25), Outcome(1, status=REFUSED)], 2.0, [0.001])
        again = Run.from_json(json.loads(json.dumps(run.to_json())))
        assert again == run
        assert (len(again.finished), len(again.refused)) == (1, 1)


class TestBaselines:
    """Round robin and least connections do what they are called."""

    @staticmethod
    def picks(policy: str, snapshot: Snapshot, times: int, **without: set[str]) -> list[str]:
        pick = picker(POLICIES[policy])
        choices = [pick(snapshot, needs(), **without) for _ in range(times)]
        return [" ".join(choice.names) for choice in choices]

    def test_round_robin_ignores_load_and_takes_turns_in_each_role(self) -> None:
        prefill = [worker("p0", tokens=5000), worker("p1"), worker("p2")]
        snapshot = fleet(prefill, [worker("d0", sequences=9), worker("d1")])
        found = self.picks("round-robin", snapshot, 6)
        assert [pair.split()[0] for pair in found] == ["p0", "p1", "p2"] * 2
        assert [pair.split()[1] for pair in found] == ["d0", "d1"] * 3

    def test_least_connections_takes_the_least_busy_then_turns(self) -> None:
        prefill = [worker("p0", tokens=5000), worker("p1"), worker("p2")]
        snapshot = fleet(prefill, [worker("d0", sequences=2), worker("d1", sequences=1)])
        assert self.picks("least-connections", snapshot, 3) == ["p1 d1", "p2 d1", "p1 d1"]

    def test_who_is_down_full_or_failed_is_left_out(self) -> None:
        snapshot = fleet(
            [worker("p0", state="SILENT"), worker("p1")],
            [worker("d0", blocks_free=0), worker("d1"), worker("d2"), worker("d3")],
        )
        found = self.picks("round-robin", snapshot, 4, full={"d1"}, failed={"d2"})
        assert set(found) == {"p1 d3"}


async def test_the_generator_times_and_counts_what_a_router_answers() -> None:
    """Its process, against a router that nobody runs: each request ends with a status."""
    planned = Mix((4, 4), (2, 2)).arrivals(100.0, 0.1, seed=1)
    async with asyncio.timeout(60):
        run = await drive(Load("127.0.0.1:1", planned, timeout_s=5.0))
    assert run.statuses == {"UNAVAILABLE": len(planned)}
    assert all(outcome.ended_s > 0 for outcome in run.outcomes)
