"""Fault plans, the injector's record of outages, the proxy, faults of KV transfers, leaks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.errors import TransferFailed
from baton.local import ports
from kvtransfer.interface import Transport
from tests.chaos.checks import SLACK, leaks
from tests.chaos.faults import KV_FAULTS, LASTING, WEIGHTS, Injector, Outage, plan
from tests.chaos.kv_faults import Control, FaultyTransport
from tests.chaos.proxy import Proxy, owner
from tests.contract.kvtransfer_parts import TRANSPORTS, Pair, slots

PROCESSES = {
    f"{role}-{number}": role for role in ("router", "prefill", "decode") for number in (0, 1)
}


def test_a_seed_decides_everything() -> None:
    short = list(plan(7, 50.0, PROCESSES))
    assert short == list(plan(7, 100.0, PROCESSES))[: len(short)]
    assert short != list(plan(8, 50.0, PROCESSES))


def test_faults_come_in_order_and_hit_what_is_there() -> None:
    faults = list(plan(1, 2000.0, PROCESSES))
    times = [fault.at_s for fault in faults]
    assert times == sorted(times) and times[-1] < 2000.0
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    for fault in faults:
        low_s, high_s = LASTING.get(fault.kind, (0.0, 0.0))
        assert low_s <= fault.duration_s <= high_s
        if fault.kind == "kv":
            assert fault.target in KV_FAULTS
        elif fault.kind != "etcd":
            assert fault.target in PROCESSES
        if fault.other:  # only a decode worker is called by prefill workers
            role = PROCESSES[fault.other]
            assert role == "router" or (PROCESSES[fault.target], role) == ("decode", "prefill")
    assert any(PROCESSES.get(fault.target) == "router" for fault in faults)


@pytest.fixture
def injector() -> Injector:
    """An injector that has done nothing yet."""
    named = {name: SimpleNamespace(name=name, role=role) for name, role in PROCESSES.items()}
    cluster: Any = SimpleNamespace(processes=named)
    return Injector(cluster, {}, Path(), lambda name: "", lambda line: None)


def test_a_role_is_down_only_when_all_of_it_are_down_at_one_moment(injector: Injector) -> None:
    injector.outages += [
        Outage("decode-0", "kill", 10.0, 20.0),
        Outage("decode-1", "stop", 25.0, 30.0),
    ]
    injector.outages += [Outage("prefill-0", "kill", 12.0)]
    assert not injector.role_down(0.0, 100.0)
    injector.outages.append(Outage("decode-1", "hole", 19.0, 21.0))
    assert injector.role_down(0.0, 100.0)
    assert injector.role_down(19.5, 19.6)
    assert not injector.role_down(0.0, 18.0)
    assert not injector.role_down(20.5, 100.0)


def test_a_fault_that_is_not_over_still_counts(injector: Injector) -> None:
    injector.outages += [Outage("prefill-0", "kill", 1.0), Outage("prefill-1", "kill", 2.0)]
    assert injector.role_down(50.0, 60.0)
    assert not injector.role_down(0.0, 1.5)


def test_one_router_down_is_not_every_router_down(injector: Injector) -> None:
    injector.outages.append(Outage("router-0", "kill", 10.0, 20.0))
    assert injector.any_router_down(15.0, 16.0)
    assert not injector.any_router_down(15.0, 16.0, every=True)
    assert not injector.any_router_down(21.0, 22.0)
    injector.outages.append(Outage("router-1", "drain", 18.0, 30.0))
    assert injector.any_router_down(15.0, 19.0, every=True)


def test_a_stream_over_http_depends_on_its_own_router(injector: Injector) -> None:
    injector.outages += [
        Outage("router-0", "kill", 10.0, 20.0),
        Outage("router-1", "drain", 30.0, 40.0),
    ]
    assert injector.router_down("router-0", 15.0, 16.0, killed=True)
    assert not injector.router_down("router-1", 15.0, 16.0)
    assert injector.router_down("router-1", 35.0, 36.0)
    assert not injector.router_down("router-1", 35.0, 36.0, killed=True)


def test_only_a_kill_takes_spans_with_it(injector: Injector) -> None:
    injector.outages += [
        Outage("decode-0", "stop", 10.0, 20.0),
        Outage("decode-1", "kill", 30.0, 40.0),
    ]
    assert not injector.killed(0.0, 29.0)
    assert injector.killed(29.0, 31.0)
    assert not injector.killed(31.0, 39.0)


def test_leaks_are_what_grew_beyond_the_slack_in_processes_that_lived() -> None:
    def held(extra: int) -> dict[str, dict[str, int]]:
        return {"tasks": {"a": 3}, "threads": {"main": 1}, "files": {"socket": 10 + extra}}

    slack = SLACK["files"]
    assert leaks({1: held(0)}, {1: held(slack)}) == []
    assert leaks({1: held(0)}, {2: held(1000)}) == []
    (found,) = leaks({1: held(0)}, {1: held(slack + 1)})
    assert "socket" in found


def test_a_connection_belongs_to_the_process_that_opened_it() -> None:
    dial = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as mine,
            subprocess.Popen(
                [sys.executable, "-c", f"{dial}; print(s.getsockname()[1]); input()", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ) as other,
        ):
            assert other.stdin is not None and other.stdout is not None
            theirs = int(other.stdout.readline())
            pids = {"other": other.pid, "me": os.getpid(), "gone": 2**22 + 1}
            assert owner(mine.getsockname()[1], pids) == "me"
            assert owner(theirs, pids) == "other"
            assert owner(theirs, {"me": os.getpid()}) == "unknown"
            other.stdin.write("\n")


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Callers:
    """Dials a proxy under names; all connections are closed at the end."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # by local port
        self._writers: list[asyncio.StreamWriter] = []

    async def dial(self, proxy: Proxy, caller: str) -> Streams:
        """A connection that the proxy takes for one of `caller`."""
        host, _, port = proxy.address.rpartition(":")
        mine = ports.free()
        self.names[mine] = caller
        streams = await asyncio.open_connection(host, int(port), local_addr=(host, mine))
        self._writers.append(streams[1])
        return streams

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture
async def callers() -> AsyncIterator[Callers]:
    callers = Callers()
    yield callers
    await callers.close()


