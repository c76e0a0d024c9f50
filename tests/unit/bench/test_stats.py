"""Statistics of known requests, computed by hand; numpy is the oracle of percentiles."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.comparison import compared, knee_of
from baton.bench.request import INTERRUPTED, Outcome, Phases
from baton.bench.stats import Stats, goodput_of, percentile, quantiles, spread_of, stats_of
from baton.bench.timeline import timeline_of
from baton.slo import Slo
from tests.unit.bench.outcomes import failed, outcome

FAST = outcome(0.1, 0.2, 0.3, 0.4)  # TTFT 0.1, TPOT 0.1, E2E 0.4
SLOW = outcome(1.0, 1.5, 2.5)  # TTFT 1.0, TPOT 0.75, E2E 2.5
SHORT = outcome(0.3)  # no TPOT
BOTH = Slo.parse("ttft=0.5,tpot=0.5")


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


class TestSpread:
    @given(VALUES, st.floats(0, 100))
    def test_percentiles_are_those_of_numpy(self, values: list[float], percent: float) -> None:
        expected = np.percentile(values, percent)
        assert percentile(values, percent) == pytest.approx(expected, abs=1e-6)

    def test_by_hand(self) -> None:
        """Rank 0.95 * 4 = 3.8 of 1, 2, 3, 4, 10: from 4, eight tenths of the way to 10."""
        assert spread_of([10, 1, 3, None, 2, 4]) == {
            "count": 5, "mean": 4, "min": 1, "max": 10, "p50": 3,
            "p90": pytest.approx(7.6), "p95": pytest.approx(8.8), "p99": pytest.approx(9.76),
        }  # fmt: skip

    def test_of_nothing(self) -> None:
        assert spread_of([]) is None and spread_of([None]) is None
        assert quantiles([None]) == []
        assert math.isnan(percentile([], 50))

    def test_quantiles_are_evenly_spaced_in_rank(self) -> None:
        assert quantiles([4, 0, 2], steps=4) == [0, 1, 2, 3, 4]
        assert len(quantiles([1.0])) == 101


class TestLatencies:
    def test_one_request(self) -> None:
        assert (SLOW.ttft_s, SLOW.e2e_s, SLOW.tpot_s) == (1.0, 2.5, 0.75)
        assert SLOW.gaps_s == [0.5, 1.0]
        assert (SHORT.tpot_s, SHORT.gaps_s) == (None, [])
        assert (Outcome(0.0).ttft_s, Outcome(0.0).tpot_s) == (None, None)

    def test_messages_of_several_tokens(self) -> None:
        """TPOT counts tokens, inter-token latency messages: as vLLM has it."""
        burst = Outcome(0.0, output_tokens=5)
        burst.token_times_s, burst.token_counts = array("d", [1.0, 3.0]), array("I", [1, 4])
        assert (burst.tpot_s, burst.gaps_s, burst.received_tokens) == (0.5, [2.0], 5)

    def test_of_many(self) -> None:
        stats = stats_of([FAST, SLOW, SHORT, failed("TIMEOUT")], 5.0, None)
        assert spread(stats, "ttft_s") == (3, pytest.approx(1.4 / 3), 0.3)
        assert spread(stats, "itl_s") == (5, pytest.approx(1.8 / 5), pytest.approx(0.1))
        assert spread(stats, "tpot_s") == (2, pytest.approx(0.425), pytest.approx(0.425))
        assert spread(stats, "e2e_s") == (3, pytest.approx(3.2 / 3), 0.4)
        assert stats["quantiles"]["ttft_s"][0] == 0.1
        assert stats["quantiles"]["ttft_s"][-1] == 1.0


def spread(stats: Stats, name: str) -> tuple[int, float, float]:
    """How many, mean and median."""
    found = stats[name]  # type: ignore[literal-required]
    return found["count"], found["mean"], found["p50"]


class TestCounts:
    def test_rates_are_of_those_that_ended_well(self) -> None:
        stats = stats_of([FAST, SLOW, failed("HTTP_429", "slow down")], 4.0, None)
        assert stats["requests"] == {"sent": 3, "ok": 2, "failed": 1, "interrupted": 0}
        assert (stats["input_tokens"], stats["output_tokens"]) == (20, 7)
        assert (stats["input_tokens_per_s"], stats["output_tokens_per_s"]) == (5, 1.75)
        assert stats["requests_per_s"] == 0.5
        assert stats["statuses"] == {"OK": 2, "HTTP_429": 1}

    def test_errors_by_status(self) -> None:
        stats = stats_of([failed("A", "first"), failed("B"), failed("B"), FAST], 1.0, None)
        assert stats["errors"] == [
            {"status": "B", "count": 2, "message": "no"},
            {"status": "A", "count": 1, "message": "first"},
        ]

    def test_interrupted_ones_count_nowhere(self) -> None:
        stats = stats_of([FAST, failed(INTERRUPTED)], 1.0, BOTH)
        assert stats["requests"] == {"sent": 1, "ok": 1, "failed": 0, "interrupted": 1}
        assert stats["errors"] == []
        assert stats["goodput"] and stats["goodput"]["share"] == 1.0

    def test_nothing_at_all(self) -> None:
        stats = stats_of([], 0.0, BOTH)
        assert stats["ttft_s"] is None and stats["requests_per_s"] == 0.0
        assert stats["goodput"] and stats["goodput"]["share"] == 0.0

    def test_short_and_miscounted_answers(self) -> None:
        short = outcome(0.1, 0.2, planned_output=5)
        miscounted = outcome(0.1, 0.2, output_tokens=3, phases=Phases(0, 0, 0, 0, 0))
        stats = stats_of([FAST, short, miscounted], 1.0, None)
        assert (stats["short_outputs"], stats["miscounted"]) == (1, 1)

    def test_the_prefix_cache(self) -> None:
        known, unknown = outcome(0.1, cached_tokens=4), outcome(0.1)
        cache = stats_of([known, known, unknown], 1.0, None)["prefix_cache"]
        assert cache == {"cached_tokens": 8, "share": 0.4}
        assert stats_of([unknown], 1.0, None)["prefix_cache"] is None

    def test_phases(self) -> None:
        """Of 300 ms to the first token the server saw 250, 50 of them in the queue."""
        told = outcome(0.3, 0.6, attempts=2, phases=Phases(0.05, 0.25, 0.6, 0.02, 4096))
        local = outcome(0.3, attempts=1, prefilled_by_decode=True, phases=Phases(0, 0.2, 0.3, 0, 0))
        phases = stats_of([told, local, FAST], 1.0, None)["phases"]
        assert phases is not None
        medians = {
            name: s["p50"] for name, s in phases.items() if isinstance(s, dict)
        }  # fmt: skip
        assert medians == {
            name: pytest.approx(value)
            for name, value in {
                "queue_s": 0.025, "first_token_after_queue_s": 0.2, "transfer_s": 0.02,
                "decode_s": 0.225, "outside_s": 0.075, "server_ttft_s": 0.225,
                "server_e2e_s": 0.45,
            }.items()
        }  # fmt: skip
        counts = ("transfer_bytes", "transferred", "prefilled_by_decode", "failovers")
        assert [phases[name] for name in counts] == [4096, 1, 1, 1]  # type: ignore[literal-required]


class TestGoodput:
    def test_every_limit_counts_and_failures_are_not_good(self) -> None:
        goodput = goodput_of([FAST, SLOW, SHORT, failed("TIMEOUT")], 8.0, BOTH)
        assert goodput == {
            "slo": {"ttft": 0.5, "tpot": 0.5},
            "share": 0.5,
            "requests_per_s": 0.25,
            "met": {"ttft": 0.5, "tpot": 0.5},
        }

    def test_a_limit_is_met_when_it_is_reached(self) -> None:
        assert goodput_of([SLOW], 1.0, Slo.parse("ttft=1,e2e=2.5"))["share"] == 1.0
        assert goodput_of([SLOW], 1.0, Slo.parse("ttft=0.999"))["share"] == 0.0


class TestTimeline:
    def test_each_thing_is_in_its_span(self) -> None:
        early = outcome(0.1, 0.4, sent_s=0.0)  # ends at 0.41
        late = outcome(0.3, 1.0, sent_s=0.3)  # tokens at 0.6 and 1.3, ends at 1.31
        timeline = timeline_of([early, late, failed("TIMEOUT", sent_s=0.6)])
        assert timeline["width_s"] == 0.25
        assert timeline["begin_s"] == [0, 0.25, 0.5, 0.75, 1.0, 1.25]
        assert timeline["sent"] == [1, 1, 1, 0, 0, 0]
        assert timeline["ended_ok"] == [0, 1, 0, 0, 0, 1]
        assert timeline["failed"] == [0, 0, 1, 0, 0, 0]
        assert timeline["running"] == [1, 1, 1, 1, 1, 0]
        assert timeline["output_tokens"] == [1, 1, 1, 0, 0, 1]
        assert timeline["ttft_p50_s"] == [0.1, None, 0.3, None, None, None]
        assert timeline["itl_p95_s"] == [None, pytest.approx(0.3), *[None] * 3, pytest.approx(0.7)]

    def test_a_long_run_has_no_more_spans_than_can_be_drawn(self) -> None:
        timeline = timeline_of([outcome(0.1, sent_s=s) for s in range(0, 3000, 7)])
        assert timeline["width_s"] == 60 and len(timeline["begin_s"]) <= 61
        assert sum(timeline["sent"]) == len(range(0, 3000, 7))

    def test_of_nothing(self) -> None:
        assert timeline_of([])["begin_s"] == []


class TestComparison:
    @staticmethod
    def stats(ttft_s: float) -> Stats:
        return stats_of([outcome(ttft_s, ttft_s + 0.1)], 1.0, None)

    def ttft(self, *pairs: tuple[float, float]) -> tuple[float | None, str]:
        blocks = [(self.stats(a), self.stats(b)) for a, b in pairs]
        found = compared(self.stats(0.2), self.stats(0.1), blocks)
        one = next(one for one in found if one["figure"] == "ttft_s.p50")
        assert one["block_ratios"] == [pytest.approx(b / a) for a, b in pairs]
        return one["ratio"], one["better"]

    def test_better_in_every_block(self) -> None:
        assert self.ttft(*[(0.2, 0.1)] * 4) == (0.5, "second")
        assert self.ttft(*[(0.1, 0.2)] * 4) == (0.5, "first")

    def test_not_decided(self) -> None:
        assert self.ttft(*[(0.2, 0.1)] * 3, (0.1, 0.2))[1] == ""
        assert self.ttft(*[(0.2, 0.1)] * 3)[1] == ""  # too few to tell

    def test_more_throughput_is_better(self) -> None:
        few, many = stats_of([FAST], 1.0, None), stats_of([FAST] * 3, 1.0, None)
        found = {one["figure"]: one for one in compared(few, many, [(few, many)] * 4)}
        assert found["requests_per_s"]["better"] == "second"
        assert found["requests_per_s"]["ratio"] == 3.0
        assert "goodput.share" not in found
        assert found["requests.failed"]["ratio"] is None


class TestKnee:
    def test_the_last_rate_that_is_served_well(self) -> None:
        def at(good: int) -> Stats:
            return stats_of([FAST] * good + [SLOW] * (10 - good), 1.0, BOTH)

        assert knee_of([(1, at(10)), (2, at(9)), (4, at(8)), (8, at(10))]) == {
            "value": 2,
            "by": "slo",
        }
        assert knee_of([(1, at(8)), (2, at(10))]) is None
        assert knee_of([(1, at(10)), (2, at(10))]) is None  # not reached

    def test_where_the_curve_bends(self) -> None:
        def at(rate: int, e2e_s: float) -> Stats:
            return stats_of([outcome(e2e_s)] * rate, 1.0, None)

        curve = [(1.0, at(10, 0.1)), (2.0, at(20, 0.12)), (4.0, at(38, 0.2)), (8.0, at(42, 3.0))]
        assert knee_of(curve) == knee_of(curve[::-1]) == {"value": 4.0, "by": "shape"}
        assert knee_of(curve[:2]) is None
        assert knee_of([(v, at(10 * i + 10, 0.1)) for i, (v, _) in enumerate(curve)]) is None
