"""Reserve answers at once with blocks or a refusal, and never hurts the batch; every way a sequence
ends frees its blocks and informs its router."""

import asyncio
import threading

import pytest

from baton.engine.step_report import SequenceProgress, StepReport
from baton.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.net import message_stream
from baton.v1 import common_pb2, handoff_pb2
from baton.worker import node
from decode_worker.handoff import State
from tests.unit.engine.checkpoints import byte_tokenizer
from tests.unit.worker.running import (
    PATIENCE_S,
    Router,
    Worker,
    asked,
    granted,
    matching,
    offer_of,
    prompt,
    spec,
    until,
)


async def test_a_full_pool_refuses_at_once_with_advice(decode, router):
    await router.reserve(spec("a", prompt(150)))
    with pytest.raises(Overloaded) as refused:
        await router.reserve(spec("b", prompt(150, start=1)))
    assert refused.value.retry_after_s > 0
    assert "decode" not in decode.spans.ended  # the router tries again, perhaps for minutes
    with pytest.raises(InvalidRequest) as used:
        await router.reserve(spec("a", prompt(20)))
    assert used.value.field == "handoff_id"
    await router.cancel("a")
    await router.reserve(spec("b", prompt(150, start=1)))
    await router.cancel("b")


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
            router.reserving(spec(name, prompt(3, start=i)), local=3)
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
        assert max(len(message.events) for message in one.messages) >= 3
        assert {e.handoff_id for message in two.messages for e in message.events} == {"d"}
        assert await decode.clean()


def runs(decode, name):
    """As far as its events go, what was reserved runs; all handoffs, and this one."""
    handoffs = decode.decoding._handoffs
    handoffs._handoffs[name].enter(State.WRITING)
    handoffs._handoffs[name].enter(State.RUNNING)
    return handoffs, handoffs._handoffs[name]


async def test_neither_a_first_token_nor_those_of_a_lone_stream_wait_for_others(
    decode, router, monkeypatch
):
    monkeypatch.setattr(message_stream, "SOON_S", 1e6)
    await router.reserve(spec("alone", prompt(9)), local=9)
    assert len(await router.tokens("alone")) == 4
    for name in "ab":
        await router.reserve(spec(name, prompt(9)))
        handoffs, _ = runs(decode, name)
    progress = [SequenceProgress(name, 1, (5,)) for name in "ab"]
    handoffs.on_step(StepReport(0, 0, 2, progress, decode.node.engine.load()))
    assert [[*(await router.event(name)).token_ids] for name in "ab"] == [[5], [5]]
    for name in "ab":
        handoffs._give_up(handoffs._handoffs[name], "enough")


async def test_the_span_of_a_run_tells_of_its_longest_gap_and_its_preemptions(decode, router):
    await router.reserve(spec("a", prompt(9)))
    handoffs, handoff = runs(decode, "a")
    ms, load = 1_000_000, decode.node.engine.load()
    first = [SequenceProgress("a", 1, (5,))]
    handoffs.on_step(StepReport(10 * ms, 20 * ms, 1, first, load))
    for ended_ms in (25, 60, 66):
        started_ns, ended_ns = (ended_ms - 1) * ms, ended_ms * ms
        handoffs.on_step(StepReport(started_ns, ended_ns, 1, [], load, token_ids={"a": 6}))
    two = [SequenceProgress("a", 6, (7, 8))]
    handoffs.on_step(StepReport(70 * ms, 80 * ms, 2, two, load))
    handoff.sequence.preemptions = 2
    handoffs._give_up(handoff, "enough")
    (attributes,) = decode.spans.of("decode.run")
    of_run = ("steps", "preemptions", "longest_gap_ms")
    assert [attributes[f"baton.{name}"] for name in of_run] == [5, 2, 35.0]
    assert attributes["gen_ai.usage.output_tokens"] == 6 and len(attributes) == 4


