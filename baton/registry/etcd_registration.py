"""One worker's key in etcd, kept true until the worker leaves.

One task does all the writing, in rounds: see that the lease lives (or take a new one), then see
that the store holds the newest record under it, also after another process deleted or overwrote
it. A round that fails is repeated with backoff, for ever: an outage of etcd never ends a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from baton.config import RegistryConfig
from baton.errors import BatonError, Stale
from baton.registry import records
from baton.registry.backoff import Backoff
from baton.registry.etcd_client import CALL_S, EtcdClient
from baton.v1.common_pb2 import WorkerRecord

log = logging.getLogger(__name__)


class EtcdRegistration:
    """`baton.registry.interface.Registration` over etcd."""

    def __init__(self, client: EtcdClient, config: RegistryConfig, record: WorkerRecord) -> None:
        self._client = client
        self._prefix = config.workers_prefix
        self._ttl_s = config.lease_ttl_s
        self._record = records.copied(record)
        self._key = records.key_of(self._prefix, record)
        self._written = b""
        self._lease = 0  # 0: none
        self._renew_s = self._ttl_s / 3
        self._connected = False
        self._unwritten = asyncio.Event()
        self._settled = asyncio.Event()  # the newest record is written, or cannot be for now
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether etcd answered the last time it was asked."""
        return self._connected

    async def start(self) -> None:
        """Writes the key and begins to keep it alive; Unavailable or ConfigError if it cannot."""
        await self._client.connect(self._prefix)
        self._unwritten.set()
        try:
            await self._round()
        except BaseException:  # the key may be written already
            await self.stop()
            raise
        self._task = asyncio.create_task(self._keep(), name=f"keep {self._key}")

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; see the seam."""
        self._record = records.copy_for_update(self._record, record)
        self._settled.clear()
        self._unwritten.set()
        if self._connected:
            await self._settled.wait()

    async def stop(self) -> None:
        """Removes the key at once; if etcd cannot be reached its lease does so later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._lease:
            return
        try:
            async with asyncio.timeout(CALL_S):
                await self._client.revoke(self._lease)
        except Stale:
            log.info("the lease of %s was gone before it was given back", self._key)
        except (BatonError, TimeoutError) as error:
            log.warning("%s is left to its lease's end: %s", self._key, error)

    async def _keep(self) -> None:
        backoff = Backoff()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._renew_s):
                        await self._unwritten.wait()
                try:
                    await self._round()
                    backoff.reset()
                except BatonError as error:
                    self._lost(error)
                    await backoff.wait()
        except Exception:
            log.exception("the keeper of %s failed", self._key)
            raise
        finally:
            self._connected = False
            self._settled.set()

    async def _round(self) -> None:
        if not self._lease or await self._client.keep_alive(self._lease) <= 0:
            if self._lease:
                log.warning("the lease of %s is gone; registering again", self._key)
            self._lease, ttl_s = await self._client.grant(self._ttl_s)
            self._renew_s = ttl_s / 3
            self._unwritten.set()
        elif not self._unwritten.is_set():
            await self._check_stored()
        self._connected = True
        if self._unwritten.is_set():
            self._unwritten.clear()
            self._written = records.encode(self._record)
            await self._client.put(self._key, self._written, self._lease)
        if not self._unwritten.is_set():
            self._settled.set()

    async def _check_stored(self) -> None:
        """Has the record written again if the store does not hold it as it was written."""
        stored = await self._client.get(self._key)
        if stored is None or (stored.value, stored.lease) != (self._written, self._lease):
            what = "was changed" if stored else "was deleted"
            log.warning("%s %s by another process; writing it again", self._key, what)
            self._unwritten.set()

    def _lost(self, error: BatonError) -> None:
        if self._connected:
            log.warning("%s cannot be kept alive for now: %s", self._key, error)
        if isinstance(error, Stale):
            self._lease = 0
        self._connected = False
        # Whatever the store remembers when it comes back, the newest record is written again.
        self._unwritten.set()
        self._settled.set()
