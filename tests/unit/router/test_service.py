"""The router's services over scripted workers, called as a client calls them."""

import asyncio
import contextlib
from functools import partial

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton import rpc
from baton.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from router import frontend
from router.admission.admission import Admission
from router.dispatch import attempt
from router.frontend import GenerationService
from router.service import FleetServicer, InferenceServicer

from .scripted_workers import (
    TIMEOUT_S,
    Cluster,
    counting,
    first_token,
    started,
    token,
    until_stuck,
)
from .small_tokenizers import byte_tokenizer

PROMPT = (1, 2, 3)


class Router:
    """A router's servicers on a real server, and a client's stubs."""

    def __init__(self, cluster, tokenizer, default_timeout_s=10.0, **limits):
        admission = Admission("tiny", tokenizer, default_timeout_s, **limits)
        self.cluster = cluster
        self.service = GenerationService(
            admission, cluster.wait_queue, cluster.dispatch, cluster.fleet, cluster.tracer
        )
        status = fleet_pb2.RouterStatus(incarnation="router", model="tiny")
        self.fleet = FleetServicer(self.service, status)
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)

    async def __aenter__(self):
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self.service), self._server
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self.fleet, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = rpc.channel(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.fleet_stub = fleet_pb2_grpc.FleetServiceStub(self._channel)
        return self

    async def __aexit__(self, *exc):
        async with asyncio.timeout(TIMEOUT_S):
            await self.service.idle()
        await self._channel.close()
        await self._server.stop(0)

    def generate(self, timeout=None, max_tokens=5, **fields):
        """A call under way."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
        return self.stub.Generate(request, timeout=timeout)

    async def complete(self, **fields):
        """Started, all deltas, finish."""
        async with asyncio.timeout(TIMEOUT_S):
            first, *deltas, last = [message async for message in self.generate(**fields)]
        return first.started, [message.delta for message in deltas], last.finish


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test"), exporter
    provider.shutdown()


@pytest.fixture
async def router_of(tmp_path):
    """Starts routers over clusters of scripted workers."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(prefill=1, decode=1, *, cluster=None, **router):
            cluster = Cluster(prefill, decode, **(cluster or {}))
            await stack.enter_async_context(cluster)
            tokenizer = byte_tokenizer(tmp_path)
            return await stack.enter_async_context(Router(cluster, tokenizer, **router))

        yield start


async def failure_of(call):
    """The status a call ends with, whatever it says before."""
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call:
                pass
    return caught.value


async def finish_of(call):
    """The finish of a call that has been read from before."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (message := await call.read()).HasField("finish"):
            pass
    return message.finish


def retry_after_s(error):
    """The advice of a RetryInfo detail."""
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    info = error_details_pb2.RetryInfo()
    assert status_pb2.Status.FromString(packed).details[0].Unpack(info)
    return info.retry_delay.ToMilliseconds() / 1000


def silent(heard):
    """A handler that never answers."""

    async def script(request):
        heard.set()
        await asyncio.Event().wait()

    return script


async def test_a_stream_is_started_deltas_and_a_finish(router_of):
    router = await router_of()
    begun, deltas, finish = await router.complete()
    assert begun.prompt_tokens == 3
    assert begun.request_id
    assert [t for delta in deltas for t in delta.token_ids] == counting(5)
    assert "".join(delta.text for delta in deltas) == "abcde"
    assert finish.reason == common_pb2.FINISH_REASON_LENGTH
    assert finish.usage == common_pb2.Usage(prompt_tokens=3, completion_tokens=5)
    assert (finish.route.prefill, finish.route.decode, finish.route.attempts) == ("p0", "d0", 1)
    assert 0 < finish.timing.ttft_ms <= finish.timing.e2e_ms


@pytest.mark.parametrize("max_tokens", [5, 20])
async def test_what_a_step_brings_behind_a_stop_string_is_not_output(router_of, max_tokens):
    """Speculating workers send several tokens at once; here the second of them ends it."""
    router = await router_of()
    decode = router.cluster.decodes[0]

    def at_once(sequence, ahead):
        tokens = [token(sequence, ahead + step) for step in range(4)]
        decode.send(sequence.handoff_id, *(one for one, _ in tokens), reason=tokens[-1][1])

    decode.runs = [at_once]
    _, deltas, finish = await router.complete(max_tokens=max_tokens, stop=["bc"])
    assert [list(delta.token_ids) for delta in deltas] == [[100], [101], [102]]
    assert [delta.text for delta in deltas] == ["a", "", ""]
    assert (finish.reason, finish.stop) == (common_pb2.FINISH_REASON_STOP, "bc")
    assert finish.usage.completion_tokens == 3
    if max_tokens == 20:  # otherwise the worker has ended it by itself
        assert (await decode.cancelled.get()).endswith("-1")


async def test_several_tokens_of_a_step_are_one_delta(router_of):
    router = await router_of()
    decode = router.cluster.decodes[0]

    def at_once(sequence, ahead):
        decode.send(sequence.handoff_id, 101, 102, 103)
        decode.send(sequence.handoff_id, 104, reason=common_pb2.FINISH_REASON_LENGTH)

    decode.runs = [at_once]
    _, deltas, finish = await router.complete()
    assert [list(delta.token_ids) for delta in deltas] == [[100], [101, 102, 103], [104]]
    assert [delta.text for delta in deltas] == ["a", "bcd", "e"]
    assert finish.usage.completion_tokens == 5


@pytest.mark.parametrize("where", ["room", "reserve", "prefill", "decode"])
async def test_the_routers_own_deadline_ends_every_wait_on_silent_workers(router_of, where):
    router = await router_of(default_timeout_s=0.5)
    prefill, decode = router.cluster.prefills[0], router.cluster.decodes[0]
    heard = asyncio.Event()

    async def silent_prefill(request):
        yield started()
        await asyncio.Event().wait()

    if where == "room":
        decode.tell(blocks_free=0)
        await router.cluster.until(lambda s: not s.decode[0].load.blocks_free)
    elif where == "reserve":
        decode.reserves = [silent(heard)]
    elif where == "prefill":
        prefill.scripts = [silent_prefill]
    else:
        decode.runs = [lambda sequence, ahead: None]
    error = await failure_of(router.generate())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert f"after {int(where == 'decode')} tokens" in error.details()
    assert decode.requests == [] or await decode.cancelled.get() == (
        decode.requests[0].sequence.handoff_id
    )


async def test_the_deadline_ends_the_stream_of_a_caller_who_reads_as_it_comes(router_of):
    router = await router_of(default_timeout_s=0.5)
    decode = router.cluster.decodes[0]
    decode.runs = [decode.flood] * 8
    calls = [router.generate() for _ in range(8)]
    errors = await asyncio.gather(*map(failure_of, calls))
    assert {error.code() for error in errors} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await router.cluster.all_freed()


@pytest.mark.parametrize("end", ["deadline", "drain", "seconds", "bytes"])
async def test_a_caller_who_does_not_read_holds_nothing_and_is_told_why(
    router_of, monkeypatch, end
):
    if end == "seconds":
        monkeypatch.setattr(frontend, "UNREAD_S", 0.5)
    monkeypatch.setattr(attempt, "MAX_UNREAD_BYTES", 1 << (16 if end == "bytes" else 30))
    router = await router_of(default_timeout_s=0.5 if end == "deadline" else 600.0)
    decode = router.cluster.decodes[0]
    decode.runs = [partial(decode.flood, tokens=4, top=200)]
    call = aiter(router.generate())
    assert (await anext(call)).HasField("started")
    if end == "drain":
        await until_stuck(router.service.stats)
        router.service.give_up()
    async with asyncio.timeout(TIMEOUT_S):
        await router.service.idle()
        assert await decode.cancelled.get() == decode.requests[0].sequence.handoff_id
    error = await failure_of(call)
    code, told = {
        "deadline": (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed after"),
        "drain": (grpc.StatusCode.UNAVAILABLE, "go on at another one"),
        "seconds": (grpc.StatusCode.CANCELLED, "did not read its output for"),
        "bytes": (grpc.StatusCode.CANCELLED, "of output unread"),
    }[end]
    assert error.code() is code
    assert told in error.details()
    assert router.service.stats.ended == {code.name: 1}


async def test_the_deadline_does_not_wait_for_a_stopped_worker_to_hear_of_it(router_of):
    """A stopped process keeps its sockets open and answers nothing, Cancel neither."""
    router = await router_of(default_timeout_s=0.5)
    decode, heard, go_on = router.cluster.decodes[0], asyncio.Event(), asyncio.Event()
    decode.runs = [lambda sequence, ahead: None]

    async def unheard(handoff_id):
        heard.set()
        await go_on.wait()

    decode.on_cancel = unheard
    error = await failure_of(router.generate())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(TIMEOUT_S):
        await heard.wait()
        await router.service.idle()  # though Cancel is still under way
    go_on.set()


async def test_a_caller_that_hangs_up_frees_everything(router_of):
    router = await router_of()
    prefill, decode = router.cluster.prefills[0], router.cluster.decodes[0]
    decode.runs = [lambda sequence, ahead: None]
    call = router.generate()
    async with asyncio.timeout(TIMEOUT_S):
        while not (await call.read()).delta.token_ids:
            pass
        call.cancel()
        assert await decode.cancelled.get() == decode.requests[0].sequence.handoff_id
        await prefill.ended.get()
        await router.service.idle()
    assert router.service.running == 0


async def test_no_worker_is_unavailable_with_retry_info(router_of):
    router = await router_of(prefill=0)
    error = await failure_of(router.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no prefill worker" in error.details()
    assert retry_after_s(error) == 1.0


async def test_a_full_queue_refuses_at_once_with_retry_info(router_of):
    router = await router_of(cluster={"max_queue": 1})
    decode = router.cluster.decodes[0]
    decode.tell(blocks_free=0)
    await router.cluster.until(lambda s: not s.decode[0].load.blocks_free)
    waiting = router.generate()
    await router.cluster.until_waiting(1)
    error = await failure_of(router.generate())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after_s(error) > 0
    decode.tell()
    assert (await finish_of(waiting)).usage.completion_tokens == 5


async def test_a_bad_request_is_refused_with_its_field_before_any_work(router_of):
    router = await router_of()
    error = await failure_of(router.generate(stop=[""]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.error_of(error).field == "stop"
    assert router.cluster.decodes[0].requests == []
    error = await failure_of(router.generate(model="other"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_a_draining_router_finishes_what_it_has_and_takes_nothing_new(router_of):
    router = await router_of()
    decode, paused = router.cluster.decodes[0], []
    decode.runs = [lambda *run: paused.append(run)]
    running = router.generate()
    async with asyncio.timeout(TIMEOUT_S):
        while not (await running.read()).delta.token_ids:
            pass
    router.service.draining = True
    error = await failure_of(router.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_s(error) > 0
    status = (await router.fleet_stub.GetStatus(fleet_pb2.GetStatusRequest())).router
    assert (status.state, status.running) == ("NOT_SERVING", 1)
    decode.run_to_end(*paused.pop())
    assert (await finish_of(running)).usage.completion_tokens == 5
    async with asyncio.timeout(TIMEOUT_S):
        await router.service.idle()


async def test_the_status_shows_workers_with_their_states(router_of):
    router = await router_of(decode=2)
    decode = router.cluster.decodes[1]
    decode.tell(state=common_pb2.WORKER_STATE_DRAINING, running=3)
    await router.cluster.until_state(decode, "DRAINING")
    status = await router.fleet_stub.GetStatus(fleet_pb2.GetStatusRequest())
    assert [(w.record.incarnation, w.state) for w in status.workers] == [
        ("p0", "READY"), ("d0", "READY"), ("d1", "DRAINING")]  # fmt: skip
    assert status.workers[2].load.running == 3
    assert status.router.state == "SERVING"
    assert status.router.registry_connected


async def test_models_and_tokens_are_told(router_of):
    router = await router_of()
    (model,) = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context, model.vocab_size, model.chat) == ("tiny", 32, 257, True)
    answer = await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="Hi"))
    assert (len(answer.token_ids), answer.max_context) == (2, 32)


async def test_every_span_of_a_failed_over_request_ends_once_under_one_trace(router_of, spans):
    tracer, exporter = spans
    router = await router_of(prefill=2, cluster={"tracer": tracer})

    async def lost(request):
        yield first_token(100)
        raise RuntimeError("lost")

    router.cluster.prefills[0].scripts = [lost]
    begun, _, finish = await router.complete()
    assert finish.route.attempts == 2
    await router.service.idle()
    ended = exporter.get_finished_spans()
    assert sorted(span.name for span in ended) == [
        "router.admit", "router.attempt", "router.attempt", "router.backoff", "router.begin",
        "router.check", "router.finish", "router.first_token", "router.generate", "router.place",
        "router.place", "router.prefill", "router.prefill", "router.stream",
        "router.stream"]  # fmt: skip
    assert {f"{span.context.trace_id:032x}" for span in ended} == {begun.trace_id}
    first, second = sorted(
        (span for span in ended if span.name == "router.attempt"), key=lambda span: span.start_time
    )
    assert (first.attributes["baton.attempt"], second.attributes["baton.attempt"]) == (1, 2)
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET


async def test_spans_of_a_cancelled_request_end_once(router_of, spans):
    tracer, exporter = spans
    router = await router_of(cluster={"tracer": tracer})
    router.cluster.decodes[0].runs = [lambda sequence, ahead: None]
    call = router.generate()
    async with asyncio.timeout(TIMEOUT_S):
        while not (await call.read()).delta.token_ids:
            pass
        call.cancel()
        await router.service.idle()
    ended = {span.name: span for span in exporter.get_finished_spans()}
    assert len(ended) == len(exporter.get_finished_spans())
    assert ended["router.attempt"].attributes["baton.cancelled"] is True
    assert ended["router.generate"].attributes["baton.cancelled"] is True


async def test_a_broken_stream_goes_on_behind_its_tokens(router_of):
    router = await router_of()
    *_, finish = await router.complete(resumed_token_ids=[100, 101])
    assert finish.usage.completion_tokens == 5
    sequence = router.cluster.prefills[0].requests[0].sequence
    assert list(sequence.token_ids) == [*PROMPT, 100, 101]
    assert sequence.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("resumed", "sampling", "field"),
    [
        ([100] * 5, {}, "resumed_token_ids"),
        ([100], {"temperature": 0.5}, "sampling.seed"),
        ([1 << 30], {}, "token_ids"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused(router_of, resumed, sampling, field):
    router = await router_of()
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=5, **sampling),
        resumed_token_ids=resumed,
    )
    error = await failure_of(router.stub.Generate(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.error_of(error).field == field


async def test_a_request_says_where_it_would_run(router_of):
    router = await router_of(decode=2)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
    answer = await router.fleet_stub.Explain(fleet_pb2.ExplainRequest(request=request))
    assert (answer.refused, answer.prompt_tokens, answer.tenant) == ("", len(PROMPT), "default")
    assert [(c.prefill, c.decode) for c in answer.candidates] == [("p0", "d0"), ("p0", "d1")]
    assert not any(decode.requests for decode in router.cluster.decodes)
    router.cluster.decodes[0].tell(blocks_free=0)
    await router.cluster.until(lambda s: not s.decode[0].load.blocks_free)
    answer = await router.fleet_stub.Explain(fleet_pb2.ExplainRequest(request=request))
    assert [(c.decode, bool(c.refused)) for c in answer.candidates] == [("d1", False), ("d0", True)]
