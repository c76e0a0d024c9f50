"""A worker whose ranks are on several hosts: how the hosts find each other, and all but the first.

    first host (--node-rank 0)               each other host (--node-rank N)
    the worker, its first rank               the process of `run`: starts a process for each rank,
     │                                       announces them in etcd, restarts them
     ├── connection: commands ──────────────▶ a rank (`remote_rank.py`)
     ├── connection: drain ─────────────────▶
     └── a connection for each KV link ─────▶

A rank serves the first process that connects, and ends with it, as a rank on the first host does.
When a host stops, it asks the worker to drain, and stops once the worker has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import uvloop

from baton.config import WorkerConfig, split_address
from baton.engine.rank_executor import MESSAGES, Failed, Ready
from baton.engine.rank_process import RankProcess
from baton.errors import ConfigError, Unavailable
from baton.net import object_connection, tls
from baton.net.backoff import Backoff
from baton.net.object_connection import Messages, ObjectConnection
from baton.net.server import stop_on_signals
from baton.net.tasks import wait_at_most
from baton.registry import EtcdRegistry
from baton.rendezvous import listening_socket
from baton.v1.common_pb2 import RankHost
from kvtransfer.remote_pool import KV_MESSAGES

log = logging.getLogger(__name__)

_POLL_S = 1.0  # between two look-ups of the other hosts, while a worker starts
_REMIND_S = 30.0
_START_S = 120.0  # for a rank's process to import torch and listen
_ANSWER_S = 10.0
_STOP_S = 5.0


@dataclass(frozen=True)
class RemoteRankConfig:
    """What a rank's process starts with. local_rank: number among the ranks of its host."""

    worker: WorkerConfig
    local_rank: int
    secret: bytes


@dataclass(frozen=True)
class Open:
    """Opens a connection to a rank. purpose: a key of `TABLES`. Answers: `Ready`, `Failed`."""

    purpose: str


@dataclass(frozen=True)
class Listening:
    """From a rank to the process that started it: where it listens."""

    address: str


@dataclass(frozen=True)
class Drain:
    """This host is to stop: the worker should drain."""


CONTROL = (Open, Ready, Failed, Listening, Drain)
COMMANDS, KV, DRAIN = "commands", "kv", "drain"
TABLES: dict[str, Messages] = {COMMANDS: MESSAGES, KV: KV_MESSAGES, DRAIN: CONTROL}
"""What a connection carries once it is open, by its purpose."""


@dataclass(frozen=True)
class RankAddress:
    """Where a rank on another host listens, and the secret of its worker."""

    host: str
    port: int
    secret: bytes

    def connect(self, purpose: str) -> ObjectConnection:
        """A connection for one purpose. Raises OSError, EOFError."""
        credentials = tls.current()
        context = credentials.client_context() if credentials.ca_file else None
        name = f"worker.{tls.DOMAIN}" if context else ""
        place = self.host, self.port, self.secret
        opening = object_connection.connect(*place, context, name, CONTROL)
        try:
            opening.send(Open(purpose))
            if not opening.poll(_ANSWER_S):
                raise TimeoutError("no answer")
            if isinstance(answer := opening.recv(), Failed):
                raise ConnectionRefusedError(answer.reason)
        except BaseException:
            opening.close()
            raise
        return ObjectConnection(opening.socket, TABLES[purpose])


def advertised_host(config: WorkerConfig) -> str:
    """The address at which this host's ranks reach each other."""
    advertised = split_address(config.advertise)[0] if config.advertise else config.host
    return (config.kv_host or advertised).strip("[]")


def check_address(config: WorkerConfig) -> None:
    """Raises ConfigError if other hosts cannot reach ranks here, or if anybody could."""
    host = advertised_host(config)
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
    """The ranks of all other hosts in order, once all are announced; none with one host.

    Raises ConfigError for a host with another --tp or --nnodes.
    """
    expected, waited_s = config.engine.tp // config.nnodes, 0.0
    while True:
        hosts = await registry.rank_hosts(config.name) if config.nnodes > 1 else {}
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
                RankAddress(*split_address(address), hosts[node].secret)
                for node in wanted
                for address in hosts[node].addresses
            ]
        if waited_s % _REMIND_S == 0:
            log.info("waiting for --node-rank %s of %s", ", ".join(missing), config.name)
        await asyncio.sleep(_POLL_S)
        waited_s += _POLL_S


async def connected(
    config: WorkerConfig, registry: EtcdRegistry
) -> tuple[list[RankAddress], list[ObjectConnection]]:
    """The ranks of other hosts, and a connection for commands to each. Raises as `find` does."""
    if config.nnodes > 1:
        check_address(config)
    backoff = Backoff()
    while True:
        addresses, connections = await find(config, registry), list[ObjectConnection]()
        try:
            for address in addresses:
                connections.append(await asyncio.to_thread(address.connect, COMMANDS))
            return addresses, connections
        except (OSError, EOFError) as error:  # it may be about to end, with its first process
            log.warning("rank at %s:%d: %s", address.host, address.port, error)
            for connection in connections:
                connection.close()
            await backoff.wait()


def watch_for_drain(addresses: list[RankAddress], drain: Callable[[], None]) -> None:
    """Calls `drain`, from a thread, when the host of one of the ranks is to stop.

    Raises Unavailable.
    """

    def watch(connection: ObjectConnection) -> None:
        with contextlib.suppress(OSError, EOFError):  # the connection for commands ends, too
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
    """Runs the ranks of a host that is not the first until a signal. Raises ConfigError."""
    return uvloop.run(_run(config))


async def _run(config: WorkerConfig) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    check_address(config)
    registry, backoff, began = EtcdRegistry(config.registry), Backoff(), False
    try:
        while not stop.is_set():
            name, reason = (config.name, config.node_rank), "a rank has ended"
            try:
                secret = secrets.token_bytes()
                async with _ranks(config, secret) as (ranks, addresses):
                    host = RankHost(
                        worker=config.name, node_rank=config.node_rank,
                        addresses=addresses, secret=secret,
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


@contextlib.asynccontextmanager
async def _ranks(
    config: WorkerConfig, secret: bytes
) -> AsyncIterator[tuple[list[RankProcess], list[str]]]:
    """This host's ranks and where they listen; at the end none is left. Raises ConfigError."""
    module, ranks = "baton.worker.remote_rank", list[RankProcess]()
    try:
        for number in range(config.engine.tp // config.nnodes):
            given = RemoteRankConfig(config, number, secret)
            ranks.append(RankProcess.start(module, number, given, CONTROL))
        answers = [await asyncio.to_thread(rank.answer, _START_S) for rank in ranks]
        yield ranks, [one.address for one in answers]
    finally:
        for rank in ranks:
            await asyncio.to_thread(rank.end)


async def _until_one_ends(ranks: list[RankProcess], stop: asyncio.Event, drain_s: float) -> None:
    """Returns when a rank has ended; once this host is to stop, drains the worker first."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for rank in ranks:
        loop.add_reader(rank.connection.fileno(), ended.set)  # it sends nothing more
    try:
        waits = {asyncio.create_task(event.wait()) for event in (stop, ended)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            log.info("asking the worker to drain")
            for rank in ranks:
                rank.connection.send(Drain())
            await wait_at_most(drain_s + _STOP_S, ended.wait())
        for wait in waits:
            wait.cancel()
    finally:
        for rank in ranks:
            loop.remove_reader(rank.connection.fileno())
