"""`baton bench serve` against a real cluster: what it reports is what the servers counted."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.config import EngineConfig
from baton.local import ports
from baton.local.cluster import LocalCluster
from tests.cluster.command import baton, running
from tests.cluster.conftest import USED_PORTS, ClusterFactory
from tests.waiting import eventually

# Steps of 2 ms and 40,000 prompt tokens a second: the time is the load's, not the model's.
ENGINE = EngineConfig(simulate="40000,2", kv_blocks=2048)
HTTP_PORT = ports.free()
WARM_UP, WARM_UP_TOKENS = 4, 16


async def fast_cluster(cluster_factory: ClusterFactory) -> LocalCluster:
    """The cluster that these tests share."""
    USED_PORTS.add(HTTP_PORT)
    return await cluster_factory(engine=ENGINE, http_port=HTTP_PORT)


async def counts(cluster: LocalCluster) -> dict[str, Any]:
    """What the router has counted since it began."""
    async with AsyncClient(cluster.address) as client:
        counted: dict[str, Any] = (await client.status())["router"]["counts"]
        return {**counted, "ok": counted["ended"].get("OK", 0)}


async def test_both_ways_count_as_the_router_does(
    cluster_factory: ClusterFactory, tmp_path: Path
) -> None:
    """The gateway against gRPC in turns: each request, prompt token and output token is there."""
    cluster = await fast_cluster(cluster_factory)
    before = await counts(cluster)
    done = await baton(
        *("bench", "serve", "--target", f"http://{cluster.http_addresses[0]}"),
        *("--against", cluster.address, "--rate", "10", "--duration", "4", "--blocks", "2"),
        *("--prompt-tokens", "40-80", "--output-tokens", "20", "--shared-prefix", "64"),
        *("--slo", "ttft=60,tpot=60", "--output", str(tmp_path), "--json"),
        timeout_s=150,
    )
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    http, grpc = (server["figures"] for server in report["stages"][0]["servers"])
    for figures in (http, grpc):
        assert figures["requests"]["ok"] == figures["requests"]["sent"] > 15
        assert figures["output_tokens"] == 20 * figures["requests"]["ok"]
        assert figures["input_tokens"] > 104 * figures["requests"]["ok"] - 1
        assert (figures["short_outputs"], figures["miscounted"]) == (0, 0)
        assert figures["goodput"]["share"] == 1.0
        assert figures["prefix_cache"]["share"] > 0.2  # the shared prefix, after its first time
        for latency in ("ttft_s", "tpot_s", "e2e_s"):
            assert 0 < figures[latency]["p50"] <= figures[latency]["p99"]
        assert figures["tpot_s"]["p50"] > 0.0015  # a step takes 2 ms
    assert http["requests"]["sent"] == grpc["requests"]["sent"]
    assert http["input_tokens"] == grpc["input_tokens"]
    phases = grpc["phases"]
    assert phases["server_ttft_s"]["mean"] < grpc["ttft_s"]["mean"]  # the caller sees it later
    assert phases["outside_s"]["min"] > -0.001

    after = await counts(cluster)
    measured = http["requests"]["ok"] + grpc["requests"]["ok"]
    outputs = http["output_tokens"] + grpc["output_tokens"]
    assert after["ok"] - before["ok"] == measured + 2 * WARM_UP
    added = after["output_tokens"] - before["output_tokens"]
    assert added == outputs + 2 * WARM_UP * WARM_UP_TOKENS
    asked = after["prompt_tokens"] - before["prompt_tokens"]
    warm_up = asked - http["input_tokens"] - grpc["input_tokens"]
    assert 2 * WARM_UP * 104 <= warm_up <= 2 * WARM_UP * 144


async def test_a_trace_is_replayed_and_ctrl_c_leaves_a_report(
    cluster_factory: ClusterFactory, tmp_path: Path
) -> None:
    """A long trace, ended early: status 130, a report marked partial, nothing goes on."""
    cluster = await fast_cluster(cluster_factory)
    row = {"input_length": 2000, "output_length": 400, "hash_ids": [1, 2, 3, 4]}
    rows = (json.dumps({"timestamp": 1000 * i, **row}) + "\n" for i in range(2000))
    (tmp_path / "trace.jsonl").write_text("".join(rows))
    command = (
        *("bench", "serve", "--target", cluster.address, "--output", str(tmp_path / "out")),
        *("--trace", str(tmp_path / "trace.jsonl"), "--rate-scale", "8", "--length-scale", "0.1"),
    )
    async with running(*command, env={}) as bench:
        await bench.says(" done, ", timeout_s=90)
        assert await bench.end(signal.SIGINT) == 130
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["partial"] and report["workload"]["trace"] == "trace.jsonl"
    figures = report["stages"][0]["servers"][0]["figures"]
    assert 0 < figures["requests"]["ok"] < 2000
    assert figures["input_tokens"] == 200 * figures["requests"]["ok"]
    assert figures["output_tokens"] == 40 * figures["requests"]["ok"]
    assert figures["prefix_cache"]["share"] > 0.5  # all rows have the same ids
    async with AsyncClient(cluster.address) as client:
        await eventually(
            client.status, lambda status: not status["router"]["running"], "requests still run", 30
        )
