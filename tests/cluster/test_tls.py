"""A cluster whose ports take TLS alone: callers are served, KV moves, strangers are told why."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from baton import rpc
from baton.errors import Unavailable
from baton.local import certs, ports
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.command import baton
from tests.cluster.conftest import Clusters
from tests.cluster.oracle import SIMULATED, Case, Oracle, check


async def test_a_cluster_with_tls(clusters: Clusters, simulated: Oracle, tmp_path: Path) -> None:
    cluster, client = await clusters(
        engine=SIMULATED, alone=True, tls=True, metrics_port=0, http_port=ports.free()
    )
    assert cluster.certs is not None
    ca, target = str(cluster.certs / "ca.pem"), ("--target", cluster.address)
    done = await check(client, simulated, Case(tuple(range(200)), "greedy", 24))
    assert done.route.prefill and done.timing.transfer_bytes, "no KV was handed over"
    assert await cluster.restart("prefill-0") == 0
    done = await check(client, simulated, Case(tuple(range(100, 300)), "greedy", 24))
    assert done.route.prefill and done.timing.transfer_bytes, "no KV was handed over"

    context = ssl.create_default_context(cafile=ca)
    async with httpx.AsyncClient(verify=context) as http:
        answer = await http.get(f"https://{cluster.http_addresses[0]}/v1/models")
        assert answer.json()["data"][0]["id"] == "demo"
        page = await http.get(f"https://{cluster.metrics['router']}/metrics")
        assert "baton_requests_ended_total" in page.text

    for command in (("status",), ("doctor",), ("explain", "def"), ("generate", "def")):
        ended = await baton(*command, *target, "--tls-ca", ca)
        assert ended.status == 0, ended.err
    ended = await baton("status", *target)
    assert ended.status == 1 and "speaks TLS: name its authority with --tls-ca" in ended.err
    certs.write(tmp_path, [])
    ended = await baton("status", *target, "--tls-ca", str(tmp_path / "ca.pem"))
    assert ended.status == 1 and "--tls-ca does not vouch for" in ended.err
    for record in cluster.membership.records.values():
        async with rpc.channel(record.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(Unavailable), rpc.translated():
                await stub.Drain(worker_pb2.DrainRequest(), timeout=5)
