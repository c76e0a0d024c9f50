"""Asking where a request would run: the SDK's method and the command, against a real server."""

import asyncio
import json
import re

from baton.cli import main as cli
from baton.v1 import fleet_pb2
from tests.unit.client.scripted_router import HELLO, ScriptedRouter

PLACED = {
    "prefill": "p0", "decode": "d0", "ttft_ms": 12.34, "tpot_ms": 5.5, "queue_tokens": 70,
    "prefill_cached_tokens": 32, "decode_cached_tokens": 16, "same_host": True, "score": 364.36,
}  # fmt: skip
BEST = fleet_pb2.Candidate(**PLACED)
LEFT_OUT = fleet_pb2.Candidate(prefill="p0", decode="d1", refused="d1 is SILENT", score=400)


def router_that_says(*candidates, **fields):
    router = ScriptedRouter(HELLO)
    router.explanation = fleet_pb2.ExplainResponse(
        candidates=candidates, prompt_tokens=41, queued=3, **fields
    )
    return router


async def test_the_clients_explain(connect, serve):
    router = router_that_says(BEST, tenant="us")
    async with connect(await serve(router)) as client:
        answer = await client.explain([1, 2, 3], max_tokens=9, cache_salt="s", timeout=7)
    (request,) = router.requests
    assert list(request.request.token_ids.ids) == [1, 2, 3]
    assert (request.request.sampling.max_tokens, request.request.cache_salt) == (9, "s")
    assert 0 < router.time_left_s[0] < 7.5
    assert answer == {
        "refused": "", "decode_prefills": False, "prompt_tokens": 41, "tenant": "us", "queued": 3,
        "model": "",
        "candidates": [
            {**PLACED, "refused": "", "decode_prefills": False, "handed_over_ttft_ms": 0.0}
        ],
    }  # fmt: skip


async def test_the_command(serve, capsys):
    async def explain(router, *argv):
        argv = ["explain", *argv, "--target", await serve(router), "--timeout", "30"]
        return await asyncio.to_thread(cli.main, argv), capsys.readouterr().out

    router = router_that_says(BEST, LEFT_OUT)
    asked = ("--max-tokens", "5", "--cache-salt", "s", "--model", "sql")
    status, out = await explain(router, "x =", *asked)
    assert status == 0
    lines = out.splitlines()
    assert lines[:2] == [
        "a prompt of 41 tokens; 3 requests wait at the router", "would run on p0 and d0",
    ]  # fmt: skip
    titles = "prefill|decode|score ms|TTFT ms|TPOT ms|tokens first|cached: prefill|decode|host"
    assert re.split("  +", lines[3]) == [*titles.split("|"), "left out"]
    assert lines[4].split() == ["p0", "d0", "364.4", "12.3", "5.5", "70", "32", "16", "same"]
    assert lines[5].endswith("other  d1 is SILENT")
    request = router.requests[0].request
    assert (request.text, request.sampling.max_tokens, request.cache_salt) == ("x =", 5, "s")
    assert request.model == "sql"
    _, out = await explain(router_that_says(LEFT_OUT, refused="no room", tenant="us"), "x")
    assert "of tenant us" in out and "would be refused or wait: no room" in out
    _, out = await explain(router_that_says(BEST, decode_prefills=True), "--token-ids", "1,2")
    assert "on d0, which would compute the prompt itself: first token in 12.3 ms, handed ov" in out
    assert "left out" not in out
    _, out = await explain(router_that_says(refused="no worker"), "x", "--chat")
    assert "no worker" in out and "no workers" in out
    _, out = await explain(router_that_says(BEST), "x", "--json")
    assert json.loads(out)["candidates"][0]["prefill"] == "p0"
