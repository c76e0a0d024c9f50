"""The scenarios' own parts: a wrong figure or an unfair baseline would go unnoticed."""

from __future__ import annotations

import pytest

from baton.bench.generator import Run
from baton.bench.request import Demand
from baton.local.span_store import Span
from benchmarks.__main__ import COMMANDS, SCENARIOS, parser
from benchmarks.scenarios.baseline_router import POLICIES, picker
from benchmarks.scenarios.cost import cost_of
from benchmarks.scenarios.overload import report
from benchmarks.scenarios.placement import reusable
from router.fleet.snapshot import Snapshot
from tests.unit.bench.outcomes import failed, outcome
from tests.unit.router.snapshots import fleet, needs, worker

MS = 1_000_000


@pytest.mark.parametrize("name", [*COMMANDS, *SCENARIOS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out


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

    def test_workers_that_are_down_full_or_failed_are_left_out(self) -> None:
        snapshot = fleet(
            [worker("p0", state="SILENT"), worker("p1")],
            [worker("d0", blocks_free=0), worker("d1"), worker("d2"), worker("d3")],
        )
        found = self.picks("round-robin", snapshot, 4, full={"d1"}, failed={"d2"})
        assert set(found) == {"p1 d3"}


def test_what_a_perfect_cache_would_reuse() -> None:
    parts = [((1, 64), (9, 61)), ((1, 64), (2, 64), (3, 10)), ((4, 64), (2, 11))]
    assert reusable([Demand(0.0, p, 1) for p in parts]) == pytest.approx(64 / (125 + 138 + 75))


class TestOverload:
    def test_goals(self) -> None:
        refused = failed("RESOURCE_EXHAUSTED", "full 3", retry_after_s=0.5)
        refused.ended_s = 0.01
        met = report(Run([outcome(0.1), outcome(0.3), refused], 2.0), 0.5)
        assert len(met) == 5 and all(met.values())
        assert any("refused 1, with usable advice 1" in text for text in met)

    @pytest.mark.parametrize("number", range(5))
    def test_each_goal_can_be_missed(self, number: int) -> None:
        late = failed("RESOURCE_EXHAUSTED", retry_after_s=0.5)
        late.ended_s = 1.0
        unadvised = failed("RESOURCE_EXHAUSTED")
        unadvised.ended_s = 0.01
        wrong = [
            outcome(0.1, status="UNAVAILABLE"), outcome(0.9), unadvised, late,
            failed("UNAVAILABLE"),
        ]  # fmt: skip
        met = list(report(Run([outcome(0.1), wrong[number]], 2.0), 0.5).values())
        assert not met[number]


def span(name: str, start_ms: float, end_ms: float, **attributes: object) -> Span:
    return Span("t", name, "", name, "s", int(start_ms * MS), int(end_ms * MS), attributes)


def trace(*chunk_ends: int, hidden_ms: float = 0.0, transfer_start: float = 12.0) -> list[Span]:
    return [
        span("decode.first_step", 18, 25),
        span("prefill", 0, 30, **{"baton.prompt_tokens": 600}),
        *(span("prefill.chunk", end - 1, end) for end in chunk_ends),
        span("kv.transfer", transfer_start, 16, bytes=4000, wire_ms=2.0, hidden_ms=hidden_ms),
        span("decode.admit", 15, 18),
    ]


class TestHandoffCost:
    def test_one_chunk_is_noticed_put_verified_and_waits(self) -> None:
        cost = cost_of(trace(10))
        assert cost is not None
        assert (cost.prompt_tokens, cost.chunks, cost.num_bytes) == (600, 1, 4000)
        assert (cost.notice, cost.last_put, cost.commit, cost.wait) == (2, 2, 1, 3)
        assert cost.bookkeeping(bytes_per_ms=4000) == pytest.approx(5 - 1)

    def test_of_several_chunks_only_the_last_counts(self) -> None:
        cost = cost_of(trace(4, 10, hidden_ms=1.5, transfer_start=5.0))
        assert cost is not None
        assert (cost.chunks, cost.notice, cost.last_put, cost.commit) == (2, 0, 0.5, 4.5)
        assert cost.hidden == 0.75
        assert cost.bookkeeping(bytes_per_ms=4000) == pytest.approx(5 - 0.25)

    @pytest.mark.parametrize("missing", ["prefill.chunk", "kv.transfer", "decode.first_step"])
    def test_what_was_not_handed_over_costs_nothing(self, missing: str) -> None:
        assert cost_of([span for span in trace(10) if span.name != missing]) is None
