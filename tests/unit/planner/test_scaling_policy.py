"""Decisions as a table: what is seen, what is wanted; and how plans behave over time."""

import itertools
import math

import pytest

from baton.planner.scaling_policy import (
    DECODE,
    MIXED,
    PREFILL,
    ROLES,
    Flip,
    Observation,
    Policy,
    State,
    Worker,
    plan,
)

# 1 s a prompt of 1,000 tokens; batches of 20 at 50 ms: 400 output tokens a second.
RATES = {"prefill_tokens_per_s": 1000.0, "step_ms": 10.0, "sequence_ms": 2.0, "max_batch": 64}
POLICY = Policy(ttft_s=5.0, tpot_s=0.05)
EVERY_S = 5.0


def workers(prefill=0, decode=0, mixed=0, starting=0):
    """Ready workers, and prefill workers that are not."""
    counts = {PREFILL: prefill, DECODE: decode, MIXED: mixed}
    ready = [
        Worker(f"{role}-{number}", role, True, running=number)
        for role, count in counts.items()
        for number in range(count)
    ]
    return (*ready, *(Worker(f"starting-{n}", PREFILL, False) for n in range(starting)))


def load(rate, prompt=100.0, output=40.0, **more):
    return {"arrivals_per_s": rate, "prompt_tokens": prompt, "output_tokens": output, **more}


class Plans:
    """Plans again and again, on a clock of its own, and keeps what was decided."""

    def __init__(self, policy=POLICY, **there):
        self.now, self.state, self.policy = 1000.0, State(), policy
        self.workers, self.decisions = workers(**there), []

    def run(self, seconds, demand, apply=False):
        for _ in range(int(seconds / EVERY_S)):
            seen = Observation(self.now, self.workers, **{**RATES, **demand})
            decision = plan(self.now, seen, self.state, self.policy)
            self.state = decision.state
            self.decisions.append(decision)
            self.now += EVERY_S
            if apply:
                self.flip(decision.flips)
        return decision

    def flip(self, flips):
        after = {flip.worker: flip.after for flip in flips}
        self.workers = tuple(
            Worker(one.name, after.get(one.name, one.role), one.ready, one.running)
            for one in self.workers
        )

    @property
    def flips(self):
        return [flip for decision in self.decisions for flip in decision.flips]

    def changes(self, role):
        numbers = [decision.roles[role].wanted for decision in self.decisions]
        return sum(a != b for a, b in itertools.pairwise(numbers))


@pytest.mark.parametrize(
    ("there", "demand", "wanted"),
    [
        # 10 requests/s: 1,000 prompt and 400 output tokens a second, at most 80 % busy.
        ({"prefill": 1, "decode": 1}, load(10), {PREFILL: 2, DECODE: 2, MIXED: 0}),
        ({"prefill": 4, "decode": 4}, load(10), {PREFILL: 2, DECODE: 2, MIXED: 0}),
        # Long prompts need more prefill workers and no other decode workers, and the other way.
        ({"prefill": 1, "decode": 1}, load(10, prompt=400.0), {PREFILL: 5, DECODE: 2, MIXED: 0}),
        ({"prefill": 1, "decode": 1}, load(10, output=200.0), {PREFILL: 2, DECODE: 7, MIXED: 0}),
        # What is cached is not computed.
        (
            {"prefill": 5, "decode": 2},
            load(10, prompt=400.0, cached_share=0.75),
            {PREFILL: 2, DECODE: 2, MIXED: 0},
        ),
        # The KV pool holds two sequences of 140 tokens: 2 of them, at 14 ms.
        (
            {"prefill": 2, "decode": 2},
            load(10, kv_tokens=280),
            {PREFILL: 2, DECODE: 4, MIXED: 0},
        ),
        # Never below the least of a role, even without requests.
        ({"prefill": 3, "decode": 3}, load(0), {PREFILL: 1, DECODE: 1, MIXED: 0}),
        # Mixed workers alone do both; beside others they are used first.
        ({"mixed": 1}, load(10), {PREFILL: 0, DECODE: 0, MIXED: 3}),
        ({"prefill": 2, "decode": 2, "mixed": 1}, load(10), {PREFILL: 1, DECODE: 1, MIXED: 1}),
        # Requests that wait are demand, too: 300 within a minute are 5 a second.
        ({"prefill": 1, "decode": 1}, load(10, queued=300), {PREFILL: 2, DECODE: 2, MIXED: 0}),
        # A role that nobody has, and nobody needs, is not wanted for late tokens.
        (
            {"prefill": 2, "decode": 2},
            load(10, tpot_p95_s=1.0, ttft_p95_s=1.0),
            {PREFILL: 2, DECODE: 3, MIXED: 0},
        ),
        # Nobody is there yet.
        ({}, load(0), {PREFILL: 1, DECODE: 1, MIXED: 0}),
    ],
)
def test_each_role_has_as_many_workers_as_its_own_need(there, demand, wanted):
    decision = Plans(**there).run(120, demand)
    assert {role: decision.roles[role].wanted for role in ROLES} == wanted, decision.explanation
    assert not decision.held and not decision.changed, "it stays so"


