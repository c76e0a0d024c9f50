"""Decides how many workers of which role a cluster needs, and which workers change their role.

    decision = plan(now, observation, state, policy)

A pure function: the planner calls it with what routers measured, the simulator with what it
simulates. Each role has a need of its own, in workers, that depends on the demand and on what one
worker can do, never on how many are ready: workers that do not come change no need.

- prefill: queueing theory. The wait in front of n workers (Sakasegawa's approximation of M/M/n)
  and the prompt's own time must fit into the TTFT target.
- decode: the largest batch whose step fits into the TPOT target, and into the KV pool, says how
  many tokens a second a worker may be given.
- mixed workers do both. Beside workers of the other roles they are kept as they are, and their
  capacity is credited to both in proportion to the needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.worker import ROLES

PREFILL, DECODE, MIXED = ROLES

_BUSY = 0.8  # largest share of time that a worker is planned to be busy
_IDLE = 0.2  # least: where more workers hardly shorten the wait, no more are asked for
_TAIL = 3.0  # 95th percentile of an exponential wait, over its mean
_NEAR = 0.7  # of a target: a latency above it keeps workers from being taken away
_LATENCY_S = 60.0  # over which routers take percentiles
_BAND = 0.1  # workers by which a need must exceed a number, or fall below it, to change it
_GAIN = 0.9  # a change of roles must lower the higher load to this share of it
_FLIP_SHARE = 8  # of 8 workers at most one changes its role at a time
_USUAL_BATCH = 64  # where workers report no limit


@dataclass(frozen=True)
class Worker:
    """One worker as routers see it."""

    name: str
    role: str
    ready: bool
    running: int = 0  # sequences in its batch


@dataclass(frozen=True)
class Observation:
    """What a cluster does, over the last minute or so, and what its workers can do."""

    time_s: float  # when it was seen, by the planner's clock
    workers: tuple[Worker, ...]
    arrivals_per_s: float = 0.0  # also of requests that were refused for want of room
    prompt_tokens: float = 0.0  # mean of a request
    cached_share: float = 0.0  # of the prompts' tokens
    output_tokens: float = 0.0  # mean of a request; 0: not known
    queued: int = 0  # requests that wait for room
    running: int = 0  # requests, also those that wait
    ttft_p95_s: float = 0.0  # 0: not known
    tpot_p95_s: float = 0.0
    # Medians of the workers' measurements; 0: not known.
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0  # a decode step without its sequences
    sequence_ms: float = 0.0  # added to it by each sequence
    max_batch: int = 0
    kv_tokens: int = 0  # size of its KV pool
    incomplete: str = ""  # what is missing in it; empty: nothing


@dataclass(frozen=True)
class Policy:
    """What a plan has to reach, and how fast it may change."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    # By role. The least are those of the roles that the cluster has.
    least: Mapping[str, int] = field(default_factory=lambda: {PREFILL: 1, DECODE: 1, MIXED: 0})
    most: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 100))
    window_s: float = 60.0  # that a number must be too low, or too high, before it changes
    hold_s: float = 10.0  # that roles must be out of balance before they change
    cooldown_s: float = 30.0  # between two changes of roles
    stale_s: float = 30.0  # age of observations from which on nothing is changed


@dataclass(frozen=True)
class State:
    """What one decision leaves to the next."""

    wanted: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[tuple[float, Mapping[str, float]], ...] = ()  # when, and by role, of the window
    flipped_s: float = -math.inf  # when roles were changed last
    # Which way roles are out of balance (1: more prefill workers, -1: fewer), and since when.
    unbalanced: tuple[int, float] = (0, math.inf)
    raised_s: float = -math.inf  # when a number was raised for its latencies last


@dataclass(frozen=True)
class RolePlan:
    """One role in a decision."""

    need: float  # workers, as a fraction
    ready: int
    wanted: int


@dataclass(frozen=True)
class Flip:
    """A worker that changes its role."""

    worker: str
    before: str
    after: str


@dataclass(frozen=True)
class Decision:
    """The next plan."""

    state: State
    roles: Mapping[str, RolePlan]
    flips: tuple[Flip, ...] = ()
    explanation: str = ""  # with the figures
    changed: bool = False  # a number that is wanted, or a role
    held: bool = False  # the observation was of no use: everything stays


def plan(now: float, seen: Observation | None, state: State, policy: Policy) -> Decision:
    """The plan at `now`, by the clock of the observation's time; `state`: the last plan's."""
    if seen is None:
        return _held(seen, state, "no router has answered yet")
    if (age_s := now - seen.time_s) > policy.stale_s:
        return _held(seen, state, f"the routers' last status is {age_s:.0f} s old")
    demand = _demand(seen, policy)
    if why := seen.incomplete or demand.unknown:
        return _held(seen, state, why)
    needs = _needs_by_role(demand, seen, state)
    state = _remembered(now, needs, state, policy)
    state, texts, changed = _wanted(now, seen, state, policy)
    state, flips, why = _flips(now, seen, state, policy)
    roles = {
        role: RolePlan(needs[role], len(_of(seen, role, ready=True)), state.wanted[role])
        for role in ROLES
    }
    explanation = "; ".join(filter(None, [demand.text, *texts, why]))
    return Decision(state, roles, flips, explanation, changed or bool(flips))


