"""The command line as users meet it: what it prints, what it exits with, what it leaves behind."""

import json
import os
import re
import signal
from typing import Any

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.cli import doctor as doctor_command
from baton.client import AsyncClient
from baton.local import ports
from tests.cluster.oracle import SIMULATED
from tests.processes import as_json, baton, baton_running
from tests.waiting import WAIT_S, eventually

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop("
LIKELIEST = ("--max-tokens", "4", "--temperature", "0")
SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
WARM_UP, WARM_UP_TOKENS = 4, 16


async def test_generate_equals_one_process_and_status_shows_its_workers(clusters):
    """Text, tokens, route; status; a deadline that passes is one line and status 1."""
    cluster, _ = await clusters()
    target = ("--target", cluster.address)
    asked = (PROMPT * 2, "--max-tokens", "24", "--ignore-eos", *SAMPLED)
    local = ("--local", "--dtype", "float32", "--threads", "1")
    here = await as_json("generate", *asked, *local)
    there = await as_json("generate", *asked, *target)
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

    status = await as_json("status", *target)
    assert status["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    pids = {process.pid for process in cluster.processes.values()}
    table = await baton("status", *target)
    for worker in status["workers"]:
        assert worker["state"] == "READY" and worker["pid"] in pids
        kinds = ("blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined")
        assert sum(worker[kind] for kind in kinds) == worker["blocks_total"] > 0
        assert re.search(rf"{worker['role']} +{worker['incarnation']} .* READY ", table.out)
    (pair,) = status["pairs"]
    assert [pair["prefill"], pair["decode"]] == [w["incarnation"] for w in status["workers"]]

    argv = ("--max-tokens", "2000", "--ignore-eos", "--timeout", "0.5")
    refused = await baton("generate", "x", *argv, *target)
    assert refused.status == 1
    assert re.fullmatch(r"baton: error: [^\n]*within --timeout 0\.5 s[^\n]*\n", refused.err)


async def test_health_and_reflection(clusters):
    """They answer on the router and on every worker."""
    cluster, _ = await clusters()
    addresses = [record.address for record in cluster.membership.records.values()]
    ask = reflection_pb2.ServerReflectionRequest(list_services="*")
    for address in [cluster.address, *addresses]:
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = await reflection.ServerReflectionInfo(iter([ask]), timeout=WAIT_S).read()
            names = {service.name for service in listing.list_services_response.service}
            assert "grpc.health.v1.Health" in names
            assert any(name.startswith("baton.v1.") for name in names)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_a_pair_uses_the_transport_the_doctor_reports(clusters, transport):
    """It hands KV over between the pair first, and says how fast that was. And it reports the
    workers' hardware: on a CPU torch's version and no GPU."""
    cluster, _ = await clusters(**({"transport": "gloo"} if transport == "gloo" else {}))
    used = await as_json("generate", "x = [" * 40, "--target", cluster.address, "--max-tokens", "2")
    assert used["route"]["transport"] == transport
    closed = f"127.0.0.1:{ports.free()}"
    report = await as_json("doctor", "--test", "--target", f"{closed},{cluster.address}")
    (pair,) = report["pairs"]
    assert (pair["transport"], pair["in_use"], pair["problems"]) == (transport, transport, [])
    assert bool(pair["not_possible"]) == (transport == "gloo")
    assert pair["gb_per_s"] > 0 and pair["sent_bytes"] > 0
    assert [(one["level"], one["subject"]) for one in report["cluster"]] == [
        ("ok", "cluster"), ("ok", "handoff test"), ("ok", "requests")
    ]  # fmt: skip
    _, tested, requests = report["cluster"]
    assert tested["text"].startswith("1 of 1 pairs") and "handed_over" in requests["text"]
    assert report["router"]["answers"] and report["router"]["state"] == "SERVING"
    assert [worker["role"] for worker in report["workers"]] == ["prefill", "decode"]
    for worker in report["workers"]:
        assert worker["device"] == "cpu" and worker["gpu"] is None
        assert worker["versions"]["torch"] == torch.__version__
        assert worker["transports"] == (["gloo"] if transport == "gloo" else ["shm", "gloo"])
    shown = doctor_command.render(report)  # as it is printed without --json
    assert "this machine" in shown and report["workers"][0]["incarnation"] in shown
    assert "workers are READY" in shown


async def counts(cluster):
    """What the router has counted since it began."""
    async with AsyncClient(cluster.address) as client:
        counted: dict[str, Any] = (await client.status())["router"]["counts"]
        return {**counted, "ok": counted["ended"].get("OK", 0)}


async def test_figures_of_a_benchmark_agree_with_the_routers_counts(clusters, tmp_path):
    """Over HTTP and over gRPC: each request, prompt token and output token is there."""
    cluster, _ = await clusters(engine=SIMULATED)
    before = await counts(cluster)
    both = []
    for target in (f"http://{cluster.http_addresses[0]}", cluster.address):
        done = await baton(
            *("bench", "serve", "--target", target, "--rate", "40", "--duration", "0.75"),
            *("--prompt-tokens", "40-80", "--output-tokens", "20", "--shared-prefix", "64"),
            *("--slo", "ttft=60,tpot=60", "--output", str(tmp_path), "--json", "--seed", "3"),
        )
        assert done.status == 0, done.err
        report = json.loads(done.out)
        assert report == json.loads((tmp_path / "report.json").read_text())
        both.append(report["stages"][0]["figures"])
    http, grpc = both
    for figures in both:
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


async def test_up_from_ready_to_stopped(forked, tmp_path):
    """Traces, `top` and counts of requests; what is killed is restarted; nothing is left."""
    env = {"TMPDIR": str(tmp_path)}
    argv = ("up", "--port", "0", "--dtype", "float32", "--trace", "--drain-timeout", "1")
    async with baton_running(*argv, env=env) as up:
        address = (await up.says("ready: ")).split()[1].rstrip(",")
        target = ("--target", address)
        await up.says(f"baton trace {' '.join(target)}")
        process = psutil.Process(up.process.pid)
        family = set(process.children(recursive=True))
        assert len(family) == 5  # etcd, router, two workers, and what forks the last three
        first = await check_traces(target)
        await up.says("kv.transfer")  # the request's trace is drawn

        (victim,) = (line for line in up.lines if line.startswith("prefill-0 ready in "))
        psutil.Process(int(re.findall(r"pid (\d+)", victim)[0])).kill()
        await up.says("prefill-0 was killed by SIGKILL; starting it again in 0.5 s")
        await up.says("prefill-0 ready in ")
        family |= set(process.children(recursive=True))
        again = await as_json("generate", PROMPT * 2, *target, *LIKELIEST)
        assert again["token_ids"] == first["token_ids"]
        next(one for one in process.children() if one.name() == "etcd").kill()
        await up.says("etcd ended with status -9; starting it again")

        async def is_back():
            status = await as_json("status", *target)
            names = [child.name() for child in process.children()]
            return bool(status["router"]["registry_connected"]) and "etcd" in names

        await eventually(is_back, bool, "etcd is not back")
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


async def test_a_router_of_two_processes_from_ready_to_stopped(clusters):
    """One port, refused to others; SIGHUP; a child is killed, and then the parent."""
    cluster, _ = await clusters(engine=SIMULATED)
    port = ports.free()
    argv = ("router", "--router-processes", "2", "--etcd", cluster.etcd_address)
    argv += ("--port", str(port), "--drain-timeout", "1")
    status = ("status", "--target", f"127.0.0.1:{port}")
    async with baton_running(*argv, env={}) as router:
        await router.says(f"2 processes serve at 127.0.0.1:{port}")
        other = await baton(*argv)
        assert other.status == 1 and "Address already in use" in other.err
        parent = psutil.Process(router.process.pid)
        first = set(parent.children())
        shown = await as_json(*status)
        assert {shown["router"]["pid"], shown["siblings"][0]["pid"]} == {p.pid for p in first}

        router.process.send_signal(signal.SIGHUP)
        await router.says("all processes have been restarted")
        second = set(parent.children())
        assert len(second) == 2 and not first & second
        next(iter(second)).kill()
        await router.says("was killed by SIGKILL; starting it again in 0.5 s")
        await router.says("takes calls at")
        assert (await as_json(*status))["router"]["state"] == "SERVING"
        third = set(parent.children())
        assert await router.end(signal.SIGTERM) == 0
    async with baton_running(*argv, env={}) as router:
        await router.says("2 processes serve at")
        fourth = set(psutil.Process(router.process.pid).children())
        await router.end(signal.SIGKILL)
    gone, alive = psutil.wait_procs(first | second | third | fourth, timeout=WAIT_S)
    assert len(gone) == 7 and not alive
    ports.check_free("127.0.0.1", port)


async def check_traces(target):
    """`trace`, `top` and `status` after a request, which is returned, and a refusal."""
    # Longer than what decode computes by itself, so that there is a transfer to see.
    first = await as_json("generate", PROMPT * 2, *target, *LIKELIEST)
    refused = await baton("generate", "--token-ids", "99999999", *target)
    assert refused.status == 1

    trace_id = first["trace_id"]
    drawn = await baton("trace", trace_id, *target)
    assert (drawn.status, drawn.err) == (0, "")
    assert drawn.out.startswith(f"trace {trace_id}: ")
    share = re.search(r"spans account for ([\d.]+)% of the request's", drawn.out)
    assert share and 80 < float(share[1]) <= 100
    frame = await baton("top", "--once", "--interval", "0.2", *target)
    assert (frame.status, frame.err) == (0, "")
    assert "\x1b" not in frame.out and "quit" not in frame.out  # it may go into a pipe
    for row in (r"prefill +prefill-0-[0-9a-f]{8} +READY ", r"decode +decode-0-[0-9a-f]{8} +READY ",
                r"prefill-0-[0-9a-f]{8}  decode-0-[0-9a-f]{8}  shm +OPEN "):  # fmt: skip
        assert re.search(f"^{row}", frame.out, re.M), frame.out
    assert "refused INVALID_ARGUMENT: token id 99999999" in frame.out
    counted = (await as_json("status", *target))["router"]["counts"]
    assert counted["ended"] == {"OK": 1, "INVALID_ARGUMENT": 1}
    assert (counted["refused"], counted["output_tokens"]) == (1, 4)
    return first


async def test_the_demo_shows_route_and_trace(forked):
    shown = await baton("demo")
    assert shown.status == 0, shown.err
    route = (
        r"\n  prefill by (prefill-0-\w{8}), decode by (decode-0-\w{8})\n  KV cache moved over shm: "
    )
    assert re.search(route, shown.out), shown.out
    for span in (
        "client  generate", "router  text_completion demo", "decode  decode.run",
        "prefill  prefill.chunk", "prefill  kv.transfer",
    ):  # fmt: skip
        assert re.search(rf"{re.escape(span)} +\d+\.\d +\d+\.\d ms \|", shown.out)
    assert "stopped; the whole demo took" in shown.out.splitlines()[-1]
