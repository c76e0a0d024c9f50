"""Prompts on the prefill worker, with a real decode worker at the other end."""

import asyncio

import pytest

from baton.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from baton.v1 import common_pb2, prefill_pb2
from prefill_worker.worker import MAX_OPENED_AHEAD, peers_to_open
from tests.unit.worker.running import (
    PATIENCE_S,
    Paced,
    Router,
    Worker,
    asked,
    matching,
    pair_of,
    prompt,
    spec,
    target,
    until,
)

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.fixture
async def pair(directory):
    async with pair_of(directory) as pair:
        yield pair


async def start_paced(pair, wanted):
    """The running prompt, its first step waiting for `allow`."""
    paced = Paced(pair.prefill)
    call = await pair.start(wanted)
    await paced.waits()
    return paced, call


async def messages(call):
    return await call.all()


async def test_links_are_opened_as_workers_come_and_no_handoff_opens_one(pair, directory):
    """An epoch counts the Offers that a decode worker has answered."""

    def links():
        return {link.decode: link.epoch for link in pair.prefill.node.pairs()}

    async with Worker("decode", directory, pair.prefill.store, incarnation="decode-1"):
        await until(lambda: links() == {"decode-0": 1, "decode-1": 1})
    await until(lambda: links() == {"decode-0": 1})  # the other has left
    await messages(await pair.start(spec("a", prompt(20))))
    await pair.router.tokens("a")
    assert links() == {"decode-0": 1}


def test_links_are_opened_to_ready_workers_of_the_same_kv_and_not_in_large_fleets():
    def record(name, **fields):
        role = common_pb2.WorkerRole.Value(f"WORKER_ROLE_{name.split('-')[0].upper()}")
        return common_pb2.WorkerRecord(
            **{"incarnation": name, "role": role, "state": "WORKER_STATE_READY", **fields}
        )

    def opened(*more, **own):
        all_of_them = [record("prefill-0", **own), record("decode-0"), *more]
        return peers_to_open({one.incarnation: one for one in all_of_them}, "prefill-0")

    assert peers_to_open({}, "prefill-0") == set()
    assert opened(record("decode-1"), record("prefill-1")) == {"decode-0", "decode-1"}
    for state in ("STARTING", "DRAINING"):
        assert opened(record("decode-1", state=f"WORKER_STATE_{state}")) == {"decode-0"}
        assert opened(state=f"WORKER_STATE_{state}") == set()
    assert opened(record("decode-1", kv={"block_size": 32})) == {"decode-0"}
    for role in ("prefill", "decode"):
        most = [record(f"{role}-{n}") for n in range(MAX_OPENED_AHEAD)]
        assert len(opened(*most)) == (1 if role == "prefill" else MAX_OPENED_AHEAD)
        assert opened(*most, record(f"{role}-one-more")) == set()


@pytest.mark.parametrize("num_tokens", [1, 16, 33, 100])
async def test_a_prompt_is_computed_handed_over_and_continued(pair, num_tokens):
    responses = await messages(await pair.start(spec("a", prompt(num_tokens), 6)))
    assert [message.WhichOneof("event") for message in responses] == [
        "started", "first_token", "committed",
    ]  # fmt: skip
    committed = responses[2].committed
    assert committed.transport == common_pb2.TRANSPORT_SHM
    assert committed.transfer_bytes == num_tokens * TOKEN_BYTES
    tokens = [responses[1].first_token.token_id, *await pair.router.tokens("a")]
    await pair.router.reserve(spec("alone", prompt(num_tokens), 6, cache_salt="other"), local=512)
    assert tokens == await pair.router.tokens("alone")


async def test_the_first_token_does_not_wait_for_the_handoff(pair):
    call = await pair.start(spec("a", prompt(20)))
    gate = pair.decode.hold_engine()  # Commit needs it
    assert (await call.read()).HasField("started")
    assert (await call.read()).HasField("first_token")
    gate.set()
    assert (await call.read()).HasField("committed")
    await pair.router.tokens("a")