async def test_tokens_come_together_by_the_stream_interval(decode, router):
    """All of them, each with its log-probabilities; the first one at once."""
    sampling = common_pb2.SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
    await router.reserve(spec("each", prompt(9), sampling=sampling), local=9)
    await router.reserve(spec("eight", prompt(9), sampling=sampling), local=9, interval=8)
    each, events = await router.tokens("each"), []
    while not events or not events[-1].finish_reason:
        events.append(await router.event("eight"))
    assert [len(event.token_ids) for event in events] == [1, 8, 8, 3]
    assert [token for event in events for token in event.token_ids] == each
    assert [p.chosen.token_id for event in events for p in event.logprobs] == each


async def test_what_is_given_up_has_its_last_tokens_before_the_reason(decode, router):
    await router.reserve(spec("a", prompt(20)), interval=8)
    handoffs, handoff = runs(decode, "a")
    for token in (5, 6, 7):
        progress = [SequenceProgress("a", 1, (token,))]
        handoffs.on_step(StepReport(0, 0, 1, progress, decode.node.engine.load()))
    handoffs._give_up(handoff, "enough")
    events = [await router.event("a") for _ in range(3)]
    assert [list(event.token_ids) for event in events] == [[5], [6, 7], []]
    assert [event.abort_reason for event in events] == ["", "", "enough"]


SAMPLING = common_pb2.SamplingParams(max_tokens=4, temperature=-1)
EOS = 1


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
        (matching("x", prompt(4), "("), "sampling.structured_output"),
    ],
)
async def test_a_malformed_sequence_is_refused_alone(decode, router, bad, field):
    await router.reserve(spec("good", prompt(10), max_tokens=20), local=10)
    with pytest.raises(InvalidRequest) as refused:
        await router.reserve(bad, local=512)
    assert refused.value.field == field
    assert len(await router.tokens("good")) == 20


async def test_a_router_that_cancels_while_the_engine_is_busy_leaves_nothing(decode, router):
    gate = decode.hold_engine()
    for name, local in (("reserved", 0), ("started", 20)):
        entered = asked(decode, "reserve")
        answer = router.reserving(spec(name, prompt(20)), local)
        router.stream.outgoing.cancel.append(name)  # in one message: behind the reservation
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    gate.set()
    with pytest.raises(Stale, match="cancelled while"):
        await asyncio.wait_for(answer, PATIENCE_S)
    assert await decode.clean()
    assert decode.spans.ended.count("decode") == 2
    assert router.messages == []


async def test_others_are_answered_while_a_grammar_is_compiled(decode, router):
    gate = decode.hold_grammars()
    waits = router.reserving(matching("waits", prompt(20), "[ab]{3}"), local=20)
    await router.reserve(spec("other", prompt(20, start=5)))
    assert not waits.done() and (await decode.blocks()).blocks_held == 2
    gate.set()
    assert (await asyncio.wait_for(waits, PATIENCE_S)).started
    *matched, end = await router.tokens("waits")
    a, b = byte_tokenizer().encode("ab").ids
    assert len(matched) == 3 and set(matched) <= {a, b} and end == EOS
    await router.cancel("other")


@pytest.mark.parametrize("end", ["cancelled", "lost", "late"])
async def test_what_ends_while_its_grammar_is_compiled_leaves_nothing(decode, router, end):
    gate, twice = decode.hold_grammars(), asked(decode, "reserve", 2)
    wanted = matching("a", prompt(20), "[ab]{3}", time_left_ms=200 if end == "late" else 0)
    async with Router(decode, "other") as other:
        answer = other.reserving(wanted, local=20)
        while "a" not in decode.decoding._handoffs._handoffs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if end == "lost":
            other.call.cancel()
        elif end == "cancelled":
            await other.cancel("a")
        await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
        if end != "lost":
            with pytest.raises(DeadlineExceeded if end == "late" else Stale):
                await asyncio.wait_for(answer, PATIENCE_S)
    gate.set()
    await router.reserve(matching("next", prompt(20, start=5), "c"))  # the thread is free again
    await router.cancel("next")
    assert decode.node.engine._sequences == {} and not twice.is_set()
    assert len(decode.node.grammars._waiting) == 0 and decode.spans.ended.count("decode") == 2


