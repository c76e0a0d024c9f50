"""A worker whose ranks are on several hosts: how they find each other, and the hosts but the first.

    first host (--node-rank 0)               each other host (--node-rank N)
    the worker, its first rank               this module's process: starts a process for each rank,
     │                                       says in etcd where they are, starts them again
     ├── connection: steps ─────────────────▶ a rank (`rank_server.py`)
     └── a connection for each KV link ─────▶

A rank serves the one first process that comes, and ends with it, as a rank on the first host does.
When a host is to stop, it asks the worker to drain, and stays until it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Pipe

import uvloop

from baton.config import WorkerConfig, split_address
from baton.errors import ConfigError, InternalError, Unavailable
from baton.net import object_connection, tls
from baton.net.backoff import Backoff
from baton.net.object_connection import ObjectConnection
from baton.registry import EtcdRegistry
from baton.rendezvous import listening_socket
from baton.v1.common_pb2 import RankHost

log = logging.getLogger(__name__)

STEPS, KV, DRAIN = "steps", "kv", "drain"  # what a connection is for
_ASK_S = 1.0  # between two looks for the other hosts; only while a worker starts
_REMIND_S = 30.0
_START_S = 120.0  # for a rank's process to import torch
_ANSWER_S = 10.0
_STOP_S = 5.0


@dataclass(frozen=True)
class RankAddress:
    """Where a rank on another host is."""

    host: str
    port: int
    secret: bytes
    role: str

    def connect(self, purpose: str) -> ObjectConnection:
        """Raises OSError, EOFError."""
        credentials = tls.current()
        context = credentials.client_context() if credentials.ca_file else None
        name = f"{self.role}.{tls.DOMAIN}" if context else ""
        place = self.host, self.port, self.secret
        connection = object_connection.connect(*place, context, name)
        connection.send(purpose)
        if not connection.poll(_ANSWER_S):
            connection.close()
            raise TimeoutError("no answer")
        if refusal := connection.recv():
            connection.close()
            raise ConnectionRefusedError(refusal)
        return connection


def own_address(config: WorkerConfig) -> str:
    """At which the ranks of other hosts reach this one's."""
    advertised = split_address(config.advertise)[0] if config.advertise else config.host
    return (config.kv_host or advertised).strip("[]")


def check_address(config: WorkerConfig) -> None:
    """Raises ConfigError where ranks cannot listen for other hosts, or strangers could."""
    host = own_address(config)
    try:
        if ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(f"other hosts cannot reach {host}: give --advertise, too")
    except ValueError:
        pass  # a name
    tls.current().check_exposed(host)
    try:
        listening_socket(host).close()
    except OSError as error:
        raise ConfigError(
            f"{host}, by --kv-host, --advertise or --host, is no address of this machine: {error}"
        ) from error


async def find(config: WorkerConfig, registry: EtcdRegistry) -> list[RankAddress]:
    """The ranks of all other hosts, in their order, once they are there; none with one host.

    Raises ConfigError where a host was told of another number of ranks or hosts.
    """
    expected, waited_s = config.engine.tp // config.nnodes, 0.0
    while True:
        hosts = await registry.rank_hosts(config.role, config.name) if config.nnodes > 1 else {}
        wanted = range(1, config.nnodes)
        for node in wanted:
            if node in hosts and len(hosts[node].addresses) != expected:
                raise ConfigError(
                    f"--node-rank {node} of {config.name} has {len(hosts[node].addresses)} ranks, "
                    f"not {expected}: give all of its hosts the same --tp and --nnodes"
                )
        missing = [str(node) for node in wanted if node not in hosts]
        if not missing:
            return [
                RankAddress(*split_address(address), hosts[node].secret, config.role)
                for node in wanted
                for address in hosts[node].addresses
            ]
        if waited_s % _REMIND_S == 0:
            log.info("waiting for --node-rank %s of %s", ", ".join(missing), config.name)
        await asyncio.sleep(_ASK_S)
        waited_s += _ASK_S


