"""The router's services over scripted workers, called as a client calls them."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.reflection_pb2 import (
    ServerReflectionRequest,
    ServerReflectionResponse,
)
from opentelemetry.context import Context
from opentelemetry.trace import StatusCode

from baton.cli import main as cli
from baton.errors import Cancelled, Unauthenticated
from baton.generation.sampling_params import SamplingParams, StructuredOutput
from baton.generation.structured_output import GrammarCompiler
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore
from baton.net import rpc, tls
from baton.net.server import Health
from baton.net.tasks import cancelled
from baton.telemetry import tracing
from baton.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
)
from router import grpc_service
from router.admission.admission import Admission
from router.admission.tenants import Tenants
from router.fleet.fleet import Fleet
from router.grpc_service import FleetServicer, InferenceServicer, authorize, authorize_counted
from router.output import sink
from router.telemetry.request_span import RequestSpan
from tests.tracing import Traces

from .scripted_workers import (
    DRAINING,
    TIMEOUT_S,
    Cluster,
    counting,
    first_token,
    received,
    says,
    seen,
    started,
    token,
    tokenized,
)
from .small_tokenizers import admission, byte_tokenizer
from .snapshots import decode_views

PROMPT = (1, 2, 3)
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def request_of(max_tokens=5, prompt=PROMPT, **fields):
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0),
        **fields,
    )


class Router:
    """A router's servicers on a real server, and a client's stubs."""

    def __init__(
        self, cluster, tokenizer, default_timeout_s=TIMEOUT_S, tenants=None, trace_content=0
    ):
        tenants = tenants or Tenants()
        self.admission = admission(
            tokenizer, tenants, default_timeout_s=default_timeout_s, trace_content=trace_content
        )
        self.cluster, self.decode = cluster, (*cluster.decodes, None)[0]
        self.service = cluster.service(self.admission)
        self._server = rpc.server(partial(authorize_counted, self.service))

    async def __aenter__(self):
        status = fleet_pb2.RouterStatus(incarnation="router", model="tiny", otlp="http://o:1")
        self.status_of_router = status
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self.service), self._server
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(
            FleetServicer(self.service, status), self._server
        )
        Health().add_to(self._server, ["baton.v1.FleetService"])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self.channel = rpc.channel(self.address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.fleet_stub = fleet_pb2_grpc.FleetServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc):
        async with asyncio.timeout(TIMEOUT_S):
            await self.service.idle()
        await self.channel.close()
        await self._server.stop(0)
        await self.admission.aclose()

    def generate(self, **fields):
        """A call under way."""
        return self.stub.Generate(request_of(**fields))

    async def complete(self, **fields):
        """Started, all deltas, finish."""
        async with asyncio.timeout(TIMEOUT_S):
            first, *deltas, last = [message async for message in self.generate(**fields)]
        return first.started, [message.delta for message in deltas], last.finish

    async def begun(self, **fields):
        """A call that has its first token."""
        call = self.generate(**fields)
        async with asyncio.timeout(TIMEOUT_S):
            while not (await call.read()).delta.token_ids:
                pass
        return call

    async def status(self, **request):
        return await self.fleet_stub.GetStatus(fleet_pb2.GetStatusRequest(**request))


@pytest.fixture
async def router_of(tmp_path):
    """Starts routers over clusters of scripted workers."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(prefill=1, decode=1, *, cluster=None, max_context=32, **settings):
            cluster = Cluster(prefill, decode, max_context=2 * max_context, **(cluster or {}))
            await stack.enter_async_context(cluster)
            tokenizer = byte_tokenizer(tmp_path, max_position_embeddings=max_context)
            return await stack.enter_async_context(Router(cluster, tokenizer, **settings))

        yield start


async def failure_of(call, code=None, text=""):
    """The status a call ends with, whatever comes before; with this code, and this text in it."""
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call:
                pass
    assert code in (None, caught.value.code().name) and text in caught.value.details()
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


def pauses(sequence, ahead):
    """A run of no tokens."""


