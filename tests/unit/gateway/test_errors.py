"""Errors as callers get them: OpenAI's format, the field, when to retry."""

import asyncio
import codecs
import contextlib
import functools
import gzip
import json
import socket
import time
import zlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from baton import errors
from baton.gateway.chat_completions import parse_chat
from baton.gateway.completions import parse_completion
from baton.gateway.endpoint import MAX_BODY_BYTES
from baton.net import rpc
from baton.net.http_errors import failure_of
from router import adapters
from router.output import sink
from tests.unit.router.scripted_workers import DRAINING, TIMEOUT_S, seen
from tests.unit.router.small_tokenizers import byte_tokenizer

from .conftest import PROMPT, events_of, tenants_of


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_an_unexpected_error_is_logged_and_advice_is_in_whole_seconds(caplog):
    """The status of every error is in the SDK's reference, which tests/unit/test_docs.py checks."""
    failure = failure_of(ZeroDivisionError("by zero"))
    assert failure.status == 500 and "by zero" in json.loads(failure.body)["error"]["message"]
    assert "ZeroDivisionError" in caplog.text
    for after_s in (0.0, 0.3, 2.5):
        headers = dict(failure_of(errors.Overloaded("full", after_s)).headers)
        assert int(headers[b"retry-after"]) >= max(1, after_s)
        assert (b"retry-after-ms" in headers) is (after_s > 0)


class Panic(BaseException):
    """As Rust's panics are, which no `except Exception` catches."""


@pytest.mark.parametrize("asked", [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"stream": True}])
async def test_a_panic_of_a_library_is_a_status_at_once(gateway, monkeypatch, caplog, asked):
    def panic(*args):
        raise Panic("no entry found for key")

    monkeypatch.setattr(type(gateway.tokenizer), "encode", panic)
    for answer in (
        await gateway.complete(**{"prompt": "a", **asked}),
        await gateway.post("/tokenize", {"prompt": "a"}),
    ):
        assert "Panic: no entry found for key" in error_of(answer, 500)["message"]
    assert "Traceback" in caplog.text
    assert (await gateway.complete()).status_code == 200, "what needs no text"


JSON = {"content-type": "application/json"}
# One of each kind; schemathesis tries what else breaks the description. The context holds 32.
BAD = [
    *(({"prompt": prompt}, "prompt") for prompt in (5, [], "", [1, 999], [1] * 40)),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], [2, 1 << 32]]}, "prompt[1][1]"),
    ({"prompt": "a" * (1 << 16), "n": 128}, "n"),
    ({"prompt": ["a"] * 9, "n": 128}, "n"),
    *(({name: bad}, name) for name, bad in {
        "temperature": "hot", "top_p": -0.1, "n": True, "suffix": "x", "min_tokens": 6,
        "max_tokens": 0, "logprobs": 21, "logit_bias": {"a": 1}, "stop": ["a"] * 17,
        "stop_token_ids": [999],
        "seed": 1 << 64, "priority": "urgent", "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema"}, "structured_outputs": {}, "use_beam_search": 0,
    }.items()),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     "response_format"),
    ({"max_tokens": 30}, "max_tokens"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": True, "truncate_prompt_tokens": 2}, "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"stop": [""]}, "stop[0]"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": "\ud800"}, None),
]  # fmt: skip
BAD_CHATS = [
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}},
     "response_format.schema"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "x" * 99}]}, "messages"),
    ({"messages": [{"role": "user"}] * 4097}, "messages"),
    *(({name: bad}, name) for name, bad in {
        "functions": [{"name": "f"}], "chat_template": "x", "audio": {"voice": "x"},
        "modalities": ["text", "audio"],
        "max_tokens": 0, "top_logprobs": 2, "logprobs": 2, "max_completion_tokens": 31,
    }.items()),
    ({"max_tokens": 31}, "max_tokens"),
    ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
]  # fmt: skip
BAD_TOKENIZE = [({}, "prompt"), ({"prompt": "a", "messages": [{"role": "u"}]}, "prompt"),
                ({"prompt": 1}, "prompt"), ({"messages": []}, "messages")]  # fmt: skip