@pytest.mark.parametrize("late", [False, True])
async def test_a_first_token_that_is_the_last_commits_nothing(pair, late):
    """Also when its blocks are gone before the event loop gets the reports."""
    paced, call = await start_paced(pair, spec("a", prompt(40), 1))
    paced.allow.release(2)
    engine = pair.prefill.node.engine
    while late and "a" in engine._sequences:  # the event loop is held
        engine.load().result(PATIENCE_S)
    responses = await messages(call)
    assert responses[-1].first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert len(responses) == 2


async def test_a_prompt_alone_is_computed_whole_and_handed_to_nobody(pair):
    def wanted(name, max_tokens):
        asked = spec(name, prompt(70), max_tokens)
        asked.sampling.prompt_logprobs = 2
        return asked

    scored = await messages(await pair.start(wanted("a", 4)))
    await pair.router.tokens("a")
    # Its prefix is cached by now.
    alone = await messages(pair.prompts.prefill(wanted("b", 0), None))
    parts = [message.prompt_logprobs for message in alone[1:-1]]
    assert parts == [message.prompt_logprobs for message in scored[1:-2]]
    assert alone[0].started.cached_tokens == 0 and len(parts) == 3
    assert sum(len(part.logprobs) for part in parts) == 69
    assert alone[-1].first_token == prefill_pb2.PrefillFirstToken(
        finish_reason=common_pb2.FINISH_REASON_LENGTH
    )
    with pytest.raises(InvalidRequest) as refused:
        await messages(pair.prompts.prefill(wanted("c", 4), None))
    assert refused.value.field == "target"


async def test_a_prompt_fills_the_context_unless_it_has_output(pair):
    """Its embedding is normalized, and is all that is asked for."""
    most = pair.prefill.node.record.max_context
    full = spec("full", prompt(most), 0)
    full.sampling.embedding = True
    (*_, end) = await messages(pair.prompts.prefill(full, None))
    pooled = end.first_token.pooled
    assert len(pooled) == 64 and sum(x * x for x in pooled) == pytest.approx(1)
    for name, num_tokens, max_tokens in (("output", most, 1), ("longer", most + 1, 0)):
        with pytest.raises(InvalidRequest) as refused:
            await messages(pair.prompts.prefill(spec(name, prompt(num_tokens), max_tokens), None))
        assert refused.value.field == "sequence.token_ids"
    both = spec("both", prompt(70), 4)
    both.sampling.embedding = True
    with pytest.raises(InvalidRequest) as refused:
        await messages(await pair.start(both))
    assert refused.value.field == "sampling.embedding"


@pytest.mark.parametrize(("decode_caches", "sent"), [(True, 6), (False, 70)])
async def test_cached_prompts_send_what_decode_lacks(directory, decode_caches, sent):
    async with pair_of(directory, prefix_cache=decode_caches) as pair:
        made = []
        for name in ("a", "b"):
            responses = await messages(await pair.start(spec(name, prompt(70), 5)))
            made.append([responses[1].first_token.token_id, *await pair.router.tokens(name)])
        assert responses[0].started.cached_tokens == 64
        assert responses[2].committed.transfer_bytes == sent * TOKEN_BYTES
        assert made[0] == made[1]


async def test_cancel_stops_the_chunks_before_decode_has_answered_the_abort(pair):
    paced, call = await start_paced(pair, spec("a", prompt(100)))
    paced.allow.release()
    assert (await call.read()).HasField("started")
    gate, paused = pair.decode.hold_engine(), asked(pair.prefill, "pause")  # Abort needs the engine
    call.cancel()
    await asyncio.wait_for(paused.wait(), PATIENCE_S)
    paced.allow.release(9)
    load = await pair.prefill.blocks()
    assert (load.running, load.waiting) == (0, 0)
    gate.set()
    assert await pair.clean()
    assert (await pair.prefill.blocks()).steps <= 2  # of four


DUE_LATE, DUE_EARLY = {"virtual_finish_ms": 600_000}, {"virtual_finish_ms": 1_000}
LONG_PROMPT = {"virtual_finish_ms": 60_200, "prompt_us": 200_000}
SHORT_PROMPT = {"virtual_finish_ms": 60_100, "prompt_us": 80_000}