async def test_a_stream_is_started_deltas_and_a_finish(router_of):
    router = await router_of()
    begun, deltas, finish = await router.complete()
    assert begun.prompt_tokens == 3
    assert begun.request_id
    assert [t for delta in deltas for t in delta.token_ids] == counting(5)
    assert "".join(delta.text for delta in deltas) == "abcde"
    assert finish.reason == LENGTH
    assert finish.usage == common_pb2.Usage(prompt_tokens=3, completion_tokens=5)
    assert (finish.route.prefill, finish.route.decode, finish.route.attempts) == ("p0", "d0", 1)
    assert 0 < finish.timing.ttft_ms <= finish.timing.e2e_ms
    (model,) = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context, model.vocab_size, model.chat) == ("tiny", 32, 257, True)
    answer = await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="Hi"))
    assert (len(answer.token_ids), answer.max_context) == (2, 32)
    explain = fleet_pb2.ExplainRequest(request=request_of())
    answer = await router.fleet_stub.Explain(explain)
    assert (answer.refused, answer.prompt_tokens, answer.tenant) == ("", len(PROMPT), "default")
    assert [(c.prefill, c.decode) for c in answer.candidates] == [("p0", "d0")]
    assert len(router.decode.requests) == 1, "explaining runs nothing"


@pytest.fixture
def tenants(tmp_path):
    """Of a file with the tenant and operator keys "t" and "o"."""
    tables = "[tenants.t]\nkey_files = ['t.key']\n[admin]\nkey_files = ['o.key']"
    for name, text in (("t.key", "t"), ("o.key", "o"), ("tenants.toml", tables)):
        (tmp_path / name).write_text(text)
    return Tenants(tmp_path / "tenants.toml")


async def test_with_tenants_operators_questions_need_an_operators_key(
    router_of, tenants, monkeypatch, capsys
):
    router = await router_of(tenants=tenants)
    reflection = router.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ServerReflectionRequest.SerializeToString, ServerReflectionResponse.FromString,
    )  # fmt: skip
    ask = ServerReflectionRequest(list_services="*")

    async def run(*argv):
        """A command's exit status, output and error."""
        status = await asyncio.to_thread(cli.main, [*argv, "--target", router.address])
        return status, *capsys.readouterr()

    allowed = partial(authorize, tenants)
    async with OtlpReceiver(SpanStore(), authorize=allowed) as receiver:
        router.status_of_router.otlp = receiver.address
        commands = (
            ("status",), ("explain", "x"), ("top", "--once", "--interval", "0.1"), ("doctor",),
            ("trace",), ("trace", "--from", receiver.address),
        )  # fmt: skip
        for key, answers in (("", False), ("t", False), ("wrong", False), ("o", True)):
            monkeypatch.setenv("BATON_API_KEY", key)
            for command in commands:
                status, _, err = await run(*command)
                refused = "send a key of [admin] in the tenants file" in err
                assert refused != answers, (key, command, err)
                if command[0] in ("status", "explain", "top"):
                    assert status == (not answers), (key, command, err)
            call = reflection(metadata=rpc.bearer(key), timeout=TIMEOUT_S)
            if answers:
                await call.write(ask)
                assert (await call.read()).HasField("list_services_response")
            else:
                await failure_of(call, "UNAUTHENTICATED")
    call = router.stub.Generate(request_of(), metadata=rpc.bearer("t"))
    assert (await finish_of(call)).usage.completion_tokens == 5
    call = router.stub.Generate(request_of(), metadata=rpc.bearer("o"))
    await failure_of(call, "UNAUTHENTICATED", "an operator's: requests need a tenant's")


@pytest.mark.parametrize(
    ("has_file", "asks_certificates", "roles", "key", "answered"),
    [
        (False, False, (), "", True),
        (False, True, (), "", False),
        (False, True, ("router",), "x", True),
        (True, True, (), "t", False),
        (True, True, (), "o", True),
        (True, True, ("admin",), "", True),
        (True, False, ("admin",), "", False),  # such a port has verified no certificate
    ],
)
def test_an_operator_has_a_key_or_where_the_port_asks_for_it_a_certificate_with_a_role(
    tenants, monkeypatch, has_file, asks_certificates, roles, key, answered
):
    monkeypatch.setattr(tls._process, "client_ca_file", asks_certificates or None)
    names = [f"{role}.baton".encode() for role in roles]
    context = SimpleNamespace(
        invocation_metadata=lambda: rpc.bearer(key),
        auth_context=lambda: {"x509_subject_alternative_name": names},
    )
    for method in ("/baton.v1.FleetService/GetStatus", "/grpc.reflection.v1alpha.X/Y"):
        with contextlib.nullcontext() if answered else pytest.raises(Unauthenticated):
            authorize(tenants if has_file else Tenants(), method, context)


