"""KEDA's external scaler: answers with the wanted replicas of the published plan.

Every planner answers, whichever leads. A trigger's metadata has `role`: prefill, decode or mixed,
and `model` where several are served: "chat" or, with its version, "chat@v1".
The metric is the number of wanted replicas and its target is 1 a replica, so that the autoscaler
takes the number as it is. Without a recent plan it gets an error, and leaves the replicas alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from baton.config import shown_name
from baton.config.worker import ROLES
from baton.errors import InvalidRequest, Unavailable
from baton.v1 import externalscaler_pb2, externalscaler_pb2_grpc, planner_pb2

PLAN_S = 300.0  # after which a plan that was not confirmed is ignored


class PublishedPlan:
    """The newest plan of the cluster, as this planner has read or written it."""

    def __init__(self) -> None:
        self.plan = planner_pb2.Plan()
        self._seen_s = -PLAN_S
        self.changed = asyncio.Event()  # set when the next plan is

    def set(self, plan: planner_pb2.Plan) -> None:
        """A plan was written; also if it is as before."""
        self.plan, self._seen_s = plan, asyncio.get_running_loop().time()
        self.changed.set()
        self.changed = asyncio.Event()

    def wanted(self, role: str, model: str = "") -> int:
        """Wanted replicas.

        Raises Unavailable without a recent plan, which is not the same as 0; InvalidRequest where
        the plan has several models, or versions of the model, and no one is named.
        """
        if asyncio.get_running_loop().time() - self._seen_s > PLAN_S:
            raise Unavailable(f"there is no plan of the last {PLAN_S:.0f} s: does a planner lead?")
        of_role = [one for one in self.plan.roles if one.role == role]
        found = [one for one in of_role if model in ("", one.model, _name(one))]
        if len(found) > 1:
            names = ", ".join(map(_name, found))
            raise InvalidRequest(
                f"the trigger's metadata must have model, one of {names}, not {model!r}",
                "scalerMetadata",
            )
        if not found:
            what = f"workers of {model}" if of_role else "workers"
            raise Unavailable(f"the planner has not seen the {what} yet")
        return found[0].wanted


class ScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """The contract of KEDA."""

    def __init__(self, published: PublishedPlan) -> None:
        self._published = published

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> externalscaler_pb2.IsActiveResponse:
        """Whether any replica is wanted."""
        return self._active(request)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        """Whether any replica is wanted: now, and with every plan."""
        while True:
            changed = self._published.changed
            yield self._active(request)
            await changed.wait()

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Any
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """The metric of a role, and a target of 1."""
        name = _metric(_role_of(request))
        spec = externalscaler_pb2.MetricSpec(metricName=name, targetSize=1, targetSizeFloat=1.0)
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Any
    ) -> externalscaler_pb2.GetMetricsResponse:
        """The wanted replicas of a role."""
        role = _role_of(request.scaledObjectRef)
        if request.metricName != _metric(role):
            raise InvalidRequest(f"the metric of role {role} is {_metric(role)}", "metricName")
        wanted = self._wanted(request.scaledObjectRef)
        value = externalscaler_pb2.MetricValue(
            metricName=request.metricName, metricValue=wanted, metricValueFloat=wanted
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _active(
        self, reference: externalscaler_pb2.ScaledObjectRef
    ) -> externalscaler_pb2.IsActiveResponse:
        return externalscaler_pb2.IsActiveResponse(result=self._wanted(reference) > 0)

    def _wanted(self, reference: externalscaler_pb2.ScaledObjectRef) -> int:
        model = reference.scalerMetadata.get("model", "")
        return self._published.wanted(_role_of(reference), model)


def _name(one: planner_pb2.RolePlan) -> str:
    return shown_name(one.model, one.version)


def _metric(role: str) -> str:
    return f"baton-wanted-{role}"


def _role_of(reference: externalscaler_pb2.ScaledObjectRef) -> str:
    role = reference.scalerMetadata.get("role", "")
    if role not in ROLES:
        raise InvalidRequest(
            f"the trigger's metadata must have role: {', '.join(ROLES)}, not {role!r}",
            "scalerMetadata",
        )
    return role
