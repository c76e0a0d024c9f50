"""Prompts on the prefill worker, with a real decode worker at the other end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context

from baton import rpc
from baton.errors import DeadlineExceeded, InvalidRequest, TransferFailed, Unavailable
from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, handoff_pb2, handoff_pb2_grpc, prefill_pb2
from baton.worker import node
from tests.unit.worker.running import (
    PATIENCE_S,
    Paced,
    Router,
    Worker,
    asked,
    prompt,
    spec,
    target,
)

SALT = "another's"


@dataclass
class Pair:
    """A prefill and a decode worker, and a router between them."""

    prefill: Worker
    decode: Worker
    router: Router

    async def start(self, wanted: common_pb2.SequenceSpec, **fields: Any) -> Any:
        """Reserves, and returns the running Prefill call; `fields` change the target."""
        reserved = await self.router.reserve(wanted)
        return self.call(wanted, target(self.decode, reserved, **fields))

    def call(self, wanted: common_pb2.SequenceSpec, to: prefill_pb2.HandoffTarget) -> Any:
        request = prefill_pb2.PrefillRequest(sequence=wanted, target=to)
        return self.prefill.prefill.Prefill(request, timeout=PATIENCE_S)

    async def start_paced(self, wanted: common_pb2.SequenceSpec) -> tuple[Paced, Any]:
        """The running call, its first step waiting for `allow`."""
        paced = Paced(self.prefill)
        call = await self.start(wanted)
        await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
        return paced, call

    async def open_link(self) -> None:
        """From now on decode gets Aborts however early they come; before, the router cancels."""
        await messages(await self.start(spec("opens", prompt(1, start=200))))
        await self.router.tokens("opens")

    async def clean(self) -> bool:
        return await self.prefill.clean() and await self.decode.clean()


@pytest.fixture
async def pair(directory: Path, store: MemoryStore) -> AsyncIterator[Pair]:
    async with (
        Worker("decode", directory, store) as decode,
        Worker("prefill", directory, store) as prefill,
        Router(decode) as router,
    ):
        pair = Pair(prefill, decode, router)
        yield pair
        if not prefill.life.done():
            assert await pair.clean()


async def messages(call: Any) -> list[prefill_pb2.PrefillResponse]:
    with rpc.translated():
        return [message async for message in call]


async def alone(pair: Pair, token_ids: list[int], max_tokens: int) -> list[int]:
    """What decode makes of a prompt all by itself."""
    wanted = spec("alone", token_ids, max_tokens, cache_salt=SALT)
    await pair.router.reserve(wanted, local=512)
    return await pair.router.tokens("alone")


@pytest.mark.parametrize("num_tokens", [1, 16, 33, 100])
async def test_a_prompt_is_computed_handed_over_and_continued(pair: Pair, num_tokens: int) -> None:
    responses = await messages(await pair.start(spec("a", prompt(num_tokens), 6)))
    assert [message.WhichOneof("event") for message in responses] == [
        "started", "first_token", "committed",
    ]  # fmt: skip
    committed = responses[2].committed
    assert committed.transport == common_pb2.TRANSPORT_SHM
    assert committed.transfer_bytes == num_tokens * 2 * 2 * 2 * 16 * 4
    rest = await pair.router.tokens("a")
    assert [responses[1].first_token.token_id, *rest] == await alone(pair, prompt(num_tokens), 6)


async def test_the_first_token_does_not_wait_for_the_handoff(pair: Pair) -> None:
    gate = threading.Event()
    call = await pair.start(spec("a", prompt(20)))
    pair.decode.node.engine.submit(gate.wait)  # Commit needs decode's engine
    assert (await call.read()).HasField("started")
    assert (await call.read()).HasField("first_token")
    gate.set()
    assert (await call.read()).HasField("committed")
    assert await call.code() is not None
    await pair.router.tokens("a")


async def test_a_first_token_that_is_the_last_commits_nothing(pair: Pair) -> None:
    await pair.open_link()
    responses = await messages(await pair.start(spec("a", prompt(40), 1)))
    assert responses[-1].first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert len(responses) == 2


async def test_a_last_token_is_told_though_its_blocks_are_gone_already(pair: Pair) -> None:
    paced, engine = Paced(pair.prefill), pair.prefill.node.engine
    call = await pair.start(spec("a", prompt(40), 1))
    await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
    paced.allow.release(2)
    while "a" in engine._sequences:  # the event loop is held: it gets both chunks' reports at once
        engine.load().result(PATIENCE_S)
    responses = await messages(call)
    assert responses[-1].first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
    await pair.router.cancel("a")


async def test_cached_prompts_send_what_decode_lacks(pair: Pair) -> None:
    for name, salt in (("a", ""), ("b", ""), ("c", "")):
        wanted = spec(name, prompt(70), 3, cache_salt=salt)
        responses = await messages(await pair.start(wanted))
        await pair.router.tokens(name)
    assert responses[0].started.cached_tokens == 64
    assert responses[2].committed.transfer_bytes == 6 * 2 * 2 * 2 * 16 * 4


async def test_prefill_caches_and_decode_does_not(directory: Path, store: MemoryStore) -> None:
    async with (
        Worker("decode", directory, store, prefix_cache=False) as decode,
        Worker("prefill", directory, store) as prefill,
        Router(decode) as router,
    ):
        pair = Pair(prefill, decode, router)
        made = []
        for name in ("a", "b"):
            responses = await messages(await pair.start(spec(name, prompt(70), 5)))
            made.append([responses[1].first_token.token_id, *await router.tokens(name)])
        assert responses[0].started.cached_tokens == 64
        assert responses[2].committed.transfer_bytes == 70 * 2 * 2 * 2 * 16 * 4
        assert made[0] == made[1]
        assert await pair.clean()


async def test_cancel_stops_the_chunks_before_decode_has_answered_the_abort(pair: Pair) -> None:
    await pair.open_link()
    paced, gate = Paced(pair.prefill), threading.Event()
    call = await pair.start(spec("a", prompt(100)))
    paced.allow.release()
    assert (await call.read()).HasField("started")
    pair.decode.node.engine.submit(gate.wait)  # Abort needs decode's engine
    halted = asked(pair.prefill, "halt")
    call.cancel()
    await asyncio.wait_for(halted.wait(), PATIENCE_S)
    paced.allow.release(9)
    load = await pair.prefill.blocks()
    assert (load.running, load.waiting) == (0, 0)
    gate.set()
    assert await pair.clean()
    assert (await pair.prefill.blocks()).steps <= 3  # of five, with the one that opened the link


async def test_cancel_in_the_queue_frees_both_ends(pair: Pair) -> None:
    gate = threading.Event()
    pair.prefill.node.engine.submit(gate.wait)
    queued = asked(pair.prefill, "add")
    call = await pair.start(spec("a", prompt(100)))
    await asyncio.wait_for(queued.wait(), PATIENCE_S)
    call.cancel()
    await asyncio.wait_for(pair.prefill.node.idle(), PATIENCE_S)
    gate.set()
    await pair.router.cancel("a")
    assert await pair.clean()
    assert (await pair.prefill.blocks()).steps == 0


async def test_a_prompt_that_is_due_earlier_overtakes_between_chunks(pair: Pair) -> None:
    paced, queued = Paced(pair.prefill), asked(pair.prefill, "add", 2)
    late = await pair.start(spec("late", prompt(100), due_ms=600_000))
    await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
    early = await pair.start(spec("early", prompt(40, start=50), due_ms=1_000))
    telling = asyncio.create_task(messages(early))
    await asyncio.wait_for(queued.wait(), PATIENCE_S)
    paced.allow.release(3)  # a chunk of the late one, and the two that the early one needs
    assert len(await telling) == 3
    assert pair.prefill.node.load().queue_tokens == 100 - 32 - 24
    paced.allow.release(9)
    assert len(await messages(late)) == 3
    for name in ("early", "late"):
        await pair.router.tokens(name)


async def test_a_reservation_cancelled_on_the_way_fails_the_prompt(pair: Pair) -> None:
    paced, call = await pair.start_paced(spec("a", prompt(100)))
    await pair.router.cancel("a")
    paced.allow.release(4)
    with pytest.raises(Exception, match=r"gone|not reserved"):
        await messages(call)


async def test_decode_gone_is_a_retryable_failure(
    directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "RECORD_WAIT_S", 0.05)
    async with Worker("prefill", directory, store) as prefill:
        gone = Worker("decode", directory, store, drain_s=0)
        async with gone as decode, Router(decode) as router:
            pair = Pair(prefill, decode, router)
            wanted = spec("a", prompt(100))
            to = target(decode, await router.reserve(wanted))
        with pytest.raises((TransferFailed, Unavailable)):
            await messages(pair.call(wanted, to))
        assert await prefill.clean()


async def test_a_decode_worker_that_is_not_registered_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "RECORD_WAIT_S", 0.05)
    wanted = spec("a", prompt(40))
    with pytest.raises(Exception, match="registry has no decode worker earlier"):
        await messages(await pair.start(wanted, incarnation="earlier"))
    await pair.router.cancel("a")


async def test_a_deadline_stops_the_chunks(pair: Pair) -> None:
    paced = Paced(pair.prefill)
    wanted = spec("a", prompt(100))
    to = target(pair.decode, await pair.router.reserve(wanted))
    wanted.time_left_ms = 100
    call = pair.call(wanted, to)
    with pytest.raises(DeadlineExceeded):
        await messages(call)
    await asyncio.wait_for(pair.prefill.node.idle(), PATIENCE_S)
    paced.allow.release(4)


async def test_a_deadline_ends_the_wait_for_commit(pair: Pair) -> None:
    await pair.open_link()
    wanted, gate = spec("a", prompt(40)), threading.Event()
    to = target(pair.decode, await pair.router.reserve(wanted))
    pair.decode.node.engine.submit(gate.wait)  # Commit needs decode's engine
    wanted.time_left_ms = 500
    with pytest.raises(DeadlineExceeded):
        await messages(pair.call(wanted, to))
    await asyncio.wait_for(pair.prefill.node.idle(), PATIENCE_S)
    assert (await pair.prefill.blocks()).blocks_held == 0
    gate.set()
    await pair.router.cancel("a")


@pytest.mark.parametrize("cached_tokens", [5, 48, 2**32 - 16])
async def test_impossible_cached_tokens_are_refused(pair: Pair, cached_tokens: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await messages(await pair.start(spec("a", prompt(48)), cached_tokens=cached_tokens))
    assert refused.value.field == "target.cached_tokens"
    await pair.router.cancel("a")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (spec("x", []), "sequence.token_ids"),
        (spec("x", prompt(300)), "sequence.token_ids"),
        (spec("x", prompt(4), prompt_tokens=5), "sequence.prompt_tokens"),
        (spec("a", prompt(40)), "sequence.handoff_id"),  # it runs
    ],
)
async def test_a_malformed_sequence_fails_alone(
    pair: Pair, bad: common_pb2.SequenceSpec, field: str
) -> None:
    paced, good = await pair.start_paced(spec("a", prompt(40)))
    with pytest.raises(InvalidRequest) as refused:
        await messages(pair.call(bad, prefill_pb2.HandoffTarget()))
    assert refused.value.field == field
    paced.allow.release(9)
    assert len(await messages(good)) == 3
    await pair.router.tokens("a")


async def test_draining_finishes_what_runs_and_takes_nothing_new(pair: Pair) -> None:
    paced, call = await pair.start_paced(spec("a", prompt(40)))
    pair.prefill.node._stop.set()
    with pytest.raises(Unavailable, match="draining"):
        await messages(pair.call(spec("b", prompt(40)), prefill_pb2.HandoffTarget()))
    paced.allow.release(9)
    assert len(await messages(call)) == 3
    await asyncio.wait_for(pair.prefill.life, PATIENCE_S)
    await pair.router.tokens("a")
    assert await pair.decode.clean()


async def test_what_does_not_finish_in_time_is_given_back(
    directory: Path, store: MemoryStore
) -> None:
    async with (
        Worker("decode", directory, store) as decode,
        Worker("prefill", directory, store, drain_s=0.05) as prefill,
        Router(decode) as router,
    ):
        paced = Paced(prefill)
        call = await Pair(prefill, decode, router).start(spec("a", prompt(100)))
        await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
        prefill.node._stop.set()
        with pytest.raises(Unavailable, match="draining"):
            await messages(call)
        paced.allow.release(9)
        await asyncio.wait_for(prefill.life, PATIENCE_S)
        assert await decode.clean()


async def test_the_handoff_does_not_wait_until_its_caller_has_read(pair: Pair) -> None:
    """Decode goes on with the sequence before the first token was read."""
    wanted = spec("h", prompt(20))
    reserved = await pair.router.reserve(wanted)
    request = prefill_pb2.PrefillRequest(sequence=wanted, target=target(pair.decode, reserved))
    responses, read = [], asyncio.Event()

    async def send(message: prefill_pb2.PrefillResponse) -> None:
        responses.append(message.WhichOneof("event"))
        if not message.HasField("started"):
            await read.wait()

    running = asyncio.create_task(pair.prefill.node.prefill(request, Context(), send))
    assert len(await pair.router.tokens("h")) > 1
    assert responses == ["started", "first_token"]
    read.set()
    await running
    assert responses == ["started", "first_token", "committed"]


class Stranger(handoff_pb2_grpc.HandoffServiceServicer):
    """Takes Offers as a decode worker would, but is not registered."""

    def __init__(self) -> None:
        self.offers: list[handoff_pb2.OfferRequest] = []

    async def Offer(self, request: handoff_pb2.OfferRequest, context: Any) -> Any:
        self.offers.append(request)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "got you")


async def test_an_address_in_a_message_leads_nowhere(pair: Pair) -> None:
    """It is not called, and the true pair is not quarantined."""
    stranger, server = Stranger(), grpc.aio.server()
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(stranger, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}".encode()
    await server.start()
    try:
        wanted = spec("a", prompt(40))
        to = target(pair.decode, await pair.router.reserve(wanted))
        to.MergeFromString(bytes([1 << 3 | 2, len(address)]) + address)  # the field's old number
        assert len(await messages(pair.call(wanted, to))) == 3
    finally:
        await server.stop(None)
    assert stranger.offers == []
    assert [status.state for status in pair.prefill.node.pairs()] == ["OPEN"]
    await pair.router.tokens("a")


async def test_what_was_not_reserved_is_neither_decoded_nor_cached(pair: Pair) -> None:
    reserved = await pair.router.reserve(spec("a", prompt(40), cache_salt="tenant"))
    others = spec("a", prompt(40, start=9), cache_salt="tenant")
    with pytest.raises(InvalidRequest) as refused:
        await messages(pair.call(others, target(pair.decode, reserved)))
    assert refused.value.field == "token_digest"
    assert await pair.decode.clean()
    again = await pair.router.reserve(spec("b", prompt(40), cache_salt="tenant"))
    assert again.cached_tokens == 0
    await pair.router.cancel("b")
