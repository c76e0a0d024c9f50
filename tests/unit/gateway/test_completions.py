"""Completions and chats over HTTP: whole and streamed, in OpenAI's shapes."""

import asyncio
import base64
import contextlib
import gc
import json
import math
import mmap
import re
import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from baton.errors import BatonError, InvalidRequest
from baton.gateway import generation
from baton.gateway.chat_completions import ChatOutput
from baton.gateway.completions import parse_completion
from baton.gateway.generation import run_choices
from baton.gateway.parsed_request import ParsedRequest
from baton.net.http_server import Connection
from baton.v1 import common_pb2, inference_pb2
from router.generation_service import Caller
from router.queueing.fair_queue import FairQueue
from router.request import RequestState
from tests.unit.router.scripted_workers import LENGTH, first_token, seen, started

from .conftest import PROMPT


def sequences(gateway):
    return [request.sequence for request in gateway.cluster.prefills[0].requests]


async def run(generate, parsed, count):
    """Runs the choices of a body by a service of which this is all."""
    service = SimpleNamespace(
        deadline_of=lambda caller: math.inf,
        generate=generate,
        group=lambda caller, count: contextlib.nullcontext(caller),
    )
    sink = SimpleNamespace(start=lambda started: None, finish=None, prompt=None)
    await run_choices(service, parsed, Caller(), [sink] * count, None)


async def test_a_completion_whole_and_streamed(gateway):
    response = await gateway.complete()
    answer = response.json()
    assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["choices"] == [
        {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length",
         "stop_reason": None}]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    *chunks, last = events = await gateway.events(stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcde"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    assert len({(e["id"], e["object"], e["model"], e["created"]) for e in events}) == 1
    assert all("usage" not in event for event in await gateway.events())
    assert [reserve.stream_interval for reserve in gateway.decode.requests] == [16, 1, 1]


@contextlib.asynccontextmanager
async def freed(*kinds):
    """What a block makes of these types is freed soon, without a garbage collection."""

    def kept():
        return {id(one) for one in gc.get_objects() if type(one) in kinds}

    gc.collect()
    gc.disable()
    try:
        before = kept()  # of other tests
        yield
        await seen(lambda: kept() <= before)
    finally:
        gc.enable()


async def test_an_answered_request_is_freed_without_a_garbage_collection(gateway):
    async with freed(ParsedRequest, RequestState):
        await gateway.complete(n=2)
        await gateway.events("/v1/chat/completions")
        assert (await gateway.complete(prompt=[])).status_code == 400
        for prompt in ([999], [[1], [2], [999]]):  # the last is refused while others run
            assert (await gateway.complete(prompt=prompt)).status_code == 400
        call, go_on = await gateway.begun_with_three_choices()
        call.cancel()
    go_on.set()


async def test_a_closed_connection_is_freed_without_a_garbage_collection(gateway):
    async with freed(Connection), httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/health")).status_code == 200


async def test_an_answer_says_what_happened_to_it_when_it_is_asked(gateway):
    asked = {"x-baton-route": "1"}
    (served,) = (await gateway.complete(asked)).json()["usage"]["baton"]
    phases = {name: served.pop(name) for name in list(served) if name.endswith("_ms")}
    assert served == {
        "prefill": "p0", "decode": "d0", "transport": "shm", "attempts": 1,
        "transfer_bytes": 1000, "cached_tokens": 0}  # fmt: skip
    assert set(phases) == {"queue_ms", "ttft_ms", "transfer_ms", "tpot_ms", "e2e_ms"}
    assert 0 < phases["ttft_ms"] <= phases["e2e_ms"]
    assert len((await gateway.complete(asked, n=2)).json()["usage"]["baton"]) == 2
    assert "baton" not in (await gateway.complete()).json()["usage"]


async def test_a_chat_whole_and_streamed(gateway):
    prompt = gateway.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    answer = (await gateway.chat(max_completion_tokens=3)).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "abc", "refusal": None}  # fmt: skip
    chunks = await gateway.events("/v1/chat/completions", max_tokens=3)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}]  # fmt: skip
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert [list(sequence.token_ids) for sequence in sequences(gateway)] == [prompt] * 2
    usage = (await gateway.chat()).json()["usage"]  # without a limit it may fill the context
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(prompt), 32)