@pytest.mark.parametrize(
    ("first", "second", "pause_s"),
    [(DUE_LATE, DUE_EARLY, 0.0), (LONG_PROMPT, SHORT_PROMPT, 0.4)],
    ids=["due earlier", "the other takes longer than its virtual finish time"],
)
async def test_a_prompt_overtakes_another_between_chunks(pair, first, second, pause_s):
    queued = asked(pair.prefill, "add", 2)
    paced, late = await start_paced(pair, spec("late", prompt(100), **first))
    await asyncio.sleep(pause_s)
    early = await pair.start(spec("early", prompt(40, start=50), **second))
    await asyncio.wait_for(queued.wait(), PATIENCE_S)
    paced.allow.release(3)  # a chunk of the late one, and the two that the early one needs
    assert len(await messages(early)) == 3
    assert pair.prefill.node.load().queue_tokens == 100 - 32 - 24
    paced.allow.release(9)
    assert len(await messages(late)) == 3
    for name in ("early", "late"):
        await pair.router.tokens(name)


async def test_a_reservation_cancelled_on_the_way_fails_the_prompt(pair):
    paced, call = await start_paced(pair, spec("a", prompt(100)))
    await pair.router.cancel("a")
    paced.allow.release(4)
    with pytest.raises(Exception, match=r"gone|not reserved"):
        await messages(call)


@pytest.mark.parametrize("end", ["cancelled", "lost", "late"])
async def test_what_ends_while_its_grammar_is_compiled_runs_no_chunk(pair, end):
    wanted = matching("a", prompt(20), "[ab]{3}")
    to = target(pair.decode, await pair.router.reserve(wanted))
    gate, submitted = pair.prefill.hold_grammars(), pair.prefill.node.grammars._waiting
    wanted.time_left_ms = 300 if end == "late" else 0
    async with Router(pair.prefill, "other") as other:
        call = other.prefill(wanted, to)
        await until(lambda: len(submitted) >= 2)
        if end == "late":
            with pytest.raises(DeadlineExceeded):
                await messages(call)
        elif end == "lost":
            other.call.cancel()
        else:
            call.cancel()
        await asyncio.wait_for(pair.prefill.node.idle(), PATIENCE_S)
    gate.set()
    await pair.router.cancel("a")
    assert (await pair.prefill.blocks()).steps == 0
    assert len(await messages(await pair.start(matching("b", prompt(20), "[ab]{3}")))) == 3
    assert len(await pair.router.tokens("b")) == 3 and not submitted


@pytest.mark.parametrize("queued", [True, False])
async def test_a_prompt_preempted_after_blocks_were_queued_fails_and_can_be_repeated(
    directory, queued
):
    """The worker decodes, too; without queued blocks the prompt is computed again and sent."""
    async with pair_of(directory) as pair:
        wanted = spec("a", prompt(100), virtual_finish_ms=600_000)
        await pair.router.reserve(spec("alone", prompt(100)), local=512)
        expected = await pair.router.tokens("alone")
        if queued:  # otherwise decode lacks the last four tokens alone
            wanted.cache_salt = "decode has none of it"
        paced = Paced(pair.prefill)
        grows = spec("grows", prompt(143, start=9), virtual_finish_ms=1_000)
        await pair.prompts.reserve(grows, local=512)
        added = asked(pair.prefill, "add")
        call = await pair.start(wanted)
        await asyncio.wait_for(added.wait(), PATIENCE_S)
        paced.allow.release(5)  # up to its first chunk
        responses = [await call.read()]
        paced.allow.release(99)
        if queued:
            with pytest.raises(Overloaded, match="lost its KV blocks"):
                await messages(call)
            await pair.router.cancel("a")
            wanted.handoff_id = "again"
            call, responses = await pair.start(wanted), []
        responses += await messages(call)
        made = [responses[1].first_token.token_id, *await pair.router.tokens(wanted.handoff_id)]
        assert made == expected
        assert len(await pair.prompts.tokens("grows")) == 4
        assert (await pair.prefill.blocks()).preemptions == 1
        await until(lambda: len(pair.prefill.spans.of("prefill")) == 1 + queued)
    first = pair.prefill.spans.of("prefill")[0]
    assert first["baton.preemptions"] == 1 and first["baton.longest_gap_ms"] >= 0
    assert [run["baton.preemptions"] for run in pair.prefill.spans.of("decode.run")] == [0]


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_a_deadline_ends_the_chunks_and_the_wait_for_commit(pair, steps):
    paced, wanted = Paced(pair.prefill), spec("a", prompt(100))
    to = target(pair.decode, await pair.router.reserve(wanted))
    gate = pair.decode.hold_engine()  # Commit needs it
    wanted.time_left_ms = 100 * max(steps, 1)
    if steps:
        paced.allow.release(steps)
    with pytest.raises(DeadlineExceeded):
        await messages(pair.prompts.prefill(wanted, to))
    await asyncio.wait_for(pair.prefill.node.idle(), PATIENCE_S)
    paced.allow.release(4)
    assert (await pair.prefill.blocks()).blocks_held == 0
    gate.set()
    await pair.router.cancel("a")
    assert len(pair.prefill.spans.of("prefill.queue")) == 1


