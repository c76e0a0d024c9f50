"""Clusters of real processes for these tests, and a check that nothing of them is left.

    async def test_it(clusters):
        cluster, client = await clusters(prefill=2, transport="gloo")  # shared: started once
        cluster, client = await clusters(engine=SIMULATED)  # computes nothing: for timing
        cluster, client = await clusters(alone=True, drain_s=60.0)  # this test's, stopped after it

The settings are fields of ClusterConfig, and `programs`, `extra_args` and `env` of LocalCluster.
Processes that a test killed stay dead while it runs (unless it asks for `restart=True`) and are
started again after it; then no worker of a shared cluster may hold a block. All tests of this
folder run on one event loop, which the clusters need, and after all others.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.client import AsyncClient
from baton.config import ClusterConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore
from tests.cluster.oracle import ENGINE, SIMULATED, Oracle, all_blocks_free
from tests.preloaded import PROGRAMS, Preloaded
from tests.processes import left_behind, own_shared_memory
from tests.waiting import WAIT_S

HERE = Path(__file__).parent
MOST_SHARED = 3  # clusters that run at a time; even an idle one takes its share of a core

Clusters = Callable[..., Awaitable[tuple[LocalCluster, AsyncClient]]]
RUNNING: list[LocalCluster] = []


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


async def start(**settings: Any) -> LocalCluster:
    """A started cluster; it must be given to `stop`."""
    others = {
        key: settings.pop(key) for key in ("programs", "extra_args", "env") if key in settings
    }
    if settings.get("routers", 1) == 1:
        settings.setdefault("http_port", ports.free())
    config = ClusterConfig(**{"engine": ENGINE, "port": 0, "log_level": "info", **settings})
    cluster = LocalCluster(config, say=lambda text: None, start_timeout_s=WAIT_S, **others)
    RUNNING.append(cluster)
    try:
        await cluster.__aenter__()
    except BaseException:
        RUNNING.remove(cluster)
        for process in cluster.processes.values():
            print(f"--- {process.name}", process.log_tail(60), sep="\n")
        raise
    return cluster


async def stop(cluster: LocalCluster) -> None:
    """Stops a cluster; its processes must have ended by themselves or by a test's signal."""
    await cluster.stop()
    RUNNING.remove(cluster)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last cluster: no process, shared memory, temporary file or thread of ours."""
    temporary = tmp_path_factory.mktemp("temporary")
    shared_memory = own_shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        yield
    assert not left_behind(temporary, shared_memory)
    assert not [one.name for one in threading.enumerate() if one.name.startswith(("kv-", "engine"))]


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """What the SDK waits for by default, ten seconds for a status, is for machines that are not
    busy."""
    with pytest.MonkeyPatch.context() as patch:
        for method in vars(AsyncClient).values():
            if (defaults := getattr(method, "__kwdefaults__", None)) and defaults.get("timeout"):
                patch.setitem(defaults, "timeout", WAIT_S)
        assert AsyncClient.status.__kwdefaults__ == {"timeout": WAIT_S}
        yield


@pytest.fixture(scope="session")
def forked(nothing_left_behind: None) -> Iterator[None]:
    """The processes of clusters, and commands that tests run, are forks of one with torch."""
    with Preloaded(PROGRAMS) as preloaded:
        preloaded.server()  # now: tests count the processes that they leave
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receiver(nothing_left_behind: None) -> AsyncIterator[OtlpReceiver]:
    """Where the spans of all clusters arrive."""
    async with OtlpReceiver(SpanStore(max_traces=10_000, max_spans=1_000_000)) as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(forked: None, receiver: OtlpReceiver) -> AsyncIterator[dict[str, LocalCluster]]:
    """Clusters that several tests use, by their settings, the one used last at the end."""
    started: dict[str, LocalCluster] = {}
    yield started
    for cluster in started.values():
        await stop(cluster)


@pytest_asyncio.fixture(loop_scope="session")
async def clusters(
    shared: dict[str, LocalCluster], receiver: OtlpReceiver
) -> AsyncIterator[Clusters]:
    """Starts clusters, or gives those that were started with the same settings before."""
    used: list[LocalCluster] = []
    async with AsyncExitStack() as stack:

        async def get(*, alone: bool = False, **settings: Any) -> tuple[LocalCluster, AsyncClient]:
            settings = {"restart": False, "otlp": receiver.address, **settings}
            if alone:
                cluster = await start(**settings)
                stack.push_async_callback(stop, cluster)
            else:
                cluster = await share(shared, settings, used)
                used.append(cluster)
            ca_file = cluster.certs and cluster.certs / "ca.pem"
            client = AsyncClient(cluster.targets, ca_file=ca_file)
            return cluster, await stack.enter_async_context(client)

        yield get
    for cluster in used:
        for name, process in cluster.processes.items():
            if not (process.running or cluster.config.restart):
                await process.wait()
                await cluster.start_again(name)
        await cluster.wait_ready()
        async with AsyncClient(cluster.targets) as client:
            await all_blocks_free(client)


async def share(
    shared: dict[str, LocalCluster], settings: dict[str, Any], used: Sequence[LocalCluster]
) -> LocalCluster:
    """The cluster of these settings; where it is a new one, others that are not used may end."""
    key = repr(sorted(settings.items()))
    cluster = shared.pop(key, None)
    if cluster is None:
        for old in [old for old in shared if shared[old] not in used][: 1 - MOST_SHARED]:
            await stop(shared.pop(old))
        cluster = await start(**settings)
    shared[key] = cluster
    return cluster


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The demo model in this process, float32; what it generates is kept for the session."""
    with Oracle(ENGINE) as process:
        yield process


@pytest.fixture(scope="session")
def simulated() -> Iterator[Oracle]:
    """The same for clusters of simulated engines: their tokens do not depend on their speed."""
    with Oracle(SIMULATED, simulate="1e9,0") as process:
        yield process
