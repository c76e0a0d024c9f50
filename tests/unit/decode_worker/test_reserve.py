"""Reserve: blocks or a refusal at once, and never a way to hurt the batch; and its events."""

import asyncio

import pytest

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.v1 import common_pb2, decode_pb2
from tests.unit.worker.running import PATIENCE_S, Router, asked, prompt, spec


async def test_a_full_pool_refuses_at_once_with_advice(decode, router):
    await router.reserve(spec("a", prompt(150)))
    with pytest.raises(Overloaded) as refused:
        await router.reserve(spec("b", prompt(150, start=1)))
    assert refused.value.retry_after_s > 0
    with pytest.raises(InvalidRequest) as used:
        await router.reserve(spec("a", prompt(20)))
    assert used.value.field == "handoff_id"
    await router.cancel("a")
    await router.reserve(spec("b", prompt(150, start=1)))
    await router.cancel("b")


async def test_a_router_must_listen_first(decode):
    with pytest.raises(Unavailable, match="event stream"):
        await Router(decode).reserve(spec("a", prompt(20)))
    assert await decode.clean()


async def test_cached_tokens_are_reported_and_little_left_to_compute_starts_by_itself(
    decode, router
):
    for name, prompt_, local, expected in (
        ("a", prompt(40), 40, (0, True)),
        ("b", prompt(40), 0, (32, False)),
        ("c", prompt(40), 8, (32, True)),
        ("d", prompt(40, start=5), 39, (0, False)),
    ):
        reserved = await router.reserve(spec(name, prompt_), local)
        assert (reserved.cached_tokens, reserved.started) == expected
        if reserved.started:
            assert len(await router.tokens(name)) == 4
    other_salt = await router.reserve(spec("e", prompt(40), cache_salt="x"))
    assert other_salt.cached_tokens == 0
    await router.cancel("b", "d", "e")


async def test_a_step_is_one_message_for_all_of_a_routers_sequences(decode):
    """And without any, an empty one is a heartbeat where that is wanted."""
    async with Router(decode, "one") as one, Router(decode, "two", heartbeat_ms=60) as two:
        gate, entered = decode.hold_engine(), asked(decode, "reserve", 4)
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
        for _ in range(3):
            await two.heartbeat()
        assert max(len(message.events) for message in one.messages) == 3
        assert {len(message.events) for message in two.messages} == {0, 1}
        assert all(message.events for message in one.messages)
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
async def test_a_malformed_sequence_is_refused_alone(decode, router, bad, field):
    await router.reserve(spec("good", prompt(10), max_tokens=20), local=10)
    with pytest.raises(InvalidRequest) as refused:
        await router.reserve(bad, local=512)
    assert refused.value.field == field
    assert len(await router.tokens("good")) == 20


async def test_a_caller_that_hangs_up_while_the_engine_is_busy_leaves_nothing(decode, router):
    gate = decode.hold_engine()
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
