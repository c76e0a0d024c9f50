"""LocalCluster with real processes that have no model: start, failure, restart, stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.config import ClusterConfig
from baton.errors import ConfigError, DeadlineExceeded, Unavailable
from baton.local import commands, ports
from baton.local.cluster import LocalCluster, restart_delay_s
from baton.local.cpus import Share

MEMBER = str(Path(__file__).with_name("member.py"))


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets clusters of this file start `member.py` instead of the services."""

    def router(config: ClusterConfig, port: int, etcd: str, otlp: str | None) -> list[str]:
        return [sys.executable, MEMBER, "router", etcd, config.cluster, str(port)]

    def worker(
        config: ClusterConfig, role: str, share: Share, etcd: str, otlp: str | None
    ) -> list[str]:
        return [sys.executable, MEMBER, role, etcd, config.cluster, "0"]

    monkeypatch.setattr(commands, "router", router)
    monkeypatch.setattr(commands, "worker", worker)


def cluster(*, extra: dict[str, Sequence[str]] | None = None, **config: Any) -> LocalCluster:
    config = {"port": 0, "drain_s": 5.0, **config}
    return LocalCluster(ClusterConfig(**config), extra_args=extra or {}, start_timeout_s=30)


def exists(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


async def test_starts_and_leaves_nothing() -> None:
    said: list[str] = []
    lines: list[tuple[str, str]] = []
    async with LocalCluster(
        ClusterConfig(port=0, prefill=1, decode=2),
        say=said.append,
        on_line=lambda name, line: lines.append((name, line)),
    ) as started:
        assert set(started.processes) == {"router", "prefill-0", "decode-0", "decode-1"}
        assert {p.role for p in started.processes.values()} == {"router", "prefill", "decode"}
        pids = [p.pid for p in started.processes.values()] + [started.etcd.pid]  # type: ignore[union-attr]
        assert all(exists(pid) for pid in pids)
        assert all(os.getpgid(p.pid) == p.pid for p in started.processes.values())
        assert len(started.membership.records) == 3
        port = int(started.address.rpartition(":")[2])
    assert not any(exists(pid) for pid in pids)
    ports.check_free("127.0.0.1", port)
    assert ("decode-1", "decode begins") in lines
    assert started.processes["decode-1"].log_tail() == "decode begins\ndecode ended by itself"
    assert "router ended by itself" in started.processes["router"].log
    assert all(p.exit_status == 0 for p in started.processes.values())
    assert sum(" ready in " in text for text in said) == 4  # etcd and three workers


async def test_a_process_that_fails_to_start_is_named_with_its_last_words() -> None:
    failing = cluster(extra={"decode-0": ["--fail"]})
    with pytest.raises(Unavailable, match=r"decode-0 exited with status 1(?s:.*)checkpoint is bro"):
        async with failing:
            pytest.fail("it started")
    assert not any(p.running for p in failing.processes.values())


async def test_a_crashed_worker_is_started_again() -> None:
    async with cluster() as started:
        before = started.processes["decode-0"].pid
        started.kill("decode-0", signal.SIGKILL)
        await started.wait_ready(timeout_s=30)
        after = started.processes["decode-0"]
        assert after.pid != before and after.starts == 2
        assert after.pid in {r.pid for r in started.membership.records.values()}


async def test_without_restart_it_stays_away_until_told() -> None:
    async with cluster(restart=False) as started:
        process = started.processes["decode-0"]
        started.kill("decode-0")
        assert await process.wait() == -signal.SIGKILL
        assert process.starts == 1
        await started.start_again("decode-0")
        name = await started.add_worker("decode")
        await started.wait_ready(timeout_s=30)
        assert (name, process.starts) == ("decode-1", 2)
        with pytest.raises(DeadlineExceeded, match="missing: decode-1"):
            started.kill("decode-1", signal.SIGSTOP)
            await started.processes["decode-1"].stop(5)  # ends a stopped process, too
            await started.start_again("decode-1")
            await started.wait_ready(timeout_s=0.01)


async def test_a_deaf_process_is_killed_in_bounded_time() -> None:
    async with cluster(extra={"prefill": ["--deaf"]}, drain_s=0) as started:
        process = started.processes["prefill-0"]
    assert process.exit_status == -signal.SIGKILL
    assert "killed" in process.log_tail(1)


async def test_cancelled_while_starting_and_while_stopping() -> None:
    begun = asyncio.Event()
    starting = LocalCluster(ClusterConfig(port=0), on_line=lambda name, line: begun.set())
    task = asyncio.create_task(starting.__aenter__())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(p.running for p in starting.processes.values())

    async with cluster(extra={"decode": ["--deaf"]}, drain_s=60) as started:
        stopping = asyncio.create_task(started.stop())
        await started.processes["router"].wait()
        stopping.cancel()  # as a second ctrl-C does: no more patience
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert started.processes["decode-0"].exit_status == -signal.SIGKILL


async def test_a_port_in_use_is_told_before_anything_starts() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    refused = cluster(port=port)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use.*--port"):
        async with refused:
            pytest.fail("it started")
    assert not refused.processes
    server.close()
    await server.wait_closed()


def test_restarts_back_off_to_a_bound() -> None:
    assert [restart_delay_s(n) for n in (1, 2, 3, 6, 1000)] == [0.5, 1, 2, 10, 10]
