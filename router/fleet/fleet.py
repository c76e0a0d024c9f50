"""The router's view of all workers: follows the registry, keeps one `Member` for each incarnation.

During a registry outage the last known members are served on; whether a worker answers is seen on
its own connection, not in the registry. So a worker whose record is lost (its lease ended while it
or the registry was late) stays for as long as its connection answers and it may come back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set

from baton.errors import Unavailable
from baton.registry import Membership
from baton.v1 import common_pb2, worker_pb2
from router.fleet.circuit_breaker import CircuitBreakers, Key
from router.fleet.kv_index import KvIndex
from router.fleet.liveness import LivenessConfig
from router.fleet.member import Member
from router.fleet.snapshot import EJECTED, Snapshot

log = logging.getLogger(__name__)

# Calls to workers that never answered, of all together: a process that may write to the registry
# can enter thousands that do not exist.
_FIRST_CALLS_PER_S = 50
_LEFT = "the worker has left the cluster"
_BATCH_S = 0.02  # changes of the registry that come closer together are applied at once


class Fleet:
    """Members by incarnation, and how calls to them end. Event-loop thread only."""

    def __init__(
        self,
        membership: Membership,
        router_id: str,
        text_fingerprint: str,
        liveness: LivenessConfig,
        decode_alone: bool = True,
    ) -> None:
        """`decode_alone`: decode workers serve alone where no prefill worker is READY."""
        self._decode_alone = decode_alone
        self.breakers = CircuitBreakers()
        self.breakers.on_open = self._ejected
        self.on_ejected: Callable[[Key], None] = lambda key: None
        # Called at each change of members, of their load, or of open breakers.
        self.listeners: list[Callable[[], None]] = []
        self._membership = membership
        self._liveness = liveness
        self._open: Set[Key] = frozenset()  # breakers at the last tick
        self._closed = 0  # probes that have closed a breaker, at the last tick
        self._router_id = router_id
        self._text_fingerprint = text_fingerprint
        self._members: dict[str, Member] = {}
        self._index = KvIndex()
        self._touched: set[str] = set()  # members whose views are others than in `_seen`
        self._seen: Snapshot | None = None  # None: members have come or left
        self._quarantined: dict[str, list[tuple[str, str]]] = {}  # pairs, by member
        self._judged = Snapshot(())
        self._judged_by: tuple[Snapshot, Mapping[Key, str]] = self._judged, {}

    @property
    def registry_connected(self) -> bool:
        return self._membership.connected

    @property
    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links between workers, as their prefill ends report and as this router judges them."""
        pairs = {
            (pair.prefill, pair.decode): pair
            for member in self._members.values()
            for pair in member.pairs
        }
        judged = self.snapshot().excluded_pairs
        for prefill, decode in sorted(judged.keys() - self._look().excluded_pairs.keys()):
            pair = worker_pb2.PairStatus(prefill=prefill, decode=decode)
            if (reported := pairs.get((prefill, decode))) is not None:
                pair.CopyFrom(reported)
            pair.state = EJECTED
            pairs[prefill, decode] = pair
        return list(pairs.values())

    async def follow(self) -> None:
        """Runs until cancelled, or until the watch ends."""
        ticking = asyncio.create_task(self._tick_for_ever(), name="fleet ticks")
        try:
            async for records in self._membership.changes():
                await self._apply(records)
                await asyncio.sleep(_BATCH_S)
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await _close(self._members.values(), "the router is stopping")

    def snapshot(self) -> Snapshot:
        """Returns the current snapshot, a new object only after a change."""
        seen, opened = self._look(), self.breakers.all_open()
        if seen is not self._judged_by[0] or opened != self._judged_by[1]:
            self._judged = self.breakers.without_ejected(seen)
            self._judged_by = seen, opened
        return self._judged

    def adapters(self) -> dict[str, str]:
        """Identities of the LoRA adapters that requests may use, by name.

        Where workers have different ones by a name, as while it is being replaced, it is that which
        most of them have.
        """
        counts = Counter(
            (one.name, one.identity)
            for member in self._members.values()
            for one in member.record.adapters
        )
        return dict(key for key, _ in reversed(counts.most_common()))

    def tokens_in_flight(self) -> int:
        """Prompt tokens that workers have and did not compute yet."""
        return self._look().tokens_in_flight

    def member(self, incarnation: str) -> Member:
        """A member by name; raises Unavailable when it has just left."""
        if member := self._members.get(incarnation):
            return member
        raise Unavailable(f"worker {incarnation} has left")

    def _look(self) -> Snapshot:
        """All workers as they and their connections report."""
        if self._seen is not None and not self._touched:
            return self._seen
        touched = self._touched if self._seen is not None else self._members.keys()
        views = [self._members[name].view for name in touched if name in self._members]
        self._touched.clear()
        why = "the prefill worker leaves it alone after a failure"
        excluded = dict.fromkeys(itertools.chain(*self._quarantined.values()), why)
        if self._seen is None:
            views.sort(key=lambda view: view.incarnation)
            self._seen = Snapshot(tuple(views), excluded, self._index, self._decode_alone)
        elif views:
            is_other = excluded != self._seen.excluded_pairs
            self._seen = self._seen.replaced(views, excluded if is_other else None)
        return self._seen

    async def _apply(self, records: Mapping[str, common_pb2.WorkerRecord]) -> None:
        leaving = self._pop_gone()
        for incarnation, record in records.items():
            if record.state == common_pb2.WORKER_STATE_STARTING:
                continue  # it has no server yet
            if (member := self._members.get(incarnation)) is None:
                if incarnation in self._membership.missing:
                    continue  # it is followed again when it registers
                self._members[incarnation] = self._join(record)
                self._seen = None
                await asyncio.sleep(0)  # thousands may come at once
            elif member.record is not record:
                member.update(record)
        self.announce()
        await _close(leaving, _LEFT)

    def _pop_gone(self) -> list[Member]:
        """Takes out those without a record, but for the ones that answer and may come back or
        finish what they run: a draining worker hangs up when it has."""
        lost = self._membership.missing if self._membership.connected else frozenset()
        registered = self._membership.records.keys() - lost
        gone = [
            incarnation
            for incarnation in self._members.keys() - registered
            if not (member := self._members[incarnation]).answers
            or not (member.draining or incarnation in lost)
        ]
        leaving = [self._members.pop(incarnation) for incarnation in gone]
        if leaving:
            self._seen = None
            self.breakers.retain(self._members)
        return leaving

    def _join(self, record: common_pb2.WorkerRecord) -> Member:
        mismatch = ""
        if record.text_fingerprint != self._text_fingerprint:
            mismatch = (
                f"its tokenizer ({record.text_fingerprint[:12]}) is not the router's "
                f"({self._text_fingerprint[:12]}): start both with the same model"
            )
        return Member(
            record,
            self._router_id,
            mismatch,
            self._liveness,
            self._index,
            self._touched,
            self._quarantined,
            self.announce,
            lambda: len(self._members) / _FIRST_CALLS_PER_S,
        )

    async def _tick_for_ever(self) -> None:
        """Lets members count silence, all of them by the same clock; see `LivenessConfig`."""
        while True:
            await asyncio.sleep(self._liveness.tick_s)
            try:
                self._tick()
                if leaving := self._pop_gone():
                    self.announce()
                    await _close(leaving, _LEFT)
            except Exception:  # a bug in one tick must not end the watch over silent workers
                log.exception("a tick of the fleet failed")

    def _tick(self) -> None:
        # All of them have their tick. A router that starts waits for first tries, also for one that
        # fails, which changes no state.
        first_failed = [member for member in list(self._members.values()) if member.tick()]
        opened = self.breakers.all_open()
        # A probe may begin and end between two ticks, and meanwhile others found no worker.
        closed = self.breakers.num_closed
        if first_failed or opened.keys() != self._open or closed != self._closed:
            self._open, self._closed = opened.keys(), closed
            self.announce()

    def _ejected(self, key: Key, why: str) -> None:
        self.on_ejected(key)
        log.warning("ejected %s: %s", key if isinstance(key, str) else " to ".join(key), why)

    def announce(self) -> None:
        """Lets what waits for a change look again: workers may have room."""
        for listener in self.listeners:
            listener()


async def _close(members: Iterable[Member], reason: str) -> None:
    closing = [member.close(reason) for member in members]
    await asyncio.gather(*closing, return_exceptions=True)
