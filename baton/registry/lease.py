"""One process's key in etcd under a lease that is kept alive."""

from __future__ import annotations

import asyncio
import copy
import logging

from google.protobuf.message import Message

from baton.errors import BatonError, Stale
from baton.net.backoff import Backoff
from baton.net.tasks import wait_at_most
from baton.registry.etcd_client import CALL_S, EtcdClient
from baton.registry.membership import copy_for_update, encode
from baton.v1.common_pb2 import WorkerRecord, WorkerState

log = logging.getLogger(__name__)


class LeasedKey:
    """One process's key in etcd, kept true until it leaves.

    One task does all the writing, in rounds: see that the lease lives (or take a new one), then see
    that the store holds the newest record under it, also after another process deleted or overwrote
    it. A failed round is repeated with backoff without end: an outage of etcd ends no worker.
    """

    def __init__(self, client: EtcdClient, ttl_s: int, key: str, record: Message) -> None:
        self._client, self._ttl_s, self.key = client, ttl_s, key
        self._record = copy.deepcopy(record)
        self._written, self._revision = b"", 0
        self._lease = 0  # 0: none
        self._renew_s = self._ttl_s / 3
        self.connected = False  # whether etcd answered the last time it was asked
        self._unwritten = asyncio.Event()
        self._unwritten.set()
        self._settled = asyncio.Event()  # the newest record is written, or cannot be for now

    async def update(self, record: WorkerRecord) -> None:
        """Replaces a worker's record; its incarnation stays, or InvalidRequest is raised.

        Returns when etcd has it or turned out to be out of reach; then it is written as soon as
        etcd is back, and `connected` is False meanwhile. An outage raises nothing.
        """
        assert isinstance(self._record, WorkerRecord)
        self._record = copy_for_update(self._record, record)
        self._settled.clear()
        self._unwritten.set()
        if self.connected:
            await self._settled.wait()

    async def revoke(self) -> None:
        """Removes the key at once; if etcd cannot be reached its lease does so later."""
        if not self._lease:
            return
        try:
            async with asyncio.timeout(CALL_S):
                await self._say_leaving()
                await self._client.revoke(self._lease)
        except Stale:
            log.info("the lease of %s was gone before it was given back", self.key)
        except (BatonError, TimeoutError) as error:
            log.warning("%s is left to its lease's end: %s", self.key, error)

    async def _say_leaving(self) -> None:
        """Watchers keep a READY worker whose key vanishes: its lease may have ended by mistake."""
        record = self._record
        if isinstance(record, WorkerRecord) and record.state == WorkerState.WORKER_STATE_READY:
            record.state = WorkerState.WORKER_STATE_DRAINING
            await self._put()

    async def keep(self) -> None:
        """Keeps the lease alive and the key as it should be, until cancelled."""
        backoff = Backoff()
        try:
            while True:
                await wait_at_most(self._renew_s, self._unwritten.wait())
                try:
                    await self.write()
                    backoff.reset()
                except Exception as error:  # also bugs: its lease must not expire while it serves
                    self._lost(error)
                    await backoff.wait()
        finally:
            self.connected = False
            self._settled.set()

    async def write(self) -> None:
        """Renews the lease, or takes a new one; writes the record if needed. Raises BatonError."""
        if not self._lease or await self._client.keep_alive(self._lease) <= 0:
            if self._lease:
                log.warning("the lease of %s is gone; registering again", self.key)
            self._lease, ttl_s = await self._client.grant(self._ttl_s)
            self._renew_s = ttl_s / 3
            self._unwritten.set()
        elif not self._unwritten.is_set():
            await self._check_stored()
        self.connected = True
        if self._unwritten.is_set():
            self._unwritten.clear()
            await self._put()
        if not self._unwritten.is_set():
            self._settled.set()

    async def _put(self) -> None:
        self._written = encode(self._record)
        self._revision = await self._client.put(self.key, self._written, self._lease)

    async def _check_stored(self) -> None:
        """Has the record written again if the store does not hold it as it was written."""
        stored, revision = await self._client.get(self.key)
        if revision < self._revision:
            return  # this member of etcd is behind; if etcd lost data, it lost the lease as well
        if stored is None or (stored.value, stored.lease) != (self._written, self._lease):
            what = "was changed" if stored else "was deleted"
            log.warning("%s %s by another process; writing it again", self.key, what)
            self._unwritten.set()

    def _lost(self, error: Exception) -> None:
        bug = None if isinstance(error, BatonError) else error
        if self.connected or bug:
            log.warning("%s cannot be kept alive for now: %s", self.key, error, exc_info=bug)
        if isinstance(error, Stale):
            self._lease = 0
        self.connected = False
        # Whatever the store remembers when it comes back, the newest record is written again.
        self._unwritten.set()
        self._settled.set()
