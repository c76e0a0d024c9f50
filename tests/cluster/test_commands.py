"""`baton doctor`, `bench serve`, `trace` and `top` against a running cluster."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.cli import doctor as doctor_command
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


async def test_http_and_grpc_figures_agree_with_the_routers_counts(
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


async def doctor(address: str) -> dict[str, Any]:
    """The object of `doctor --json`."""
    done = await baton("doctor", "--json", "--target", address)
    assert (done.status, done.err) == (0, "")
    report: dict[str, Any] = json.loads(done.out)
    return report


@pytest.mark.parametrize(("asked", "taken"), [("auto", "shm"), ("gloo", "gloo")])
async def test_a_pair_uses_the_transport_the_doctor_reports(
    cluster_factory: ClusterFactory, asked: str, taken: str
) -> None:
    settings = {} if asked == "auto" else {"transport": asked}
    cluster = await cluster_factory(**settings)
    before = await doctor(cluster.address)
    (pair,) = before["pairs"]
    assert pair["transport"] == taken and pair["problems"] == []
    generated = await baton(
        "generate", "x = [" * 40, "--target", cluster.address, "--max-tokens", "2", "--json"
    )
    assert json.loads(generated.out)["route"]["transport"] == taken
    after = await doctor(cluster.address)
    assert after["pairs"] == [{**pair, "in_use": taken}]
    assert bool(pair["not_possible"]) == (taken == "gloo")
    (all_well,) = after["cluster"]
    assert all_well["level"] == "ok"


async def test_the_doctor_reports_the_workers_hardware(cluster_factory: ClusterFactory) -> None:
    """On a CPU: torch's version and no GPU, for people as a table."""
    cluster = await cluster_factory()
    report = await doctor(f"127.0.0.1:{ports.free()},{cluster.address}")  # the first is closed
    assert report["router"]["answers"] and report["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in report["workers"]] == ["prefill", "decode"]
    for worker in report["workers"]:
        assert worker["device"] == "cpu" and worker["gpu"] is None
        assert worker["versions"]["torch"] == torch.__version__
        assert worker["transports"] == ["shm", "gloo"]
    shown = doctor_command.render(report)  # as it is printed without --json
    assert "this machine" in shown and report["workers"][0]["incarnation"] in shown
    assert "every worker is READY" in shown


PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 12
STARTED = re.compile(r"ready: (\S+), etcd")


@pytest.mark.timeout(300)
async def test_a_request_can_be_traced_afterwards(tmp_path: Path) -> None:
    """`baton up` keeps traces by default, and any router knows where."""
    env = {"TMPDIR": str(tmp_path)}
    async with running("up", "--port", "0", "--drain-timeout", "1", env=env) as up:
        match = STARTED.match(await up.says("ready: ", 120.0))
        assert match
        target = ("--target", match[1])
        await up.says(f"baton trace --target {match[1]}")
        empty = await baton("trace", *target)
        assert (empty.status, empty.out) == (1, "")
        assert "keeps no trace of a request yet" in empty.err

        done = await baton("generate", PROMPT, "--max-tokens", "8", "--json", *target)
        trace_id = json.loads(done.out)["trace_id"]
        drawn = await baton("trace", trace_id, *target)
        assert (drawn.status, drawn.err) == (0, "")
        assert drawn.out.startswith(f"trace {trace_id}: ")
        for span in (
            "router  router.generate", "router  router.admit", "router  router.place",
            "decode  decode.reserve", "prefill  prefill.chunk", "prefill  kv.transfer",
            "decode  decode.run",
        ):  # fmt: skip
            assert re.search(rf"─ {span}|^{span}", drawn.out, re.M), (span, drawn.out)
        share = re.search(r"spans account for ([\d.]+)% of the request's", drawn.out)
        assert share and 80 < float(share[1]) <= 100

        refused = await baton("generate", "--token-ids", "99999999", *target)
        assert refused.status == 1
        listed = json.loads((await baton("trace", "--json", *target)).out)["traces"]
        assert [(one["trace_id"] == trace_id, one["error"] is None) for one in listed] in (
            [(False, False), (True, True)],
            [(True, True)],  # the refused one's span is still on its way
        )
        last = await baton("trace", "--slowest", "1", *target)
        assert trace_id in last.out

        unknown = await baton("trace", "2" * 32, *target)
        assert (unknown.status, unknown.out) == (1, "")
        assert "has no trace " + "2" * 32 in unknown.err

        frame = await baton("top", "--once", "--interval", "0.2", *target)
        assert (frame.status, frame.err) == (0, "")
        for role in ("prefill", "decode"):
            assert re.search(rf"^{role} +{role}-0-[0-9a-f]{{8}} +READY ", frame.out, re.M), (
                frame.out
            )
        assert re.search(
            r"^prefill-0-[0-9a-f]{8}  decode-0-[0-9a-f]{8}  shm +OPEN ", frame.out, re.M
        ), frame.out
        assert "refused INVALID_ARGUMENT: token id 99999999" in frame.out
        counts = json.loads((await baton("status", "--json", *target)).out)["router"]["counts"]
        assert counts["ended"] == {"OK": 1, "INVALID_ARGUMENT": 1}
        assert (counts["refused"], counts["output_tokens"]) == (1, 8)
        assert await up.end(signal.SIGTERM) == 0
    down = await baton("top", "--once", "--interval", "0.2", *target)
    assert (down.status, down.out) == (1, "")
    assert f"no router answers: {match[1]}: " in down.err
