"""Whole clusters on a virtual clock: deterministic, and every request ends."""

import pytest

from baton.bench.request import Demand
from baton.bench.workload import Lengths, Workload
from baton.config import RouterLimits, SimulatedSpeed
from baton.config.slo import Slo
from baton.simulator.simulation import Simulation
from baton.simulator.worker import WorkerSpec

SPEC = WorkerSpec(SimulatedSpeed.parse("8000,10,0.5"), num_blocks=4096, token_bytes=1000)
PAIR = {"prefill": 1, "decode": 1}


def load(rate=8, count=80, prompt=512, output=50, **fields):
    return Workload(
        rate=rate,
        count=count,
        prompt_lengths=Lengths(prompt, prompt),
        output_lengths=Lengths(output, output),
        **fields,
    ).demands()


def test_a_lone_request_takes_what_its_parts_take():
    found = Simulation(SPEC, PAIR).run([Demand(1.0, ((1, 512),), 50)])
    stats = found.stats()
    # 8,000 tokens a second, and the router's 2 ms.
    assert stats["ttft_s"]["p50"] == pytest.approx(512 / 8000 + 0.002)
    assert stats["tpot_s"]["p50"] == pytest.approx(0.0105, rel=0.02)  # and once a handoff
    assert stats["handed_over_share"] == 1
    assert stats["itl_s"]["count"] == 49


def test_it_is_the_same_each_time():
    results = [Simulation(SPEC, PAIR).run(load()).stats(Slo.parse("ttft=1")) for _ in range(2)]
    assert results[0] == results[1]


@pytest.mark.parametrize("roles", [PAIR, {"mixed": 2}, {"prefill": 2, "decode": 3}])
def test_every_request_ends_and_frees_its_blocks(roles):
    found = Simulation(SPEC, roles).run(load(rate=20))
    assert len(found.requests) == 80
    assert all(one.last_at > one.first_at > one.arrived_at for one in found.requests)
    generated = sum(one["generated_tokens"] for one in found.workers.values())
    assert generated == 80 * 50
    assert sum(one["prompt_tokens"] for one in found.workers.values()) == 80 * 512


def test_an_overload_waits_and_is_refused_by_the_routers_own_rules():
    limits = RouterLimits(max_queue=16)
    found = Simulation(SPEC, PAIR, limits).run(load(rate=100, count=150))
    stats = found.stats()
    assert 0 < stats["requests"]["ok"] < 150
    assert stats["refusals"] == {"16 requests are waiting already": 150 - stats["requests"]["ok"]}
    limits = RouterLimits(ttft_target_s=0.5)
    found = Simulation(SPEC, PAIR, limits).run(load(rate=40, count=150))
    assert any(one.refused.startswith("the first token is expected in") for one in found.requests)
    in_time = [one for one in found.requests if not one.refused]
    late = [one for one in in_time if one.first_at - one.arrived_at > 0.5]
    assert len(late) <= len(in_time) / 10


def test_common_prefixes_are_found_where_they_are_cached():
    found = Simulation(SPEC, {"prefill": 2, "decode": 2}).run(load(shared_prefix=512)).stats()
    assert found["cached_share"] > 0.4  # half of each prompt
    apart = Simulation(SPEC, {"prefill": 2, "decode": 2}).run(load()).stats()
    assert apart["cached_share"] == 0
    assert found["ttft_s"]["p50"] < apart["ttft_s"]["p50"] * 1.1


def test_requests_with_a_common_prefix_that_come_together_compute_it_once():
    """Two requests together were computed by two workers each, as neither cached anything yet."""
    turns = [
        Demand(group + turn * 0.01, ((group, 4096), (100 * group + turn, 64)), 8)
        for group in range(1, 11)
        for turn in range(4)
    ]
    found = Simulation(SPEC, {"prefill": 2, "decode": 2}).run(turns)
    computed = sum(one["prompt_tokens"] for one in found.workers.values())
    assert computed < 10 * (4096 * 1.3 + 4 * 64)  # 1: ideal; 2 without knowing of prompts in work


def test_roles_change_while_requests_run():
    changes = []

    def follow(now, router):
        if not changes:
            name = next(n for n, one in router.fleet.members.items() if one.role == "decode")
            router.fleet.set_role(name, "prefill")
            changes.append((now, name))

    simulation = Simulation(SPEC, {"prefill": 1, "decode": 2})
    found = simulation.run(load(rate=20), follow=follow, interval_s=3.0)
    assert found.roles == {"prefill": 2, "decode": 1}
    assert changes[0][0] == pytest.approx(3.0)
    assert all(not one.refused for one in found.requests)


def test_deadlines_end_requests_that_wait_or_run():
    limits = RouterLimits(default_timeout_s=2.0)
    found = Simulation(SPEC, PAIR, limits).run(load(rate=100, count=150))
    late = [one for one in found.requests if one.refused == "its deadline passed"]
    in_time = [one for one in found.requests if not one.refused]
    assert len(found.requests) == 150
    assert late
    assert in_time
    assert all(one.last_at - one.arrived_at <= 2.0 + SPEC.chunk_s for one in in_time)


@pytest.mark.parametrize("roles", [PAIR, {"mixed": 2}])
@pytest.mark.parametrize("timeout_s", [0.03, 0.5, 2.0])
def test_requests_whose_deadline_passes_leave_nothing_on_workers(roles, timeout_s):
    """In a reservation, in the queue, while their prompt is computed and sent, while they run."""
    kept = []

    def follow(now, router):
        for one in router.fleet.members.values():
            left = one.worker.blocks.num_held, one.worker._num_sequences, one.worker.totals.steps
            kept.append((*left, one.num_requests, len(one.assigned)))

    simulation = Simulation(SPEC, roles, RouterLimits(default_timeout_s=timeout_s))
    late = Demand(30.0, ((1000, 16),), 1)  # the others have ended by then
    found = simulation.run(
        [*load(rate=100, count=150, output=500), late], follow=follow, interval_s=4.0
    )
    ended = [one.refused for one in found.requests]
    assert ended.count("its deadline passed") > 20
    (*_, steps, _, _), (*_, others, _, _) = kept[:2]
    assert kept[:14] == [(0, 0, steps, 0, 0), (0, 0, others, 0, 0)] * 7, "nor do they run on"