@pytest.mark.parametrize(("key", "answered"), [("t", True), ("", False), ("o", False)])
async def test_a_key_is_looked_at_before_the_request(router_of, tenants, key, answered):
    """And before a span, the queue and admission; what it refuses is counted as a request."""
    router = await router_of(tenants=tenants)
    method = "/baton.v1.InferenceService/Generate"
    send = router.channel.unary_stream(method, request_serializer=bytes)
    call = send(b"\xff" * 1000, metadata=rpc.bearer(key), timeout=TIMEOUT_S)
    await failure_of(call, "INVALID_ARGUMENT" if answered else "UNAUTHENTICATED")
    listed = router.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=rpc.bearer(key))
    with contextlib.nullcontext() if answered else pytest.raises(grpc.RpcError):
        await listed
    counted = {} if answered else {"UNAUTHENTICATED": 1}
    assert router.service.stats.counts.ended == counted


async def test_two_keys_are_one_too_many(router_of):
    """Who passes requests on may look at the first, and we at the last."""
    router = await router_of()
    call = router.stub.Generate(request_of(), metadata=rpc.bearer("t") * 2)
    await failure_of(call, "UNAUTHENTICATED", "more than once")


@pytest.mark.parametrize(
    ("stop", "max_tokens", "tokens", "text", "end"),
    [
        # Speculating workers send several tokens at once.
        ([], 5, [100, 101, 102, 103, 104], "abcde", (LENGTH, "")),
        # What a step brings behind a stop string is not output.
        (["bc"], 5, [100, 101, 102], "a", (STOP, "bc")),
        (["bc"], 20, [100, 101, 102], "a", (STOP, "bc")),
    ],
)
async def test_several_tokens_of_a_step_are_one_delta_up_to_a_stop_string(
    router_of, stop, max_tokens, tokens, text, end
):
    router = await router_of()

    def at_once(sequence, ahead):
        step = [token(sequence, ahead + number) for number in range(4)]
        router.decode.send(sequence.handoff_id, *(one for one, _ in step), reason=step[-1][1])

    router.decode.runs = [at_once]
    _, deltas, finish = await router.complete(max_tokens=max_tokens, stop=stop)
    # The first token's delta, from the prefill worker, may be joined with theirs.
    assert len(deltas) <= 2
    assert [token_id for delta in deltas for token_id in delta.token_ids] == tokens
    assert "".join(delta.text for delta in deltas) == text
    assert (finish.reason, finish.stop) == end
    assert (deltas[-1].finish_reason, deltas[-1].stop) == end  # if the finish is lost
    assert finish.usage.completion_tokens == len(tokens)
    if max_tokens == 20:  # otherwise the worker has ended it by itself
        assert (await received(router.decode.cancelled)).endswith("-1")


# The end, before the last token.


@pytest.mark.parametrize("where", ["room", "reserve", "prefill", "decode"])
async def test_the_routers_own_deadline_ends_every_wait_on_silent_workers(router_of, where):
    router = await router_of(default_timeout_s=0.5)

    async def silent_reserve(request):
        await asyncio.Event().wait()

    if where == "room":
        await router.cluster.fill()
    elif where == "reserve":
        router.decode.reserves = [silent_reserve]
    elif where == "prefill":
        router.cluster.prefills[0].scripts = [says(started())]
    else:
        router.decode.runs = [pauses]
    said = f"after {int(where == 'decode')} tokens"
    await failure_of(router.generate(), "DEADLINE_EXCEEDED", said)
    for request in router.decode.requests:
        assert await received(router.decode.cancelled) == request.sequence.handoff_id


