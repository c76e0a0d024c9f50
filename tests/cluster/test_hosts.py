"""Workers whose ranks are on several hosts, which addresses of the loopback device stand for."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator

from baton.client import AsyncClient
from baton.local.cluster import LocalCluster
from tests.cluster.conftest import Clusters
from tests.cluster.oracle import Oracle, Streams, all_blocks_free, check
from tests.preloaded import ranks_of
from tests.processes import Running, baton_running
from tests.waiting import eventually

HOSTS = ("127.0.0.2", "127.0.0.3")


@contextlib.asynccontextmanager
async def worker(cluster: LocalCluster, role: str) -> AsyncIterator[list[Running]]:
    """One of two ranks on two hosts; when it is entered, it serves."""
    assert cluster.certs is not None
    options = [
        "--etcd", cluster.etcd_address, "--name", f"several-{role}", "--model", "demo",
        "--dtype", "float32", "--kv-cache", "32MiB", "--tp", "2", "--tp-backend", "gloo",
        "--threads", "1", "--nnodes", "2", "--tls-client-ca", str(cluster.certs / "ca.pem"),
        "--tls-cert", str(cluster.certs / "worker.pem"),
        "--tls-key", str(cluster.certs / "worker-key.pem"),
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for node, host in enumerate(HOSTS):
            command = [f"{role}-worker", "--host", host, "--node-rank", str(node), *options]
            nodes.append(await stack.enter_async_context(baton_running(*command, env={})))
        await nodes[0].says("ready at")
        yield nodes


async def workers_of(client: AsyncClient) -> dict[str, str]:
    """Incarnations of the workers that are READY, by name."""
    found = (await client.status())["workers"]
    ready = (w["incarnation"] for w in found if w["state"] == "READY")
    return {incarnation.rpartition("-")[0]: incarnation for incarnation in ready}


async def test_ranks_on_several_hosts(clusters: Clusters, oracle: Oracle) -> None:
    cluster, client = await clusters(alone=True, tls=True, transport="gloo")
    async with worker(cluster, "prefill") as prefill, worker(cluster, "decode") as decode:
        names = ("prefill-0", "decode-0", "several-prefill", "several-decode")
        found = await eventually(
            lambda: workers_of(client), lambda seen: len(seen) == len(names), "not all are READY"
        )
        pairs = (("several-prefill", "decode-0"), ("prefill-0", "several-decode"),
                 ("several-prefill", "several-decode"))  # fmt: skip
        for start, pair in enumerate(pairs):
            case, chosen = oracle.case(500, 600 * start), [found[name] for name in pair]
            done = await check(client, oracle, case, workers=chosen)
            assert [done.route.prefill, done.route.decode] == chosen
            assert done.timing.transfer_bytes, "no KV was handed over"

        streams = Streams(client, oracle, oracle.mixed(6))
        running_streams = await streams.start()
        (rank,) = ranks_of(decode[1].pid)
        rank.kill()
        await running_streams
        await decode[0].says("a rank of this worker has ended")
        assert await decode[0].process.wait() == 1
        await decode[1].says("begins again")
        await decode[1].says("1 ranks ready")
        assert await decode[1].end(signal.SIGTERM) == 0, "no worker uses it any more"

        streams = Streams(client, oracle, oracle.mixed(6))
        running_streams = await streams.start()
        assert await prefill[1].end(signal.SIGTERM) == 0
        assert await prefill[0].process.wait() == 0, "it has drained"
        await running_streams
        await all_blocks_free(client)