async def test_a_bad_field_is_refused_by_name_before_any_work(gateway):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, base, bad in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 5}, BAD),
        ("/v1/chat/completions", chat, BAD_CHATS),
        ("/tokenize", {}, BAD_TOKENIZE),
        ("/detokenize", {}, [({"tokens": [999]}, "tokens"), ({"tokens": ["a"]}, "tokens[0]")]),
    ):
        for body, param in bad:
            text = json.dumps({**base, **body})
            error = error_of(await gateway.client.post(path, content=text, headers=JSON), 400)
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), body
    assert gateway.decode.requests == []


async def test_an_error_says_what_to_do(gateway):
    for kind in ("image_url", "input_audio", "video_url", "file"):
        parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
        error = error_of(await gateway.chat(messages=[{"role": "user", "content": parts}]), 400)
        assert error["param"] == "messages[0].content[1].type"
        assert f"is '{kind}': must be text: images, audio, video" in error["message"]
    for field in ({"functions": [{}]}, {"messages": [{"role": "u", "function_call": {}}]}):
        error = error_of(await gateway.chat(**field), 400)
        assert "is not supported: leave it out" in error["message"]
    error = error_of(await gateway.complete(max_tokens=30), 400)
    assert "max_tokens is 30" in error["message"] and "leaves 29" in error["message"]
    for prompt in (3, None, {}):
        error = error_of(await gateway.complete(prompt=prompt), 400)
        assert "must be text, token ids, or a list of either" in error["message"]
    default = await gateway.complete(prompt=[1] * 20, max_tokens=None)  # 16, where they fit
    assert default.json()["usage"]["completion_tokens"] == 12


async def test_half_of_an_escaped_character_is_named(gateway):
    for text, half in (
        (rb"cut \ud83d", r"\ud83d"),
        (rb"\uD83D and more", r"\uD83D"),
        (rb"\udf89 low", r"\udf89"),
        (rb"\\\ud83c\udf89\n\u00e9\ud83c\u0041", r"\ud83c"),
    ):
        body = b'{"prompt": "%b"}' % text
        error = error_of(await gateway.client.post("/v1/completions", content=body), 400)
        assert f"{half} is half of a surrogate pair" in error["message"]
    for text in (rb"\\ud83d \x", rb"\ud83c\udf89 \x", rb"\ud8", b"\\ud8\xff\xff", rb"\U"):
        body = b'{"prompt": "%b"}' % text
        error = error_of(await gateway.client.post("/v1/completions", content=body), 400)
        assert "half of" not in error["message"]


async def test_hints_and_values_that_mean_without_are_ignored(gateway):
    hints = {"user": "me", "store": True, "metadata": {"a": 1}, "whatever": [1], "tools": [],
             "tool_choice": "none", "response_format": {"type": "text"},
             "parallel_tool_calls": True, "logit_bias": None}  # fmt: skip
    assert (await gateway.chat(max_tokens=2, **hints)).status_code == 200


