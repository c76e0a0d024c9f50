"""Figures of known requests, reckoned by hand."""

from __future__ import annotations

from array import array

import pytest

from baton.bench.comparison import compared
from baton.bench.figures import Figures, figures_of
from baton.bench.knee import knee_of
from baton.bench.outcome import INTERRUPTED, Outcome, Phases
from baton.bench.slo import Slo
from baton.bench.timeline import timeline_of
from baton.errors import ConfigError
from tests.unit.bench.outcomes import failed, outcome

FAST = outcome(0.1, 0.2, 0.3, 0.4)  # TTFT 0.1, TPOT 0.1, E2E 0.4
SLOW = outcome(1.0, 1.5, 2.5)  # TTFT 1.0, TPOT 0.75, E2E 2.5
SHORT = outcome(0.3)  # no TPOT
BOTH = Slo.parse("ttft=0.5,tpot=0.5")


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
        figures = figures_of([FAST, SLOW, SHORT, failed("TIMEOUT")], 5.0, None)
        assert spread(figures, "ttft_s") == (3, pytest.approx(1.4 / 3), 0.3)
        assert spread(figures, "itl_s") == (5, pytest.approx(1.8 / 5), pytest.approx(0.1))
        assert spread(figures, "tpot_s") == (2, pytest.approx(0.425), pytest.approx(0.425))
        assert spread(figures, "e2e_s") == (3, pytest.approx(3.2 / 3), 0.4)
        assert figures["quantiles"]["ttft_s"][0] == 0.1
        assert figures["quantiles"]["ttft_s"][-1] == 1.0


def spread(figures: Figures, name: str) -> tuple[int, float, float]:
    """How many, mean and median."""
    found = figures[name]  # type: ignore[literal-required]
    return found["count"], found["mean"], found["p50"]


class TestCounts:
    def test_rates_are_of_those_that_ended_well(self) -> None:
        figures = figures_of([FAST, SLOW, failed("HTTP_429", "slow down")], 4.0, None)
        assert figures["requests"] == {"sent": 3, "ok": 2, "failed": 1, "interrupted": 0}
        assert (figures["input_tokens"], figures["output_tokens"]) == (20, 7)
        assert (figures["input_tokens_per_s"], figures["output_tokens_per_s"]) == (5, 1.75)
        assert figures["requests_per_s"] == 0.5
        assert figures["statuses"] == {"OK": 2, "HTTP_429": 1}

    def test_errors_by_status(self) -> None:
        figures = figures_of([failed("A", "first"), failed("B"), failed("B"), FAST], 1.0, None)
        assert figures["errors"] == [
            {"status": "B", "count": 2, "message": "no"},
            {"status": "A", "count": 1, "message": "first"},
        ]

    def test_interrupted_ones_count_nowhere(self) -> None:
        figures = figures_of([FAST, failed(INTERRUPTED)], 1.0, BOTH)
        assert figures["requests"] == {"sent": 1, "ok": 1, "failed": 0, "interrupted": 1}
        assert figures["errors"] == []
        assert figures["goodput"] and figures["goodput"]["share"] == 1.0

    def test_nothing_at_all(self) -> None:
        figures = figures_of([], 0.0, BOTH)
        assert figures["ttft_s"] is None and figures["requests_per_s"] == 0.0
        assert figures["goodput"] and figures["goodput"]["share"] == 0.0

    def test_short_and_miscounted_answers(self) -> None:
        short = outcome(0.1, 0.2, planned_output=5)
        miscounted = outcome(0.1, 0.2, output_tokens=3, phases=Phases(0, 0, 0, 0, 0))
        figures = figures_of([FAST, short, miscounted], 1.0, None)
        assert (figures["short_outputs"], figures["miscounted"]) == (1, 1)

    def test_the_prefix_cache(self) -> None:
        known, unknown = outcome(0.1, cached_tokens=4), outcome(0.1)
        cache = figures_of([known, known, unknown], 1.0, None)["prefix_cache"]
        assert cache == {"cached_tokens": 8, "share": 0.4}
        assert figures_of([unknown], 1.0, None)["prefix_cache"] is None

    def test_phases(self) -> None:
        """Of 300 ms to the first token the server saw 250, 50 of them in the queue."""
        told = outcome(0.3, 0.6, attempts=2, phases=Phases(0.05, 0.25, 0.6, 0.02, 4096))
        local = outcome(0.3, attempts=1, prefilled_by_decode=True, phases=Phases(0, 0.2, 0.3, 0, 0))
        phases = figures_of([told, local, FAST], 1.0, None)["phases"]
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
        goodput = BOTH.goodput([FAST, SLOW, SHORT, failed("TIMEOUT")], 8.0)
        assert goodput == {
            "slo": {"ttft": 0.5, "tpot": 0.5},
            "share": 0.5,
            "requests_per_s": 0.25,
            "met": {"ttft": 0.5, "tpot": 0.5},
        }

    def test_a_limit_is_met_when_it_is_reached(self) -> None:
        assert Slo.parse("ttft=1,e2e=2.5").goodput([SLOW], 1.0)["share"] == 1.0
        assert Slo.parse("ttft=0.999").goodput([SLOW], 1.0)["share"] == 0.0

    @pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "x=1", "ttft=nan"])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match="no objective"):
            Slo.parse(text)


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
    def figures(ttft_s: float) -> Figures:
        return figures_of([outcome(ttft_s, ttft_s + 0.1)], 1.0, None)

    def ttft(self, *pairs: tuple[float, float]) -> tuple[float | None, str]:
        blocks = [(self.figures(a), self.figures(b)) for a, b in pairs]
        found = compared(self.figures(0.2), self.figures(0.1), blocks)
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
        few, many = figures_of([FAST], 1.0, None), figures_of([FAST] * 3, 1.0, None)
        found = {one["figure"]: one for one in compared(few, many, [(few, many)] * 4)}
        assert found["requests_per_s"]["better"] == "second"
        assert found["requests_per_s"]["ratio"] == 3.0
        assert "goodput.share" not in found
        assert found["requests.failed"]["ratio"] is None


class TestKnee:
    def test_the_last_rate_that_is_served_well(self) -> None:
        def at(good: int) -> Figures:
            return figures_of([FAST] * good + [SLOW] * (10 - good), 1.0, BOTH)

        assert knee_of([(1, at(10)), (2, at(9)), (4, at(8)), (8, at(10))]) == {
            "value": 2,
            "by": "slo",
        }
        assert knee_of([(1, at(8)), (2, at(10))]) is None
        assert knee_of([(1, at(10)), (2, at(10))]) is None  # not reached

    def test_where_the_curve_bends(self) -> None:
        def at(rate: int, e2e_s: float) -> Figures:
            return figures_of([outcome(e2e_s)] * rate, 1.0, None)

        curve = [(1.0, at(10, 0.1)), (2.0, at(20, 0.12)), (4.0, at(38, 0.2)), (8.0, at(42, 3.0))]
        assert knee_of(curve) == knee_of(curve[::-1]) == {"value": 4.0, "by": "shape"}
        assert knee_of(curve[:2]) is None
        assert knee_of([(v, at(10 * i + 10, 0.1)) for i, (v, _) in enumerate(curve)]) is None
