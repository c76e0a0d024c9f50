"""Weighted fair queueing by tokens, over tenants and over the end users and prompts of each.

A tenant's virtual time is the prefill time of the fleet that it has used, divided by its share. The
prompt with the earliest virtual finish time goes first; it counts its tenant's earlier prompts:

    virtual_finish_i = virtual time of its tenant + (sum of their w_j + w_i) / share

No other tenant appears in that sum, so a waiting tenant gets at least its share among all that
send, to within three of the largest prompts, whatever the order and volume of their requests. A
tenant that arrives while others wait starts at the highest mean of virtual times so far, minus its
own prompt or LEAD_S, so that a light tenant goes first; or where it stood, if that is later, so
that leaving gains nothing. (The mean itself falls when the tenant with the most leaves; a newcomer
that started there would pass the work that is owed to others.) Idle capacity is free.

The prompts of one tenant are ordered by rank, which is fixed at admission: the virtual time at
which i would end if all end users with prompts ran at once, each with all of its own prompts by
priority. Until then, another prompt j of its user takes min(w_j, w_i * p_j / p_i), and another user
with prompts of W in sum and a priority of p takes min(W, own_i * p / p_i):

    own_i  = w_i + sum over its user's j
    rank_i = virtual time of its tenant + (own_i + sum over other users) / share

Prompts without an end user are those of one.
So a short prompt passes longer ones that came earlier, and as whatever passes advances the virtual
time, none starves. (Golestani's self-clocked fair queueing, 1994; the mean is that of EEVDF, Stoica
and Abdel-Wahab, 1995.)
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from baton.v1 import common_pb2
from router.request import PRIORITY_FACTORS, PendingPrompt, TenantShare

LEAD_S = 1.0  # more than most prompts take, and a delay that others notice once
# A tenant that sent a request in this time may send another before a waiting prompt is computed.
ACTIVE_S = 60.0


@dataclass(eq=False)
class _TenantQueue:
    share: float
    virtual_time: float = -math.inf
    last_seen: float = -math.inf  # arrival of its last request
    pending: list[PendingPrompt] = field(default_factory=list)  # by rank, then by arrival

    def set_finish_times(self, first: int = 0) -> None:
        """Sets the virtual finish times of the prompts from index `first` on."""
        at = self.pending[first - 1].virtual_finish if first else self.virtual_time
        for prompt in islice(self.pending, first, None):
            at += prompt.cost
            prompt.virtual_finish = at


class FairQueue:
    """All tenants' pending prompts and their order. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, _TenantQueue] = {}
        self._highest_mean = 0.0

    def add(
        self,
        owner: TenantShare,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
        user: str = "",
    ) -> PendingPrompt:
        """Adds a prompt of `seconds` of the fleet's prefill time; the caller must `remove` it."""
        tenant = self._tenants.setdefault(owner.tenant, _TenantQueue(owner.share))
        prompt, tenant.virtual_time = self._new_prompt(owner, seconds, priority, user)
        tenant.share, tenant.last_seen = owner.share, self._clock()
        index = bisect(tenant.pending, prompt.rank, key=_rank)
        tenant.pending.insert(index, prompt)
        tenant.set_finish_times(index)
        return prompt

    def preview(
        self,
        owner: TenantShare,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
        user: str = "",
    ) -> PendingPrompt:
        """Returns what `add` would return now, without adding it."""
        prompt, start = self._new_prompt(owner, seconds, priority, user)
        tenant = self._tenants.get(owner.tenant)
        earlier = [other for other in tenant.pending if other.rank <= prompt.rank] if tenant else []
        prompt.virtual_finish = start + sum(other.cost for other in (*earlier, prompt))
        return prompt

    def remove(self, prompt: PendingPrompt, *, computed: bool = False) -> None:
        """Removes a prompt, which costs its tenant nothing unless `computed`; idempotent."""
        tenant = self._tenants[prompt.owner.tenant]
        if prompt in tenant.pending:
            index = tenant.pending.index(prompt)
            del tenant.pending[index]
            if not computed:
                tenant.set_finish_times(index)
                return
            tenant.virtual_time += prompt.cost
            if index:  # the finish times of those after it do not change
                tenant.set_finish_times()

    def forget(self, tenant: str) -> None:
        """Removes a tenant that has no pending prompts; it is a new one if it comes back."""
        if tenant in self._tenants:
            assert not self._tenants[tenant].pending, "it has requests"
            del self._tenants[tenant]

    def seconds_until(self, prompt: PendingPrompt) -> float:
        """Time until a prompt's virtual finish, if all recently active tenants use their shares."""
        since, shares = self._clock() - ACTIVE_S, prompt.share
        for name, tenant in self._tenants.items():
            if name != prompt.owner.tenant and (tenant.pending or tenant.last_seen >= since):
                shares += tenant.share
        return (prompt.virtual_finish - self._mean()) * shares

    def _new_prompt(
        self, owner: TenantShare, seconds: float, priority: common_pb2.Priority, user: str
    ) -> tuple[PendingPrompt, float]:
        """A new prompt, and its tenant's virtual time once it is added."""
        factor = PRIORITY_FACTORS[priority or owner.priority]
        # A request below its tenant's priority yields to other tenants, too; one above it goes
        # before its own tenant's other requests only.
        share = owner.weight * min(factor, PRIORITY_FACTORS[owner.priority])
        tenant = self._tenants.get(owner.tenant) or _TenantQueue(owner.share)
        start = tenant.virtual_time
        if not tenant.pending:
            start = self._highest_mean = max(self._highest_mean, self._mean())
            if any(other.pending for other in self._tenants.values()):
                start = max(tenant.virtual_time, start - min(LEAD_S, seconds) / owner.share)
        own, others = 0.0, dict[str, tuple[float, float]]()  # seconds, the highest factor
        for other in tenant.pending:
            if other.user == user:
                own += min(other.seconds, seconds / factor * other.factor)
            else:
                total, highest = others.get(other.user, (0.0, 0.0))
                others[other.user] = total + other.seconds, max(highest, other.factor)
        own += seconds
        shared = sum(min(total, own / factor * highest) for total, highest in others.values())
        rank = start + (own + shared) / share
        prompt = PendingPrompt(
            owner, seconds, factor, share, rank, seconds_until=self.seconds_until, user=user
        )
        return prompt, start

    def _mean(self) -> float:
        """Mean virtual time of waiting tenants by share; if none waits, the latest of all."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.pending]
        if not waiting:
            return max([0.0, *(tenant.virtual_time for tenant in self._tenants.values())])
        total = sum(tenant.share * tenant.virtual_time for tenant in waiting)
        return total / sum(tenant.share for tenant in waiting)


def _rank(prompt: PendingPrompt) -> float:
    return prompt.rank