@dataclass(frozen=True)
class _Demand:
    """Workers that prompts and outputs need, as fractions."""

    prefill: float = 0.0
    decode: float = 0.0
    text: str = ""
    unknown: str = ""  # what has not been measured yet


def _demand(seen: Observation, policy: Policy) -> _Demand:
    rate = seen.arrivals_per_s
    # Requests that wait are to be served within a window; a long queue at most doubles the demand,
    # so that it does not ask for more and more workers while none comes.
    rate += min(seen.queued / policy.window_s, rate)
    if rate == 0 and seen.running == 0:
        return _Demand(text="no requests")
    if not (seen.prefill_tokens_per_s and seen.step_ms + seen.sequence_ms):
        return _Demand(unknown="no worker has measured its rates yet")
    uncached = seen.prompt_tokens * (1 - seen.cached_share)
    prefill = _prefill_workers(rate, uncached / seen.prefill_tokens_per_s, policy.ttft_s)
    batch = _batch(seen, policy.tpot_s)
    step_s = (seen.step_ms + seen.sequence_ms * batch) / 1e3
    # Little's law; while no request has ended, those that run are all that is known of it.
    streams = rate * seen.output_tokens * step_s if seen.output_tokens else seen.running
    decode = streams / batch / _BUSY
    text = (
        f"{rate:.2f} requests/s with {uncached:.0f} uncached prompt tokens, at "
        f"{seen.prefill_tokens_per_s:.0f} a second and worker, need {prefill:.2f} workers for a "
        f"TTFT of {policy.ttft_s:g} s; their {seen.output_tokens:.0f} output tokens, at "
        f"{step_s * 1e3:.1f} ms in batches of {batch:.0f}, need {decode:.2f} for a TPOT of "
        f"{policy.tpot_s:g} s"
    )
    return _Demand(prefill, decode, text)


def _prefill_workers(rate: float, service_s: float, ttft_s: float) -> float:
    """Workers at which wait and prompt fit into the target; as many as help where nothing does."""
    busy = rate * service_s  # in workers
    low, high = busy / _BUSY, busy / _IDLE
    if busy == 0 or service_s + _TAIL * _wait_s(low, busy, service_s) <= ttft_s:
        return low
    for _ in range(20):
        middle = (low + high) / 2
        if service_s + _TAIL * _wait_s(middle, busy, service_s) <= ttft_s:
            high = middle
        else:
            low = middle
    return high


def _wait_s(workers: float, busy: float, service_s: float) -> float:
    """Mean wait in front of workers of which `busy` are busy. Sakasegawa (1977)."""
    share = busy / workers
    waiting: float = share ** (math.sqrt(2 * (workers + 1)) - 1)
    return service_s * waiting / (workers * (1 - share))


def _batch(seen: Observation, tpot_s: float) -> float:
    """Sequences of a decode worker that the TPOT target, its batch and its KV pool allow."""
    limits = [float(seen.max_batch or _USUAL_BATCH)]
    if seen.sequence_ms:
        limits.append((tpot_s * 1e3 - seen.step_ms) / seen.sequence_ms)
    if seen.kv_tokens and (tokens := seen.prompt_tokens + seen.output_tokens):
        limits.append(seen.kv_tokens / tokens)
    return max(1.0, min(limits))


def _needs_by_role(demand: _Demand, seen: Observation, state: State) -> dict[str, float]:
    """Mixed workers are given what they can take of both; the other roles need the rest."""
    total = demand.prefill + demand.decode
    if not (_is_used(PREFILL, seen, state) or _is_used(DECODE, seen, state)):
        credit = 1.0
    else:
        credit = min(1.0, len(_of(seen, MIXED)) / total) if total else 0.0
    return {
        PREFILL: demand.prefill * (1 - credit),
        DECODE: demand.decode * (1 - credit),
        MIXED: total * credit,
    }


def _remembered(now: float, needs: Mapping[str, float], state: State, policy: Policy) -> State:
    """The state with these needs, and the last one from before the window."""
    kept = [*state.needs, (now, needs)]
    while len(kept) > 1 and kept[1][0] <= now - policy.window_s:
        kept.pop(0)
    return replace(state, needs=tuple(kept))


