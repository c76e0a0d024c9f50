"""The models that this router serves: one `ModelVersion` for each version, found by name.

A request's `model` is resolved once, at admission, to a version, whose workers alone serve it, also
after failures: other versions' tokens would not continue its own. Nothing below knows of models.

    "chat@v1"  that version                    "chat"  its route, else its first version
    "fast"     its route, else an alias        ""      the router's first --model
    "sql"      a LoRA adapter that workers have loaded by this name
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.config import ModelSource, full_name, shown_name
from baton.errors import ConfigError, ModelNotFound, Unavailable, quoted
from baton.registry import Membership
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from baton.v1.route_pb2 import CANARY_STATE_RUNNING, ModelRoute, RouteTarget
from router.admission.admission import Admission
from router.dispatch.dispatch import Dispatch
from router.fleet.circuit_breaker import Key
from router.fleet.fleet import Fleet
from router.fleet.snapshot import MISMATCH, WorkerView
from router.queueing.wait_queue import WaitQueue
from router.telemetry.stats import Traffic

log = logging.getLogger(__name__)

ADAPTER_SEPARATOR = "#"  # between a version's full name and an adapter's identity
_MAX_NAMED = 16  # models in an error
_RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class ModelVersion:
    """One version of a model: its workers, their queue, and how text becomes its tokens."""

    name: str
    version: str
    admission: Admission  # versions with one tokenizer share it
    membership: Membership  # of its workers only
    fleet: Fleet
    wait_queue: WaitQueue
    dispatch: Dispatch
    traffic: Traffic = field(default_factory=Traffic)
    running: int = 0  # requests
    output_tokens: int = 0  # delivered

    @property
    def full_name(self) -> str:
        return full_name(self.name, self.version)

    def __str__(self) -> str:
        return shown_name(self.name, self.version)

    @property
    def labels(self) -> dict[str, str]:
        """Its labels in metrics and spans."""
        return {"gen_ai.request.model": self.name, "baton.model.version": self.version}

    def traffic_now(self) -> fleet_pb2.ModelTraffic:
        """The version's present load and rates at this router."""
        traffic = fleet_pb2.ModelTraffic(
            model=self.name,
            version=self.version,
            queued=self.wait_queue.depth,
            running=self.running,
            counts=self.traffic.counts,
            latency=self.traffic.latency(time.monotonic()),
        )
        traffic.counts.output_tokens = self.output_tokens
        return traffic

    @property
    def why_not_ready(self) -> str:
        """Why it cannot generate tokens yet; empty once it can."""
        return self.fleet.snapshot().why_not_ready

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens; 0 while no limit is known."""
        return self.admission.prompts.context_limit(self.fleet.snapshot().max_context)


def resumed_name(full_name: str, adapter: str) -> str:
    """The model that resolves to the same version and adapter again, whatever has changed."""
    return f"{full_name}{ADAPTER_SEPARATOR}{adapter}" if adapter else full_name


# Makes a version whose workers are the membership's.
NewVersion = Callable[[str, str, Admission, Membership], ModelVersion]


@dataclass(frozen=True)
class Target:
    """What a request's model was resolved to."""

    version: ModelVersion
    route: str = ""  # name of the route that chose it; empty: none
    adapter: str = ""  # identity of the LoRA adapter; empty: none