@pytest.mark.parametrize("ttft_s", [0.2, 1.0])
def test_a_tighter_target_for_the_first_token_needs_more_prefill_workers(ttft_s):
    tight = Plans(Policy(ttft_s=ttft_s, tpot_s=0.05), prefill=1, decode=1).run(70, load(10))
    loose = Plans(prefill=1, decode=1).run(70, load(10))
    assert tight.roles[PREFILL].need > loose.roles[PREFILL].need
    assert tight.roles[DECODE].need == loose.roles[DECODE].need


def test_a_target_that_nobody_can_meet_asks_for_a_bounded_number():
    never = Policy(ttft_s=0.01, tpot_s=0.001)
    plans = Plans(never, prefill=1, decode=1)
    slow = load(1, ttft_p95_s=9.0, tpot_p95_s=9.0)
    for _ in range(30):
        decision = plans.run(70, slow)
        wanted = {role: decision.roles[role].wanted for role in (PREFILL, DECODE)}
        plans.workers = workers(**wanted)
    assert wanted[PREFILL] <= 2 and wanted[DECODE] <= 5


@pytest.mark.parametrize("up", [True, False])
def test_a_number_goes_down_as_fast_as_up(up):
    plans = Plans(prefill=2, decode=2)
    plans.run(300, load(10 if up else 40))
    plans.decisions.clear()
    plans.run(300, load(40 if up else 10))
    numbers = [one.roles[DECODE].wanted for one in plans.decisions]
    changed = [n for n, (a, b) in enumerate(itertools.pairwise(numbers), 1) if a != b]
    assert changed == [POLICY.window_s / EVERY_S]  # at once to the final number


def test_a_load_that_swings_within_the_window_changes_nothing():
    plans = Plans(prefill=2, decode=2)
    plans.run(300, load(10))
    for number in range(60):
        plans.run(20, load(30 if number % 2 else 2))
    assert plans.changes(PREFILL) == plans.changes(DECODE) == 0


def test_wanted_workers_that_never_come_are_neither_multiplied_nor_waited_for():
    """aibrix's replicas doubled each round while none was ready; Dynamo's planner froze."""
    plans = Plans(prefill=1, decode=1, starting=1)
    late = {"queued": 10_000, "running": 10_000, "ttft_p95_s": 60.0}
    plans.run(3600, load(20, **late))
    numbers = {one.roles[PREFILL].wanted for one in plans.decisions[20:]}
    assert len(numbers) == 1 and numbers.pop() <= 7, "2 s of prompts a second, and their backlog"
    assert "are not ready" in plans.decisions[-1].explanation
    decision = plans.run(120, load(5))
    assert decision.roles[PREFILL].wanted == 1, "goes on by the load"


def test_late_first_tokens_are_charged_to_the_role_that_is_short():
    """A first token waits for decode, too, which reserves first."""
    plans = Plans(prefill=4, decode=1)
    decision = plans.run(400, load(7, ttft_p95_s=20.0))
    assert decision.roles[PREFILL].wanted == 1
    assert decision.roles[DECODE].wanted >= 2


