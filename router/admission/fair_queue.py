"""Weighted fair queueing by tokens, over tenants and within each tenant.

A request i gets a virtual finish time: when its prompt would be computed if the fleet's prefill
served all tenants at once by weight, and the requests of a tenant at once by priority. Before i is
done, request j of the same tenant takes min(w_j, w_i * p_j / p_i) seconds of prefill; with `ahead`
the sum of these,

    virtual_finish_i = base + (w_i + ahead) / share

So a short prompt goes before its tenant's own long ones that came earlier. `base` is now, or the
earliest virtual finish of all that wait where even that has passed: a virtual clock, so that a
newcomer never queues behind a flood that is late. A tenant that comes while only others wait may
begin up to LEAD_S before it, as far as it has not done so already: a light tenant goes first, one
that comes again and again alternates with the others. A virtual finish is fixed at admission and
the clock advances with the work, so no request starves; a tenant that used idle capacity pays
nothing later, and one that was away has saved up no more than LEAD_S.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import common_pb2

LEAD_S = 2.0  # more than most prompts take, less than others notice once
# A tenant that sent something so lately counts as active. If a light tenant counted only while it
# waits, a flood's virtual finish times would be computed without it and lie before its next one.
ACTIVE_S = 60.0
_FACTORS = {
    common_pb2.PRIORITY_LOW: 0.25,
    common_pb2.PRIORITY_NORMAL: 1.0,
    common_pb2.PRIORITY_HIGH: 4.0,
}


@dataclass(frozen=True)
class Flow:
    """A tenant's weight and priority among tenants."""

    tenant: str
    weight: float = 1.0
    priority: common_pb2.Priority = common_pb2.PRIORITY_NORMAL

    @property
    def share(self) -> float:
        """Against other tenants' shares."""
        return self.weight * _FACTORS[self.priority]


@dataclass(frozen=True, eq=False)
class PendingPrompt:
    """A request whose prompt is not computed yet."""

    virtual_finish: float  # on the clock that FairQueue was given
    flow: Flow
    seconds: float  # of the fleet's prefill
    factor: float  # of its priority
    share: float  # of the fleet, for its tenant
    base: float  # where its time begins
    lead_s: float  # by which that is before the virtual clock


class FairQueue:
    """The virtual finish times of all tenants' pending prompts. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: dict[str, dict[PendingPrompt, None]] = {}  # by tenant; ordered
        self._active: dict[str, tuple[Flow, float]] = {}  # tenants that came of late, and when
        self._served: dict[str, float] = {}  # how far an active tenant's time has been used
        # A heap; prompts that were removed stay in it until they come to its top.
        self._by_finish: list[tuple[float, int, PendingPrompt]] = []
        self._count = itertools.count()

    def add(
        self,
        flow: Flow,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> PendingPrompt:
        """A prompt of `seconds` of the fleet's prefill; the caller must `remove` it."""
        prompt = self.preview(flow, seconds, priority)
        self._active[flow.tenant] = flow, self._clock()
        self._served[flow.tenant] = prompt.base + seconds / prompt.share
        self._pending.setdefault(flow.tenant, {})[prompt] = None
        key = prompt.virtual_finish + prompt.lead_s
        heapq.heappush(self._by_finish, (key, next(self._count), prompt))
        return prompt

    def preview(
        self,
        flow: Flow,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> PendingPrompt:
        """What `add` would return now; nothing is added."""
        now = self._clock()
        factor = _FACTORS[priority or flow.priority]
        own = self._pending.get(flow.tenant, ())
        per_factor = seconds / factor
        ahead = sum(min(prompt.seconds, per_factor * prompt.factor) for prompt in own)
        share = self._share(flow, min(factor, _FACTORS[flow.priority]), now)
        base = clock = self._virtual_clock(now)
        # A lead is over other tenants that wait. Without any it would only put a long prompt
        # before its own tenant's next short ones.
        if not own and self._pending:
            base = min(clock, max(clock - LEAD_S, self._served.get(flow.tenant, -math.inf)))
        finish = base + (seconds + ahead) / share
        return PendingPrompt(finish, flow, seconds, factor, share, base, clock - base)

    def remove(self, prompt: PendingPrompt) -> None:
        """The prompt is computed, or is not going to be; may be called again."""
        own = self._pending.get(prompt.flow.tenant, {})
        own.pop(prompt, None)
        if not own:
            self._pending.pop(prompt.flow.tenant, None)

    def _virtual_clock(self, now: float) -> float:
        """Now, or the earliest virtual finish (without leads) that is pending, if it has passed."""
        heap = self._by_finish
        while heap and heap[0][2] not in self._pending.get(heap[0][2].flow.tenant, ()):
            heapq.heappop(heap)
        return min(now, heap[0][0]) if heap else now

    def _share(self, flow: Flow, factor: float, now: float) -> float:
        """The flow's part of the fleet next to those tenants that are active.

        A request below its tenant's priority yields to other tenants too; one above it goes
        before its own tenant's other requests only.
        """
        for tenant, (_, came) in tuple(self._active.items()):
            if came < now - ACTIVE_S and tenant not in self._pending:
                del self._active[tenant], self._served[tenant]
        mine = flow.weight * factor
        active = self._active.items()
        others = (other.share for name, (other, _) in active if name != flow.tenant)
        return mine / (mine + sum(others))