@pytest.fixture
async def proxy(callers: Callers) -> AsyncIterator[Proxy]:
    """A proxy in front of an echo."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Proxy(port, callers.names.__getitem__) as proxy:
        yield proxy
    server.close()
    await server.wait_closed()


async def echoed(streams: Streams, data: bytes, timeout_s: float = 5.0) -> bytes:
    """What comes back."""
    reader, writer = streams
    writer.write(data)
    async with asyncio.timeout(timeout_s):
        return await reader.readexactly(len(data))


async def test_bytes_pass_both_ways_and_the_end_is_passed_on(
    proxy: Proxy, callers: Callers
) -> None:
    streams = await callers.dial(proxy, "one")
    assert await echoed(streams, b"x" * 100_000) == b"x" * 100_000
    assert proxy.callers == ["one"]
    streams[1].close()
    await streams[1].wait_closed()
    while proxy.callers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_cut_resets_the_callers_connections_alone(proxy: Proxy, callers: Callers) -> None:
    one, other = await callers.dial(proxy, "one"), await callers.dial(proxy, "other")
    await echoed(one, b"a")
    await echoed(other, b"b")
    assert proxy.cut("one") == 1
    with pytest.raises(ConnectionResetError):
        await one[0].readexactly(1)
    assert await echoed(other, b"still here") == b"still here"
    assert await echoed(await callers.dial(proxy, "one"), b"again") == b"again"


async def test_a_held_caller_gets_nothing_until_release_and_then_everything(
    proxy: Proxy, callers: Callers
) -> None:
    one, other = await callers.dial(proxy, "one"), await callers.dial(proxy, "other")
    await echoed(one, b"a")
    proxy.hold("one")
    late = await callers.dial(proxy, "one")  # a new connection is held, too
    for streams in (one, late):
        with pytest.raises(TimeoutError):
            await echoed(streams, b"held", timeout_s=0.2)
    assert await echoed(other, b"free") == b"free"
    proxy.release("one")
    for streams in (one, late):
        async with asyncio.timeout(5.0):
            assert await streams[0].readexactly(4) == b"held"


async def test_a_slow_connection_takes_its_time(proxy: Proxy, callers: Callers) -> None:
    streams = await callers.dial(proxy, "one")
    proxy.slow(200_000.0)
    began = time.monotonic()
    await echoed(streams, b"x" * 60_000)
    assert time.monotonic() - began > 0.2
    proxy.slow(0.0)


async def test_without_a_listener_behind_it_connections_are_reset(callers: Callers) -> None:
    async with Proxy(ports.free(), callers.names.__getitem__) as lonely:
        streams = await callers.dial(lonely, "one")
        with pytest.raises(ConnectionResetError):
            await streams[0].readexactly(1)


LOCAL, REMOTE = slots(12, 3, 4, 5), slots(12, 9, 2, 7)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return tmp_path / "kv.json"


@pytest.fixture(params=["shm", "gloo"])
def pair(request: pytest.FixtureRequest, control: Path) -> Pair:
    """A pair of pools over a faulty transport."""
    make: Callable[[], Transport] = TRANSPORTS[request.param]
    pair = Pair(FaultyTransport(make(), Control(control)))
    request.addfinalizer(pair.close)
    return pair


def test_without_a_control_file_there_is_no_fault(pair: Pair, control: Path) -> None:
    _, sent, arrived = pair.move(LOCAL, REMOTE)
    assert (sent.value, sent.num_bytes) == (arrived.value, arrived.num_bytes)
    assert torch.equal(pair.target.tensor[9], pair.source.tensor[3])
    assert not control.with_suffix(".done").exists()


@pytest.mark.parametrize("fault", ["corrupt", "lose"])
def test_changed_bytes_have_another_checksum(pair: Pair, control: Path, fault: str) -> None:
    before = pair.source.tensor.clone()
    control.write_text(json.dumps({"fault": fault}))
    _, sent, arrived = pair.move(LOCAL, REMOTE)
    assert sent.value == pair.source.digest(LOCAL).value
    assert sent.value != arrived.value
    assert torch.equal(pair.source.tensor, before), "the sender's blocks are as they were"
    assert control.with_suffix(".done").read_text() == f"{fault}\n"


def test_a_broken_link_raises(pair: Pair, control: Path) -> None:
    control.write_text(json.dumps({"fault": "fail"}))
    with pytest.raises(TransferFailed):
        pair.move(LOCAL, REMOTE)


def test_every_second_put_fails(control: Path) -> None:
    control.write_text(json.dumps({"fault": "lose", "every": 2}))
    dice = Control(control)
    assert [bool(dice.draw()) for _ in range(4)] == [False, True, False, True]


def test_a_share_of_puts_fails(control: Path) -> None:
    control.write_text(json.dumps({"fault": "corrupt", "share": 0.5}))
    dice = Control(control)
    hit = sum(bool(dice.draw()) for _ in range(400))
    assert 100 < hit < 300
