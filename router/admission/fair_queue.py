"""When each request is due: fair queueing by tokens, over tenants and within each.

A request i is due when it would be done if the fleet's prefill went round: to tenants by weight,
within a tenant to its requests by priority, a little to each. Before i is done, request j of the
same tenant takes min(w_j, w_i * p_j / p_i) seconds of prefill; with `ahead` the sum of these,

    due_i = base + (w_i + ahead) / share

So a short prompt is due before its tenant's own long ones that came earlier. `base` is now, or the
earliest due of all that wait where even that has passed: a virtual clock, so that a newcomer never
queues behind a flood that is late. A tenant that comes while only others wait may begin up to
LEAD_S before it, as far as it has not done so already: a light one goes first, one that comes again
and again takes turns. A due is fixed and the clock goes on with the work, so nobody waits for ever;
who used idle capacity pays nothing later, and who was away has saved up no more than LEAD_S.
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
# Who came so lately counts as wanting some. If a light tenant counted only while it waits, dues of
# a flood would be reckoned without it, come too early, and lie before the light tenant's next.
ACTIVE_S = 60.0
_FACTORS = {
    common_pb2.PRIORITY_LOW: 0.25,
    common_pb2.PRIORITY_NORMAL: 1.0,
    common_pb2.PRIORITY_HIGH: 4.0,
}


@dataclass(frozen=True)
class Claim:
    """A tenant's standing among tenants."""

    tenant: str
    weight: float = 1.0
    priority: common_pb2.Priority = common_pb2.PRIORITY_NORMAL

    @property
    def share(self) -> float:
        """Against other tenants' shares."""
        return self.weight * _FACTORS[self.priority]


@dataclass(frozen=True, eq=False)
class Turn:
    """A request whose prompt is not computed yet."""

    due: float  # on the clock that Turns was given
    claim: Claim
    seconds: float  # of the fleet's prefill
    factor: float  # of its priority
    share: float  # of the fleet, for its tenant
    base: float  # where its time begins
    lead_s: float  # so much before the clock of all


class Turns:
    """Everybody's turns. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, dict[Turn, None]] = {}  # by tenant; a dict for its order
        self._active: dict[str, tuple[Claim, float]] = {}  # who came of late, and when
        self._begun: dict[str, float] = {}  # how far an active tenant's turns have been used
        self._dues: list[tuple[float, int, Turn]] = []  # a heap; turns that have ended stay a while
        self._count = itertools.count()

    def take(
        self,
        claim: Claim,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> Turn:
        """A turn for `seconds` of the fleet's prefill; the caller must `end` it."""
        turn = self.look(claim, seconds, priority)
        self._active[claim.tenant] = claim, self._clock()
        self._begun[claim.tenant] = turn.base + seconds / turn.share
        self._waiting.setdefault(claim.tenant, {})[turn] = None
        heapq.heappush(self._dues, (turn.due + turn.lead_s, next(self._count), turn))
        return turn

    def look(
        self,
        claim: Claim,
        seconds: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> Turn:
        """The turn that `take` would give now; nobody waits for it."""
        now = self._clock()
        factor = _FACTORS[priority or claim.priority]
        own = self._waiting.get(claim.tenant, ())
        per_factor = seconds / factor
        ahead = sum(min(turn.seconds, per_factor * turn.factor) for turn in own)
        share = self._share(claim, min(factor, _FACTORS[claim.priority]), now)
        clock = self._virtual(now)
        # A lead is over others who wait. Where nobody does it would only put a long prompt before
        # its own tenant's next short ones.
        leads = not own and bool(self._waiting)
        base = self._with_lead(claim.tenant, clock) if leads else clock
        due = base + (seconds + ahead) / share
        return Turn(due, claim, seconds, factor, share, base, clock - base)

    def end(self, turn: Turn) -> None:
        """The prompt is computed, or is not going to be; may be called again."""
        own = self._waiting.get(turn.claim.tenant, {})
        own.pop(turn, None)
        if not own:
            self._waiting.pop(turn.claim.tenant, None)

    def _virtual(self, now: float) -> float:
        """Now, or the earliest due (leads left out) of all that wait where that has passed."""
        while self._dues and not self._waits(self._dues[0][2]):
            heapq.heappop(self._dues)
        return min(now, self._dues[0][0]) if self._dues else now

    def _with_lead(self, tenant: str, clock: float) -> float:
        """Where the turn of a tenant with nothing waiting begins."""
        return min(clock, max(clock - LEAD_S, self._begun.get(tenant, -math.inf)))

    def _waits(self, turn: Turn) -> bool:
        return turn in self._waiting.get(turn.claim.tenant, ())

    def _share(self, claim: Claim, factor: float, now: float) -> float:
        """The claim's part of the fleet next to those tenants that want some, or did of late.

        A request that asks for less than its tenant's priority gives way to other tenants too; one
        that asks for more goes before its own tenant's others only.
        """
        for tenant, (_, came) in tuple(self._active.items()):
            if came < now - ACTIVE_S and tenant not in self._waiting:
                del self._active[tenant]
                del self._begun[tenant]
        mine = claim.weight * factor
        others = (other.share for other, _ in self._active.values() if other != claim)
        return mine / (mine + sum(others))