@pytest.mark.parametrize(
    ("demand", "role"), [({"ttft_p95_s": 6.0}, PREFILL), ({"tpot_p95_s": 0.06}, DECODE)]
)
def test_a_missed_target_asks_for_one_more_at_a_time(demand, role):
    rate = 7.0 if role == PREFILL else 7.9
    there = {PREFILL: 1, DECODE: 2} if role == PREFILL else {PREFILL: 2, DECODE: 1}
    plans = Plans(prefill=there[PREFILL], decode=there[DECODE])
    decision = plans.run(50, load(rate, **demand))
    assert decision.roles[role].wanted == there[role] + 1, decision.explanation
    decision = plans.run(600, load(rate, **demand))
    assert decision.roles[role].wanted == there[role] + 1, "not before that one is there"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, "no router"),
        ({"time_s": 960.0}, "40 s old"),
        ({"incomplete": "router-1 does not answer"}, "router-1"),
        ({"prefill_tokens_per_s": 0.0}, "measured"),
    ],
)
def test_without_good_data_everything_stays(seen, why):
    plans = Plans(prefill=1, decode=3)
    wanted = {PREFILL: 1, DECODE: 3, MIXED: 0}
    state = State(wanted=wanted, unbalanced=(1, 0.0))
    if seen is not None:
        seen = Observation(
            **{"time_s": 1000.0, "workers": plans.workers, **RATES, **load(50)} | seen
        )
    decision = plan(1000.0, seen, state, POLICY)
    assert decision.held and not decision.flips and why in decision.explanation
    assert {role: one.wanted for role, one in decision.roles.items()} == wanted
    assert decision.state.unbalanced == (0, math.inf), "the time without data does not count"


def test_limits_hold():
    policy = Policy(5.0, 0.05, least={PREFILL: 2, DECODE: 1}, most={PREFILL: 3, DECODE: 3})
    plans = Plans(policy, prefill=2, decode=2)
    assert plans.run(120, load(1000)).roles[PREFILL].wanted == 3
    assert plans.run(120, load(0)).roles[PREFILL].wanted == 2


def test_the_least_busy_worker_of_the_idle_role_changes_to_the_busy_one():
    plans = Plans(prefill=1, decode=3)
    plans.run(30, load(15, output=10.0), apply=True)
    assert plans.flips == [Flip("decode-0", DECODE, PREFILL)]
    assert [one.changed for one in plans.decisions] == [False, False, True, False, False, False]
    assert "lowers the load of the busier role from 1.88 to 0.94" in plans.decisions[2].explanation


def test_roles_change_only_when_that_was_needed_for_a_while():
    plans = Plans(prefill=1, decode=3)
    for _ in range(20):
        plans.run(5, load(15, output=10.0), apply=True)
        plans.run(5, load(5, output=10.0), apply=True)
    assert not plans.flips


@pytest.mark.parametrize(
    ("there", "flips"), [((1, 1), 0), ((2, 1), 0), ((0, 1), 0), ((1, 2), 1), ((0, 2), 1)]
)
def test_the_last_worker_of_a_role_keeps_it(there, flips):
    """And that none changes is no change, after which others would have to wait."""
    plans = Plans(prefill=there[0], decode=there[1])
    decision = plans.run(300, load(100, output=1.0), apply=True)
    assert len(plans.flips) == flips
    assert (plans.state.flipped_s > -math.inf) == bool(flips), decision.explanation


def test_workers_that_are_not_ready_change_no_role():
    plans = Plans(prefill=1, decode=1, starting=4)
    plans.run(300, load(10, output=400.0), apply=True)
    assert not plans.flips


def test_a_flapping_load_flips_within_the_cooldown_only():
    plans = Plans(prefill=4, decode=4)
    for number in range(60):
        demand = load(30, output=4.0) if number % 2 else load(3, output=600.0)
        plans.run(20, demand, apply=True)
    assert 0 < len(plans.flips) <= 60 * 20 / POLICY.cooldown_s
    assert all(sum(one.role == role for one in plans.workers) >= 1 for role in (PREFILL, DECODE))


def test_a_large_fleet_is_balanced_in_steps():
    plans = Plans(prefill=20, decode=180)
    plans.run(60, load(800, output=10.0), apply=True)
    assert len(plans.decisions[2].flips) == 200 // 8
    plans.run(600, load(800, output=10.0), apply=True)
    assert max(plans.decisions[-1].roles[role].need for role in ROLES) > 0
    needs = plans.decisions[-1].roles
    counts = {role: sum(one.role == role for one in plans.workers) for role in ROLES}
    assert needs[PREFILL].need / counts[PREFILL] <= 1 and needs[DECODE].need / counts[DECODE] <= 1


def test_a_new_leader_goes_on_with_the_published_plan():
    state = State(wanted={PREFILL: 4, DECODE: 2, MIXED: 0}, flipped_s=990.0)
    plans = Plans(prefill=1, decode=2)
    plans.state = state
    assert plans.run(5, load(20)).roles[PREFILL].wanted == 4
    plans.run(15, load(15, output=10.0))
    assert not plans.flips, "the cooldown of the last leader counts"
