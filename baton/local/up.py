"""`baton up`: runs a local cluster until ctrl-C, says what happens, draws each request's trace.

SIGHUP restarts its processes one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from baton.config import ClusterConfig
from baton.errors import BatonError, ConfigError
from baton.local import trace_tree
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore

INTERRUPTED = 130
_QUIET_S = 1.0  # exporters flush several times a second: a trace this quiet has all its spans
_ROUTER = "baton-router"


async def run(config: ClusterConfig) -> int:
    """Runs the cluster until SIGINT or SIGTERM, then stops it; a second signal kills it.

    Returns the exit status: 0 once it was ready. Raises ConfigError or Unavailable when it cannot
    start.
    """
    if config.trace and config.otlp:
        raise ConfigError("--trace shows the traces here and --otlp sends them away: choose one")
    cancel_on_signals()
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    was_ready = False
    try:
        async with AsyncExitStack() as stack:
            config = await _with_receiver(config, stack)
            cluster = LocalCluster(config, say=say, on_line=echo)
            await stack.enter_async_context(cluster)
            was_ready = True
            say(_ready_text(cluster))
            await _restart_on(hangup, cluster)
    except asyncio.CancelledError:
        pass
    say("stopped")
    return 0 if was_ready else INTERRUPTED


def cancel_on_signals() -> None:
    """SIGINT and SIGTERM cancel the current task, so that its `async with` blocks are left."""
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.cancelling():
            say(("\n" if sys.stdout.isatty() else "") + "stopping…")  # not beside the terminal's ^C
        task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, cancel)


def say(text: str) -> None:
    """A line for the person at the terminal."""
    with contextlib.suppress(OSError):  # the cluster goes on when its reader has left
        print(text, flush=True)


def echo(name: str, line: str) -> None:
    """A process's log line, on stderr."""
    with contextlib.suppress(OSError):
        print(f"[{name}] {line}", file=sys.stderr, flush=True)


async def _restart_on(hangup: asyncio.Event, cluster: LocalCluster) -> None:
    """Restarts all processes in turn at each SIGHUP, until the terminal is gone."""
    had_terminal = _has_terminal()
    while True:
        await hangup.wait()
        if had_terminal and not _has_terminal():
            return  # the window was closed: nobody is left to press ctrl-C
        say(f"SIGHUP: restarting {', '.join(cluster.processes)}, one after the other")
        try:
            await cluster.rolling_restart()
            say("all processes have been restarted")
        except BatonError as error:
            say(f"the restart has stopped: {error}")
        hangup.clear()  # one that came meanwhile has had its restart


def _has_terminal() -> bool:
    return any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


async def _with_receiver(config: ClusterConfig, stack: AsyncExitStack) -> ClusterConfig:
    """`config`, sending its traces here when they are to be shown."""
    if not config.trace:
        return config
    store = SpanStore()
    store.follow(_show_finished, _QUIET_S)
    receiver = await stack.enter_async_context(OtlpReceiver(store))
    return dataclasses.replace(config, otlp=receiver.address)


def _show_finished(spans: Sequence[Span]) -> bool:
    """Draws the trace of a request that has ended; whether it was one."""
    finished = any(span.service == _ROUTER and span.is_entry for span in spans)
    if finished:
        width = os.get_terminal_size().columns if sys.stdout.isatty() else 100
        say("\n" + trace_tree.render(spans, min(width, 160)))
    return finished


def _ready_text(cluster: LocalCluster) -> str:
    target = "" if cluster.targets == "127.0.0.1:7700" else f" --target {cluster.targets}"
    return (
        f"ready: {cluster.targets}, etcd {cluster.etcd_address}. In another terminal:\n"
        f"  baton generate 'class Stack:'{target}\n"
        f"  baton status{target}\n"
        "ctrl-C stops it"
    )