async def test_cancel_frees_in_any_state_but_nothing_of_another_router(decode, router):
    for name in ("a", "b", "c", "d"):
        await router.reserve(spec(name, prompt(20)))
    await router.reserve(spec("runs", prompt(20), max_tokens=200), local=20)
    await router.event("runs")
    await router.cancel("runs")  # at once: it would soon need more blocks than there are
    async with Router(decode, "other") as other:
        other.stream.outgoing.cancel.extend("cd")
        await other.reserve(spec("mine", prompt(20)))  # it has been read
        await other.cancel("mine")
    await router.cancel("unknown", "a", "a", "b")
    load = await decode.blocks()
    assert (load.running, load.blocks_held) == (0, 4)
    await router.cancel("c", "d")


async def test_a_lease_ends_by_itself(directory, store):
    """But not while a sender may write."""
    lease_s = 3.0  # longer than it takes until a sender may write
    async with (
        Worker("decode", directory, store, lease_s=lease_s) as decode,
        Router(decode) as router,
    ):
        names = await granted(decode, router, "writes")
        began = asyncio.get_running_loop().time()
        await router.reserve(spec("a", prompt(20)))
        assert "lease" in (await router.event("a")).abort_reason
        assert lease_s <= asyncio.get_running_loop().time() - began < PATIENCE_S
        load = await decode.blocks()
        assert (load.blocks_held, load.blocks_quarantined) == (2, 0)
        await decode.handoff.call(handoff_pb2.AbortRequest(**names), PATIENCE_S)
        assert await decode.clean()


async def test_a_writer_that_hangs_does_not_keep_an_entry_for_ever(directory, store):
    """Its process lives, so its blocks are quarantined until it says that it has ended."""
    async with Worker("decode", directory, store, lease_s=0.05) as decode, Router(decode) as router:
        names = await granted(decode, router, "hangs")
        assert "lease" in (await router.event("hangs")).abort_reason
        load = await decode.blocks()
        assert load.blocks_held == 0 and load.blocks_quarantined > 0
        await decode.handoff.call(handoff_pb2.AbortRequest(**names), PATIENCE_S)
        assert await decode.clean()


async def test_a_deadline_ends_a_request_in_any_state_and_is_no_fault_of_the_worker(
    decode, router, monkeypatch
):
    with pytest.raises(DeadlineExceeded):  # on a slow machine it may pass during the call
        await router.reserve(spec("reserved", prompt(20), time_left_ms=50))
        await router.event("reserved")
    await router.reserve(spec("early", prompt(20), time_left_ms=5000))
    handoffs = decode.decoding._handoffs
    early = handoffs._handoffs["early"]
    handoffs._expire(early, early.deadline)  # as timers come, by up to a millisecond
    with pytest.raises(DeadlineExceeded):
        await router.event("early")
    gates, reserve = list[threading.Event](), decode.node.engine.reserve

    def reserve_and_hold(*args):  # it would soon have generated all tokens
        reserved = reserve(*args)
        gates.append(decode.hold_engine())
        return reserved

    monkeypatch.setattr(decode.node.engine, "reserve", reserve_and_hold)
    try:
        with pytest.raises(DeadlineExceeded):
            runs = spec("runs", prompt(20), max_tokens=200, time_left_ms=700)
            await router.reserve(runs, local=20)
            while event := await router.event("runs"):
                assert not event.finish_reason
    finally:
        gates[0].set()


async def test_a_connection_that_breaks_ends_its_routers_sequences_alone(decode):
    async with Router(decode, "stays") as stays:
        async with Router(decode, "leaves") as leaves:
            await leaves.reserve(spec("a", prompt(20), max_tokens=200), local=20)
            await leaves.reserve(spec("b", prompt(20)))
            await leaves.event("a")
            await stays.reserve(spec("c", prompt(20), max_tokens=100), local=20)
        assert len(await stays.tokens("c")) == 100
        assert await decode.clean()
        # Another connection of the same name has nothing to do with the first.
        async with Router(decode, "stays") as again:
            await stays.reserve(spec("d", prompt(20), max_tokens=50), local=20)
            await again.reserve(spec("e", prompt(20)), local=20)
            assert len(await again.tokens("e")) == 4
        assert len(await stays.tokens("d")) == 50