async def test_a_body_is_json_under_any_content_type(gateway):
    """`curl -d` calls it a form."""

    async def post(text, kind="application/json"):
        headers = {"content-type": kind} if kind else {}
        return await gateway.client.post("/v1/completions", content=text, headers=headers)

    nested = b'{"x": ' + b"[" * 100_000
    bad = b'{"prompt": "a", "suffix": "\xff"}'
    for text in (b"", b"{", b"[]", b'{"prompt": "a", "temperature": NaN}', nested, b"\xff", bad):
        assert error_of(await post(text), 400)["param"] is None
    for levels in range(900, 1000):  # some of them are too many for a part of the parser
        parameters = b'{"x": %b%b}' % (b"[" * levels, b"]" * levels)
        tool = b'{"type": "function", "function": {"name": "f", "parameters": %b}}' % parameters
        chat = b'{"messages": [{"role": "user", "content": "a"}], "tools": [%b]}' % tool
        error_of(await gateway.client.post("/v1/chat/completions", content=chat), 400)
    assert error_of(await post(b'{"prompt": "a\xe6 f"}'), 400)["param"] == "prompt"
    sizes = [rpc.max_request_bytes(context) for context in (0, 4096, 1 << 18, 1 << 24)]
    assert sizes == [MAX_BODY_BYTES, 2 << 20, 4 << 20, MAX_BODY_BYTES]
    error_of(await post(b'{"prompt": "' + b"a" * MAX_BODY_BYTES), 413)
    body = json.dumps({"prompt": "a", "max_tokens": 2})
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        assert (await post(body, kind)).status_code == 200
    assert (await post(codecs.BOM_UTF8 + body.encode())).status_code == 200
    error = error_of(await gateway.client.post("/v1/completions", data={"prompt": "a"}), 400)
    assert "content-type is 'application/x-www-form-urlencoded'" in error["message"]


async def test_unknown_paths_methods_and_models(gateway):
    error_of(await gateway.client.get("/v2/models"), 404)
    response = await gateway.client.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    response = await gateway.client.options("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (204, "POST, OPTIONS")
    response_head = await gateway.client.head("/health")
    assert (response_head.status_code, response_head.content) == (200, b"")
    assert response.content == b"" and "access-control-allow-origin" not in response.headers
    for response in (await gateway.complete(model="x"), await gateway.client.get("/v1/models/x")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "model 'x' is not served here; 'tiny' is"


TAKEN = errors.InvalidRequest("another adapter is loaded as a", "name")


@pytest.mark.parametrize(
    ("refusals", "status", "param"),
    [
        ({"p0": TAKEN}, 400, "lora_name"),
        ({"d0": errors.InvalidRequest("no adapter_config.json", "directory")}, 400, "lora_path"),
        ({"p0": errors.InvalidRequest("there is no memory for adapters")}, 400, None),
        ({"p0": errors.Unavailable("it stops"), "d0": TAKEN}, 400, "lora_name"),
        ({"p0": errors.ModelNotFound("it is not loaded here")}, 404, "lora_name"),
        ({"p0": errors.DeadlineExceeded("late"), "d0": errors.Overloaded("full")}, 504, None),
        ({"p0": errors.Overloaded("all places are taken")}, 503, None),
        ({"p0": errors.InternalError("a bug")}, 503, None),
    ],
)
@pytest.mark.parametrize("change", ["load", "unload"])
async def test_workers_that_refuse_an_adapter_say_whose_fault_it_is(
    gateway, monkeypatch, change, refusals, status, param
):
    class Stub:
        def __init__(self, name):
            self.name = name

        async def LoadAdapter(self, request, timeout):
            if self.name in refusals:
                raise refusals[self.name]

        UnloadAdapter = LoadAdapter

    @contextlib.asynccontextmanager
    async def channel(address, role):
        (name,) = (one.incarnation for one in workers if one.record.address == address)
        yield name

    workers = gateway.cluster.workers
    holding = [SimpleNamespace(record=one.record, ready=True) for one in workers]
    for worker in workers:
        worker.record.adapters.add(name="a")
    monkeypatch.setattr(adapters, "_workers", lambda versions: holding)
    monkeypatch.setattr(adapters.rpc, "channel", channel)
    monkeypatch.setattr(adapters.worker_pb2_grpc, "WorkerServiceStub", Stub)
    body = {"lora_name": "a", **({"lora_path": "/a"} if change == "load" else {})}
    answer = await gateway.post(f"/v1/{change}_lora_adapter", body)
    if (status, change) == (404, "load"):
        param = "base_model_name"
    error = error_of(answer, status)
    assert error["param"] == param
    assert all(name in error["message"] for name in refusals)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"lora_name": "tiny"}, 400, "lora_name"),  # the name of a model
        ({"base_model_name": "none"}, 404, "base_model_name"),
        ({"base_model_name": "none@"}, 404, "base_model_name"),
    ],
)
async def test_a_refused_adapter_names_the_bodys_field(gateway, body, status, field):
    asked = {"lora_name": "a", "lora_path": "/a", **body}
    error = error_of(await gateway.post("/v1/load_lora_adapter", asked), status)
    assert error["param"] == field
    gone = await gateway.post("/v1/unload_lora_adapter", {"lora_name": "a"})
    assert error_of(gone, 404)["param"] == "lora_name"