async def test_choices_of_several_prompts(gateway):
    answer = (await gateway.complete(prompt=["ab", "c"], n=2, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"abcde"}
    assert answer["usage"]["prompt_tokens"] == 3  # each prompt once
    assert answer["usage"]["completion_tokens"] == 20
    sent = sorted((len(s.token_ids), s.sampling.seed) for s in sequences(gateway))
    assert sent == [(1, 7), (1, 8), (2, 7), (2, 8)]
    answer = (await gateway.complete(prompt=[[5, 6], [7]], return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[100, 101, 102, 103, 104]] * 2
    assert sorted(list(s.token_ids) for s in sequences(gateway)[4:]) == [[5, 6], [7]]
    *chunks, last = await gateway.events(n=3, stream_options={"include_usage": True})
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"abcde"}
    assert (last["usage"]["completion_tokens"], last["usage"]["prompt_tokens"]) == (15, 3)


async def test_usage_can_be_told_with_each_chunk(gateway):
    told = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": ["ab", "c"], "n": 2, "stream_options": told}
    *chunks, last = await gateway.events(**asked)
    counts = dict.fromkeys(range(4), 0)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        counts[choice["index"]] += 1
        prompt, output = (2, 2, 1, 1)[choice["index"]], counts[choice["index"]]
        assert chunk["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        }  # fmt: skip
    assert set(counts.values()) == {5}
    assert last["usage"]["completion_tokens"] == 20 and not last["choices"]
    told["include_usage"] = False
    refused = await gateway.complete(**{**asked, "stream": True})
    assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"


async def test_tokens_of_logprobs_can_be_shown_as_ids(gateway):
    asked = {"prompt": "abc", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await gateway.complete(**asked, prompt_logprobs=1)).json()["choices"]
    a, b, c, d = (f"token_id:{gateway.tokenizer.encode(text)[-1]}" for text in "abcd")
    assert choice["logprobs"]["tokens"] == [a, b, c]
    assert choice["logprobs"]["top_logprobs"] == [None, {b: -1, c: -0.5}, {c: -2, d: -0.5}]
    assert choice["prompt_logprobs"][1][b.partition(":")[2]]["decoded_token"] == b
    output = ChatOutput(
        0, gateway.tokenizer, with_logprobs=True, with_token_ids=False, as_token_ids=True
    )
    token = common_pb2.TokenLogprob(token_id=100, logprob=-1)
    (entry,) = output.logprobs([common_pb2.PositionLogprobs(chosen=token, top=[token])]).content
    assert entry.token == entry.top_logprobs[0].token == "token_id:100" and entry.bytes


async def test_a_prompt_of_several_choices_is_computed_before_the_others_begin(gateway):
    prefill = gateway.cluster.prefills[0]
    call, go_on = await gateway.begun_with_three_choices()
    await asyncio.sleep(0.2)
    assert len(prefill.requests) == 1
    go_on.set()
    assert len((await call).json()["choices"]) == 3
    assert len(prefill.requests) == 3


async def test_stop_strings_and_echo(gateway):
    (choice,) = (await gateway.complete(max_tokens=20, stop="cd")).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    kept = await gateway.complete(stop=["x", "cd"], include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == "abcd"
    chunks = await gateway.events(max_tokens=20, stop="cd")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert "stop_reason" not in chunks[0]["choices"][0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "cd"
    echoed = (await gateway.complete(prompt="xy", echo=True)).json()["choices"][0]["text"]
    assert echoed == "xyabcde"
    chunks = await gateway.events(prompt=[[100, 101]], echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ababcde"


async def test_an_echo_has_the_prompts_log_probabilities(gateway):
    asked = {"prompt": "abc", "echo": True, "logprobs": 1}
    only = (await gateway.complete(**asked, max_tokens=0)).json()
    (choice,) = only["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"], "text_offset": [0, 1, 2], "token_logprobs": [None, -1, -2],
        "top_logprobs": [None, {"b": -1, "c": -0.5}, {"c": -2, "d": -0.5}]}  # fmt: skip
    assert only["usage"]["completion_tokens"] == 0
    assert gateway.decode.requests == []
    choices = (await gateway.complete(**asked, n=2, max_tokens=1)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abca"] * 2
    assert [choice["logprobs"]["tokens"][:3] for choice in choices] == [["a", "b", "c"]] * 2
    wanted = [one.sampling.HasField("prompt_logprobs") for one in sequences(gateway)[1:]]
    assert wanted == [True, False], "the prompt's are computed once"
    chunks = [event["choices"][0] for event in await gateway.events(**asked, max_tokens=2)]
    assert [chunk["text"] for chunk in chunks] == ["abca", "b"]
    assert chunks[0]["logprobs"]["token_logprobs"] == [None, -1, -2]
    assert chunks[1]["logprobs"]["text_offset"] == []  # the scripted model has none


async def test_prompt_logprobs_are_vllms(gateway):
    (choice,) = (await gateway.complete(prompt="abc", prompt_logprobs=1)).json()["choices"]
    b, c, d = gateway.tokenizer.encode("bcd")
    second = {"logprob": -1, "rank": 1, "decoded_token": "b"}
    third = {"logprob": -2, "rank": 2, "decoded_token": "c"}
    assert choice["text"] == "abcde" and choice["prompt_logprobs"] == [
        None,
        {str(c): {"logprob": -0.5, "rank": 1, "decoded_token": "c"}, str(b): second},
        {str(d): {"logprob": -0.5, "rank": 1, "decoded_token": "d"}, str(c): third},
    ]
    answer = (await gateway.chat(prompt_logprobs=0, max_tokens=0)).json()
    told = answer["prompt_logprobs"]
    assert len(told) == answer["usage"]["prompt_tokens"] and told[0] is None
    assert [len(one) for one in told[1:]] == [1] * (len(told) - 1)
    assert answer["choices"][0]["message"]["content"] == ""
    assert "prompt_logprobs" not in (await gateway.complete()).json()["choices"][0]


async def test_the_likeliest_of_several_are_returned(gateway):
    shares = iter((-3.0, -1.0, -2.0))

    async def one_token(request):
        yield started()
        message = first_token(100, LENGTH)
        message.first_token.logprobs.chosen.logprob = share = next(shares)
        message.first_token.token_id = 100 - int(share)
        yield message

    gateway.cluster.prefills[0].scripts = [one_token] * 3
    answer = (await gateway.complete(n=2, best_of=3, max_tokens=1)).json()
    found = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    assert found == [(0, "b", None), (1, "c", None)]
    assert answer["usage"]["completion_tokens"] == 3


def ends_with(token_id, reason):
    """A prefill worker's script of one token."""

    async def script(request):
        yield started()
        yield first_token(token_id, reason)

    return script


async def test_special_tokens_are_text_where_they_are_asked_for(gateway):
    gateway.cluster.prefills[0].scripts = [ends_with(0, LENGTH)] * 2
    texts = [
        (await gateway.complete(max_tokens=1, skip_special_tokens=skipped)).json()["choices"][0]
        for skipped in (True, False)
    ]
    assert [choice["text"] for choice in texts] == ["", "</s>"]
    answer = (await gateway.post("/detokenize", {"tokens": [100, 0, 101]})).json()
    assert answer == {"prompt": "a</s>b"}


async def test_a_long_prompt_is_cut_and_bad_words_become_tokens(gateway):
    letters = "abcdefghij" * 5  # the context holds 32
    assert (await gateway.complete(prompt=letters)).status_code == 400
    await gateway.complete(prompt=letters, truncate_prompt_tokens=3, bad_words=["bad"],
                           allowed_token_ids=[100, 101])  # fmt: skip
    (sequence,) = sequences(gateway)
    encode = gateway.tokenizer.encode
    assert list(sequence.token_ids) == encode("hij")
    words = [list(word.token_ids) for word in sequence.sampling.bad_words]
    assert words == [encode("bad")]
    assert list(sequence.sampling.allowed_token_ids) == [100, 101]
    answer = (await gateway.complete(prompt=letters, truncate_prompt_tokens=-1)).json()
    assert answer["usage"]["prompt_tokens"] == 32 - 5
    cut = {"input": letters, "truncate_prompt_tokens": -1}
    answer = (await gateway.post("/v1/embeddings", cut)).json()
    assert answer["usage"]["prompt_tokens"] == 32


async def test_a_token_that_ended_an_output_is_its_stop_reason(gateway):
    ends = ends_with(105, common_pb2.FINISH_REASON_STOP)
    gateway.cluster.prefills[0].scripts = [ends] * 2
    (choice,) = (await gateway.complete(stop_token_ids=[105])).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("", 105)
    (chunk,) = await gateway.events(stop_token_ids=[105])
    assert chunk["choices"][0]["stop_reason"] == 105


async def test_embeddings_of_texts_and_tokens(gateway):
    async def embeddings(**body):
        return (await gateway.post("/v1/embeddings", body)).json()

    one = await embeddings(input=[3, 4])
    assert one == {
        "object": "list", "model": "tiny", "usage": {"prompt_tokens": 2, "total_tokens": 2},
        "data": [{"object": "embedding", "index": 0, "embedding": [0, 3, 4]}]}  # fmt: skip
    several = await embeddings(input=["a", "b"], encoding_format="base64")
    found = [base64.b64decode(item["embedding"]) for item in several["data"]]
    assert [struct.unpack("<2f", item) for item in found] == [(0, 100), (0, 101)]
    cut = await embeddings(input=[[5, 3, 4], [9, 3, 4]], dimensions=3)
    first, second = (item["embedding"] for item in cut["data"])
    assert first == pytest.approx([0, 5 / 34**0.5, 3 / 34**0.5]) and second != first
    assert gateway.decode.requests == []
    for bad, field in (
        ({"input": [3], "dimensions": 3}, "dimensions"), ({"input": [999]}, "input"),
        ({"input": []}, "input"), ({"input": "a" * 99}, "input"), ({}, "input"),
    ):  # fmt: skip
        assert (await embeddings(**bad))["error"]["param"] == field


async def test_settings_reach_the_workers_and_defaults_are_openais(gateway):
    same = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 2, "logprobs": 2,
        "ignore_eos": True,
    }  # fmt: skip
    await gateway.complete(**same, logit_bias={"5": -100}, seed=-1, stop_token_ids=[9])
    await gateway.post("/v1/completions", {"prompt": PROMPT, "top_k": -1, "stop": None})
    given, default = (sequence.sampling for sequence in sequences(gateway))
    assert {name: getattr(given, name) for name in same} == same
    assert (dict(given.logit_bias), list(given.stop_token_ids)) == ({5: -100.0}, [9])
    assert given.seed == (1 << 64) - 1
    assert (default.temperature, default.max_tokens, default.top_k) == (1.0, 16, 0)
    assert not default.HasField("logprobs") and not default.ignore_eos


async def test_a_top_p_of_0_leaves_the_likeliest_token_alone(gateway):
    assert (await gateway.complete(top_p=0)).status_code == 200
    (sampling,) = (sequence.sampling for sequence in sequences(gateway))
    assert 0 < sampling.top_p < 1e-5


async def test_priority_target_and_salt_reach_the_router(gateway):
    seen = gateway.watch()
    for value in ("low", "normal", "high", 1, 0, -1, None):
        await gateway.complete(priority=value, cache_salt="s", ttft_target_ms=9000)
    asked = [request for request, _ in seen]
    low, normal, high = (common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL,
                         common_pb2.PRIORITY_HIGH)  # fmt: skip
    own = common_pb2.PRIORITY_UNSPECIFIED
    assert [request.priority for request in asked] == [low, normal, high, low, own, high, own]
    assert {(request.cache_salt, request.ttft_target_ms) for request in asked} == {("s", 9000)}


async def test_the_end_user_reaches_the_fair_queue(gateway, monkeypatch):
    users, new_prompt = [], FairQueue._new_prompt

    def watched(queue, owner, seconds, priority, user):
        users.append(user)
        return new_prompt(queue, owner, seconds, priority, user)

    monkeypatch.setattr(FairQueue, "_new_prompt", watched)
    for body in ({"user": "u", "safety_identifier": "i"}, {"safety_identifier": "i"}, {}):
        await gateway.complete(prompt_cache_key="k", **body)
    assert users == ["u", "i", ""]
    assert (await gateway.complete(user="u" * 1025)).status_code == 400


async def test_service_tiers_are_priorities_and_are_returned(gateway):
    seen = gateway.watch()
    for tier in ("flex", "priority", "default", "auto"):
        answer = (await gateway.complete(service_tier=tier)).json()
        assert answer["service_tier"] == tier
    answer = (await gateway.complete(service_tier="priority", priority="low")).json()
    low, high = common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_HIGH
    assert [request.priority for request, _ in seen] == [low, high, 0, 0, low]
    assert re.fullmatch("fp_[0-9a-f]{10}", answer["system_fingerprint"])
    (chunk, *_) = await gateway.events()
    assert chunk["system_fingerprint"] == answer["system_fingerprint"]
    assert "service_tier" not in chunk
    assert (await gateway.complete(service_tier="fast")).json()["error"]["param"] == "service_tier"


OBJECT, SCHEMA = '{"type": "object"}', {"type": "array", "items": {"type": "integer"}}


RESTRICTIONS = [
    ("response_format", {"type": "text"}, None),
    ("response_format", {"type": "json_object"}, {"json_schema": OBJECT}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"json_schema": json.dumps(SCHEMA)},
    ),
    ("guided_json", SCHEMA, {"json_schema": json.dumps(SCHEMA)}),
    ("guided_json", OBJECT, {"json_schema": OBJECT}),
    ("guided_regex", "a+", {"regex": "a+"}),
    ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
    ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
    ("structured_outputs", {"json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ("structured_outputs", {"json_object": True}, {"json_schema": OBJECT}),
    ("structured_outputs", {"regex": "a+"}, {"regex": "a+"}),
]


async def test_a_restriction_reaches_both_workers(gateway):
    for field, value, expected in RESTRICTIONS:
        for send in (gateway.complete, gateway.chat):
            assert (await send(ignore_eos=False, **{field: value})).status_code == 200
        specs = [request.sequence for request in gateway.cluster.prefills[0].requests[-2:]]
        specs += [request.sequence for request in gateway.decode.requests[-2:]]
        assert len({spec.handoff_id for spec in specs}) == 2 and len(specs) == 4
        for spec in specs:
            assert spec.sampling.HasField("structured_output") is (expected is not None), field
            message = common_pb2.StructuredOutput(**(expected or {}))
            assert spec.sampling.structured_output == message


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": f"[ab]{{3}}|{'x' * 60_000}"}},
        {"guided_choice": ["x" * 60_000]},
        {"allowed_token_ids": list(range(3, 259)) * 60},
        {"suffix": "x" * 100_000},
        {"model": "x" * 100_000},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_prompts_that_come_together_share_what_is_the_same(gateway, more):
    """A copy of all settings for each would take a thousand times the body's size."""
    body = json.dumps({"prompt": ["a"] * 1024, "max_tokens": 1, **more}).encode()
    kept, admission = [], gateway.admission

    async def generate(request, caller, sink, choices, number, target):
        tenant = admission.tenants.tenant_for(())
        kept.append(await admission.admit(request, math.inf, 32, "id", tenant, choices, number))
        sink.start(inference_pb2.Started())

    before = resident_bytes()
    with contextlib.suppress(BatonError):
        parsed = parse_completion(body)
        assert resident_bytes() - before < 32 << 20
        await run(generate, parsed, 1024)
        assert len(kept) == 1024
    assert resident_bytes() - before < 32 << 20


@contextlib.contextmanager
def turns_of_the_loop():
    """Gives a function that returns the number of the event loop's turn."""
    loop, turn = asyncio.get_running_loop(), 0

    def count():
        nonlocal turn, handle
        turn += 1
        handle = loop.call_soon(count)

    handle = loop.call_soon(count)
    yield lambda: turn
    handle.cancel()


async def test_others_have_a_turn_of_the_loop_between_two_choices(gateway):
    entered = []

    async def generate(request, caller, sink, choices, number, target):
        entered.append(turn())
        sink.start(inference_pb2.Started())

    parsed = parse_completion(json.dumps({"prompt": ["a"] * 20, "max_tokens": 1}).encode())
    with turns_of_the_loop() as turn:
        await run(generate, parsed, 20)
    assert len(set(entered)) == 20, entered


async def test_requests_that_come_together_are_admitted_in_several_turns(gateway, monkeypatch):
    entered = Counter()

    async def admit(*args):
        entered[turn()] += 1
        raise InvalidRequest("enough")

    monkeypatch.setattr(gateway.admission, "admit", admit)
    request = inference_pb2.GenerateRequest(text="a")
    with turns_of_the_loop() as turn:
        calls = [gateway.service.generate(request, Caller(), None) for _ in range(40)]
        await asyncio.gather(*calls, return_exceptions=True)
    assert entered.total() == 40 and max(entered.values()) <= 8, entered


@pytest.mark.parametrize("n", [1, 20])
async def test_few_choices_of_a_request_run_at_a_time(gateway, monkeypatch, n):
    monkeypatch.setattr(generation, "_MAX_AT_ONCE", 4)
    running, most = 0, 0

    async def generate(request, caller, sink, choices, number, target):
        nonlocal running, most
        running += 1
        most = max(most, running)
        sink.start(inference_pb2.Started())
        await asyncio.sleep(0.01)
        running -= 1

    body = {"prompt": ["a"] * (20 // n), "n": n, "max_tokens": 1}
    await run(generate, parse_completion(json.dumps(body).encode()), 20)
    assert most == 4


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
