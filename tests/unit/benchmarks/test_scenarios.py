"""The scenarios' own parts: a wrong figure or an unfair baseline would go unnoticed."""

import pytest

from baton.bench.generator import Run
from baton.config import EngineConfig
from baton.engine import build
from baton.local.span_store import Span
from benchmarks.__main__ import COMMANDS, parser
from benchmarks.scenarios.baseline_router import POLICIES, picker
from benchmarks.scenarios.handoff_cost import cost_of
from benchmarks.scenarios.overload import goals_of
from benchmarks.scenarios.step_profile import PARTS, profile
from tests.unit.bench.outcomes import failed, outcome
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.router.snapshots import fleet, needs, worker

MS = 1_000_000


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out


def picks(policy, snapshot, times, **without):
    pick = picker(POLICIES[policy])
    choices = [pick(snapshot, needs(), **without) for _ in range(times)]
    return [" ".join(choice.names) for choice in choices]


def test_round_robin_takes_turns_and_least_connections_the_least_busy():
    prefill = [worker("p0", tokens=5000), worker("p1"), worker("p2")]
    snapshot = fleet(prefill, [worker("d0", sequences=2), worker("d1", sequences=1)])
    found = picks("round-robin", snapshot, 6)
    assert found == ["p0 d0", "p1 d1", "p2 d0", "p0 d1", "p1 d0", "p2 d1"]
    assert picks("least-connections", snapshot, 3) == ["p1 d1", "p2 d1", "p1 d1"]
    broken = fleet(
        [worker("p0", state="SILENT"), worker("p1")],
        [worker("d0", blocks_free=0), worker("d1"), worker("d2"), worker("d3")],
    )
    found = picks("round-robin", broken, 4, full={"d1"}, failed={"d2"})
    assert set(found) == {"p1 d3"}  # what is down, full or failed is left out


def refusal(ended_s, retry_after_s=0.5):
    return failed("RESOURCE_EXHAUSTED", "full 3", ended_s=ended_s, retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    ("further", "missed"),
    [
        (outcome(0.3), []),
        (refusal(0.01), []),
        (outcome(0.1, status="UNAVAILABLE"), [0, 4]),
        (outcome(0.9), [1]),
        (refusal(0.01, retry_after_s=0), [2]),
        (refusal(1.0), [3]),
        (failed("UNAVAILABLE"), [4]),
    ],
)
def test_each_goal_of_overload_is_met_or_missed(further, missed):
    goals = list(goals_of(Run([outcome(0.1), further], 2.0), 0.5).values())
    assert len(goals) == 5 and [i for i, is_met in enumerate(goals) if not is_met] == missed


def span(name, start_ms, end_ms, **attributes):
    return Span("t", name, "", name, "s", int(start_ms * MS), int(end_ms * MS), attributes)


def trace(*chunk_ends, hidden_ms=0.0, transfer_start=12.0):
    return [
        span("decode.first_step", 18, 25),
        span("prefill", 0, 30, **{"baton.prompt_tokens": 600}),
        *(span("prefill.chunk", end - 1, end) for end in chunk_ends),
        span("kv.transfer", transfer_start, 16, bytes=4000, wire_ms=2.0, hidden_ms=hidden_ms),
        span("decode.admit", 15, 18),
    ]


@pytest.mark.parametrize(
    ("spans", "parts", "bookkeeping"),
    [
        (trace(10), (1, 2, 2, 1, 3, 0), 5 - 1),
        (trace(4, 10, hidden_ms=1.5, transfer_start=5.0), (2, 0, 0.5, 4.5, 3, 0.75), 5 - 0.25),
    ],
    ids=["one chunk is noticed, put, verified and waits", "of several only the last counts"],
)
def test_a_handoff_costs_what_follows_its_last_chunk(spans, parts, bookkeeping):
    cost = cost_of(spans)
    assert cost is not None and (cost.prompt_tokens, cost.num_bytes) == (600, 4000)
    found = (cost.chunks, cost.notice, cost.last_put, cost.commit, cost.wait, cost.hidden)
    assert found == parts
    assert cost.bookkeeping(bytes_per_ms=4000) == pytest.approx(bookkeeping)
    for missing in ("prefill.chunk", "kv.transfer", "decode.first_step"):  # not handed over
        assert cost_of([span for span in spans if span.name != missing]) is None


def test_every_part_of_a_step_takes_time(tmp_path):
    make_checkpoint(tmp_path, "LlamaForCausalLM")
    settings = EngineConfig(model=str(tmp_path), kv_blocks=64, dtype="float32", threads=1)
    parts, phases = profile(build.load(settings), batch=3, context=20, steps=3)
    assert set(parts) == {*PARTS, "rest", "step"}
    assert all(seconds > 0 for seconds in parts.values())
    assert max(parts.values()) == parts["step"]
    assert 0 <= sum(phases.values()) < parts["step"] * 3