async def test_no_worker_is_503_with_retry_after(gateway_of):
    gateway = await gateway_of(cluster={"recovery_s": 0.1})
    for worker in gateway.cluster.workers:
        worker.tell(state=DRAINING)
        await gateway.cluster.until_state(worker, "DRAINING")
    response = await gateway.complete()
    assert "no prefill worker" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "1"
    # Of models, too: clients wait for them, as other servers open their port when they can serve.
    for path in ("/ready", "/v1/models", "/v1/models/tiny"):
        response = await gateway.client.get(path)
        assert "no prefill worker" in error_of(response, 503)["message"]
        assert path == "/ready" or response.headers["retry-after"] == "1"
    assert (await gateway.client.get("/health")).status_code == 200


async def test_keys_are_the_tenants(gateway_of, tmp_path):
    gateway = await gateway_of(
        tenants=tenants_of(tmp_path, '[tenants.search]\nkey_files = ["key"]', "key")
    )
    good, bad = {"authorization": "Bearer key"}, {"authorization": "Bearer wrong"}
    for headers, status in (({}, 401), (bad, 401), (good, 200)):
        for response in (
            await gateway.complete(headers),
            await gateway.client.get("/v1/models", headers=headers),
            await gateway.post("/tokenize", {"prompt": "x"}, headers),
        ):
            assert response.status_code == status
            if status == 401:
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
    response = await gateway.client.get("/metrics", headers=good)
    assert "is for operators" in error_of(response, 401)["message"]
    # Without a key, nothing of a body is read.
    assert b" 401 " in await answer_to_half_a_body(gateway)


async def test_a_tenant_is_told_that_it_wanted_the_first_token_too_early(gateway_of, tmp_path):
    gateway = await gateway_of(tenants=tenants_of(tmp_path, "[default]"))
    (prefill,) = gateway.cluster.prefills
    prefill.tell(prefill_tokens_per_s=1000, queue_tokens=100_000)
    await gateway.cluster.until(lambda s: any(view.load.queue_tokens for view in s.workers))
    refused = await gateway.complete(ttft_target_ms=1)
    assert "ttft_target_ms" in error_of(refused, 429)["message"]
    assert "tokens" not in refused.text and refused.headers["retry-after"]


