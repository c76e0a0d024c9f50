"""Election of one leader among processes, by a key in etcd that exists under the leader's lease.

Who creates the key leads until its lease ends. A leader counts the lease from before it asked for
it, so by its own clock it never leads longer than by etcd's, and acts within `left_s`. What it
writes to a key is refused once another leader has written there (`LedKey`).
"""

from __future__ import annotations

import asyncio
import logging

from baton.errors import BatonError, Stale
from baton.registry.etcd_client import EtcdClient

log = logging.getLogger(__name__)

_FOLLOW_S = 0.5  # between two attempts to become the leader


class Election:
    """One process's candidacy for a key."""

    def __init__(self, client: EtcdClient, key: str, ttl_s: int, name: str) -> None:
        """`name`: of this process, unique; the key's value."""
        self._client, self._key, self._ttl_s = client, key, ttl_s
        self._name = name.encode()
        self._lease = 0
        self._until = 0.0
        self._connected = True

    @property
    def left_s(self) -> float:
        """How long this process certainly still leads, in seconds; 0: it does not."""
        return max(0.0, self._until - _now())

    async def run(self) -> None:
        """Becomes the leader when it can, and stays it while etcd answers, until cancelled."""
        while True:
            try:
                await self._renew() if self.left_s else await self._stand()
                self._connected = True
            except Exception as error:  # after a bug, too: else no process would lead
                bug = None if isinstance(error, BatonError) else error
                if self._connected or bug:
                    text = "the election cannot be followed for now: %s"
                    log.warning(text, error, exc_info=bug)
                self._connected = False
            await asyncio.sleep(self._ttl_s / 3 if self.left_s else _FOLLOW_S)

    async def resign(self) -> None:
        """Gives the lead up at once, if etcd answers; else the lease ends by itself."""
        self._until, lease, self._lease = 0.0, self._lease, 0
        if lease:
            try:
                await self._client.revoke(lease)
            except BatonError as error:
                log.warning("the lead is left to its lease's end: %s", error)

    async def _renew(self) -> None:
        asked = _now()
        ttl_s = await self._client.keep_alive(self._lease)
        self._until = asked + ttl_s if ttl_s > 0 else 0.0
        if ttl_s <= 0:
            log.warning("does not lead any more: the lease is gone")

    async def _stand(self) -> None:
        """Creates the key, unless it exists."""
        found, _ = await self._client.get(self._key)
        if found and found.lease != self._lease:
            return
        asked = _now()
        if not self._lease or await self._client.keep_alive(self._lease) <= 0:
            self._lease, _ = await self._client.grant(self._ttl_s)
        created = await self._client.put_if(self._key, self._name, 0, self._lease)
        mine, _ = await self._client.get(self._key)
        if created or (mine and mine.lease == self._lease):  # an answer may have been lost
            self._until = asked + self._ttl_s
            log.info("%s leads", self._name.decode())


class LedKey:
    """A key that the leader writes and everybody reads.

    A new leader writes it once before it acts. From then on an earlier one, which may not know yet,
    writes in vain, because the key has changed since it wrote it.
    """

    def __init__(self, client: EtcdClient, key: str, election: Election) -> None:
        self._client, self._key, self._election = client, key, election
        self._revision = 0  # of its last change that is known here
        self.value = b""
        self.changed_s = -float("inf")  # when it was seen to be another, by the loop's clock

    async def read(self) -> bytes:
        """The value; empty if there is none. Raises BatonError."""
        found, _ = await self._client.get(self._key)
        if (revision := found.mod_revision if found else 0) != self._revision:
            self._take(found.value if found else b"", revision)
        return self.value

    async def write(self, value: bytes) -> None:
        """Writes it. Raises Stale unless this process leads and wrote or read it last."""
        if not self._election.left_s:
            raise Stale("another process leads, or none does")
        revision = await self._client.put_if(self._key, value, self._revision)
        if not revision:
            raise Stale("another leader has written since")
        self._take(value, revision)

    def _take(self, value: bytes, revision: int) -> None:
        self.value, self._revision, self.changed_s = value, revision, _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
