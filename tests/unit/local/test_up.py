"""`baton up`: it ends with its terminal, keeps traces and draws them."""

import asyncio
import contextlib
import os
import pty
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.errors import Unavailable
from baton.local import up
from baton.local.span_store import Span, SpanStore
from baton.local.trace_source import KeptTraces
from tests.waiting import WAIT_S, eventually

HERE = Path(__file__)
UP = f"""
import asyncio, fcntl, functools, sys, termios
from baton.config import ClusterConfig
from baton.local import up
if sys.stdin.isatty():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # from now on closing it is our SIGHUP
member = [sys.executable, {str(HERE.with_name("member.py"))!r}]
members = dict.fromkeys(("router", "prefill", "decode"), member)
up.LocalCluster = functools.partial(up.LocalCluster, programs=members)
sys.exit(asyncio.run(up.run(ClusterConfig(port=0))))
"""


@pytest.mark.parametrize(
    ("reached", "exit_status"), [("etcd ready", 130), ("ready: ", 0), ("SIGHUP: restarting ", 0)]
)
async def test_a_closed_terminal_ends_it(tmp_path, reached, exit_status):
    """Also while it starts, and while it restarts its processes."""
    output = tmp_path / "output"
    master, slave = pty.openpty()
    with output.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", UP), stdin=slave, stdout=out, stderr=out, cwd=HERE.parents[3],
            start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip

    async def look():
        return output.read_text()

    try:
        os.close(slave)
        if is_restart := reached.startswith("SIGHUP"):
            await eventually(look, lambda text: "\nready: " in text, "not ready")
            process.send_signal(signal.SIGHUP)
        await eventually(look, lambda text: f"\n{reached}" in f"\n{text}", "not that far")
        os.close(master)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == exit_status
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert (await look()).count("SIGHUP") == is_restart and (await look()).endswith("stopped\n")
    assert os.listdir(tmp_path) == ["output"]  # noqa: PTH208


def test_what_can_be_done_with_a_cluster_that_is_ready():
    """The demo model is no partner for a chat; where keys are needed they are in the commands."""

    def text(**settings):
        config = ClusterConfig(**settings)
        address = "127.0.0.1:7700"
        cluster = SimpleNamespace(
            config=config, targets=address, etcd_address="h:1", certs=None,
            http_addresses=("127.0.0.1:7780",), metrics={},
        )  # fmt: skip
        return up._ready_text(cluster, keeps_traces=True)

    assert "the demo model continues Python; it does not chat" in text()
    assert "any api_key" in text() and "KEY" not in text()
    keys = RouterLimits(api_keys=("sha256:" + "0" * 64,))
    locked = text(engine=EngineConfig(model="/models/m"), limits=keys)
    assert "a chat in the browser: http://127.0.0.1:7780/;" in locked and "demo" not in locked
    assert 'completions -H "authorization: Bearer $KEY" -H' in locked
    unlogged = "--access-log 1 --log-level info"
    every = RouterLimits(access_log=1.0)
    assert unlogged in text() and unlogged in text(limits=every)
    assert unlogged in text(log_level="info")
    assert unlogged not in text(limits=every, log_level="info")
    assert "BATON_API_KEY" in locked and "your api_key" in locked and "0000" not in locked


async def test_a_trace_is_drawn_once_the_router_has_ended_the_request(monkeypatch, capsys):
    """The client's own span may be kept elsewhere, so a missing root is no reason to wait."""

    def span(trace, number, service, is_entry):
        return Span(trace, number, "elsewhere", "generate", service, 1, 2, is_entry=is_entry)

    monkeypatch.setattr(up, "_QUIET_S", 0.1)
    store, drawn = SpanStore(), ""
    drawing = asyncio.create_task(up._draw_finished(store))
    store.add([span("other", "a", "baton-router", False), span("other", "b", "baton-decode", True)])
    store.add([span("ended", "a", "baton-router", True)])

    async def look():
        nonlocal drawn
        drawn += capsys.readouterr().out
        return drawn

    await eventually(look, lambda text: "trace ended" in text, "not drawn")
    store.add([span("ended", "b", "baton-prefill", True)])  # late
    await asyncio.sleep(0.3)
    assert (await look()).count("trace ") == 1
    drawing.cancel()


@pytest.mark.parametrize(
    "settings", [{}, {"trace": True, "keep_traces": 0}, {"otlp": "http://o:1"}]
)
async def test_traces_are_kept_here(settings):
    async with contextlib.AsyncExitStack() as stack:
        config = await up._with_receiver(ClusterConfig(**settings), stack)
        assert config.otlp
        own, *others = config.otlp.split(",")
        assert others == [settings["otlp"]] if "otlp" in settings else not others
        source = KeptTraces(own)
        assert await asyncio.to_thread(source.traces, "", 30.0) == []
    with pytest.raises(Unavailable):
        await asyncio.to_thread(source.traces, "", 30.0)
    config = ClusterConfig(keep_traces=0, otlp="http://o:1")  # kept elsewhere
    async with contextlib.AsyncExitStack() as stack:
        assert await up._with_receiver(config, stack) == config