async def answer_to_half_a_body(gateway):
    """The status line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999\r\n\r\n{"
    )
    async with asyncio.timeout(TIMEOUT_S):
        line = await reader.readline()
    writer.close()
    return line


def cpu_s(call):
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


@functools.cache
def parsing_s():
    """CPU seconds of half a million values, all of which are made."""
    whole = b"[%s1]" % (b"[1]," * (512 << 10))
    return cpu_s(lambda: json.loads(whole))


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [%s1]}' % (b"1," * (1 << 20)),
        b'{"prompt": [%s[1]]}' % (b"[1]," * (512 << 10)),
        b'{"prompt": "a", "z": [%s1]}' % (b"[]," * (700 << 10)),
        b'{"prompt": "a", "z": {"a": [%s1]}}' % (b'{"a":"[,"},' * (190 << 10)),
        b'{%s"prompt": 1}' % b"".join(b'"%d":1,' % n for n in range(200_000)),
        b'{"messages": [%s{}]}' % (b'{"role":"u"},' * (160 << 10)),
    ],
    ids=["token ids", "prompts", "arrays", "objects", "members", "messages"],
)
def test_a_body_of_many_values_costs_little_to_refuse(body):
    """Parsing holds the interpreter lock: streams would wait for it."""
    assert len(body) > 2_000_000

    def refuse():
        with contextlib.suppress(errors.InvalidRequest):
            (parse_chat if b"messages" in body else parse_completion)(body)

    # The fewest of several: collected garbage adds some.
    assert min(cpu_s(refuse) for _ in range(5)) < parsing_s() / 4


async def test_a_body_is_one_request_to_its_tenant_however_many_choices(gateway_of, tmp_path):
    limits = "[default]\nrequests_per_minute = 3\ntokens_per_minute = 1000"
    gateway = await gateway_of(tenants=tenants_of(tmp_path, limits))
    assert len((await gateway.complete(n=10)).json()["choices"]) == 10
    assert len((await gateway.complete(prompt=["a", "b"], n=2)).json()["choices"]) == 4
    assert (await gateway.post("/tokenize", {"prompt": "a" * 50})).status_code == 200
    tenant = gateway.service.tenants.tenant_for(None)
    used = (len(PROMPT) + 10 * 5) + (2 + 4 * 5) + 50
    assert tenant._tokens.level == pytest.approx(1000 - used, abs=20)
    for response in (await gateway.complete(), await gateway.post("/tokenize", {"prompt": "a"})):
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"


async def test_a_deadline_is_a_status_or_a_streams_last_event(gateway_of):
    gateway = await gateway_of(default_timeout_s=1.0)
    gateway.decode.runs = [lambda *run: None] * 2
    response = await gateway.complete({"x-request-timeout": "0.5"})
    assert error_of(response, 504)["code"] == "deadline_exceeded"
    await gateway.cluster.all_freed()
    for bad in ("soon", "-1", "0", "inf", "nan"):
        parent = {"traceparent": f"00-{'ab' * 16}-00f067aa0ba902b7-01"}
        response = await gateway.complete({"x-request-timeout": bad, **parent})
        assert error_of(response, 400)["param"] == "x-request-timeout"
        assert response.headers["x-trace-id"] == "ab" * 16 and response.headers["x-request-id"]
    *chunks, last = await gateway.events()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"]
    assert last["error"]["code"] == "deadline_exceeded"


async def test_one_failed_choice_ends_all(gateway_of):
    """The second prompt is refused, the first would go on for ever."""
    gateway = await gateway_of(default_timeout_s=600.0)
    begun = asyncio.Event()
    gateway.decode.runs = [lambda *run: begun.set()]
    generate = gateway.service.generate

    async def refusing(request, *args, **more):
        if request.text == "b":
            await begun.wait()
            raise errors.Overloaded("no room for this one")
        await generate(request, *args, **more)

    gateway.service.generate = refusing
    response = await gateway.complete(prompt=["a", "b"])
    assert error_of(response, 429)["message"] == "no room for this one"
    await gateway.idle()
    await gateway.cluster.all_freed()


async def test_prompts_of_one_body_fit_together_or_are_refused_for_good(gateway_of, tmp_path):
    limits = "[default]\ntokens_per_minute = 100"
    gateway = await gateway_of(tenants=tenants_of(tmp_path, limits))
    tenant = gateway.service.tenants.tenant_for(None)
    tenant.charge_tokens(40)  # 60 are left: for the first of them, not for all
    asked = {"prompt": ["a" * 20] * 4, "max_tokens": 5}
    assert len((await gateway.complete(**asked)).json()["choices"]) == 4
    assert tenant._tokens.level == pytest.approx(100 - 40 - 4 * 25, abs=5)
    tenant.charge_tokens(-200)
    asked = {"prompt": ["a" * 20] * 5, "max_tokens": 5}
    error = error_of(await gateway.complete(**asked), 400)
    assert (error["param"], "take 105 tokens" in error["message"]) == ("prompt", True)
    assert tenant._usage.running == 0


async def test_a_tenants_places_are_taken_for_all_choices_with_the_first(gateway_of, tmp_path):
    limits = "[default]\nmax_running = 4\ntokens_per_minute = 100"
    gateway = await gateway_of(tenants=tenants_of(tmp_path, limits))
    tenant = gateway.service.tenants.tenant_for(None)
    call, go_on = await gateway.begun_with_three_choices()
    # It would have kept one of the three from running, and the other way round.
    error_of(await gateway.complete(n=2), 429)
    tenant.charge_tokens(200)
    go_on.set()
    assert len((await call).json()["choices"]) == 3
    assert tenant._usage.running == 0
    tenant.charge_tokens(-300)
    call, _ = await gateway.begun_with_three_choices(3.0)
    assert tenant._usage.running == 3
    error_of(await call, 504)  # two of them have never entered
    assert tenant._usage.running == 0


@pytest.mark.parametrize("why", ["drain", "queue"])
async def test_what_has_begun_is_not_refused_its_further_choices(gateway, monkeypatch, why):
    call, go_on = await gateway.begun_with_three_choices()
    service = gateway.service
    if why == "drain":
        service.draining = True
    else:
        monkeypatch.setattr(gateway.cluster.wait_queue, "_capacity", 0)
    go_on.set()
    assert len((await call).json()["choices"]) == 3
    response = await gateway.complete(stream=True)
    error = error_of(response, {"drain": 503, "queue": 429}[why])
    assert error["code"] == {"drain": "unavailable", "queue": "rate_limit_exceeded"}[why]
    assert int(response.headers["retry-after"]) >= 1


async def test_a_draining_router_finishes_streams_and_takes_nothing_new(gateway):
    paused = []
    gateway.decode.runs = [lambda *run: paused.append(run)] * 2
    async with gateway.stream() as first, gateway.stream() as second:
        assert first.status_code == second.status_code == 200
        gateway.service.draining = True
        response = await gateway.complete()
        assert "draining" in error_of(response, 503)["message"]
        assert "retry-after" in response.headers
        error_of(await gateway.client.get("/ready"), 503)
        gateway.decode.run_to_end(*paused[0])
        events = await events_of(first)
        gateway.service.give_up()  # what outlives the drain ends with an error
        *_, last = await events_of(second)
    assert "".join(event["choices"][0]["text"] for event in events) == "abcde"
    assert last["error"]["code"] == "unavailable"


@pytest.mark.parametrize("path", ["completions", "responses"])
async def test_what_is_echoed_at_once_may_be_longer_than_what_may_be_left_unread(
    gateway_of, tmp_path, monkeypatch, path
):
    monkeypatch.setattr(sink, "MAX_UNREAD_BYTES", 500)
    tokenizer = byte_tokenizer(tmp_path, max_position_embeddings=1000)
    gateway = await gateway_of(tokenizer=tokenizer, cluster={"max_context": 1000})
    text = "\n" * 300  # twice as long in JSON
    asked = {"prompt": text, "max_tokens": 5, "echo": True, "n": 2}
    if path == "responses":
        asked = {"instructions": text, "input": "Hi", "max_output_tokens": 5}
    response = await gateway.post(f"/v1/{path}", asked, stream=True)
    assert response.text.count('"error":{') == 0
    assert response.text.count(json.dumps(text)[:-1]) == {"completions": 2, "responses": 3}[path]


@pytest.mark.parametrize(("end", "n"), [("deadline", 1), ("drain", 3), ("unread", 1)])
async def test_a_client_that_does_not_read_holds_nothing_and_finds_the_reason_last(
    gateway_of, monkeypatch, end, n
):
    if end == "unread":
        monkeypatch.setattr(sink, "UNREAD_S", 0.5)
    monkeypatch.setattr(sink, "MAX_UNREAD_BYTES", 1 << 30)
    gateway = await gateway_of(default_timeout_s=3.0 if end == "deadline" else 600.0)
    gateway.decode.runs = [gateway.decode.flood] * n
    body = {"prompt": PROMPT, "n": n, "max_tokens": 5, "stream": True, "return_token_ids": True}
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    gateway.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # soon full
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.settimeout(TIMEOUT_S)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(head.encode() + text)
        # More than the sockets hold: a token takes six bytes. What is unread ends by itself.
        enough = 0 if end == "unread" else 100_000
        await seen(lambda: gateway.service.stats.counts.output_tokens > enough)
        if end == "drain":
            gateway.service.give_up()
        await gateway.idle()  # while nothing has been read
        await gateway.cluster.all_freed()
        with client.makefile("rb") as received:  # its end: no connection is kept for such a client
            answer = await asyncio.to_thread(received.read)
    *_, last, done = answer.split(b"data: ")
    code = {"deadline": b"deadline_exceeded", "drain": b"unavailable", "unread": b"cancelled"}[end]
    assert b'"code":"' + code + b'"' in last
    assert done == b"[DONE]\n\n\r\n0\r\n\r\n"


async def test_a_stream_that_waits_is_kept_alive_and_its_error_is_an_event(gateway, monkeypatch):
    monkeypatch.setattr("baton.gateway.sse.KEEP_ALIVE_S", 0.05)
    await gateway.cluster.fill()
    async with gateway.stream() as response:
        assert response.status_code == 200 and "x-request-id" in response.headers
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": waiting", ""] * 2
        gateway.service.give_up()
        error, done = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert done == "data: [DONE]"


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (True, 1), (False, 3)])
async def test_a_client_that_hangs_up_frees_everything(gateway_of, stream, n):
    gateway = await gateway_of(default_timeout_s=600.0)
    begun = asyncio.Queue()
    gateway.decode.runs = [lambda *run: begun.put_nowait(run)] * n
    call = asyncio.create_task(gateway.complete(stream=stream, n=n))
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(n):
            await begun.get()
        assert gateway.decode.held
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await gateway.decode.cancelled.get()
    await gateway.idle()
    await gateway.cluster.all_freed()
    assert gateway.decode.held == set()


ASKED = json.dumps({"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}).encode()


def gzipped(body):
    return gzip.compress(body, mtime=0)  # the same in all processes that collect tests


def deflated(body, wbits=15):
    compressor = zlib.compressobj(wbits=wbits)
    return compressor.compress(body) + compressor.flush()


GOOD = [
    ("gzip", gzipped(ASKED)), ("x-gzip", gzipped(ASKED)), ("GZip", gzipped(ASKED)),
    ("deflate", deflated(ASKED)), ("deflate", deflated(ASKED, -15)),
    ("deflate, gzip", gzipped(deflated(ASKED))), ("identity, gzip", gzipped(ASKED)),
    ("identity", ASKED), ("", ASKED),
]  # fmt: skip
WRONG = [
    ("zstd", ASKED, 415), ("br", ASKED, 415), ("nonsense", ASKED, 415),
    ("gzip, br", gzipped(ASKED), 415), ("gzip, gzip, gzip", gzipped(ASKED), 415),
    ("gzip", ASKED, 400), ("deflate", ASKED, 400), ("gzip", b"", 400),
    ("gzip", gzipped(ASKED)[:-9], 400), ("gzip", gzipped(ASKED) + b"more", 400),
    ("gzip", gzipped(b" " * (32 << 20)), 413),
    ("gzip, gzip", gzipped(gzipped(b" " * (32 << 20))), 413),
]  # fmt: skip


async def test_bodies_are_decompressed_or_refused_where_they_are_not_what_is_said(gateway):
    async def post(codings, body):
        headers = {"content-encoding": codings}
        return await gateway.client.post("/v1/completions", content=body, headers=headers)

    for codings, body in GOOD:
        response = await post(codings, body)
        assert response.status_code == 200, (codings, response.text)
        assert response.json()["choices"][0]["text"] == "abcde"
    for codings, body, status in WRONG:
        error = error_of(response := await post(codings, body), status)
        if status == 415:
            assert "gzip or deflate" in error["message"]
            assert response.headers["accept-encoding"] == "gzip, deflate"


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
LONG = [1] * 40  # of 32 tokens that the context holds


async def test_what_does_not_fit_in_the_context_is_told_in_openais_words(gateway):
    """By these agents see that they have to shorten what they send."""
    for path, body, param in (
        ("completions", {"prompt": LONG}, "prompt"),
        ("completions", {"prompt": [PROMPT, LONG]}, "prompt"),
        ("completions", {"prompt": "a" * 1000}, "prompt"),
        ("completions", {"prompt": PROMPT, "max_tokens": 32}, "max_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 99}]}, "messages"),
        ("responses", {"input": "a" * 99}, "input"),
        ("chat/completions", {**CHAT, "max_completion_tokens": 99}, "max_completion_tokens"),
        ("chat/completions", {**CHAT, "max_tokens": 99}, "max_tokens"),
        ("responses", {"input": "a", "max_output_tokens": 99}, "max_output_tokens"),
        ("embeddings", {"input": LONG}, "input"),
    ):
        for stream in (False, True):
            response = await gateway.post(f"/v1/{path}", body, stream=stream)
            if response.status_code == 200:  # behind the first prompt's output
                error = json.loads(response.text.split("data: ")[-2])["error"]
            else:
                error = error_of(response, 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            told = "This model's maximum context length is 32 tokens. However, "
            assert error["message"].startswith(told), (path, body)
            if param.endswith("_tokens"):
                assert error["message"].startswith(f"{told}{param} is {body[param]}, but")


async def test_what_would_be_kept_of_a_body_is_bounded(gateway):
    fields = {"model": "x" * 2000, "cache_salt": "x" * 300, "request_id": "x" * 200}
    for path, body, more in (
        ("completions", {"prompt": ["a"] * 9}, {"allowed_token_ids": [1] * 20_000}),
        ("embeddings", {"input": "a"}, {}),
    ):
        for field, value in (fields | more).items():
            response = await gateway.post(f"/v1/{path}", {field: value, **body})
            assert error_of(response, 400)["param"] == field


async def test_a_body_is_not_read_for_a_tenant_whose_requests_are_used_up(gateway_of, tmp_path):
    text = "[default]\nrequests_per_minute = 1"
    gateway = await gateway_of(tenants=tenants_of(tmp_path, text))
    assert (await gateway.complete()).status_code == 200
    assert b" 429 " in await answer_to_half_a_body(gateway)


@pytest.mark.parametrize("anthropic", [False, True], ids=["openai", "anthropic"])
async def test_answers_tell_what_is_left_of_the_tenants_limits(gateway_of, tmp_path, anthropic):
    limits = "[default]\nrequests_per_minute = 2\ntokens_per_minute = 1000"
    gateway = await gateway_of(tenants=tenants_of(tmp_path, limits))
    name = "anthropic-ratelimit-{1}-{0}" if anthropic else "x-ratelimit-{0}-{1}"
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}

    def told(answer, what):
        pair = [answer.headers[name.format(what, of)] for of in ("requests", "tokens")]
        return pair if what == "reset" else [int(one) for one in pair]

    for status, requests in ((200, 1), (200, 0), (429, 0)):
        if anthropic:
            answer = await gateway.post("/v1/messages", messages)
        elif requests or status == 429:
            answer = await gateway.complete()
        else:
            answer = await gateway.post("/v1/embeddings", {"input": "a"})
        assert answer.status_code == status
        assert len([one for one in answer.headers if "ratelimit" in one]) == 6
        assert told(answer, "limit") == [2, 1000]
        assert (
            told(answer, "remaining")[0] == requests and 900 < told(answer, "remaining")[1] < 1000
        )
        for reset in told(answer, "reset"):
            if anthropic:
                assert datetime.fromisoformat(reset) >= datetime.now(UTC) - timedelta(minutes=1)
            else:
                assert float(reset.removesuffix("s")) > 0


async def test_a_tenant_without_limits_has_no_headers_of_them(gateway):
    assert not [name for name in (await gateway.complete()).headers if "ratelimit" in name]
