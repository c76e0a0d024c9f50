"""The command line as users meet it: what it prints, what it exits with, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import psutil
import pytest

from baton.local import ports
from tests.cluster.command import baton, running
from tests.waiting import eventually

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop("
SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
WORKER_KEYS = {
    "role", "incarnation", "address", "pid", "device", "state", "reason", "queue_tokens", "running",
    "blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined",
}  # fmt: skip
TOLD = {
    "text": str, "token_ids": list, "finish_reason": str, "usage": dict, "timing": dict,
    "route": dict, "trace_id": str,
}  # fmt: skip
PARTS = {
    "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"},
    "timing": {"queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "transfer_ms", "transfer_bytes"},
    "route": {"prefill", "decode", "transport", "attempts"},
}  # fmt: skip


async def generate(*argv: str, stdin: str = "") -> dict[str, Any]:
    """The object of `generate --json`, which must have worked."""
    done = await baton("generate", *argv, "--json", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    told: dict[str, Any] = json.loads(done.out)
    return told


@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "seeded"])
async def test_a_cluster_equals_one_process(cluster_factory, sampling):
    """`generate --json` against a cluster and with --local: the same text, tokens and keys."""
    cluster = await cluster_factory()
    target = ("--target", cluster.address)
    asked = (PROMPT, "--max-tokens", "24", *sampling)
    there = await generate(*asked, *target)
    here = await generate(*asked, "--local", "--dtype", "float32", "--threads", "1")
    for told in (there, here):
        assert {key: type(value) for key, value in told.items()} == TOLD
        assert {part: set(told[part]) for part in PARTS} == PARTS
    for key in ("token_ids", "text", "finish_reason"):
        assert there[key] == here[key]
    assert there["usage"]["prompt_tokens"] == here["usage"]["prompt_tokens"] > 16
    assert there["usage"]["completion_tokens"] == len(there["token_ids"])
    streamed = await baton("generate", *asked, *target)
    assert (streamed.status, streamed.out, streamed.err) == (0, there["text"] + "\n", "")


async def test_the_route_is_reported(cluster_factory):
    """A long prompt goes over both workers, a short one is decoded where it is prefilled."""
    cluster = await cluster_factory()
    target = ("--target", cluster.address, "--max-tokens", "2")
    long = await generate("long = 1\n" * 30, *target)
    records = cluster.membership.records
    assert {long["route"]["prefill"], long["route"]["decode"]} == set(records)
    assert long["route"]["transport"] and long["route"]["attempts"] == 1
    assert long["timing"]["transfer_bytes"] > 0
    short = await generate("--token-ids", "5,6,7", *target)
    assert short["route"]["prefill"] is None
    assert short["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}


async def test_a_stop_string_ends_the_text(cluster_factory):
    cluster = await cluster_factory()
    options = (PROMPT, "--target", cluster.address, "--max-tokens", "40", "--ignore-eos")
    text = (await generate(*options))["text"]
    stop = text[len(text) // 2 :][:3]
    stopped = await generate(*options, "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]


async def test_status_has_its_keys(cluster_factory):
    """Exactly what the documentation promises, and as a table one line for each worker."""
    cluster = await cluster_factory()
    await generate("x = [" * 20, "--target", cluster.address, "--max-tokens", "2")  # makes a pair
    told = await baton("status", "--json", "--target", cluster.address)
    assert (told.status, told.err) == (0, "")
    status = json.loads(told.out)
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
    table = await baton("status", "--target", cluster.address)
    for worker in status["workers"]:
        assert re.search(rf"{worker['role']} +{worker['incarnation']} .* READY ", table.out)


REFUSED = [
    (["x", "--temperature", "-1"], "temperature must be between 0 and 100, not -1.0"),
    (["x", "--model", "other"], "model 'other' is not served here; 'demo' is"),
    (["--token-ids", "4000000"], "token id 4000000 is not below the vocabulary size"),
    (["word " * 5000], "of which one must be left for output"),
    (["x", "--max-tokens", "2000", "--ignore-eos", "--timeout", "0.5"], "within --timeout 0.5 s"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=[m[:12] for _, m in REFUSED])
async def test_refused_requests_are_one_line_and_status_1(cluster_factory, argv, message):
    cluster = await cluster_factory()
    refused = await baton("generate", *argv, "--target", cluster.address)
    assert refused.status == 1
    assert re.fullmatch(r"baton: error: [^\n]*\n", refused.err), refused.err
    assert message in refused.err


async def test_a_port_in_use_is_an_error_before_anything_starts(cluster_factory):
    cluster = await cluster_factory()
    port = cluster.address.rpartition(":")[2]
    refused = await baton("up", "--port", port)
    assert (refused.status, refused.out) == (1, "")
    assert f"cannot listen on {cluster.address}: Address already in use" in refused.err


async def test_up_restarts_what_is_killed_and_leaves_nothing(tmp_path):
    """Ready line; a worker and etcd come back after SIGKILL; SIGTERM ends all, exit status 0."""
    env = {"TMPDIR": str(tmp_path)}
    async with running("up", "--port", "0", "--dtype", "float32", "--trace", env=env) as up:
        ready = await up.says("ready: ")
        address = ready.split()[1].rstrip(",")
        used = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", "\n".join(up.lines))]
        family = psutil.Process(up.process.pid).children(recursive=True)
        assert len(family) == 4  # etcd, router, two workers
        # Longer than what decode computes by itself, so that there is a transfer to see.
        first = await generate(PROMPT * 2, "--target", address, "--max-tokens", "4")
        await up.says("kv.transfer")  # the request's trace is drawn
        (victim,) = (line for line in up.lines if line.startswith("prefill-0 ready in "))
        psutil.Process(int(re.findall(r"pid (\d+)", victim)[0])).kill()
        await up.says("prefill-0 was killed by SIGKILL; starting it again in 0.5 s")
        again = await up.says("prefill-0 ready in ")
        family += psutil.Process(up.process.pid).children(recursive=True)
        used += map(int, re.findall(r"127\.0\.0\.1:(\d+)", again))
        second = await generate(PROMPT * 2, "--target", address, "--max-tokens", "4")
        assert second["token_ids"] == first["token_ids"]
        next(process for process in family if process.name() == "etcd").kill()
        await up.says("etcd ended with status -9; starting it again")
        status = ("status", "--json", "--target", address)

        async def is_back() -> bool:
            told = json.loads((await baton(*status)).out)
            children = psutil.Process(up.process.pid).children()
            connected = bool(told["router"]["registry_connected"])
            return connected and "etcd" in [child.name() for child in children]

        await eventually(is_back, bool, "etcd is not back", 20.0)
        family += psutil.Process(up.process.pid).children(recursive=True)
        assert await up.end(signal.SIGTERM) == 0
        assert "stopping…" in up.lines and up.lines[-1] == "stopped"
    assert not [process for process in family if process.is_running()]
    for port in used:
        ports.check_free("127.0.0.1", port)
    assert not os.listdir(tmp_path)  # noqa: PTH208 - nothing in it may wait


async def test_up_names_what_kept_it_from_starting(tmp_path):
    """One last line with the cause, whichever process found it, and nothing left."""
    env = {"TMPDIR": str(tmp_path)}
    async with running("up", "--port", "0", "--kv-cache", "1KiB", env=env) as up:
        await up.says("while the cluster was starting: one KV block takes")
        assert up.lines[-1].startswith("baton: error: ")
        assert await up.process.wait() == 1
    assert not os.listdir(tmp_path)  # noqa: PTH208 - nothing in it may wait


async def test_the_demo_shows_route_and_trace():
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
