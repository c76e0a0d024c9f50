"""Statistics of known requests, computed by hand; numpy is the oracle of percentiles."""

from array import array

import pytest

from baton.bench.report import knee_of
from baton.bench.request import INTERRUPTED, Outcome
from baton.bench.stats import stats_of
from baton.config.slo import Slo
from tests.unit.bench.outcomes import failed, finish, outcome

FAST = outcome(0.1, 0.2, 0.3, 0.4)  # TTFT 0.1, TPOT 0.1, E2E 0.4
SLOW = outcome(1.0, 1.5, 2.5)  # TTFT 1.0, TPOT 0.75, E2E 2.5
SHORT = outcome(0.3)  # no TPOT
BOTH = Slo.parse("ttft=0.5,tpot=0.5")


def test_latencies_of_one_request():
    """TPOT counts tokens, inter-token latency messages: as vLLM has it."""
    assert (SLOW.ttft_s, SLOW.e2e_s, SLOW.tpot_s, SLOW.gaps_s) == (1.0, 2.5, 0.75, [0.5, 1.0])
    assert (SHORT.tpot_s, SHORT.gaps_s) == (None, [])
    assert (Outcome(0.0).ttft_s, Outcome(0.0).tpot_s) == (None, None)
    assert outcome(1.0, output_tokens=5, token_counts=array("I", [5])).tpot_s is None  # at once
    burst = outcome(1.0, 3.0, output_tokens=5, token_counts=array("I", [1, 4]))
    assert (burst.tpot_s, burst.gaps_s) == (0.5, [2.0])


def test_rates_and_latencies_are_of_requests_that_ended_ok():
    errors = [failed("HTTP_429", "slow down"), failed("HTTP_429"), failed("A")]
    stats = stats_of([FAST, SLOW, SHORT, *errors, failed(INTERRUPTED)], 4.0, BOTH)
    names = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
    spreads = {name: (stats[name]["count"], stats[name]["mean"]) for name in names}
    assert spreads == {
        "ttft_s": (3, pytest.approx(1.4 / 3)), "itl_s": (5, pytest.approx(1.8 / 5)),
        "tpot_s": (2, pytest.approx(0.425)), "e2e_s": (3, pytest.approx(3.2 / 3)),
    }  # fmt: skip
    expected = {
        "long_gap_share": pytest.approx(1.5 / 1.8),
        "requests": {"sent": 6, "ok": 3, "failed": 3, "interrupted": 1},
        "input_tokens": 30, "output_tokens": 8, "input_tokens_per_s": 7.5,
        "output_tokens_per_s": 2.0, "requests_per_s": 0.75,
        "statuses": {"OK": 3, "HTTP_429": 2, "A": 1, INTERRUPTED: 1},
        "errors": [
            {"status": "HTTP_429", "count": 2, "message": "slow down"},
            {"status": "A", "count": 1, "message": "no"},
        ],
    }  # fmt: skip
    assert {name: stats[name] for name in expected} == expected
    assert stats["goodput"]["share"] == 2 / 6  # interrupted requests count nowhere
    nothing = stats_of([], 0.0, BOTH)
    assert nothing["ttft_s"] is None and nothing["requests_per_s"] == 0.0
    assert nothing["goodput"] is None  # neither good nor bad


def test_short_and_miscounted_answers_and_cached_tokens():
    short = outcome(0.1, 0.2, planned_output_tokens=5)
    miscounted = outcome(0.1, 0.2, output_tokens=3, finish=finish())
    stats = stats_of([FAST, short, miscounted], 1.0)
    assert (stats["short_outputs"], stats["miscounted"], stats["prefix_cache"]) == (1, 1, None)
    known = outcome(0.1, cached_tokens=4)
    cache = stats_of([known, known, FAST], 1.0)["prefix_cache"]
    assert cache == {"cached_tokens": 8, "share": 0.4}


def test_phases():
    """Of 300 ms to the first token the server saw 250, 50 of them in the queue."""
    moved = finish(
        queue_ms=50, ttft_ms=250, e2e_ms=600, transfer_ms=20, transfer_bytes=4096, attempts=2
    )
    local = finish(ttft_ms=200, e2e_ms=300, prefill="")
    outcomes = [outcome(0.3, 0.6, finish=moved), outcome(0.3, finish=local), FAST]
    phases = stats_of(outcomes, 1.0)["phases"]
    medians = {name: s["p50"] if isinstance(s, dict) else s for name, s in phases.items()}
    assert medians == pytest.approx(
        {
            "queue_s": 0.025, "first_token_after_queue_s": 0.2, "transfer_s": 0.02,
            "decode_s": 0.225, "outside_s": 0.075, "server_ttft_s": 0.225, "server_e2e_s": 0.45,
            "transfer_bytes": 4096, "transferred": 1, "prefilled_by_decode": 1, "failovers": 1,
        }
    )  # fmt: skip
    assert stats_of([FAST], 1.0)["phases"] is None


@pytest.mark.parametrize(
    ("slo", "good", "met"),
    [
        ("ttft=0.5,tpot=0.5", 2, {"ttft": 0.5, "tpot": 0.5}),  # a single token meets any TPOT
        ("e2e=0.4", 2, {"e2e": 0.5}),
        ("ttft=0.2,e2e=3", 1, {"ttft": 0.25, "e2e": 0.75}),
        ("ttft=1,e2e=2.5", 3, {"ttft": 0.75, "e2e": 0.75}),  # a limit that is reached is met
    ],
)
def test_goodput_is_of_all_that_were_sent(slo, good, met):
    stats = stats_of([FAST, SLOW, SHORT, failed("TIMEOUT")], 8.0, Slo.parse(slo))
    goodput = stats["goodput"]
    assert (goodput["share"], goodput["requests_per_s"]) == (good / 4, good / 8)
    assert goodput["met"] == met and goodput["slo"].keys() == met.keys()
    # An answer without a token meets no limit: it may be one that ended at once.
    empty = stats_of([outcome(), FAST], 1.0, Slo.parse("ttft=9,tpot=9,e2e=9"))
    assert empty["requests"]["ok"] == 2 and empty["goodput"]["share"] == 0.5
    assert empty["goodput"]["met"] == {"ttft": 0.5, "tpot": 0.5, "e2e": 0.5}


def test_the_knee_is_the_last_rate_that_is_served_well():
    def knee(*good):
        """Of stages with so many good requests of ten."""
        stages = [stats_of([FAST] * n + [SLOW] * (10 - n), 1.0, BOTH) for n in good]
        return knee_of([(2**i, stats) for i, stats in enumerate(stages)])

    assert knee(10, 9, 8, 10) == 2
    assert knee(8, 10) is None
    assert knee(10, 10) is None  # not reached