async def test_the_deadline_ends_the_stream_of_a_caller_who_reads_as_it_comes(router_of):
    router = await router_of(default_timeout_s=0.5)
    router.decode.runs = [router.decode.flood] * 8
    await asyncio.gather(*(failure_of(router.generate(), "DEADLINE_EXCEEDED") for _ in range(8)))
    await router.cluster.all_freed()


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("deadline", "DEADLINE_EXCEEDED", "the deadline passed after"),
        ("drain", "UNAVAILABLE", "go on at another one"),
        ("seconds", "CANCELLED", "did not read its output for"),
        ("bytes", "CANCELLED", "of output unread"),
    ],
)
async def test_a_caller_that_does_not_read_holds_nothing_and_gets_the_reason(
    router_of, monkeypatch, end, code, said
):
    if end == "seconds":
        monkeypatch.setattr(sink, "UNREAD_S", 0.5)
    monkeypatch.setattr(sink, "MAX_UNREAD_BYTES", 1 << (16 if end == "bytes" else 30))
    router = await router_of(default_timeout_s=0.5 if end == "deadline" else 600.0)
    decode = router.decode
    decode.runs = [partial(decode.flood, tokens=4, top=200)]
    call = aiter(router.generate())
    assert (await anext(call)).HasField("started")
    if end == "drain":
        # More than gRPC takes: each token has 200 log-probabilities.
        await seen(lambda: router.service.stats.counts.output_tokens > 2000)
        router.service.give_up()
    async with asyncio.timeout(TIMEOUT_S):
        await router.service.idle()
        assert await decode.cancelled.get() == decode.requests[0].sequence.handoff_id
    await failure_of(call, code, said)
    assert router.service.stats.counts.ended == {code: 1}


def test_a_caller_has_its_time_from_the_first_output_on(monkeypatch):
    """Whatever waits before it: the message that says that the request has started, or headers."""
    clock = iter((1000.0, 1009.0, 1018.0, 1019.5))
    monkeypatch.setattr(sink, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    unread = sink.UnreadLimit()
    unread.add(100, 50)
    unread.add(140, 50)  # some was read
    unread.add(190, 50)  # nothing was, for 9 s
    with pytest.raises(Cancelled, match="did not read"):
        unread.add(240, 50)


async def test_a_caller_that_hangs_up_frees_everything_and_its_spans_end(router_of):
    traces = Traces()
    router = await router_of(cluster={"tracer": traces.tracer})
    prefill, decode = router.cluster.prefills[0], router.decode
    decode.runs = [pauses]
    (await router.begun()).cancel()
    async with asyncio.timeout(TIMEOUT_S):
        assert await decode.cancelled.get() == decode.requests[0].sequence.handoff_id
        await prefill.ended.get()
        await router.service.idle()
    assert router.service.running == 0
    ended = {span.name: span for span in traces.spans}
    assert len(ended) == len(traces.spans)
    assert ended["router.attempt"].attributes["baton.cancelled"] is True
    assert ended["text_completion tiny"].attributes["baton.cancelled"] is True


async def test_the_span_of_an_admission_tells_what_took_its_time(router_of, tmp_path):
    traces = Traces()
    router = await router_of(cluster={"tracer": traces.tracer})
    router.admission._grammars = GrammarCompiler(tmp_path, 257, {0})
    await router.complete()
    with_grammar = request_of()
    with_grammar.sampling.structured_output.regex = "[a-f]+"
    with_grammar.sampling.ignore_eos = False
    async with asyncio.timeout(TIMEOUT_S):
        async for _ in router.stub.Generate(with_grammar):
            pass
    await router.service.idle()
    plain, matched = [span for span in traces.spans if span.name == "router.admit"]
    assert plain.attributes["baton.tokenize_ms"] > 0 and len(plain.attributes) == 1
    assert matched.attributes["baton.grammar_ms"] > 0
    for span in (plain, matched):
        took_ms = (span.end_time - span.start_time) / 1e6
        assert sum(span.attributes.values()) <= took_ms + 1


# Refusals.


async def test_a_panic_of_a_library_is_a_status_at_once(router_of, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*args):
        raise Panic("no entry found for key")

    router = await router_of()
    monkeypatch.setattr(type(router.admission.tokenizer), "encode", panic)
    said = "Panic: no entry found for key"
    generate = router.stub.Generate(inference_pb2.GenerateRequest(text="a"))
    await failure_of(generate, "INTERNAL", said)
    with pytest.raises(grpc.RpcError, match=said) as tokenize:
        await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), timeout=TIMEOUT_S)
    assert tokenize.value.code() is grpc.StatusCode.INTERNAL
    assert (await router.status()).router.state == "SERVING"


