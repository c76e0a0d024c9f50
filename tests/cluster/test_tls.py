"""A cluster whose ports take TLS alone: callers are served, KV moves, strangers are told why.

And it has tenants: what operators ask needs their key, and keys change without a restart.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from baton.config import RouterLimits
from baton.errors import Unavailable
from baton.local import certs, ports
from baton.net import rpc
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.conftest import Clusters
from tests.cluster.oracle import SIMULATED, Case, Oracle, check
from tests.processes import baton
from tests.waiting import WAIT_S, eventually


async def test_a_cluster_with_tls_and_tenants(
    clusters: Clusters, simulated: Oracle, tmp_path: Path
) -> None:
    file, admin = tmp_path / "tenants.toml", tmp_path / "admin.key"
    file.write_text("[default]\n[admin]\nkey_files = ['admin.key']")
    admin.write_text("old")
    cluster, client = await clusters(
        engine=SIMULATED, alone=True, tls=True, metrics_port=0, http_port=ports.free(),
        transport="gloo", limits=RouterLimits(tenants_file=file),
    )  # fmt: skip
    assert cluster.certs is not None
    ca, target = str(cluster.certs / "ca.pem"), ("--target", cluster.address)
    done = await check(client, simulated, Case(tuple(range(200)), "greedy", 24))
    assert done.route.transport and done.timing.transfer_bytes, "no KV was handed over"
    assert done.route.prefill is None, "names of workers are for operators"
    assert await cluster.restart("prefill-0") == 0
    done = await check(client, simulated, Case(tuple(range(100, 300)), "greedy", 24))
    assert done.route.transport and done.timing.transfer_bytes, "no KV was handed over"

    context = ssl.create_default_context(cafile=ca)
    async with httpx.AsyncClient(verify=context) as http:
        answer = await http.get(f"https://{cluster.http_addresses[0]}/v1/models")
        assert answer.json()["data"][0]["id"] == "demo"
        page = await http.get(f"https://{cluster.metrics['router']}/metrics")
        assert "baton_requests_ended_total" in page.text

        page = await http.get(f"https://{cluster.http_addresses[0]}/metrics")
        assert page.status_code == 401 and "is for operators" in page.text

    load = ("bench", "serve", "--count", "2", "--concurrency", "1", "--prompt-tokens", "9")
    for command in (
        ("generate", "def", *target), (*load, *target),
        (*load, "--target", f"https://{cluster.http_addresses[0]}"),
    ):  # fmt: skip
        ended = await baton(*command, "--tls-ca", ca)
        assert ended.status == 0, ended.err
    asked, key = ("status", *target, "--tls-ca", ca), ("--api-key-file", str(admin))
    ended = await baton(*asked)
    assert ended.status == 1 and "send a key of [admin] in the tenants file" in ended.err
    for command in (("status",), ("doctor",), ("explain", "def"), ("top", "--once")):
        ended = await baton(*command, *target, "--tls-ca", ca, *key)
        assert ended.status == 0, ended.err
    old = tmp_path / "old.key"
    old.write_text("old")
    admin.write_text("new")

    async def answers() -> tuple[int, int]:
        ours = await baton(*asked, *key)
        return ours.status, (await baton(*asked, "--api-key-file", str(old))).status

    await eventually(answers, lambda found: found == (0, 1), "the new key is not taken up", 30.0)
    ended = await baton("status", *target)
    assert ended.status == 1 and "uses TLS: name its CA with --tls-ca" in ended.err
    ended = await baton("status", "--target", cluster.http_addresses[0], "--tls-ca", ca)
    assert ended.status == 1 and "speaks HTTP" in ended.err
    certs.write(tmp_path, [])
    ended = await baton("status", *target, "--tls-ca", str(tmp_path / "ca.pem"))
    assert ended.status == 1 and "--tls-ca did not sign" in ended.err
    for record in cluster.membership.records.values():
        async with rpc.channel(record.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(Unavailable), rpc.translated():
                await stub.Drain(worker_pb2.DrainRequest(), timeout=WAIT_S)
    for name, verdict in (
        ("decode-0", "no pair of workers is ready"), ("prefill-0", "worker is ready (")
    ):  # fmt: skip
        cluster.kill(name)
        await eventually(
            lambda: baton("explain", "def", *target, "--tls-ca", ca, *key),
            lambda ended, verdict=verdict: verdict in ended.out, "the router's reason", WAIT_S,
        )  # fmt: skip
