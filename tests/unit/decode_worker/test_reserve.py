"""Reserve: blocks or a refusal at once, and never a way to hurt the batch."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from baton.engine.sequence_table import SEQUENCES_PER_PLACE
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, decode_pb2
from tests.unit.worker.running import PATIENCE_S, Router, Worker, asked, prompt, spec


async def test_a_full_pool_refuses_at_once_with_advice(decode: Worker, router: Router) -> None:
    await router.reserve(spec("a", prompt(150)))
    with pytest.raises(Overloaded) as refused:
        await router.reserve(spec("b", prompt(150, start=1)))
    assert refused.value.retry_after_s > 0
    await router.cancel("a")
    await router.reserve(spec("b", prompt(150, start=1)))
    await router.cancel("b")


async def test_sequences_do_not_pile_up_before_the_batch(
    directory: Path, store: MemoryStore
) -> None:
    most = 2 * SEQUENCES_PER_PLACE
    async with Worker("decode", directory, store, max_batch=2) as decode, Router(decode) as router:
        for i in range(most):
            await router.reserve(spec(f"s{i}", prompt(3)))
        with pytest.raises(Overloaded) as refused:
            await router.reserve(spec("late", prompt(3)))
        assert 0 < refused.value.retry_after_s <= 1
        assert (await decode.blocks()).blocks_held == most
        await router.cancel("s0")
        await router.reserve(spec("late", prompt(3)), local=3)
        assert len(await router.tokens("late")) == 4
        await router.cancel(*(f"s{i}" for i in range(most)))
        assert await decode.clean()


async def test_a_router_must_listen_first(decode: Worker) -> None:
    router = Router(decode)
    with pytest.raises(Unavailable, match="event stream"):
        await router.reserve(spec("a", prompt(20)))
    assert await decode.clean()


async def test_an_id_is_used_once(decode: Worker, router: Router) -> None:
    await router.reserve(spec("a", prompt(20)))
    with pytest.raises(InvalidRequest) as refused:
        await router.reserve(spec("a", prompt(20)))
    assert refused.value.field == "handoff_id"
    await router.cancel("a")


async def test_cached_tokens_are_told(decode: Worker, router: Router) -> None:
    await router.reserve(spec("a", prompt(40)), local=40)
    await router.tokens("a")
    reserved = await router.reserve(spec("b", prompt(40)))
    assert (reserved.cached_tokens, reserved.started) == (32, False)
    other_salt = await router.reserve(spec("c", prompt(40), cache_salt="x"))
    assert other_salt.cached_tokens == 0
    await router.cancel("b", "c")


async def test_little_left_to_compute_starts_by_itself(decode: Worker, router: Router) -> None:
    assert (await router.reserve(spec("a", prompt(40)), local=40)).started
    assert len(await router.tokens("a")) == 4
    assert not (await router.reserve(spec("b", prompt(40, start=5)), local=39)).started
    assert (await router.reserve(spec("c", prompt(40)), local=8)).started
    assert len(await router.tokens("c")) == 4
    await router.cancel("b")


async def test_a_step_is_one_message_for_all_of_a_routers_sequences(decode: Worker) -> None:
    async with Router(decode, "one") as one, Router(decode, "two") as two:
        gate = threading.Event()
        decode.node.engine.submit(gate.wait)
        entered = asked(decode, "reserve", 4)
        names = {"a": one, "b": one, "c": one, "d": two}
        reserving = [
            asyncio.ensure_future(router.reserve(spec(name, prompt(3, start=i)), local=3))
            for i, (name, router) in enumerate(names.items())
        ]
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        gate.set()
        await asyncio.gather(*reserving)
        # Whichever step each began in, from its second token on they share the steps.
        for name, router in names.items():
            assert len(await router.tokens(name)) == 4
        assert max(len(message.events) for message in one.messages) == 3
        assert {len(message.events) for message in two.messages} == {1}
        assert await decode.clean()


SAMPLING = common_pb2.SamplingParams(max_tokens=4, temperature=-1)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (spec("", prompt(4)), "sequence.handoff_id"),
        (spec("x", []), "sequence.token_ids"),
        (spec("x", [3, 320]), "sequence.token_ids"),
        (spec("x", [3, 2**32 - 1]), "sequence.token_ids"),
        (spec("x", prompt(255)), "sequence.token_ids"),
        (spec("x", prompt(4), prompt_tokens=5), "sequence.prompt_tokens"),
        (spec("x", prompt(4), prompt_tokens=0), "sequence.prompt_tokens"),
        (spec("x", prompt(4), sampling=SAMPLING), "sampling.temperature"),
    ],
)
async def test_a_malformed_sequence_is_refused_alone(
    decode: Worker, router: Router, bad: common_pb2.SequenceSpec, field: str
) -> None:
    await router.reserve(spec("good", prompt(10), max_tokens=20), local=10)
    with pytest.raises(InvalidRequest) as refused:
        await router.reserve(bad, local=512)
    assert refused.value.field == field
    assert len(await router.tokens("good")) == 20


async def test_a_caller_that_hangs_up_while_the_engine_is_busy_leaves_nothing(
    decode: Worker,
    router: Router,
) -> None:
    gate = threading.Event()
    decode.node.engine.submit(gate.wait)
    for name, local in (("reserved", 0), ("started", 20)):
        request = decode_pb2.ReserveRequest(
            stream_id=router.stream_id,
            sequence=spec(name, prompt(20)),
            local_prefill_max_tokens=local,
        )
        entered = asked(decode, "reserve")
        call = decode.decode.Reserve(request)
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        call.cancel()
        await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    gate.set()
    assert await decode.clean()
    assert decode.spans.ended.count("decode") == 2
    assert router.messages == []