async def test_refusals_have_a_status_and_advice_before_any_work(router_of):
    router = await router_of(cluster={"max_queue": 1, "recovery_s": 0.1})
    for fields, code, field in (
        ({"stop": [""]}, "INVALID_ARGUMENT", "stop"),
        ({"resumed_token_ids": [100] * 5}, "INVALID_ARGUMENT", "resumed_token_ids"),
        ({"model": "other"}, "NOT_FOUND", "model"),
    ):
        error = await failure_of(router.generate(**fields), code)
        assert getattr(rpc.error_of(error), "field", None) == field
    await router.cluster.leave(router.decode)
    await router.cluster.until(lambda s: not decode_views(s))
    (prefill,) = router.cluster.prefills
    prefill.tell(state=DRAINING)  # it would serve whole requests
    await router.cluster.until_state(prefill, "DRAINING")
    error = await failure_of(router.generate(), "UNAVAILABLE", "no prefill worker")
    assert retry_after_s(error) == 1.0
    assert router.decode.requests == []
    router.service.draining = True
    error = await failure_of(router.generate(), "UNAVAILABLE", "draining")
    assert retry_after_s(error) > 0
    assert (await router.status()).router.state == "NOT_SERVING"


async def test_refusals_are_a_line_now_and_then_and_a_count_each(router_of, caplog):
    """Lines are written while the loop waits, and an overload refuses thousands a second."""
    router = await router_of()
    with caplog.at_level("INFO", "router"):
        for _ in range(20):
            await failure_of(router.generate(stop=[""]))
            await failure_of(router.generate(model="other"))
    said = [one.getMessage() for one in caplog.records if "ended with" in one.getMessage()]
    assert [text for text in said if "INVALID_ARGUMENT" in text] == said[:1]
    assert [text for text in said if "NOT_FOUND" in text] == said[1:]
    assert all("more since the last line" in text for text in said) and len(said) == 2
    assert router.service.stats.counts.refused == 40


async def test_a_full_queue_refuses_at_once_with_retry_info(router_of, monkeypatch):
    router = await router_of(cluster={"max_queue": 1})
    await router.cluster.fill()
    waiting = router.generate()
    await router.cluster.until_waiting(1)
    monkeypatch.setattr(Admission, "admit", lambda *_: pytest.fail("a refusal must cost nothing"))
    error = await failure_of(router.generate(), "RESOURCE_EXHAUSTED")
    assert retry_after_s(error) > 0
    router.decode.tell()
    assert (await finish_of(waiting)).usage.completion_tokens == 5


async def test_a_broken_stream_is_resumed_at_a_full_queue_but_with_its_ticket_only(router_of):
    router = await router_of(cluster={"max_queue": 1})
    router.decode.runs = [pauses]
    call = router.generate(max_tokens=8)
    async with asyncio.timeout(TIMEOUT_S):
        ticket = (await call.read()).started.resume_ticket
        tokens = list((await call.read()).delta.token_ids)
    assert ticket and tokens
    call.cancel()
    await router.cluster.all_freed()
    await router.cluster.fill()
    waiting = router.generate()
    await router.cluster.until_waiting(1)
    resumed = {"resumed_token_ids": tokens, "max_tokens": 8}
    other = {**resumed, "prompt": [1, 2], "resume_ticket": ticket}
    for fields in (resumed, {**resumed, "resume_ticket": b"x" * len(ticket)}, other):
        await failure_of(router.generate(**fields), "RESOURCE_EXHAUSTED")
    call = router.generate(**resumed, resume_ticket=ticket)
    async with asyncio.timeout(TIMEOUT_S):
        started = (await call.read()).started
    assert (started.resumed_tokens, started.resume_ticket) == (len(tokens), ticket)
    again = router.generate(**resumed, resume_ticket=ticket)  # one at a time
    await failure_of(again, "RESOURCE_EXHAUSTED")
    router.decode.tell()
    for one in (waiting, call):
        assert (await finish_of(one)).reason == LENGTH


# What operators see.