async def test_a_dead_writers_blocks_come_back(decode, router):
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    for name in "ab":
        await granted(decode, router, name, process.pid)
    await router.cancel("a")
    assert (await decode.blocks()).blocks_quarantined == 2
    process.kill()
    await process.wait()
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    while tasks := decode.decoding._links._tasks | decode.decoding._handoffs._tasks:
        await asyncio.wait(tasks)
    assert await decode.clean()


async def test_an_abort_whose_sender_hangs_up_gives_the_blocks_back(decode, router):
    """As where the deadline passes for router and sender at once, and the engine is busy."""
    names = await granted(decode, router)
    gate, released = decode.hold_engine(), asked(decode, "release")
    router.stream.outgoing.cancel.append("a")
    await asyncio.wait_for(released.wait(), PATIENCE_S)
    request = handoff_pb2.AbortRequest(**names, resend=True)
    abort = asyncio.ensure_future(decode.handoff.call(request, PATIENCE_S))
    await asyncio.sleep(0.1)
    abort.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    await decode.handoff.call(handoff_pb2.AbortRequest(**names), PATIENCE_S)
    assert await decode.clean()


async def test_a_commit_with_an_impossible_token_is_refused(decode, router):
    names, reserved = await granted(decode, router), decode.decoding._handoffs._handoffs["a"]
    commit = handoff_pb2.CommitRequest(
        **names, epoch=reserved.transfer.link.epoch, num_tokens=20, first_token_id=320,
        token_digest=reserved.token_digest,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="token id 320"):
        await decode.handoff.call(commit, PATIENCE_S)
    assert await decode.clean()


async def test_reservations_are_given_back_when_draining_takes_too_long(directory, store):
    """The last event is on the wire before the connection ends."""
    async with Worker("decode", directory, store, drain_s=0.5) as decode, Router(decode) as router:
        await router.reserve(spec("stuck", prompt(20)))
        await router.reserve(spec("runs", prompt(20), max_tokens=20), local=20)
        decode.stop()
        with pytest.raises(Unavailable, match="draining"):
            await router.reserve(spec("new", prompt(20)))
        assert len(await router.tokens("runs")) == 20
        with pytest.raises(Unavailable):
            await router.ended
        assert "draining" in (await router.event("stuck")).abort_reason
        await asyncio.wait_for(decode.life, PATIENCE_S)


async def test_only_a_registered_prefill_worker_gets_a_link(decode, router, store, monkeypatch):
    offering = decode.handoff.call(offer_of(decode, "new"), PATIENCE_S)
    asyncio.get_running_loop().call_later(0.05, decode.knows_prefill, "new")
    assert (await offering).epoch > 0
    monkeypatch.setattr(node, "RECORD_WAIT_S", 0.05)
    for incarnation in ("unknown", decode.node.record.incarnation):
        offer = offer_of(decode, incarnation)
        with pytest.raises(TransferFailed, match="no other worker"):
            await decode.handoff.call(offer, PATIENCE_S)
    # What was registered stays known while the registry is away.
    decode.knows_prefill("writer")
    store.stop()
    monkeypatch.setattr(decode, "knows_prefill", lambda *_: None)
    names = await granted(decode, router)
    await decode.handoff.call(handoff_pb2.AbortRequest(**names), PATIENCE_S)
    store.start()


async def test_links_of_prefill_workers_that_have_left_are_closed_once_no_handoff_uses_them(
    decode, router
):
    """Nothing else tells of one on another host, and each new one would add a link."""
    names = await granted(decode, router)
    links = decode.decoding._links._links
    decode.store.drop("writer")
    await asyncio.sleep(0.02)
    assert list(links) == ["writer"]
    await decode.handoff.call(handoff_pb2.AbortRequest(**names), PATIENCE_S)
    decode.knows_prefill("another")
    await until(lambda: not links)
