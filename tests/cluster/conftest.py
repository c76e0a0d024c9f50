"""Clusters of real processes for these tests, and a check that nothing of them is left.

    async def test_it(cluster_factory):
        cluster = await cluster_factory(prefill=2, transport="gloo")   # shared, started once
    async def test_kill(repaired_cluster):
        cluster = await repaired_cluster(decode=2)    # shared; what died is started afterwards
    async def test_odd(own_cluster):
        cluster = await own_cluster(decode=2, restart=False)           # this test's alone

All take the fields of ClusterConfig, and `programs`, `extra_args`, `env` and `say` of
LocalCluster. The tests of this folder run on one event loop, which the shared clusters need, and
after all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from baton.config import ClusterConfig, EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore
from baton.local.supervisor import ChildProcess
from tests.cluster.forkserver import ForkServer
from tests.cluster.oracle import Oracle

HERE = Path(__file__).parent
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=64 << 20)  # float32: tokens can be compared
START_TIMEOUT_S = 90.0

ClusterFactory = Callable[..., Awaitable[LocalCluster]]
RUNNING: list[LocalCluster] = []
USED_PORTS: set[int] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cluster tests share one loop and run last, so that their clusters outlive no other tests."""
    for item in items:
        if HERE in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
    items.sort(key=lambda item: HERE in item.path.parents)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failed test shows what each process of the running clusters wrote."""
    report = yield
    if report.failed and HERE in item.path.parents:
        for cluster in RUNNING:
            for name, process in cluster.processes.items():
                title = f"{name} of {cluster.address} (pid {process.pid}, {process.exit_status})"
                report.sections.append((title, "\n".join(process.log)))
    return report


async def start(
    *,
    programs: dict[str, list[str]] | None = None,
    extra_args: dict[str, list[str]] | None = None,
    env: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **config: Any,
) -> LocalCluster:
    """A started cluster; it must be given to `stop`."""
    settings = ClusterConfig(**{"engine": ENGINE, "port": 0, "log_level": "info", **config})
    cluster = LocalCluster(
        settings,
        programs=programs or {},
        extra_args=extra_args or {},
        env=env or {},
        say=say,
        start_timeout_s=START_TIMEOUT_S,
    )
    RUNNING.append(cluster)
    try:
        await cluster.__aenter__()
    except BaseException:
        RUNNING.remove(cluster)
        raise
    for address in (*cluster.addresses, cluster.etcd_address):
        USED_PORTS.add(int(address.rpartition(":")[2]))
    for record in cluster.membership.records.values():
        USED_PORTS.add(int(record.address.rpartition(":")[2]))
    return cluster


async def stop(cluster: LocalCluster) -> None:
    """Stops a cluster; its processes must have ended by themselves or by a test's signal."""
    await cluster.stop()
    RUNNING.remove(cluster)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last cluster: no process, no port, no shared memory."""
    shared_memory = own_shared_memory()
    yield
    children = psutil.Process().children(recursive=True)
    assert not [(child.pid, child.cmdline()) for child in children]
    for port in USED_PORTS:
        ports.check_free("127.0.0.1", port)
    assert own_shared_memory() <= shared_memory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fork_server(nothing_left_behind: None) -> AsyncIterator[None]:
    """From now on the processes of clusters are forks of one that has imported torch."""
    async with ForkServer() as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChildProcess, "spawn", server.spawn)
            yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_factory(fork_server: None) -> AsyncIterator[ClusterFactory]:
    """Starts a cluster the first time its settings are asked for. Tests leave it as it was."""
    started: dict[str, LocalCluster] = {}

    async def get(**config: Any) -> LocalCluster:
        key = repr(sorted(config.items()))
        if key not in started:
            started[key] = await start(**config)
        return started[key]

    yield get
    for cluster in started.values():
        await stop(cluster)


@pytest_asyncio.fixture(loop_scope="session")
async def repaired_cluster(cluster_factory: ClusterFactory) -> AsyncIterator[ClusterFactory]:
    """Shared clusters whose processes a test may kill; afterwards they are started again.

    Nothing is restarted while the test runs, unless it asks for `restart=True`.
    """
    used: list[LocalCluster] = []

    async def get(**config: Any) -> LocalCluster:
        used.append(await cluster_factory(**{"restart": False, **config}))
        return used[-1]

    yield get
    for cluster in used:
        for name, process in cluster.processes.items():
            if process.exit_status is not None and not cluster.config.restart:
                await cluster.start_again(name)
        await cluster.wait_ready()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def traces(nothing_left_behind: None) -> AsyncIterator[OtlpReceiver]:
    """Where clusters started with `otlp=traces.address` send their spans."""
    async with OtlpReceiver(SpanStore()) as receiver:
        yield receiver


@pytest_asyncio.fixture(loop_scope="session")
async def own_cluster(fork_server: None) -> AsyncIterator[ClusterFactory]:
    """Starts clusters that one test may kill as it likes; they end with it."""
    started: list[LocalCluster] = []

    async def get(**config: Any) -> LocalCluster:
        started.append(await start(**config))
        return started[-1]

    yield get
    for cluster in started:
        await stop(cluster)


def own_shared_memory() -> set[str]:
    """Files of ours in /dev/shm that did not exist before this session of tests."""
    began = psutil.Process().create_time()
    names = set()
    for path in Path("/dev/shm").iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # gone since it was listed
            continue
        if stat.st_uid == os.getuid() and began <= stat.st_ctime <= time.time():
            names.add(path.name)
    return names


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The demo model in this process, float32; what it generates is kept for the session."""
    with Oracle() as process:
        yield process
