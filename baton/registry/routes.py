"""The routes of model names in etcd: listed, watched, and written only over what was read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from types import MappingProxyType

from google.protobuf import json_format

from baton.errors import BatonError, Unavailable
from baton.net.backoff import Backoff
from baton.registry.etcd_client import EtcdClient
from baton.registry.membership import encode
from baton.v1 import etcd_pb2
from baton.v1.route_pb2 import ModelRoute

log = logging.getLogger(__name__)

WRITE_S = 4.0  # longest time of a write: operators wait 5 s by default, and want the cause


class RouteTable:
    """The routes as etcd has them; during an outage the last ones known. Treat them as frozen."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.routes: Mapping[str, ModelRoute] = MappingProxyType({})
        self._client, self._prefix = client, prefix
        self._revisions: dict[str, int] = {}  # of the last change of each name

    async def load(self) -> None:
        """Reads all routes. Raises as entering `EtcdRegistry.watch` does."""
        self._take(await self._client.connect(self._prefix))

    async def follow(self) -> None:
        """Applies changes until cancelled. An outage is logged at its beginning and its end."""
        backoff, connected = Backoff(), True
        while True:
            try:
                listing = await self._client.range(self._prefix)
                self._take(listing)
                if not connected:
                    log.info("following the routes again")
                connected = True
                await self._listen(listing.header.revision, backoff)
            except BatonError as error:
                if connected:
                    log.warning("routing by the last known routes: %s", error)
                connected = False
            await backoff.wait()

    async def write(self, name: str, route: ModelRoute | None) -> bool:
        """Sets a name's route, or removes it with None; False if it was changed since it was read.

        Raises Unavailable if etcd does not answer: then it may or may not be set.
        """
        text = None if route is None else encode(route)
        known = self._revisions.get(name, 0)
        try:
            async with asyncio.timeout(WRITE_S):
                revision = await self._client.put_if(self._prefix + name, text, known)
        except (TimeoutError, Unavailable) as error:
            why = str(error) or f"etcd does not answer within {WRITE_S:g} s"
            done = "removed" if route is None else "set"
            raise Unavailable(
                f"{why} (the route of {name} may still be {done}: see `baton route`)"
            ) from error
        if not revision:
            return False
        self._apply(name, route, revision)
        return True

    async def refresh(self) -> None:
        """Reads all routes again, before another try to write one."""
        self._take(await self._client.range(self._prefix))

    async def _listen(self, revision: int, backoff: Backoff) -> None:
        """Applies events until the stream breaks (raises) or history is compacted (returns)."""
        async with aclosing(self._client.watch(self._prefix, revision + 1)) as responses:  # type: ignore[type-var]
            async for response in responses:
                if response.canceled:
                    return
                backoff.reset()
                for event in response.events:
                    route = None
                    if event.type == etcd_pb2.Event.PUT:
                        route = self._decoded(event.kv)
                    self._apply(self._name(event.kv), route, event.kv.mod_revision)

    def _take(self, listing: etcd_pb2.RangeResponse) -> None:
        found = {self._name(kv): (self._decoded(kv), kv.mod_revision) for kv in listing.kvs}
        self._revisions = {name: revision for name, (_, revision) in found.items()}
        self._publish({name: route for name, (route, _) in found.items() if route is not None})

    def _apply(self, name: str, route: ModelRoute | None, revision: int) -> None:
        if revision < self._revisions.get(name, 0):
            return  # it was read or written by this process before
        if route is None:
            self._revisions.pop(name, None)
        else:
            self._revisions[name] = revision
        routes = {other: one for other, one in self.routes.items() if other != name}
        self._publish(routes if route is None else {**routes, name: route})

    def _publish(self, routes: Mapping[str, ModelRoute]) -> None:
        self.routes = MappingProxyType(dict(sorted(routes.items())))

    def _name(self, kv: etcd_pb2.KeyValue) -> str:
        return kv.key.decode(errors="replace").removeprefix(self._prefix)

    def _decoded(self, kv: etcd_pb2.KeyValue) -> ModelRoute | None:
        """None, and a warning, for a value that is no route or belongs under another key."""
        try:
            route = json_format.Parse(kv.value, ModelRoute(), ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError) as error:
            log.warning("%r does not hold a route: %s", kv.key, error)
            return None
        if route.name != self._name(kv) or not any(one.weight > 0 for one in route.targets):
            log.warning("%r holds a route of %r that cannot be used", kv.key, route.name)
            return None
        return route