@pytest.mark.parametrize(
    ("bad", "cached_tokens", "field"),
    [
        (spec("x", prompt(300)), 0, "sequence.token_ids"),
        (spec("a", prompt(40)), 0, "sequence.handoff_id"),  # it runs
        *((spec("x", prompt(48)), n, "target.cached_tokens") for n in (5, 48, 2**32 - 16)),
    ],
)
async def test_a_malformed_request_fails_alone(pair, bad, cached_tokens, field):
    paced, good = await start_paced(pair, spec("a", prompt(40)))
    with pytest.raises(InvalidRequest) as refused:
        to = prefill_pb2.HandoffTarget(cached_tokens=cached_tokens)
        await messages(pair.prompts.prefill(bad, to))
    assert refused.value.field == field
    pair.prompts.prompts["a"] = good
    paced.allow.release(9)
    assert len(await messages(good)) == 3
    await pair.router.tokens("a")


@pytest.mark.parametrize("in_time", [True, False])
async def test_draining_takes_nothing_new_and_finishes_what_runs_or_gives_it_back(
    directory, in_time
):
    async with pair_of(directory, drain_s=10.0 if in_time else 0.3) as pair:
        paced, call = await start_paced(pair, spec("a", prompt(40)))
        pair.prefill.stop()
        with pytest.raises(Unavailable, match="draining"):
            await messages(pair.prompts.prefill(spec("b", prompt(40)), prefill_pb2.HandoffTarget()))
        if in_time:
            paced.allow.release(9)
            assert len(await messages(call)) == 3
            await pair.router.tokens("a")
        else:
            with pytest.raises(Unavailable, match="draining"):
                await messages(call)
            paced.allow.release(9)
            await pair.router.cancel("a")
        await asyncio.wait_for(pair.prefill.life, PATIENCE_S)


async def test_a_prompt_is_given_back_for_what_the_engine_failed_of(directory):
    def fail(*_):
        raise RuntimeError("broken")

    with pytest.raises(InternalError, match="the engine failed: RuntimeError: broken"):
        async with pair_of(directory) as pair:
            paced, call = await start_paced(pair, spec("a", prompt(40)))
            engine = pair.prefill.node.engine
            engine.submit(lambda: setattr(engine, "_publish_report", fail))
            paced.allow.release(9)
            with pytest.raises(Unavailable) as given_back:
                await messages(call)
            await pair.router.cancel("a")
    assert "the worker ends: the engine failed: RuntimeError: broken" in str(given_back.value)


async def test_what_was_not_reserved_is_neither_decoded_nor_cached(pair):
    reserved = await pair.router.reserve(spec("a", prompt(40), cache_salt="tenant"))
    others = spec("a", prompt(40, start=9), cache_salt="tenant")
    with pytest.raises(InvalidRequest) as refused:
        await messages(pair.prompts.prefill(others, target(pair.decode, reserved)))
    assert refused.value.field == "token_digest"
    assert await pair.decode.clean()
    again = await pair.router.reserve(spec("b", prompt(40), cache_salt="tenant"))
    assert again.cached_tokens == 0
    await pair.router.cancel("b")