@pytest.mark.parametrize("who", ["tenant", "operator too", "without a file"])
async def test_names_of_workers_and_sizes_of_queues_are_for_operators(
    router_of, tenants, tmp_path, who
):
    if who == "operator too":
        (tmp_path / "o.key").write_text("t")
    settings = {} if who == "without a file" else {"tenants": Tenants(tmp_path / "tenants.toml")}
    router = await router_of(cluster={"max_queue": 1, "recovery_s": 0.1}, **settings)
    shown, key = who != "tenant", rpc.bearer("t")

    def generate(**fields):
        return router.stub.Generate(request_of(**fields), metadata=key, timeout=TIMEOUT_S)

    finish = await finish_of(generate())
    assert (finish.route.prefill, finish.route.decode) == (("p0", "d0") if shown else ("", ""))
    assert finish.route.attempts == 1
    pinned = generate(workers=["p0", "d0"])
    if shown:
        assert (await finish_of(pinned)).route.decode == "d0"
    else:
        await failure_of(pinned, "UNAUTHENTICATED", "this is for operators")
    await router.cluster.fill()
    waiting = generate()
    await router.cluster.until_waiting(1)
    refused = [(await failure_of(generate()), "1 requests are waiting already")]
    for one in router.cluster.workers:
        await router.cluster.leave(one)
    for begun in (waiting, None):
        error = await failure_of(begun or generate())
        refused.append((error, "no worker is ready (none is registered)"))
    for error, text in refused:
        assert (text in error.details()) == shown, error.details()
        assert retry_after_s(error) > 0
        assert shown or not re.search(r"\d|worker", error.details())


def of_genai(span):
    return {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")}


async def test_the_span_of_a_request_has_the_names_of_the_genai_conventions(router_of):
    """And no word of what was said, unless that is asked for."""
    traces = Traces()
    router = await router_of(cluster={"tracer": traces.tracer})
    begun, _, _ = await router.complete(max_tokens=3)
    await failure_of(router.generate(stop=[""]))
    await router.service.idle()
    ended = [span for span in traces.spans if span.name == "text_completion tiny"]
    done, refused = (of_genai(span) for span in ended)
    asked = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "tiny",
    }
    assert refused == asked
    assert ended[1].attributes["error.type"] == "InvalidRequest"
    assert "error.type" not in ended[0].attributes
    expected = {
        **asked,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.id": begun.request_id,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": begun.prompt_tokens,
        "gen_ai.usage.output_tokens": 3,
    }
    assert done.items() >= expected.items()
    assert not [name for name in done if "messages" in name or "seed" in name]


@pytest.mark.parametrize(
    ("output", "choices", "wanted"),
    [
        (None, 1, (None, None)),
        (StructuredOutput(json_schema="{}"), 2, ("json", 2)),
        (StructuredOutput(regex="a+"), 1, ("text", None)),
    ],
)
def test_the_span_says_what_form_was_asked_for_and_how_many_choices(output, choices, wanted):
    traces = Traces()
    with tracing.span(traces.tracer, "chat tiny", Context()) as span:
        asked = replace(tokenized(), params=SamplingParams(structured_output=output))
        RequestSpan(span, None, 0).admitted(inference_pb2.GenerateRequest(), asked, choices)
    found = of_genai(traces.spans[0])
    assert wanted == tuple(
        found.get(f"gen_ai.{name}") for name in ("output.type", "request.choice.count")
    )


async def test_prompt_and_answer_are_recorded_where_that_is_asked_for_and_cut(router_of):
    traces = Traces()
    router = await router_of(cluster={"tracer": traces.tracer}, trace_content=8, max_context=1024)
    messages = [("system", "Be brief."), ("user", "x" * 90 + "the end!")]
    chat = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role=role, content=text) for role, text in messages]
    )
    sampling = common_pb2.SamplingParams(max_tokens=20, ignore_eos=True)
    for asked in ({"chat": chat}, {"text": "Once upon a time"}):
        request = inference_pb2.GenerateRequest(sampling=sampling, **asked)
        async for _ in router.stub.Generate(request):
            pass
    await router.service.idle()
    found = {span.name: of_genai(span) for span in traces.spans if "tiny" in span.name}
    for name, text in (("chat tiny", "the end!"), ("text_completion tiny", " a time"[-8:])):
        (said,) = json.loads(found[name]["gen_ai.input.messages"])
        assert said["role"] == "user" and said["parts"][0]["type"] == "text"
        assert said["parts"][0]["content"].endswith(text) and len(said["parts"][0]["content"]) == 8
        (answer,) = json.loads(found[name]["gen_ai.output.messages"])
        assert (answer["role"], answer["finish_reason"]) == ("assistant", "length")
        assert 0 < len(answer["parts"][0]["content"]) <= 8


