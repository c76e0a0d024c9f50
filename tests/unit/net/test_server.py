"""What routers and workers run on: an event loop whose long turns do not starve gRPC."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from baton.config import split_address
from baton.errors import ConfigError
from baton.net import http_server, rpc
from baton.net.server import EventLoop, Health, bind, measure_lag
from tests.waiting import WAIT_S

CALLS, MESSAGES = 150, 4
TURNS = 200  # far fewer than events


class Repeater(grpc.GenericRpcHandler):
    """Answers every call with some messages."""

    def service(self, details):
        def stream(request, context):
            return (b"" for _ in range(MESSAGES))

        return grpc.unary_stream_rpc_method_handler(stream)


@pytest.fixture
def address():
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Repeater()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_events_of_grpc_do_not_come_one_a_turn(address):
    async def turns():
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(WAIT_S):

            async def call():
                return [_ async for _ in channel.unary_stream("/any/call")(b"")]

            running = [asyncio.create_task(call()) for _ in range(CALLS)]
            taken = 0
            while not all(task.done() for task in running):
                time.sleep(0.005)  # noqa: ASYNC251 - the turn is long
                await asyncio.sleep(0)
                taken += 1
            assert all(len(task.result()) == MESSAGES for task in running)
            return taken

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        assert runner.run(turns()) < TURNS


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1"])
async def test_one_host_is_for_grpc_and_http(host):
    server, address = bind(host, 0)
    await server.start()
    try:
        shown, port = split_address(address)
        assert shown == ("127.0.0.1" if "." in host else "[::1]")
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        with pytest.raises(ConfigError, match=re.escape(f"cannot listen on {address} for tests: ")):
            http_server.listen(host, port, "tests", "--http-port")
    finally:
        await server.stop(0)
    async with Health().probed(host, port) as url:
        assert url == f"http://{address}"
        answer = await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", None, WAIT_S)
        assert answer.read() == b"alive"
        answer.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here_is_named(host):
    with pytest.raises(ConfigError, match=f"{host}:0 .*; --host must be an address of this"):
        http_server.listen(host, 0, "tests", "--http-port")


def test_calls_are_not_taken_one_a_turn():
    def call_at_once(address):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/any/call")
            return [f.result(WAIT_S) for f in [call.future(b"") for _ in range(CALLS)]]

    async def turns():
        server, taken, now = rpc.server(), [], 0

        async def answer(request, context):
            taken.append(now)
            return b""

        handlers = {"call": grpc.unary_unary_rpc_method_handler(answer, bytes, bytes)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("any", handlers)])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        calling = asyncio.create_task(asyncio.to_thread(call_at_once, address))
        while not calling.done():
            time.sleep(0.005)  # noqa: ASYNC251 - the turn is long
            await asyncio.sleep(0)
            now += 1
        await server.stop(None)
        assert await calling == [b""] * CALLS
        return taken[-1] - taken[0]

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        assert runner.run(turns()) < CALLS / 2


async def test_a_timer_that_runs_late_shows_how_long_the_loop_was_busy():
    seen, blocked = asyncio.Queue(), 0.2
    measuring = asyncio.create_task(measure_lag(seen.put_nowait))
    try:
        async with asyncio.timeout(WAIT_S):
            await seen.get()
            time.sleep(blocked)  # noqa: ASYNC251 - the turn is long
            assert await seen.get() >= blocked - 0.1
    finally:
        measuring.cancel()


STOPPING = """
import asyncio, fcntl, logging, os, sys, termios
from baton.net.server import run_service, stop_on_signals
async def main():
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    print("serves", flush=True)
    await stop.wait()
    print("drains", flush=True)
    await asyncio.to_thread(os.read, drained, 1)
    return 0
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
drained = int(sys.argv[1])
if sys.stdin.isatty():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # from now on closing it is our SIGHUP
sys.exit(run_service(main()))
"""


@contextlib.contextmanager
def stopping(stdin=subprocess.DEVNULL, **settings):
    """(a process that drains until a byte is written, the descriptor for it)."""
    drained, finish = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, str(drained)], stdin=stdin, stdout=subprocess.PIPE,
        text=True, pass_fds=[drained], start_new_session=True, cwd=Path(__file__).parents[3],
        **settings,
    )  # fmt: skip
    late = threading.Timer(WAIT_S, process.kill)  # ends what reads its output
    late.start()
    try:
        assert process.stdout.readline() == "serves\n"
        yield process, finish
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(drained)
        os.close(finish)


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_drains_and_a_second_ends_the_process(first, again):
    with stopping() as (process, _):
        process.send_signal(first)
        said = f"{first.name}: stopping; SIGINT or SIGTERM now ends this process at once\n"
        assert process.stdout.readline() == said
        assert process.stdout.readline() == "drains\n"
        process.send_signal(again)
        assert process.wait(WAIT_S) == -again


def test_a_closed_terminal_drains_and_never_ends_a_drain():
    master, slave = pty.openpty()
    with stopping(stdin=slave) as (process, finish):
        os.close(slave)
        os.close(master)
        assert process.stdout.readline().startswith("SIGHUP: stopping; ")
        assert process.stdout.readline() == "drains\n"
        process.send_signal(signal.SIGHUP)
        os.write(finish, b".")
        assert process.wait(WAIT_S) == 0


def test_nohup_keeps_a_process_that_serves():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping() as (process, finish):
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().startswith("SIGTERM: stopping; ")
            os.write(finish, b".")
            assert process.wait(WAIT_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
