"""Weighted fair queueing by tokens, over tenants and within each tenant.

A tenant's virtual time is the prefill it was given, in seconds of the fleet, by its share. The
prompt that would end at the earliest virtual time goes first; after the tenant's prompts before it:

    virtual_finish_i = virtual time of its tenant + (sum of their w_j + w_i) / share

No other tenant is part of that, so one that waits gets no less than its share among all that send,
to within three of the largest prompts, whoever came first and with however much. A tenant that
comes while others wait begins at the latest mean of virtual times, less its own prompt or LEAD_S,
so that a light tenant goes first; or where it stood, if that is later, so that leaving is no gain.
(The mean itself falls when the tenant with the most leaves, and what came next would pass all that
it owes to others.) Idle capacity is free.

The prompts of one tenant go by rank, which is fixed at admission: the virtual time at which i would
end if all of them ran at once by priority. Until then, j takes min(w_j, w_i * p_j / p_i):

    rank_i = virtual time of its tenant + (w_i + sum of these) / share

So a short prompt passes long ones that came earlier; as what passes advances the virtual time, none
starves. (Golestani's self-clocked fair queueing, 1994; the mean is that of EEVDF, Stoica and
Abdel-Wahab, 1995.)
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from baton.v1 import common_pb2

LEAD_S = 1.0  # more than most prompts take, less than others notice once
# A tenant that sent something so lately may send again before a prompt that waits is computed.
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


@dataclass(eq=False)
class PendingPrompt:
    """A request whose prompt is not computed yet."""

    _queue: FairQueue = field(repr=False)
    flow: Flow
    seconds: float  # of the fleet's prefill
    factor: float  # of its priority
    share: float  # of its tenant, for this request
    rank: float  # among its tenant's
    virtual_finish: float = 0.0  # among all; later with each of its tenant's that passes it

    @property
    def cost(self) -> float:
        """By how much it advances its tenant's virtual time."""
        return self.seconds / self.share

    @property
    def fair_s(self) -> float:
        """Seconds from now until it is computed, if every active tenant takes its share."""
        return self._queue.seconds_until(self)


@dataclass(eq=False)
class _Tenant:
    share: float
    virtual_time: float = -math.inf
    seen: float = -math.inf  # when it sent something last
    pending: list[PendingPrompt] = field(default_factory=list)  # by rank, then by arrival

    def set_finishes(self, first: int = 0) -> None:
        """From number `first` on; those before it stay."""
        at = self.pending[first - 1].virtual_finish if first else self.virtual_time
        for prompt in islice(self.pending, first, None):
            at += prompt.cost
            prompt.virtual_finish = at


class FairQueue:
    """All tenants' pending prompts and their order. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._latest = 0.0  # mean, so far

    def add(
        self,
        flow: Flow,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> PendingPrompt:
        """A prompt of `seconds` of the fleet's prefill; the caller must `remove` it."""
        tenant = self._tenants.setdefault(flow.tenant, _Tenant(flow.share))
        prompt, tenant.virtual_time = self._prompt(flow, seconds, priority)
        tenant.share, tenant.seen = flow.share, self._clock()
        place = bisect(tenant.pending, prompt.rank, key=_rank)
        tenant.pending.insert(place, prompt)
        tenant.set_finishes(place)
        return prompt

    def preview(
        self,
        flow: Flow,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> PendingPrompt:
        """What `add` would return now; nothing is added."""
        prompt, start = self._prompt(flow, seconds, priority)
        tenant = self._tenants.get(flow.tenant)
        before = [other for other in tenant.pending if other.rank <= prompt.rank] if tenant else []
        prompt.virtual_finish = start + sum(other.cost for other in (*before, prompt))
        return prompt

    def remove(self, prompt: PendingPrompt, *, computed: bool = False) -> None:
        """It is computed, or is not going to be and costs nothing; may be called again."""
        tenant = self._tenants[prompt.flow.tenant]
        if prompt in tenant.pending:
            place = tenant.pending.index(prompt)
            del tenant.pending[place]
            if not computed:
                tenant.set_finishes(place)
                return
            tenant.virtual_time += prompt.cost
            if place:  # those behind it end when they would have
                tenant.set_finishes()

    def forget(self, tenant: str) -> None:
        """A tenant is gone and nothing of it is pending; should it come back, it is a new one."""
        if tenant in self._tenants:
            assert not self._tenants[tenant].pending, "it has requests"
            del self._tenants[tenant]

    def seconds_until(self, prompt: PendingPrompt) -> float:
        """From now to its virtual finish, if all tenants that came of late take their shares."""
        since, shares = self._clock() - ACTIVE_S, prompt.share
        for name, tenant in self._tenants.items():
            if name != prompt.flow.tenant and (tenant.pending or tenant.seen >= since):
                shares += tenant.share
        return (prompt.virtual_finish - self._mean()) * shares

    def _prompt(
        self, flow: Flow, seconds: float, priority: common_pb2.Priority
    ) -> tuple[PendingPrompt, float]:
        """It, and the virtual time of its tenant with it."""
        factor = _FACTORS[priority or flow.priority]
        # A request below its tenant's priority yields to other tenants, too; one above it goes
        # before its own tenant's other requests only.
        share = flow.weight * min(factor, _FACTORS[flow.priority])
        tenant = self._tenants.get(flow.tenant) or _Tenant(flow.share)
        start = tenant.virtual_time
        if not tenant.pending:
            start = self._latest = max(self._latest, self._mean())
            if any(other.pending for other in self._tenants.values()):
                start = max(tenant.virtual_time, start - min(LEAD_S, seconds) / flow.share)
        shared = sum(min(p.seconds, seconds / factor * p.factor) for p in tenant.pending)
        rank = start + (seconds + shared) / share
        return PendingPrompt(self, flow, seconds, factor, share, rank), start

    def _mean(self) -> float:
        """Virtual time over tenants that wait, by share; where none does, the latest of all."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.pending]
        if not waiting:
            return max([0.0, *(tenant.virtual_time for tenant in self._tenants.values())])
        total = sum(tenant.share * tenant.virtual_time for tenant in waiting)
        return total / sum(tenant.share for tenant in waiting)


def _rank(prompt: PendingPrompt) -> float:
    return prompt.rank