async def connected(
    config: WorkerConfig, registry: EtcdRegistry
) -> tuple[list[RankAddress], list[ObjectConnection]]:
    """All of them with the connections for their steps; each takes one such connection only.

    Raises as `find` does.
    """
    if config.nnodes > 1:
        check_address(config)
    backoff = Backoff()
    while True:
        addresses, connections = await find(config, registry), list[ObjectConnection]()
        try:
            for address in addresses:
                connections.append(await asyncio.to_thread(address.connect, STEPS))
            return addresses, connections
        except (OSError, EOFError) as error:  # it may be about to end, with its first process
            log.warning("rank at %s:%d: %s", address.host, address.port, error)
            for connection in connections:
                connection.close()
            await backoff.wait()


def watch_for_drain(addresses: list[RankAddress], drain: Callable[[], None]) -> None:
    """Calls it, from a thread, when the host of one of the ranks is to stop.

    Raises Unavailable.
    """

    def watch(connection: ObjectConnection) -> None:
        with contextlib.suppress(OSError, EOFError):  # then the one for steps ends, too
            connection.recv()
            drain()

    for address in addresses:
        try:
            connection = address.connect(DRAIN)
        except (OSError, EOFError) as error:
            where = f"{address.host}:{address.port}"
            raise Unavailable(f"the rank at {where} cannot be reached any more: {error}") from error
        threading.Thread(target=watch, args=(connection,), name="rank-host", daemon=True).start()


def run(config: WorkerConfig) -> int:
    """Serves the ranks of a host that is not the first until SIGTERM; 0. Raises ConfigError."""
    return uvloop.run(_run(config))


async def _run(config: WorkerConfig) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    check_address(config)
    registry, backoff, began = EtcdRegistry(config.registry), Backoff(), False
    try:
        while not stop.is_set():
            name, reason = (config.name, config.node_rank), "a rank has ended"
            try:
                async with _ranks(config) as ranks:
                    host = RankHost(
                        worker=config.name, role=config.role, node_rank=config.node_rank,
                        addresses=[rank.address for rank in ranks], secret=ranks[0].secret,
                    )  # fmt: skip
                    async with registry.announce(host):
                        began = True
                        log.info("%s: node %d has %d ranks ready", *name, len(ranks))
                        await _until_one_ends(ranks, stop, config.drain_s)
            except Unavailable as error:
                if not began:
                    raise
                reason = str(error)
            if not stop.is_set():
                log.warning("%s: node %d begins again: %s", *name, reason)
                await backoff.wait()
    finally:
        await registry.close()
    return 0


class _Rank:
    """A rank's process, as the one that started it sees it."""

    def __init__(self, config: WorkerConfig, number: int, secret: bytes) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "baton.worker.rank_server", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.secret = secret
        self.connection.send((config, number, secret))

    def wait_for_address(self) -> None:
        """Returns when it listens. Raises ConfigError."""
        try:
            if not self.connection.poll(_START_S):
                raise InternalError("a rank's process does not start")
            self.address = self.connection.recv()
        except (EOFError, OSError) as error:
            status = self.process.wait()
            raise ConfigError(f"a rank's process ended with status {status}") from error

    def end(self) -> None:
        """Returns when its process has ended."""
        self.connection.close()  # which ends it
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.asynccontextmanager
async def _ranks(config: WorkerConfig) -> AsyncIterator[list[_Rank]]:
    """This host's ranks, listening; at the end none is left. Raises ConfigError."""
    here, secret = config.engine.tp // config.nnodes, secrets.token_bytes()
    ranks = [_Rank(config, number, secret) for number in range(here)]
    try:
        for rank in ranks:
            await asyncio.to_thread(rank.wait_for_address)
        yield ranks
    finally:
        for rank in ranks:
            await asyncio.to_thread(rank.end)


async def _until_one_ends(ranks: list[_Rank], stop: asyncio.Event, drain_s: float) -> None:
    """Returns when a rank has ended, or all that it is used for once this host is to stop."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for rank in ranks:
        loop.add_reader(rank.connection.fileno(), ended.set)  # it says nothing more
    try:
        waits = {asyncio.create_task(event.wait()) for event in (stop, ended)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            log.info("asking the worker to drain")
            for rank in ranks:
                rank.connection.send(DRAIN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s + _STOP_S):
                    await ended.wait()
        for wait in waits:
            wait.cancel()
    finally:
        for rank in ranks:
            loop.remove_reader(rank.connection.fileno())
