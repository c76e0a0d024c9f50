"""What a router says of where a request would run."""

import asyncio
import time

import pytest

from baton.errors import Overloaded
from baton.sampling import SamplingParams
from router.admission.wait_queue import QueueEntry, WaitQueue
from router.dispatch.request_state import RequestState, TokenizedRequest
from router.placement.explain import explain
from router.placement.placement import rank_all

from .snapshots import fleet, needs, worker

PROMPT = tuple(range(20))
RATE = {"prefill_tokens_per_s": 1000}


def asked(**fields):
    return TokenizedRequest(
        **{
            "request_id": "r", "prompt": PROMPT, "params": SamplingParams(max_tokens=7),
            "stop": (), "include_stop": False, "cache_salt": "s",
            "deadline": time.monotonic() + 60, "tenant": "us",
            "virtual_finish": time.monotonic(), **fields,
        }
    )  # fmt: skip


async def until_depth(queue, depth):
    async with asyncio.timeout(10):
        while queue.depth != depth:  # noqa: ASYNC110 - a wait queue has no event
            await asyncio.sleep(0)


def said(snapshot, queue=None, local=0, **fields):
    request = asked(**fields)
    needed = RequestState(request).placement_request(local)
    return explain(snapshot, request, queue or WaitQueue(8), needed, time.monotonic())


def test_every_pair_is_told_with_what_placement_computed():
    request = asked()
    prefill = [worker("p0", "STALLED"), worker("p1", queue_tokens=60, caches=PROMPT, salt="s")]
    decode = worker("d0", caches=PROMPT[:8], salt="s", running=2, step_ms=20, host_id="there")
    snapshot = fleet(prefill, [decode])
    needed = needs(PROMPT, request.virtual_finish, cache_salt="s", new_tokens=7)
    response = explain(snapshot, request, WaitQueue(8), needed, time.monotonic())
    choice, stalled = rank_all(snapshot, needed)
    best, left_out = response.candidates
    assert (best.prefill, best.decode, best.refused) == ("p1", "d0", "")
    assert best.ttft_ms == pytest.approx(choice.ttft_s * 1e3) and best.ttft_ms > 60
    assert best.tpot_ms == pytest.approx(choice.on_decode.tpot_s * 1e3) and best.tpot_ms > 20
    assert best.score == pytest.approx(choice.score_ms)
    assert (best.queue_tokens, best.prefill_cached_tokens, best.decode_cached_tokens) == (60, 16, 8)
    assert best.same_host is False
    assert left_out.refused == stalled.refused == "p0 is STALLED"
    assert (response.refused, response.decode_prefills) == ("", False)
    assert (response.prompt_tokens, response.tenant, response.queued) == (20, "us", 0)


def test_decode_prefills_only_where_the_request_would_run():
    decode = [worker("d0", caches=PROMPT, salt="s")]
    assert said(fleet([worker("p0")], decode), local=16).decode_prefills
    assert not said(fleet([worker("p0")], decode), local=0).decode_prefills
    decode = [worker("d0", "SILENT", caches=PROMPT, salt="s")]
    response = said(fleet([worker("p0")], decode), local=16)
    assert not response.decode_prefills and "d0 is SILENT" in response.refused


def test_what_would_keep_it_from_running_is_told():
    full = fleet([worker("p0")], [worker("d0", blocks_free=0)])
    assert "no room for 20 tokens" in said(full).refused
    assert "no prefill worker is ready" in said(fleet([], [worker("d0")])).refused
    late = fleet([worker("p0", queue_tokens=900, **RATE)], [worker("d0")])
    assert "first token is expected in" in said(late, ttft_target_s=0.5).refused
    assert said(late, ttft_target_s=50.0).refused == ""


async def test_a_wait_queue_is_reported():
    async def no_room():
        raise Overloaded("full")

    free, changed = fleet([worker("p0")], [worker("d0")]), asyncio.Event()
    queue = WaitQueue(2)
    waiting = [
        asyncio.create_task(queue.place(QueueEntry(1.0, 5, f"r{i}"), no_room, lambda: changed))
        for i in range(2)
    ]
    await until_depth(queue, 2)
    response = said(free, queue)
    assert response.queued == 2 and "2 requests are waiting already" in response.refused
    waiting.pop().cancel()
    await until_depth(queue, 1)
    assert "requests waiting for room: 1" in said(free, queue).refused
    waiting.pop().cancel()
    await until_depth(queue, 0)
    assert said(free, queue).refused == ""
