"""The command line as users meet it: what it prints, what it exits with, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from baton.cli import doctor as doctor_command
from baton.client import AsyncClient
from baton.local import ports
from baton.local.cluster import LocalCluster
from tests.cluster.command import as_json, baton, running
from tests.cluster.conftest import Clusters
from tests.cluster.oracle import SIMULATED
from tests.waiting import eventually

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop("
SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
WORKER_KEYS = {
    "role", "incarnation", "address", "pid", "device", "state", "reason", "queue_tokens", "running",
    "blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined",
}  # fmt: skip
COMPLETION = {
    "text": str, "token_ids": list, "finish_reason": str, "usage": dict, "timing": dict,
    "route": dict, "trace_id": str,
}  # fmt: skip
PARTS = {
    "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"},
    "timing": {"queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "transfer_ms", "transfer_bytes"},
    "route": {"prefill", "decode", "transport", "attempts"},
}  # fmt: skip
WARM_UP, WARM_UP_TOKENS = 4, 16


async def generate(*argv: str) -> dict[str, Any]:
    """What `generate --json` prints; its keys are those that are documented."""
    done = await as_json("generate", *argv)
    assert {key: type(value) for key, value in done.items()} == COMPLETION
    assert {part: set(done[part]) for part in PARTS} == PARTS
    return done


async def test_generate_equals_one_process_and_status_has_its_keys(clusters: Clusters) -> None:
    """Text, tokens, route, stop string; status; what is refused is one line and status 1."""
    cluster, _ = await clusters()
    target = ("--target", cluster.address)
    asked = (PROMPT * 2, "--max-tokens", "24", "--ignore-eos", *SAMPLED)
    here = await generate(*asked, "--local", "--dtype", "float32", "--threads", "1")
    there = await generate(*asked, *target)
    for key in ("token_ids", "text", "finish_reason"):
        assert there[key] == here[key]
    assert there["usage"]["prompt_tokens"] == here["usage"]["prompt_tokens"] > 16
    assert there["usage"]["completion_tokens"] == len(there["token_ids"])
    route = there["route"]
    assert {route["prefill"], route["decode"]} == set(cluster.membership.records)
    assert (route["transport"], route["attempts"]) == ("shm", 1)
    assert there["timing"]["transfer_bytes"] > 0
    streamed = await baton("generate", *asked, *target)
    assert (streamed.status, streamed.out, streamed.err) == (0, there["text"] + "\n", "")
    stop = there["text"][len(there["text"]) // 2 :][:3]
    stopped = await generate(*asked, *target, "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == there["text"][: there["text"].index(stop)]
    short = await generate("--token-ids", "5,6,7", *target, "--max-tokens", "2")
    assert short["route"]["prefill"] is None
    assert short["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}

    status = await as_json("status", *target)
    assert set(status) == {"router", "workers", "pairs"}
    assert status["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    pids = {process.pid for process in cluster.processes.values()}
    for worker in status["workers"]:
        assert set(worker) == WORKER_KEYS
        assert worker["state"] == "READY" and worker["pid"] in pids
        kinds = ("blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined")
        assert sum(worker[kind] for kind in kinds) == worker["blocks_total"] > 0
    (pair,) = status["pairs"]
    assert set(pair) == {"prefill", "decode", "transport", "state"}
    assert [pair["prefill"], pair["decode"]] == [w["incarnation"] for w in status["workers"]]
    table = await baton("status", *target)
    for worker in status["workers"]:
        assert re.search(rf"{worker['role']} +{worker['incarnation']} .* READY ", table.out)

    for argv, message in (
        (("--temperature", "-1"), "temperature must be between 0 and 100, not -1.0"),
        (("--max-tokens", "2000", "--ignore-eos", "--timeout", "0.5"), "within --timeout 0.5 s"),
    ):
        refused = await baton("generate", "x", *argv, *target)
        assert refused.status == 1
        assert re.fullmatch(r"baton: error: [^\n]*\n", refused.err) and message in refused.err


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_a_pair_uses_the_transport_the_doctor_reports(
    clusters: Clusters, transport: str
) -> None:
    """And the doctor reports the workers' hardware: on a CPU torch's version and no GPU."""
    cluster, _ = await clusters(**({"transport": "gloo"} if transport == "gloo" else {}))
    used = await generate("x = [" * 40, "--target", cluster.address, "--max-tokens", "2")
    assert used["route"]["transport"] == transport
    closed = f"127.0.0.1:{ports.free()}"
    report = await as_json("doctor", "--target", f"{closed},{cluster.address}")
    (pair,) = report["pairs"]
    assert (pair["transport"], pair["in_use"], pair["problems"]) == (transport, transport, [])
    assert bool(pair["not_possible"]) == (transport == "gloo")
    (all_well,) = report["cluster"]
    assert all_well["level"] == "ok"
    assert report["router"]["answers"] and report["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in report["workers"]] == ["prefill", "decode"]
    for worker in report["workers"]:
        assert worker["device"] == "cpu" and worker["gpu"] is None
        assert worker["versions"]["torch"] == torch.__version__
        assert worker["transports"] == (["gloo"] if transport == "gloo" else ["shm", "gloo"])
    shown = doctor_command.render(report)  # as it is printed without --json
    assert "this machine" in shown and report["workers"][0]["incarnation"] in shown
    assert "every worker is READY" in shown


async def counts(cluster: LocalCluster) -> dict[str, Any]:
    """What the router has counted since it began."""
    async with AsyncClient(cluster.address) as client:
        counted: dict[str, Any] = (await client.status())["router"]["counts"]
        return {**counted, "ok": counted["ended"].get("OK", 0)}


async def test_figures_of_a_benchmark_agree_with_the_routers_counts(
    clusters: Clusters, tmp_path: Path
) -> None:
    """The gateway against gRPC in turns: each request, prompt token and output token is there."""
    cluster, _ = await clusters(engine=SIMULATED)
    before = await counts(cluster)
    done = await baton(
        *("bench", "serve", "--target", f"http://{cluster.http_addresses[0]}"),
        *("--against", cluster.address, "--rate", "20", "--duration", "2", "--blocks", "2"),
        *("--prompt-tokens", "40-80", "--output-tokens", "20", "--shared-prefix", "64"),
        *("--slo", "ttft=60,tpot=60", "--output", str(tmp_path), "--json"),
        timeout_s=100,
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
        assert figures["tpot_s"]["p50"] > 0.003  # a step takes 4 ms
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
    clusters: Clusters, tmp_path: Path
) -> None:
    """A long trace, ended early: status 130, a report marked partial, nothing goes on."""
    cluster, client = await clusters(engine=SIMULATED)
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
    idle = lambda status: not status["router"]["running"]  # noqa: E731
    await eventually(client.status, idle, "requests still run", 30)


@pytest.mark.timeout(240)
async def test_up_from_ready_to_stopped(tmp_path: Path) -> None:
    """Traces, `top` and counts of requests; what is killed is restarted; nothing is left."""
    env = {"TMPDIR": str(tmp_path)}
    argv = ("up", "--port", "0", "--dtype", "float32", "--trace", "--drain-timeout", "1")
    async with running(*argv, env=env) as up:
        address = (await up.says("ready: ", 120.0)).split()[1].rstrip(",")
        target = ("--target", address)
        await up.says(f"baton trace {' '.join(target)}")
        process = psutil.Process(up.process.pid)
        family = set(process.children(recursive=True))
        assert len(family) == 4  # etcd, router, two workers
        first = await check_traces(target)
        await up.says("kv.transfer")  # the request's trace is drawn

        (victim,) = (line for line in up.lines if line.startswith("prefill-0 ready in "))
        psutil.Process(int(re.findall(r"pid (\d+)", victim)[0])).kill()
        await up.says("prefill-0 was killed by SIGKILL; starting it again in 0.5 s")
        await up.says("prefill-0 ready in ")
        family |= set(process.children(recursive=True))
        again = await generate(PROMPT * 2, *target, "--max-tokens", "4")
        assert again["token_ids"] == first["token_ids"]
        next(one for one in process.children() if one.name() == "etcd").kill()
        await up.says("etcd ended with status -9; starting it again")

        async def is_back() -> bool:
            status = await as_json("status", *target)
            names = [child.name() for child in process.children()]
            return bool(status["router"]["registry_connected"]) and "etcd" in names

        await eventually(is_back, bool, "etcd is not back", 20.0)
        family |= set(process.children(recursive=True))
        assert await up.end(signal.SIGTERM) == 0
        assert "stopping…" in up.lines and up.lines[-1] == "stopped"
    assert not [one for one in family if one.is_running()]
    for port in re.findall(r"127\.0\.0\.1:(\d+)", "\n".join(up.lines)):
        ports.check_free("127.0.0.1", int(port))
    assert not os.listdir(tmp_path)  # noqa: PTH208 - nothing in it may wait
    down = await baton("top", "--once", "--interval", "0.2", *target)
    assert (down.status, down.out) == (1, "")
    assert f"no router answers: {address}: " in down.err


async def check_traces(target: tuple[str, ...]) -> dict[str, Any]:
    """`trace`, `top` and `status` after a request, which is returned, and a refusal."""
    # Longer than what decode computes by itself, so that there is a transfer to see.
    first = await generate(PROMPT * 2, *target, "--max-tokens", "4")
    refused = await baton("generate", "--token-ids", "99999999", *target)
    assert refused.status == 1

    trace_id = first["trace_id"]
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
    frame = await baton("top", "--once", "--interval", "0.2", *target)
    assert (frame.status, frame.err) == (0, "")
    for row in (r"prefill +prefill-0-[0-9a-f]{8} +READY ", r"decode +decode-0-[0-9a-f]{8} +READY ",
                r"prefill-0-[0-9a-f]{8}  decode-0-[0-9a-f]{8}  shm +OPEN "):  # fmt: skip
        assert re.search(f"^{row}", frame.out, re.M), frame.out
    assert "refused INVALID_ARGUMENT: token id 99999999" in frame.out
    counted = (await as_json("status", *target))["router"]["counts"]
    assert counted["ended"] == {"OK": 1, "INVALID_ARGUMENT": 1}
    assert (counted["refused"], counted["output_tokens"]) == (1, 4)
    return first


async def test_the_demo_shows_route_and_trace() -> None:
    shown = await baton("demo", timeout_s=90.0)
    assert shown.status == 0, shown.err
    route = (
        r"\n  prefill by (prefill-0-\w{8}), decode by (decode-0-\w{8})\n  KV cache moved over shm: "
    )
    assert re.search(route, shown.out), shown.out
    for span in (
        "client  generate", "router  router.generate", "decode  decode.run",
        "prefill  prefill.chunk", "prefill  kv.transfer",
    ):  # fmt: skip
        assert re.search(rf"{re.escape(span)} +\d+\.\d +\d+\.\d ms \|", shown.out)
    assert "stopped; the whole demo took" in shown.out.splitlines()[-1]