async def test_pairs_are_left_out_of_a_status_on_request(router_of, monkeypatch):
    router = await router_of()
    monkeypatch.setattr(Fleet, "pairs", [worker_pb2.PairStatus(prefill="p0", decode="d0")])
    assert len((await router.status()).pairs) == 1
    assert not (await router.status(without_pairs=True)).pairs


async def test_status_and_spans_of_a_request_that_fails_over(router_of):
    traces = Traces()
    router = await router_of(prefill=2, decode=2, cluster={"tracer": traces.tracer})
    router.cluster.prefills[0].scripts = [says(first_token(100), then=RuntimeError("lost"))]
    begun, _, finish = await router.complete()
    assert finish.route.attempts == 2
    await router.service.idle()
    ended = traces.spans
    assert sorted(span.name for span in ended) == [
        "router.admit", "router.attempt", "router.attempt", "router.backoff", "router.check",
        "router.finish", "router.first_token", "router.place", "router.place",
        "router.prefill", "router.prefill", "router.stream", "router.stream",
        "text_completion tiny"]  # fmt: skip
    assert {f"{span.context.trace_id:032x}" for span in ended} == {begun.trace_id}
    first, second = sorted(
        (span for span in ended if span.name == "router.attempt"), key=lambda span: span.start_time
    )
    assert (first.attributes["baton.attempt"], second.attributes["baton.attempt"]) == (1, 2)
    assert first.attributes["baton.placement.candidates"] == 4
    assert first.attributes["baton.placement.predicted_ttft_ms"] > 0
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET

    await failure_of(router.generate(stop=[""]))
    router.cluster.decodes[1].tell(state=common_pb2.WORKER_STATE_DRAINING, running=3)
    await router.cluster.until_state(router.cluster.decodes[1], "DRAINING")
    status = await router.status()
    workers = [(worker.record.incarnation, worker.state) for worker in status.workers]
    assert workers == [("p0", "READY"), ("p1", "READY"), ("d0", "READY"), ("d1", "DRAINING")]
    assert status.workers[3].load.running == 3
    seen, counts = status.router, status.router.counts
    assert (seen.incarnation, seen.otlp, seen.state) == ("router", "http://o:1", "SERVING")
    assert seen.registry_connected
    assert dict(counts.ended) == {"OK": 1, "INVALID_ARGUMENT": 1}
    assert (counts.refused, counts.failovers, counts.prompt_tokens, counts.output_tokens) == (
        1, 1, 3, 5,
    )  # fmt: skip
    kinds = [event.kind for event in seen.events]
    assert kinds == [fleet_pb2.EVENT_KIND_FAILOVER, fleet_pb2.EVENT_KIND_REFUSAL]
    assert "lost" in seen.events[0].text
    assert seen.latency.requests == 1 and seen.latency.ttft_p50_ms > 0


async def test_a_workers_new_state_is_published_soon(router_of, monkeypatch):
    """Not only at the next turn: a process that starts or replaces the worker waits for it."""
    router = await router_of()
    monkeypatch.setattr(grpc_service, "_POLLS", 1 << 20)
    for pid, worker in enumerate(router.service.models.workers, 1):
        worker.record.pid, worker.record.host_id = pid, f"host of {pid}"
    published = []
    shared = SimpleNamespace(publish=published.append)
    operators = FleetServicer(router.service, router.status_of_router, shared)
    publishing = asyncio.create_task(operators.publish())
    await seen(lambda: published)
    router.decode.tell(state=DRAINING)
    await seen(lambda: len(published) > 1)
    for status in published:  # by both a parent knows its own workers
        known = {(one.record.pid, one.record.host_id) for one in status.workers}
        assert known == {(1, "host of 1"), (2, "host of 2")}
    states = [sorted(one.state for one in status.workers) for status in published]
    assert states == [["READY", "READY"], ["DRAINING", "READY"]]
    await cancelled(publishing)