class Models:
    """All served versions, by name and version. Event-loop thread only."""

    def __init__(
        self,
        texts: Sequence[tuple[ModelSource, Admission]],
        new_version: NewVersion,
        aliases: Iterable[str] = (),
        routes: Callable[[], Mapping[str, ModelRoute]] = dict,
    ) -> None:
        """`texts`: the models with their tokenizers; `aliases`: as given by --model-alias.

        Raises ConfigError for aliases that stand for each other.
        """
        self.texts = texts
        self.default = texts[0][0].name
        self.names = list(dict.fromkeys(source.name for source, _ in texts))
        self.versions: dict[tuple[str, str], ModelVersion] = {}
        self.unserved: tuple[WorkerView, ...] = ()  # workers of other models
        self.changed = asyncio.Event()  # set at the next change of a fleet or of `versions`
        self.routes = routes
        self.on_ejected: Callable[[Key], None] = lambda key: None  # see `Fleet.on_ejected`
        self._new_version = new_version
        pairs = [alias.partition("=") for alias in aliases]
        self._aliases = {alias: model or self.default for alias, _, model in pairs}
        self._check_aliases()
        self._following: asyncio.TaskGroup | None = None
        self._registry = Membership()  # of all workers, once it is followed
        for source, _ in texts:
            self._get(source.name, source.version or "")

    def _check_aliases(self) -> None:
        for alias in self._aliases:
            name, passed = alias, list[str]()
            while name in self._aliases and name not in self.names:
                if name in passed:
                    named = " and ".join(f"{one}={self._aliases[one]}" for one in passed)
                    raise ConfigError(f"--model-alias: {named} lead to no model")
                passed.append(name)
                name = self._aliases[name]

    async def follow(self, membership: Membership) -> None:
        """Keeps the versions and their workers up to date until the registry's watch ends."""
        async with asyncio.TaskGroup() as self._following:
            for version in self.versions.values():
                self._following.create_task(version.fleet.follow())
            async for records in membership.changes():
                self._apply(records, membership)
            for version in self.versions.values():
                version.membership.close()

    def _apply(
        self, records: Mapping[str, common_pb2.WorkerRecord], membership: Membership
    ) -> None:
        self._registry = membership
        groups: dict[tuple[str, str], dict[str, common_pb2.WorkerRecord]] = defaultdict(dict)
        for incarnation, record in records.items():
            groups[record.model, record.version][incarnation] = record
        for key in groups.keys() - self.versions.keys():
            if key[0] in self.names and any(map(_is_described, groups[key].values())):
                self._get(*key, next(filter(_is_described, groups[key].values())).text_fingerprint)
        for key, version in self.versions.items():
            mine = groups.get(key, {})
            if version.membership.records and not mine:
                log.info("%s has no workers left", version)
            missing = membership.missing & mine.keys()
            version.membership.publish(mine, connected=membership.connected, missing=missing)
        reason = f"its model has no --model at this router, which serves {', '.join(self.names)}"
        self.unserved = tuple(
            WorkerView(record, worker_pb2.Load(), MISMATCH, f"{reason} (it has {record.model!r})")
            for _, record in sorted(records.items())
            if record.model not in self.names and _is_described(record)
        )
        self._drop_unused()
        self._announce()

    def _get(self, name: str, version: str, fingerprint: str = "") -> ModelVersion:
        """A version, made if it is not there; `fingerprint`: of its workers' tokenizer."""
        if found := self.versions.get((name, version)):
            return found
        mine = [(source, one) for source, one in self.texts if source.name == name]
        membership = Membership()
        membership.publish({}, connected=self._registry.connected)
        made = self._new_version(name, version, _text_of(mine, version, fingerprint), membership)
        made.fleet.listeners.append(self._announce)
        made.fleet.on_ejected = self._ejected
        self.versions[name, version] = made
        if self._following is not None:
            self._following.create_task(made.fleet.follow())
            log.info("serving %s", made)
        return made

    def _drop_unused(self) -> None:
        """Drops versions without workers and requests, but not the last one of a model."""
        for key, version in list(self.versions.items()):
            siblings = [one for other, one in self.versions.items() if other != key]
            replaced = any(one.name == key[0] and one.membership.records for one in siblings)
            if replaced and not version.membership.records and not version.running:
                version.membership.close()
                del self.versions[key]

    def _announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _ejected(self, key: Key) -> None:
        self.on_ejected(key)

    def resolve(self, model: str, key: str) -> Target:
        """The version for a request. Requests with the same `key` get the same one.

        Raises ModelNotFound, naming what is served, or Unavailable for a version without workers
        while the model has none at all.
        """
        model, _, adapter = model.partition(ADAPTER_SEPARATOR)
        name, has_version, version = (model or self.default).partition("@")
        if has_version:
            return Target(self._exact(name, version), adapter=adapter)
        return self._by_name(name, key, ())

    def _by_name(self, name: str, key: str, passed: tuple[str, ...]) -> Target:
        route = None if name in passed else self.routes().get(name)
        if route is not None:
            chosen = pick_target(self._usable(route), key)
            if chosen.HasField("version"):
                return Target(self._get_served(chosen.model, chosen.version), name)
            return replace(self._by_name(chosen.model, key, (*passed, name)), route=name)
        if name in self.names:
            return Target(self.first_version(name))
        if name in self._aliases:
            return self._by_name(self._aliases[name], key, (*passed, name))
        for version in self.versions.values():
            if (adapter := version.fleet.adapters().get(name)) is not None:
                return Target(version, adapter=adapter)
        raise self.not_found(name)

    def _get_served(self, name: str, version: str) -> ModelVersion:
        if name not in self.names:
            raise Unavailable(f"this router has no --model {name}, which a route names")
        return self._get(name, version)

    def _usable(self, route: ModelRoute) -> list[RouteTarget]:
        """The route's targets with requests: of these the ones with workers, if any has some."""
        weighted = [one for one in route.targets if one.weight > 0]
        ready = [one for one in weighted if not one.HasField("version") or self.is_ready(one)]
        return ready or weighted

    def is_ready(self, target: RouteTarget) -> bool:
        """Whether the target's version can serve a request."""
        version = self.versions.get((target.model, target.version))
        return version is not None and not version.why_not_ready

    def _exact(self, name: str, version: str) -> ModelVersion:
        if found := self.versions.get((name, version)):
            return found
        if name in self.names and not any(v.membership.records for v in self.of_model(name)):
            raise Unavailable(f"{name} has no workers now", _RETRY_AFTER_S)
        raise self.not_found(f"{name}@{version}")

    def of_model(self, name: str) -> list[ModelVersion]:
        """A model's versions, in their natural order: v2 before v10."""
        mine = [one for one in self.versions.values() if one.name == name]
        return sorted(mine, key=lambda one: _natural(one.version))

    def first_version(self, name: str) -> ModelVersion:
        """The version that requests get without a route: the first that has workers."""
        mine = self.of_model(name)
        return next((one for one in mine if one.membership.records), None) or self._get(name, "")

    def not_found(self, model: str) -> ModelNotFound:
        """The error for a name that is not served."""
        served = [name for name, _ in self.listed()]
        more = len(served) - _MAX_NAMED
        names = ", ".join(map(repr, served[:_MAX_NAMED])) + (
            f" and {more} more" if more > 0 else ""
        )
        are = "is" if len(served) == 1 else "are"
        return ModelNotFound(f"model {quoted(model)} is not served here; {names} {are}")

    def listed(self) -> list[tuple[str, str]]:
        """Names that requests may use, each with what it stands for."""
        routes = self.routes()
        found = {name: self._root(name, routes) for name in (*self.names, *self._aliases, *routes)}
        for name in self.names:
            for one in self.of_model(name):
                if one.version:
                    found[one.full_name] = one.full_name
        for version in self.versions.values():
            for adapter in version.fleet.adapters():
                found.setdefault(adapter, str(version))
        return list(found.items())

    def way(self, name: str, end: str) -> list[str]:
        """The names that lead by routes and aliases from `name` to `end`; empty if none do.

        All targets are followed, also those without requests and those to which a running canary
        may go back.
        """
        routes, ways = self.routes(), {name: [name]}
        waiting = [name]
        while waiting and end not in ways:
            now = waiting.pop()
            for other in self._leads_to(now, routes):
                if other not in ways:
                    ways[other] = [*ways[now], other]
                    waiting.append(other)
        return ways.get(end, [])

    def _leads_to(self, name: str, routes: Mapping[str, ModelRoute]) -> list[str]:
        if (route := routes.get(name)) is not None:
            running = route.canary.state == CANARY_STATE_RUNNING
            targets = [*route.targets, *(route.canary.before if running else ())]
            return [one.model for one in targets if not one.HasField("version")]
        return [self._aliases[name]] if name in self._aliases and name not in self.names else []

    def _root(self, name: str, routes: Mapping[str, ModelRoute]) -> str:
        if name in routes:
            return describe_targets(routes[name].targets)
        if name in self.names:
            return str(self.first_version(name))
        return self._aliases[name]

    @property
    def registry_connected(self) -> bool:
        return all(version.fleet.registry_connected for version in self.versions.values())

    @property
    def why_not_ready(self) -> str:
        """Why no model can be served; empty if one can."""
        reasons = {version: version.why_not_ready for version in self.versions.values()}
        if not all(reasons.values()):
            return ""
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{version}: {reason}" for version, reason in reasons.items())

    @property
    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links between workers, of all versions."""
        return [pair for version in self.versions.values() for pair in version.fleet.pairs]

    @property
    def workers(self) -> list[WorkerView]:
        """All workers by role, then those of models that are not served."""
        snapshots = [version.fleet.snapshot() for version in self.versions.values()]
        served = [view for snapshot in snapshots for view in snapshot.workers]
        return [*sorted(served, key=lambda view: view.record.role), *self.unserved]


def pick_target(targets: Sequence[RouteTarget], key: str) -> RouteTarget:
    """Chooses a target by its weight; equal keys get the same one.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): when weights change or a target
    goes, no more keys move than have to.
    """

    def score(target: RouteTarget) -> float:
        text = f"{key}\0{target.model}@{target.version}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
        return -target.weight / math.log(uniform)

    return max(targets, key=score)


def describe_targets(targets: Iterable[RouteTarget]) -> str:
    """Targets for people: "chat@v1" or "chat@v1 90 %, chat@v2 10 %"."""
    used = [one for one in targets if one.weight > 0]
    total = sum(one.weight for one in used)
    names = [shown_name(one.model, one.version) for one in used]
    if len(used) == 1:
        return names[0]
    return ", ".join(
        f"{name} {100 * one.weight / total:.3g} %" for name, one in zip(names, used, strict=True)
    )


def _text_of(
    texts: Sequence[tuple[ModelSource, Admission]], version: str, fingerprint: str
) -> Admission:
    """Of a model's tokenizers that of a version: the one given for it, else its workers', else the
    first."""
    for source, admission in texts:
        if source.version == version:
            return admission
    for _, admission in texts[1:]:
        if admission.tokenizer.fingerprint == fingerprint:
            return admission
    return texts[0][1]


def _natural(version: str) -> str:
    return re.sub(r"\d+", lambda number: number[0].zfill(20), version)


def _is_described(record: common_pb2.WorkerRecord) -> bool:
    """Whether the record is complete: a starting worker has no address and tokenizer yet."""
    return record.state != common_pb2.WORKER_STATE_STARTING
