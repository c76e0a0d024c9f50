"""The gRPC service for operators to set routes of model names."""

from __future__ import annotations

import math
import time
from typing import Any

from baton.config.model import check_model_name, shown_name
from baton.errors import ConfigError, InvalidRequest, Unavailable, quoted
from baton.log_format import audit
from baton.registry import RouteTable
from baton.v1 import route_pb2, route_pb2_grpc
from baton.v1.route_pb2 import CANARY_STATE_RUNNING, Canary, ModelRoute, RouteTarget
from router.canary import shared
from router.models import Models, describe_targets

_TRIES = 5  # to write over other writers
_MAX_TARGETS = 16
_MAX_STEPS = 32


class RouteServicer(route_pb2_grpc.RouteServiceServicer):
    """Routes by names, kept in etcd."""

    def __init__(self, models: Models, table: RouteTable) -> None:
        self._models, self._table = models, table

    async def ListRoutes(
        self, request: route_pb2.ListRoutesRequest, context: Any
    ) -> route_pb2.ListRoutesResponse:
        return route_pb2.ListRoutesResponse(routes=self._table.routes.values())

    async def SetRoute(
        self, request: route_pb2.SetRouteRequest, context: Any
    ) -> route_pb2.SetRouteResponse:
        """Sets a route, or begins a canary. Raises InvalidRequest for what cannot be served."""
        asked = request.route
        try:
            check_model_name(asked.name, "route")
        except ConfigError as error:
            raise InvalidRequest(str(error), "route.name") from error
        for _ in range(_TRIES):
            new = self._canary(asked) if asked.HasField("canary") else self._plain(asked)
            if await self._table.write(asked.name, new):
                audit(
                    "canary begun" if new.HasField("canary") else "route set",
                    route=new.name,
                    targets=describe_targets(new.targets),
                    caller=context.peer(),
                )
                return route_pb2.SetRouteResponse(route=new)
            await self._table.refresh()
        raise Unavailable("the route is being changed by others: try again")

    async def DeleteRoute(
        self, request: route_pb2.DeleteRouteRequest, context: Any
    ) -> route_pb2.DeleteRouteResponse:
        """Removes a route. Raises InvalidRequest if there is none."""
        for _ in range(_TRIES):
            if request.name not in self._table.routes:
                known = ", ".join(self._table.routes) or "none"
                text = f"there is no route {quoted(request.name)}; routes: {known}"
                raise InvalidRequest(text, "name")
            if await self._table.write(request.name, None):
                audit("route removed", route=request.name, caller=context.peer())
                return route_pb2.DeleteRouteResponse()
            await self._table.refresh()
        raise Unavailable("the route is being changed by others: try again")

    def _plain(self, asked: ModelRoute) -> ModelRoute:
        if len(asked.targets) > _MAX_TARGETS:
            raise InvalidRequest(f"a route has {_MAX_TARGETS} targets at most", "route.targets")
        targets = [self._target(asked.name, one) for one in asked.targets]
        for one in targets:
            if not 0 <= one.weight < math.inf:
                raise InvalidRequest(f"{one.weight:g} is no weight", "route.targets")
        if not any(one.weight > 0 for one in targets):
            raise InvalidRequest("a route needs a target with a weight above 0", "route.targets")
        names = [(one.model, one.version) for one in targets]
        if twice := {name for name in names if names.count(name) > 1}:
            name = shown_name(*min(twice))
            raise InvalidRequest(f"{name} is given twice", "route.targets")
        return ModelRoute(name=asked.name, targets=targets, changed_ms=_now_ms())

    def _canary(self, asked: ModelRoute) -> ModelRoute:
        """A route whose canary is in its first step. Raises InvalidRequest."""
        wanted = asked.canary
        target = self._target(asked.name, wanted.target)
        current = self._table.routes.get(asked.name)
        if current is not None and current.canary.state == CANARY_STATE_RUNNING:
            text = f"a canary of {asked.name} is running: end it with `baton route set` first"
            raise InvalidRequest(text, "route.canary")
        before = list(current.targets) if current else self._first(asked.name)
        if not target.HasField("version"):
            raise InvalidRequest("a canary is one version of a model", "route.canary.target")
        if any((one.model, one.version) == (target.model, target.version) for one in before):
            name = shown_name(target.model, target.version)
            text = f"{name} gets requests of {asked.name} already"
            raise InvalidRequest(text, "route.canary.target")
        steps = list(wanted.steps)
        rises = all(low < high for low, high in zip([0.0, *steps], steps, strict=False))
        if not 0 < len(steps) <= _MAX_STEPS or not rises or steps[-1] > 100:
            text = "steps are rising percentages up to 100, as 10,50,100"
            raise InvalidRequest(text, "route.canary.steps")
        if not (wanted.step_s > 0 and wanted.min_requests > 0 and wanted.max_slowdown >= 1):
            text = "step_s and min_requests must be above 0, max_slowdown at least 1"
            raise InvalidRequest(text, "route.canary")
        canary = Canary()
        canary.CopyFrom(wanted)
        canary.target.CopyFrom(target)
        canary.before.extend(before)
        canary.state, canary.step = CANARY_STATE_RUNNING, 0
        canary.reason = f"{steps[0]:g} %, begun"
        targets = shared(before, target, steps[0])
        return ModelRoute(name=asked.name, targets=targets, canary=canary, changed_ms=_now_ms())

    def _first(self, name: str) -> list[RouteTarget]:
        """The targets of a name without a route: its default version."""
        version = self._models.resolve(name, "").version
        return [RouteTarget(model=version.name, version=version.version, weight=1.0)]

    def _target(self, route: str, given: RouteTarget) -> RouteTarget:
        """A target that can serve: a bare name is a version of the route's model, or a name."""
        if given.HasField("version"):
            known = self._models.versions.get((given.model, given.version))
            if known is None or not known.membership.records:
                raise self._unknown(f"{given.model}@{given.version} has no workers", given.model)
            return given
        mine = self._models.versions.get((route, given.model))
        if mine is not None and mine.membership.records:
            return RouteTarget(model=route, version=given.model, weight=given.weight)
        if given.model not in dict(self._models.listed()) or given.model == route:
            text = f"{quoted(given.model)} is neither a version of {route} nor a model"
            raise self._unknown(text, route)
        if way := self._models.way(given.model, route):
            circle = " -> ".join(map(quoted, (route, *way)))
            raise InvalidRequest(f"the route would be a circle: {circle}", "route.targets")
        return given

    def _unknown(self, why: str, model: str) -> InvalidRequest:
        versions = [str(one) for one in self._models.of_model(model) if one.membership.records]
        there_are = ", ".join(versions or self._models.names)
        return InvalidRequest(f"{why}; there are {there_are}", "route.targets")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
