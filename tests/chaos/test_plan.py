"""Plans of faults: repeatable, in order, about processes that exist, and of every kind."""

from __future__ import annotations

from tests.chaos.plan import KV_FAULTS, LASTING, WEIGHTS, plan

PROCESSES = {
    "router": "router",
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}


def test_a_seed_decides_everything() -> None:
    assert list(plan(7, 100.0, PROCESSES)) == list(plan(7, 100.0, PROCESSES))
    assert list(plan(7, 100.0, PROCESSES)) != list(plan(8, 100.0, PROCESSES))


def test_a_longer_plan_begins_as_the_shorter_one() -> None:
    short = list(plan(3, 50.0, PROCESSES))
    assert list(plan(3, 100.0, PROCESSES))[: len(short)] == short


def test_faults_come_in_order_and_hit_what_is_there() -> None:
    faults = list(plan(1, 2000.0, PROCESSES))
    times = [fault.at_s for fault in faults]
    assert times == sorted(times) and times[-1] < 2000.0
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    for fault in faults:
        low_s, high_s = LASTING.get(fault.kind, (0.0, 0.0))
        assert low_s <= fault.duration_s <= high_s
        if fault.kind == "kv":
            assert fault.target in KV_FAULTS
        elif fault.kind != "etcd":
            assert fault.target in PROCESSES
        if fault.other:  # only a decode worker is called by prefill workers
            role = PROCESSES[fault.other]
            assert role == "router" or (PROCESSES[fault.target], role) == ("decode", "prefill")
    assert any(PROCESSES.get(fault.target) == "router" for fault in faults)
