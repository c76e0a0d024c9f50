"""LocalCluster with real processes that have no model: start, failure, restart, stop."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys

import psutil
import pytest

from baton.config import ClusterConfig, host_id
from baton.errors import ConfigError, DeadlineExceeded, Unavailable
from baton.local import cluster as local_cluster
from baton.local import ports, supervisor
from baton.local.cluster import LocalCluster
from baton.local.router_processes import RouterProcess
from baton.local.supervisor import restart_delay_s
from baton.registry import Membership
from baton.v1 import fleet_pb2
from baton.v1.common_pb2 import WORKER_STATE_READY, WorkerRecord
from tests.waiting import WAIT_S, eventually

MEMBER = [sys.executable, "-m", "tests.unit.local.member"]
MEMBERS = {"router": MEMBER, "prefill": MEMBER, "decode": MEMBER}


@pytest.fixture(autouse=True)
def forked(preloaded, monkeypatch):
    """Members are started from what has imported their libraries."""
    monkeypatch.setattr(preloaded, "modules", {*preloaded.modules, MEMBER[2]})


def cluster(*, extra=None, say=lambda text: None, patience_s=30, **options):
    others = {key: options.pop(key) for key in ("programs", "on_line") if key in options}
    others = {"programs": MEMBERS, "start_timeout_s": patience_s, "say": say, **others}
    settings = ClusterConfig(**{"port": 0, "drain_s": 5.0, **options})
    return LocalCluster(settings, extra_args=extra or {}, **others)


def settings_of(started, name):
    """What a process was started with."""
    argv = started.processes[name].argv
    return json.loads(argv[argv.index("--config") + 1])


async def lines_with(said, text, count=1):
    """The lines with `text`, once there are so many."""

    async def lines():
        return [line for line in said if text in line]

    return await eventually(lines, lambda seen: len(seen) >= count, f"no {text!r}", 30.0)


async def test_starts_with_its_gpus_programs_and_arguments_and_leaves_nothing(monkeypatch):
    """Programs and further arguments go by name before role."""
    said: list[str] = []
    lines: list[tuple[str, str]] = []
    named = [*MEMBER[:1], "-X", "utf8", *MEMBER[1:]]
    extra = {"decode": ["--advertise", "h:1"], "decode-0": ["--advertise", "h:2"]}
    monkeypatch.setattr(local_cluster.resources, "count_gpus", lambda: 2)
    started = cluster(
        decode=2, metrics_port=0, extra=extra, programs={**MEMBERS, "decode-1": named},
        say=said.append, on_line=lambda *line: lines.append(line), patience_s=120,
    )  # fmt: skip
    async with started:
        assert started._start_timeout_s == 900  # weights come from a disk, kernels are compiled
        assert set(started.processes) == {"router", "prefill-0", "decode-0", "decode-1"}
        assert {p.role for p in started.processes.values()} == {"router", "prefill", "decode"}
        assert started.etcd is not None
        pids = [started.etcd.pid, *(p.pid for p in started.processes.values())]
        assert all(map(psutil.pid_exists, pids))
        assert all(os.getpgid(p.pid) == p.pid for p in started.processes.values())
        assert len(started.membership.records) == 3
        places = {}
        for name in started.processes:
            settings = settings_of(started, name)
            places[name] = settings.get("device", ""), settings.get("gpu-memory", 0.9)
            assert "cpus" not in settings
            assert started.metrics[name] == f"127.0.0.1:{settings['metrics-port']}"
        port = int(started.address.rpartition(":")[2])
    assert not any(map(psutil.pid_exists, pids))
    ports.check_free("127.0.0.1", port)
    assert places == {
        "router": ("", 0.9), "prefill-0": ("cuda:0", 0.9), "decode-0": ("cuda:1", 0.45),
        "decode-1": ("cuda:1", 0.45),
    }  # fmt: skip
    assert "GPUs: prefill-0 on cuda:0, decode-0 on cuda:1, decode-1 on cuda:1" in said
    assert sum(" ready in " in text for text in said) == 4  # etcd and three workers
    first, second = (started.processes[f"decode-{n}"] for n in (0, 1))
    assert first.argv[:4] == [*MEMBER, "worker"]
    assert second.argv[:6] == [*named, "worker"]
    assert first.argv[-6:] == ["--name", "decode-0", "--advertise", "h:1", "--advertise", "h:2"]
    assert second.argv[-4:] == ["--name", "decode-1", "--advertise", "h:1"]
    assert ("decode-1", "decode begins") in lines
    assert second.log_tail() == "decode begins\ndecode ended by itself"
    assert "router ended by itself" in started.processes["router"].log
    assert all(p.exit_status == 0 for p in started.processes.values())


async def test_a_failed_start_is_named_and_leaves_nothing():
    failing = cluster(extra={"decode-0": ["--fail"]})
    with pytest.raises(Unavailable, match=r"decode-0 exited with status 1(?s:.*)checkpoint is bro"):
        await failing.__aenter__()
    assert not any(p.running for p in failing.processes.values())


async def test_every_wait_for_an_end_is_bounded(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "_STOP_GRACE_S", 0.3)
        async with cluster(extra={"prefill": ["--deaf"]}, drain_s=0) as started:
            process = started.processes["prefill-0"]
    assert process.exit_status == -signal.SIGKILL and "killed" in process.log_tail(1)

    begun = asyncio.Event()
    starting = cluster(on_line=lambda name, line: begun.set())
    task = asyncio.create_task(starting.__aenter__())
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert begun.is_set(), await task
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


async def test_a_worker_elsewhere_with_the_same_pid_is_not_ours():
    """Of another `baton up` at the same etcd, in another container or on another host."""

    def worker(name, host):
        return WorkerRecord(incarnation=name, pid=7, host_id=host, state=WORKER_STATE_READY)

    def status(*records):
        workers = [fleet_pb2.WorkerStatus(record=one, state="READY") for one in records]
        return fleet_pb2.GetStatusResponse(workers=workers)

    membership, theirs, ours = Membership(), worker("a", "there"), worker("b", host_id())
    membership.publish({"a": theirs}, connected=True)
    waiting = asyncio.create_task(local_cluster.workers_ready(membership, lambda: {7}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    membership.publish({"b": ours, "a": theirs}, connected=True)
    async with asyncio.timeout(WAIT_S):
        assert await waiting == {7: ours}
    sees = local_cluster.sees({7})
    assert sees(status(ours, theirs)) and not sees(status(theirs))


def test_ports_follow_the_first_and_are_checked():
    host = "127.7.7.7"  # loopback too, and nothing else takes its ports
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{host}:{port}: Address already in use"):
            ports.consecutive(host, port - 1, 2)
    assert ports.consecutive(host, port, 1) == [port]
    assert len(set(ports.consecutive(host, 0, 50))) == 50


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_has_ports(host):
    (port,) = ports.consecutive(host, 0, 1)
    assert ports.consecutive(host, port, 1) == [port]
    with ports.hold(host, port), pytest.raises(ConfigError, match=rf"on \[::1\]:{port}: Address"):
        ports.hold(host, port)


@pytest.mark.parametrize("port", [0, 7700])
@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here_has_none(host, port):
    with pytest.raises(ConfigError, match=f"on {host}:{port}: .*; --host must be an address of"):
        ports.consecutive(host, port, 1)


def test_a_held_port_is_for_those_who_share_it_and_for_nobody_else():
    def bound(shared):
        return socket.create_server((host, port), reuse_port=shared)

    host = "127.7.7.7"
    with ports.hold(host, 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{host}:{port}: Address already in use"):
            ports.hold(host, port)
        with pytest.raises(OSError, match="Address already in use"):
            bound(shared=False)
        with bound(shared=True) as first, bound(shared=True) as second:
            for _ in range(20):  # the held socket takes no connection
                socket.create_connection((host, port), timeout=WAIT_S).close()
            first.accept()[0].close()
            second.accept()[0].close()
    with bound(shared=True), pytest.raises(ConfigError, match="already in use"):
        ports.hold(host, port)  # another server shares it: it would take connections


async def test_a_rolling_restart_takes_one_process_after_the_other(monkeypatch):
    """Each leaves when its successor has been found, and before the next has to go."""
    said: list[str] = []
    found: list[tuple[str, int, int]] = []
    before: dict[str, int] = {}
    says, sees, asked = local_cluster.router_says, local_cluster.sees, {}

    def noted(pids: set[int]) -> object:
        asked[condition := sees(pids)] = pids
        return condition

    async def router_says(condition: object, router: RouterProcess) -> None:
        await says(condition, router)
        if pids := asked.get(condition):
            left = sum(map(psutil.pid_exists, before.values()))
            found.extend((router.name, pid, left) for pid in pids)

    monkeypatch.setattr(local_cluster, "sees", noted)
    monkeypatch.setattr(local_cluster, "router_says", router_says)
    async with cluster(routers=2, prefill=2, say=said.append) as started:
        before |= {name: process.pid for name, process in started.processes.items()}
        assert list(before) == ["router-0", "router-1", "prefill-0", "prefill-1", "decode-0"]
        assert len(set(started.addresses)) == 2
        for name, address in zip(before, started.addresses, strict=False):
            assert str(settings_of(started, name)["port"]) == address.rpartition(":")[2]
        said.clear()
        found.clear()
        assert await started.rolling_restart() == dict.fromkeys(before, 0)
        assert [p.starts for p in started.processes.values()] == [2] * 5
        assert all(p.pid != before[name] for name, p in started.processes.items())
        workers = [p.pid for p in started.processes.values() if p.role != "router"]
        assert {r.pid for r in started.membership.records.values()} == set(workers)
        # When its successor is found a process has not left, and those before it have.
        assert found == [
            (router, pid, left)
            for pid, left in zip(workers, (3, 2, 1), strict=True)
            for router in ("router-0", "router-1")
        ]
        assert not any(map(psutil.pid_exists, before.values()))
        verbs = {"router": ("restarting:", "serving"), "worker": ("restarting:", "ready")}
        assert [line.split()[:2] for line in said] == [
            [name, verb]
            for name in before
            for verb in verbs["router" if name.startswith("router") else "worker"]
        ]
        assert not any("starting it again" in line for line in said), "the supervisor meddled"

        with pytest.raises(DeadlineExceeded, match="missing: router-1"):
            started.kill("router-1")  # the other still serves
            await started.wait_ready(timeout_s=0.2)
        await started.wait_ready(timeout_s=WAIT_S)
        assert started.processes["router-1"].starts == 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await says(sees({os.getpid()}), started.processes["router-1"])


async def test_without_restarts_a_process_comes_back_when_asked():
    """And one that did not drain is reported."""
    said: list[str] = []
    extra = {"decode-0": ["--hasty"], "prefill-0": ["--deaf"]}
    async with cluster(extra=extra, drain_s=0, say=said.append, restart=False) as started:
        assert await started.restart("decode-0") == 3
        process = started.processes["decode-0"]
        assert "warning: decode-0 did not drain: it ended with status 3" in said
        started.kill("decode-0")
        await lines_with(said, "decode-0 was killed by SIGKILL")
        assert process.starts == 2
        assert await started.restart("decode-0") == -signal.SIGKILL
        assert len([line for line in said if line.startswith("warning: decode-0")]) == 1
        started.kill("decode-0")
        assert await process.wait() == -signal.SIGKILL
        await started.start_again("decode-0")
        name = await started.add_worker("decode")
        await started.wait_ready(timeout_s=WAIT_S)
        assert (name, process.starts) == ("decode-1", 4)
        with pytest.raises(DeadlineExceeded, match="missing: decode-1"):
            started.kill("decode-1", signal.SIGSTOP)
            await started.processes["decode-1"].stop(5)  # ends a stopped process, too
            started.processes["decode-1"].argv.append("--late")  # it does not register
            await started.start_again("decode-1")
            await started.wait_ready(timeout_s=0.01)
        started.kill("prefill-0")  # or stopping it would take the whole grace


async def test_a_process_stays_whose_successor_does_not_come_up():
    """Nor is anything left of a successor where all are stopped while it starts."""
    async with cluster() as started:
        process = started.processes["decode-0"]
        why = rf"decode-0 continues \(pid {process.pid}\).*exited with status 1: the checkpoint"
        process.argv.append("--fail")
        with pytest.raises(Unavailable, match=why):
            await started.restart("decode-0")
        process.argv[-1] = "--late"  # it does not register
        assert process.running and process is started.processes["decode-0"]
        began, successor = asyncio.Event(), process.successor()
        process.successor = lambda: successor
        successor.on_line = lambda line: began.set()
        restarting = asyncio.create_task(started.restart("decode-0"))
        await began.wait()
        restarting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restarting
        assert successor.exit_status == -signal.SIGKILL and process.running


async def test_a_worker_with_a_part_of_a_gpu_is_drained_before_its_successor_starts(monkeypatch):
    monkeypatch.setattr(local_cluster.resources, "count_gpus", lambda: 1)
    async with cluster() as started:
        process = started.processes["decode-0"]
        assert await started.restart("decode-0") == 0
        assert started.processes["decode-0"] is process and process.starts == 2


async def test_a_process_that_cannot_be_started_now_is_tried_again(monkeypatch):
    """Whether it has ended by itself or is restarted; and where it never ran, that is the error."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.1)
    said: list[str] = []
    spawn, failing = asyncio.create_subprocess_exec, 0

    async def sometimes(*argv, **options):
        nonlocal failing
        if failing:
            failing -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await spawn(*argv, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
    async with cluster(say=said.append) as started:
        why = "decode-0 cannot be started: [Errno 11] Resource temporarily unavailable"
        failing = 2
        started.kill("decode-0")
        await lines_with(said, f"{why}; starting it again in 0.4 s")
        await started.wait_ready(timeout_s=WAIT_S)
        failing = 1
        with pytest.raises(Unavailable, match="decode-0 cannot be started"):
            await started.restart("decode-0")
        await started.wait_ready(timeout_s=WAIT_S)
        failing = 1
        with pytest.raises(Unavailable, match="decode-1 cannot be started"):
            await started.add_worker("decode")


async def test_restarts_back_off_until_a_process_was_ready_for_a_while(monkeypatch):
    """A crash loop disturbs no other process and says why."""
    assert [restart_delay_s(n) for n in (1, 2, 3, 6, 1000)] == [0.5, 1, 2, 10, 10]
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.1)
    said: list[str] = []
    async with cluster(decode=2, say=said.append) as started:
        crashing = started.processes["decode-1"]
        crashing.argv.append("--fail")
        started.kill("decode-1")
        await lines_with(said, "decode-1 was killed by SIGKILL; starting it again in 0.1 s")
        why = "decode-1 exited with status 1: the checkpoint is broken; starting it again in "
        looped = await lines_with(said, why, 2)
        assert [line.removeprefix(why) for line in looped[:2]] == ["0.2 s", "0.4 s"]
        others = [p for name, p in started.processes.items() if name != "decode-1"]
        assert [p.starts for p in others] == [1] * 3 and all(p.running for p in others)
        with pytest.raises(DeadlineExceeded, match="missing: decode-1"):
            await started.wait_ready(timeout_s=0.1)
        crashing.argv.remove("--fail")
        await started.wait_ready(timeout_s=WAIT_S)
        assert crashing.pid in {record.pid for record in started.membership.records.values()}
        monkeypatch.setattr(supervisor, "_HEALTHY_S", 0.0)
        started.kill("decode-1")
        await lines_with(said, "SIGKILL; starting it again in 0.1 s", 2)
        crashing.argv.append("--fail")  # long life without READY is no health
        await lines_with(said, why, len(await lines_with(said, why)) + 1)
        assert said[-1].endswith("in 0.2 s")
