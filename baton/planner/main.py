"""Runs a planner as a process: observes, elects a leader, publishes plans, changes roles."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton.config import PlannerConfig, shown_name
from baton.errors import BatonError, Stale
from baton.log_format import about
from baton.net import rpc
from baton.net.metrics_server import serving
from baton.net.server import Health, bind, stop_on_signals
from baton.net.tasks import cancelled
from baton.planner import scaling_policy
from baton.planner.keda_scaler import PublishedPlan, ScalerServicer
from baton.planner.observer import Observer, Statuses, Version, versions_of
from baton.planner.routers import Routers
from baton.planner.scaling_policy import Decision, Flip, Observation, Policy, State
from baton.registry import Election, EtcdRegistry, LedKey, plan_of
from baton.registry.membership import ROLES, encode
from baton.telemetry import tracing
from baton.telemetry.metrics.instruments import MODEL
from baton.telemetry.metrics.prometheus import Recorder
from baton.v1 import externalscaler_pb2_grpc, planner_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
CONFIRM_S = 60.0  # a plan that stays is written again so often
FLIP_S = 5.0  # for a worker to take its role
_STALE_INTERVALS = 6
_SERVICE = "externalscaler.ExternalScaler"
_ROLE_VALUES = {name: value for value, name in ROLES.items()}


async def run(config: PlannerConfig, api_key: str | None = None) -> int:
    """Runs until a signal stops it (`stop_on_signals`); returns 0.

    Raises ConfigError and Unavailable as it starts.
    """
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    instance = {"service.instance.id": config.incarnation}
    telemetry = tracing.setup(
        "baton-planner", config.otlp, instance, config.trace_sample, config.otlp_logs
    )
    recorder, registry = Recorder("planner", instance), EtcdRegistry(config.registry)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
        stack.push_async_callback(registry.close)
        server, address = bind(config.host, config.port)
        election, key = await stack.enter_async_context(registry.stand(config.incarnation))
        routers = Routers(config.target, api_key, min(2.0, config.plan.interval_s))
        stack.push_async_callback(routers.close)
        planner = Planner(config, election, key, telemetry.tracer, recorder)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(
            ScalerServicer(planner.published), server
        )
        health = Health()
        health.add_to(server, (_SERVICE,))
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await server.start()
        await health.set(True)
        await stack.enter_async_context(health.probed(config.host, config.health_port))
        page = serving(recorder.render, config.host, config.metrics_port)
        await stack.enter_async_context(page)
        how = "changes roles" if config.plan.apply else "a dry run: says what it would change"
        log.info("planner %s at %s (%s)", config.incarnation, address, how)
        await stack.enter_async_context(_running(planner, routers, stop))
        await stop.wait()
        await health.set(False)
    planner.check()
    return 0


@contextlib.asynccontextmanager
async def _running(planner: Planner, routers: Routers, stop: asyncio.Event) -> AsyncIterator[None]:
    """Plans meanwhile; an error, which would be a bug, ends the process."""
    task = asyncio.create_task(planner.run(routers), name="plan")
    task.add_done_callback(lambda _: stop.set())
    try:
        yield
    finally:
        await cancelled(task)
        if not task.cancelled():
            planner.failure = task.exception()


class Planner:
    """Decides, and while it leads, acts."""

    def __init__(
        self,
        config: PlannerConfig,
        election: Election,
        key: LedKey,
        tracer: Tracer,
        recorder: Recorder,
    ) -> None:
        plan = config.plan
        self._config, self._election, self._key = config, election, key
        self._tracer, self._recorder = tracer, recorder
        self._policy = Policy(
            plan.ttft_s,
            plan.tpot_s,
            plan.least,
            plan.most,
            window_s=plan.window_s,
            hold_s=min(2 * plan.interval_s, plan.window_s),
            cooldown_s=plan.cooldown_s,
            stale_s=_STALE_INTERVALS * plan.interval_s,
        )
        self._observers: dict[Version, Observer] = {}
        self._served_s: dict[Version, float] = {}  # when a router last did
        self._states: dict[Version, State] = {}
        self._leads = False  # and has taken over the last leader's plan
        self._addresses: dict[str, str] = {}  # of workers, by incarnation
        self._written_s = -math.inf
        self._said: dict[Version, str] = {}  # the last decisions' outcomes
        self.published = PublishedPlan()
        self.failure: BaseException | None = None
        self._observe()

    def check(self) -> None:
        """Raises what ended `run`, if anything did."""
        if self.failure is not None:
            raise self.failure

    async def run(self, routers: Routers) -> None:
        """Looks at the cluster again and again, until cancelled."""
        while True:
            statuses = await routers.statuses()
            self._addresses = {
                one.record.incarnation: one.record.address
                for status in filter(None, statuses.values())
                for one in status.workers
            }
            seen = self._seen(statuses)
            try:
                await (self._lead(seen) if self._election.left_s else self._follow())
            except Stale as error:
                log.warning("another planner leads: %s", error)
                self._leads = False
            except BatonError as error:
                log.warning("the plan cannot be kept in etcd for now: %s", error)
            await asyncio.sleep(self._config.plan.interval_s)

    def _seen(self, statuses: Statuses) -> dict[Version, Observation | None]:
        """Each version that routers serve, or did before some of them became silent."""
        now, window_s, stale_s = _now(), self._config.plan.window_s, self._policy.stale_s
        self._served_s |= dict.fromkeys(versions_of(statuses), now)
        silent = [status is None for status in statuses.values()]
        kept_s = math.inf if all(silent) else stale_s if any(silent) else 0.0
        self._served_s = {
            version: time_s for version, time_s in self._served_s.items() if now - time_s <= kept_s
        }
        self._observers = {
            version: self._observers.get(version) or Observer(version, window_s, stale_s)
            for version in sorted(self._served_s)
        }
        return {
            version: observer.observe(now, statuses)
            for version, observer in self._observers.items()
        }

    async def _follow(self) -> None:
        """Takes over what the leader has published."""
        self._leads = False
        before = self._key.changed_s
        value = await self._key.read()
        if value and self._key.changed_s != before:
            self.published.set(plan_of(value))

    async def _lead(self, seen: Mapping[Version, Observation | None]) -> None:
        """Decides, publishes, and then acts: no other planner that has not led since can act."""
        if not self._leads:
            value = await self._key.read()
            self._states = _states_of(plan_of(value)) if value else {}
            seen = {**dict.fromkeys(self._states), **seen}  # routers may be silent just now
            self._served_s = {**dict.fromkeys(self._states, _now()), **self._served_s}
        decided = {
            version: scaling_policy.plan(
                _now(), observation, self._states.get(version, State()), self._policy
            )
            for version, observation in seen.items()
        }
        await self._publish(decided)
        self._leads = True
        self._states = {version: one.state for version, one in decided.items()}
        await asyncio.gather(*(self._act(version, one) for version, one in decided.items()))

    async def _act(self, version: Version, decided: Decision) -> None:
        """Says what was decided for a version, and changes roles."""
        known = _attributes(version, decided)
        with tracing.span(self._tracer, "planner.plan", Context(), known) as span:
            self._say(version, decided, tracing.trace_id_of(span))
            context = tracing.context_of(span)
            await asyncio.gather(*(self._flip(flip, context) for flip in decided.flips))

    async def _publish(self, decided: Mapping[Version, Decision]) -> None:
        """Writes the plan if it changed, was not confirmed for long, or is this leader's first."""
        now, new = _now(), self._plan_of(decided)
        changed = decided.keys() != self._states.keys()
        changed = changed or any(one.changed for one in decided.values())
        if self._leads and not changed and now - self._written_s < CONFIRM_S:
            self.published.plan = new  # its figures
            return
        await self._key.write(encode(new))
        self._written_s = now
        self.published.set(new)

    def _plan_of(self, decided: Mapping[Version, Decision]) -> planner_pb2.Plan:
        flipped_s = max((one.state.flipped_s for one in decided.values()), default=-math.inf)
        ago_s = _now() - flipped_s if flipped_s > -math.inf else 0.0
        return planner_pb2.Plan(
            planner=self._config.incarnation,
            time_ms=_unix_ms(),
            roles=[
                planner_pb2.RolePlan(
                    model=model, version=version, role=role,
                    need=one.need, ready=one.ready, wanted=one.wanted,
                )
                for (model, version), of in decided.items()
                for role, one in of.roles.items()
            ],
            explanation="\n".join(
                f"{shown_name(*version)}: {one.explanation}" for version, one in decided.items()
            ),
            flipped_ms=_unix_ms() - int(ago_s * 1e3) if flipped_s > -math.inf else 0,
            applied=self._config.plan.apply,
        )  # fmt: skip

    def _say(self, version: Version, decided: Decision, trace_id: str) -> None:
        """Logs a decision that changes something, and the others once while they are alike."""
        outcome = "held" if decided.held else "changed" if decided.changed else "kept"
        self._recorder.count("baton.planner.decisions", 1, {"outcome": outcome})
        level = (
            logging.INFO if decided.changed or outcome != self._said.get(version) else logging.DEBUG
        )
        extra = about(trace_id=trace_id)
        name = shown_name(*version)
        log.log(level, "%s: %s: %s", name, outcome, decided.explanation, extra=extra)
        self._said[version] = outcome

    async def _flip(self, flip: Flip, context: Context) -> None:
        """Changes a worker's role, unless this is a dry run or the lead may end meanwhile."""
        apply, result = self._config.plan.apply, "dry_run"
        known = {"baton.worker": flip.worker, "before": flip.before, "after": flip.after}
        with tracing.span(self._tracer, "planner.flip", context, known) as span:
            try:
                if apply:
                    await self._set_role(flip)
                    result = "done"
                log.info(
                    "%s %s from %s to %s",
                    "changed" if apply else "would change (--apply does)",
                    flip.worker,
                    flip.before,
                    flip.after,
                )
            except BatonError as error:
                result = "failed"
                tracing.failed(span, error)
                log.warning("%s stays %s: %s", flip.worker, flip.before, error)
        labels = {"before": flip.before, "after": flip.after, "result": result}
        self._recorder.count("baton.planner.flips", 1, labels)

    async def _set_role(self, flip: Flip) -> None:
        left_s = min(FLIP_S, self._election.left_s)
        if not left_s:
            raise Stale("the lead has ended")
        address = self._addresses[flip.worker]
        async with rpc.channel(address, role="worker") as channel:
            request = worker_pb2.SetRoleRequest(role=_ROLE_VALUES[flip.after])
            with rpc.translated():
                await worker_pb2_grpc.WorkerServiceStub(channel).SetRole(request, timeout=left_s)

    def _observe(self) -> None:
        """Connects the gauges."""
        observe = self._recorder.observe
        observe("baton.planner.leader", lambda: float(self._election.left_s > 0))
        for name, field in (("needed", "need"), ("wanted", "wanted"), ("ready", "ready")):
            observe(f"baton.planner.workers.{name}", partial(self._by_role, field))

    def _by_role(self, field: str) -> list[tuple[float, dict[str, str]]]:
        roles = self.published.plan.roles
        return [
            (getattr(one, field), {**_labels(one.model, one.version), "role": one.role})
            for one in roles
        ]


def _attributes(version: Version, decided: Decision) -> dict[str, str | int | float | bool]:
    found: dict[str, str | int | float | bool] = {
        **_labels(*version),
        "baton.planner.explanation": decided.explanation,
        "baton.planner.held": decided.held,
        "baton.planner.flips": len(decided.flips),
    }
    for role, one in decided.roles.items():
        found[f"baton.planner.{role}.need"] = one.need
        found[f"baton.planner.{role}.wanted"] = one.wanted
    return found


def _labels(model: str, version: str) -> dict[str, str]:
    return dict(zip(MODEL, (model, version), strict=True))


def _states_of(plan: planner_pb2.Plan) -> dict[Version, State]:
    """The decision states that a new leader takes over from a plan."""
    ago_s = max(0.0, (_unix_ms() - plan.flipped_ms) / 1e3)
    flipped_s = _now() - ago_s if plan.flipped_ms else -math.inf
    wanted: defaultdict[Version, dict[str, int]] = defaultdict(dict)
    for one in plan.roles:
        wanted[one.model, one.version][one.role] = one.wanted
    return {version: State(of, flipped_s=flipped_s) for version, of in wanted.items()}


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _now() -> float:
    return asyncio.get_running_loop().time()