def _wanted(
    now: float, seen: Observation, state: State, policy: Policy
) -> tuple[State, list[str], bool]:
    """The state with the workers that there should be, what is said of it, and whether any changed.

    A number goes up once every need of the window was above it, and down once every need was below:
    as fast in both directions, and a load that swings within a window changes nothing.
    """
    wanted: dict[str, int] = {}
    texts: list[str] = []
    raised_s, changed = state.raised_s, False
    for role in ROLES:
        before = state.wanted.get(role, len(_of(seen, role)))
        ready = len(_of(seen, role, ready=True))
        after = before
        if state.needs[0][0] <= now - policy.window_s:
            needs = [need[role] for _, need in state.needs]
            lowest = math.ceil(min(needs) - _BAND)
            highest = math.ceil(max(needs) + _BAND) if max(needs) else 0
            after = min(max(before, lowest), highest)
        floor, late = _floor(now, role, before, ready, seen, state, policy)
        if floor > after:
            after, texts = floor, [*texts, late]
            raised_s = now if floor > before else raised_s
        least = policy.least.get(role, 0) if _is_used(role, seen, state) else 0
        wanted[role] = after = min(max(after, least), policy.most.get(role, after))
        if after != before:
            changed = True
            texts.append(f"{before} → {after} {role} workers are wanted")
        if after > ready:
            texts.append(f"{after - ready} of the {after} {role} workers wanted are not ready")
    return replace(state, wanted=wanted, raised_s=raised_s), texts, changed


def _floor(
    now: float,
    role: str,
    before: int,
    ready: int,
    seen: Observation,
    state: State,
    policy: Policy,
) -> tuple[int, str]:
    """Workers that latencies demand whatever the model says, and why; 0: any number.

    One more than there are, and no further one before that one is ready and is seen in the
    latencies; none where workers are idle already, which more of them would be, too.
    """
    needs = state.needs[-1][1]
    if not needs[role] or needs[role] < ready / 2:
        return 0, ""
    # A first token waits for the role that is short, and it may be decode, which reserves first.
    first = max(ROLES, key=lambda one: _load(needs[one], len(_of(seen, one, ready=True))))
    ttft = seen.ttft_p95_s / policy.ttft_s if role == first else 0.0
    tpot = seen.tpot_p95_s / policy.tpot_s if role in (DECODE, MIXED) else 0.0
    if max(ttft, tpot) < _NEAR:
        return 0, ""
    name, seconds = ("TTFT", seen.ttft_p95_s) if ttft > tpot else ("TPOT", seen.tpot_p95_s)
    text = f"{name} (p95) of {seconds:.3g} s is {max(ttft, tpot):.2f} of its target"
    pending = before > ready or now - state.raised_s < max(policy.window_s, _LATENCY_S)
    return (before if pending or max(ttft, tpot) <= 1 else ready + 1), text


def _flips(
    now: float, seen: Observation, state: State, policy: Policy
) -> tuple[State, tuple[Flip, ...], str]:
    """Workers that change between prefill and decode, so that the busier role becomes less so."""
    needs = state.needs[-1][1]
    there = {role: _of(seen, role, ready=True) for role in (PREFILL, DECODE)}
    prefill, total = len(there[PREFILL]), len(there[PREFILL]) + len(there[DECODE])
    least = {role: max(1, policy.least.get(role, 1)) for role in there}

    def load(number: int) -> float:
        """The higher load of the two roles with as many prefill workers."""
        return max(_load(needs[PREFILL], number), _load(needs[DECODE], total - number))

    splits = range(least[PREFILL], total - least[DECODE] + 1)
    best = min(splits, key=lambda number: (load(number), abs(number - prefill)), default=prefill)
    calm = replace(state, unbalanced=(0, math.inf))
    if best == prefill or load(prefill) <= 1 or load(best) > load(prefill) * _GAIN:
        return calm, (), ""
    before, after = (DECODE, PREFILL) if best > prefill else (PREFILL, DECODE)
    direction = 1 if best > prefill else -1
    since = state.unbalanced[1] if state.unbalanced[0] == direction else now
    count = min(abs(best - prefill), max(1, total // _FLIP_SHARE))
    text = (
        f"{count} of {len(there[before])} {before} workers to {after} lowers the load of the "
        f"busier role from {load(prefill):.2f} to {load(prefill + direction * count):.2f}"
    )
    if now - since < policy.hold_s or now - state.flipped_s < policy.cooldown_s:
        return replace(state, unbalanced=(direction, since)), (), f"not yet: {text}"
    idle_first = sorted(there[before], key=lambda worker: (worker.running, worker.name))
    flips = tuple(Flip(worker.name, before, after) for worker in idle_first[:count])
    return replace(calm, flipped_s=now), flips, text


def _load(need: float, workers: int) -> float:
    return need / workers if workers else math.inf if need else 0.0


def _of(seen: Observation, role: str, ready: bool = False) -> list[Worker]:
    return [one for one in seen.workers if one.role == role and (one.ready or not ready)]


def _is_used(role: str, seen: Observation, state: State) -> bool:
    """Whether the cluster has the role; one without any worker is one with separate roles."""
    if not seen.workers and not any(state.wanted.values()):
        return role != MIXED
    return bool(_of(seen, role) or state.wanted.get(role))


def _held(seen: Observation | None, state: State, why: str) -> Decision:
    workers = seen.workers if seen else ()
    needs = state.needs[-1][1] if state.needs else {}
    roles = {
        role: RolePlan(
            needs.get(role, 0.0),
            sum(one.ready for one in workers if one.role == role),
            wanted,
        )
        for role, wanted in state.wanted.items()
    }
    state = replace(state, unbalanced=(0, math.inf))
    return Decision(state, roles, explanation=f"everything stays: {why}", held=True)
