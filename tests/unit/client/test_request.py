"""What callers type becomes the right message, or an InvalidRequest that names the part."""

import json

import pydantic
import pytest

from baton.client.request import (
    canary_request,
    delete_route_request,
    generate_request,
    load_adapter_request,
    route_request,
    timeout_of,
    tokenize_request,
    unload_adapter_request,
)
from baton.errors import InvalidRequest
from baton.v1 import common_pb2, inference_pb2


def test_every_prompt_and_option_arrives():
    for ids in ([1, 2], (1, 2), range(1, 3)):
        assert list(generate_request(ids, {}).token_ids.ids) == [1, 2]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = generate_request([{"role": "user", "content": parts}, {"role": "assistant"}], {})
    assert [message.content for message in request.chat.messages] == ["one\ntwo", ""]
    sampling = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": (1 << 64) - 1,
        "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    plain = {"model": "demo", "include_stop": True, "cache_salt": "s"}
    collections = {"logit_bias": {3: -100.0}, "stop_token_ids": [5, 6], "stop": ["a", "b"]}
    request = generate_request("x", {**sampling, **plain, **collections, "timeout": 1.0})
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert {name: getattr(request, name) for name in plain} == plain
    assert dict(request.sampling.logit_bias) == {3: -100.0}
    assert list(request.sampling.stop_token_ids) == [5, 6]
    assert list(request.stop) == ["a", "b"]
    assert request.sampling.HasField("logprobs")  # 0 is not "off"
    for name in ("low", "normal", "high"):
        priority = generate_request("x", {"priority": name}).priority
        assert common_pb2.Priority.Name(priority) == f"PRIORITY_{name.upper()}"
    for seconds, ms in ((2, 2000), (0.25, 250), (0.0001, 1)):
        assert generate_request("x", {"ttft_target": seconds}).ttft_target_ms == ms
    unset = dict.fromkeys(("seed", "max_tokens", "stop", "model"))
    assert not generate_request("x", unset).HasField("sampling")


class Answer(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": Answer}, {"json_schema": json.dumps(Answer.model_json_schema())}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
         {"json_schema": '{"a": 1}'}),
        ({"structured_outputs": {"json": '{"a": 1}'}}, {"json_schema": '{"a": 1}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ("a", "b")}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
    ],
)  # fmt: skip
def test_a_restriction_of_the_output_arrives(options, expected):
    sampling = generate_request("x", options).sampling
    assert sampling.HasField("structured_output") is (expected is not None)
    assert sampling.structured_output == common_pb2.StructuredOutput(**(expected or {}))


def test_a_chat_with_tools_arrives():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    call = {"id": "call_1", "name": "f", "arguments": "{}"}
    openai = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "assistant", "tool_calls": [openai], "reasoning": "Hm.", "name": None},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    ]
    options = {
        "tools": [{"type": "function", "function": function}, {"name": "g"}],
        "parallel_tool_calls": False,
        "max_thinking_tokens": 0,
        "chat_template_kwargs": {"a": [1]},
        "continue_final_message": True,
    }
    chat = generate_request(messages, {**options, "tool_choice": "required"}).chat
    turn = inference_pb2.ChatMessage(role="assistant", tool_calls=[call], reasoning="Hm.")
    assert list(chat.messages[:2]) == [turn, turn]
    chat.ClearField("messages")
    assert chat == inference_pb2.Chat(
        tools=[{**function, "parameters": '{"type": "object"}'}, {"name": "g"}],
        tool_choice=inference_pb2.TOOL_CHOICE_REQUIRED,
        single_tool_call=True,
        max_thinking_tokens=0,
        template_kwargs='{"a": [1]}',
        continue_final_message=True,
    )
    named = {"type": "function", "function": {"name": "g"}}
    for choice, field, value in (
        ("auto", "tool_choice", inference_pb2.TOOL_CHOICE_UNSPECIFIED),
        ("none", "tool_choice", inference_pb2.TOOL_CHOICE_NONE),
        (named, "tool_name", "g"),
    ):
        chat = generate_request(messages, {"tool_choice": choice}).chat
        assert getattr(chat, field) == value
    for name, bad in (("tools", [{}]), ("tools", 3), ("tool_choice", "g"), ("tool_choice", {})):
        with pytest.raises(InvalidRequest) as raised:
            generate_request(messages, {name: bad})
        assert raised.value.field == name
    with pytest.raises(InvalidRequest, match="tools is for chat messages"):
        generate_request("x", {"tools": []})


BAD_PROMPTS = [
    "\ud800", b"def f(", bytearray(b"x"), [], [1.5], 5, {1, 2.5}, [-1], ["a"], None,
    {"role": "user", "content": "hi"},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "user", "content": ["hi"]}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "colour": "red"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": "hi"}, "ho"],
    [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
]  # fmt: skip
HUGE = 10**400  # no float holds it
BAD_OPTIONS = [
    *(("sampling.max_tokens", -1), ("sampling.temperature", "hot")),
    *(("sampling.logit_bias", {"a": 1.0}), ("sampling.logit_bias", 3)),
    *(("sampling.logit_bias", [(1, 2.0)]), ("sampling.logit_bias", {1: HUGE})),
    *(("sampling.temperature", HUGE), ("stop", {"a": 1}), ("model", {"a": 1}), ("model", [1])),
    *(("sampling.stop_token_ids", ["a"]), ("stop", [3]), ("stop", 3), ("model", 3)),
    *(("max_token", 3), ("priority", "urgent"), ("priority", 3)),
    *(("response_format", bad) for bad in ("json", {"type": "json_schema"}, {"type": "xml"})),
    *(("structured_outputs", bad) for bad in ("a", {}, {"regex": 3}, {"choice": "ab"}, {"x": 1})),
    ("structured_outputs", {"regex": "a", "grammar": "b"}),
    *(("ttft_target", seconds) for seconds in (0, -1, float("nan"), "soon", 1e9)),
]


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [*((prompt, "prompt", None) for prompt in BAD_PROMPTS), *(("x", *bad) for bad in BAD_OPTIONS)],
)
def test_what_no_message_can_hold_is_refused_by_name(prompt, field, value):
    options = {} if field == "prompt" else {field.removeprefix("sampling."): value}
    with pytest.raises(InvalidRequest) as raised:
        generate_request(prompt, options)
    assert raised.value.field == field
    if prompt in (5, None, ["a"], b"def f("):
        assert "must be text, token ids, or chat messages" in str(raised.value)


@pytest.mark.parametrize("timeout", ["soon", True, float("nan"), [1], HUGE])
def test_a_timeout_is_seconds(timeout):
    with pytest.raises(InvalidRequest) as raised:
        timeout_of(timeout)
    assert raised.value.field == "timeout"
    assert [timeout_of(good) for good in (3, None, 1e300, float("inf"))] == [3.0, None, None, None]


@pytest.mark.parametrize(
    ("prompt", "model", "match"), [([1, 2], None, "text or chat"), ("x", 5, "model")]
)
def test_tokenize_refuses_token_ids_and_what_is_no_name(prompt, model, match):
    with pytest.raises(InvalidRequest, match=match):
        tokenize_request(prompt, model)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: load_adapter_request(5, "/a", ""), "name"),
        (lambda: load_adapter_request("a", None, ""), "directory"),
        (lambda: load_adapter_request("a", "/a", ["m"]), "model"),
        (lambda: unload_adapter_request(None, 0.0), "name"),
        *(
            (lambda wait_s=wait_s: unload_adapter_request("a", wait_s), "wait_s")
            for wait_s in (-1, -1e-9, float("inf"), float("nan"), 1e12, HUGE, "soon", None)
        ),
        (lambda: route_request(5, {"v1": 1.0}), "name"),
        *(
            (lambda targets=targets: route_request("chat", targets), "targets")
            for targets in (5, "a", ["a"], None, {5: 1.0}, {"": 1.0}, {"v1": "x"}, {"v1": HUGE})
        ),
        (lambda: canary_request(5, "v1", {}), "name"),
        (lambda: canary_request("chat", 5, {}), "targets"),
        (lambda: canary_request("chat", "v1", {"foo": 1}), "foo"),
        (lambda: canary_request("chat", "v1", {"foo": [1]}), "foo"),
        (lambda: canary_request("chat", "v1", {"steps": 5}), "steps"),
        (lambda: canary_request("chat", "v1", {"min_requests": -1}), "min_requests"),
        (lambda: delete_route_request(5), "name"),
    ],
)
def test_what_no_message_of_operators_can_hold_is_refused_by_name(build, field):
    with pytest.raises(InvalidRequest) as raised:
        build()
    assert raised.value.field == field


def test_what_operators_ask_for_arrives():
    asked = load_adapter_request("a", "/a", "m")
    assert (asked.name, asked.directory, asked.model) == ("a", "/a", "m")
    for wait_s, wait_ms in ((0, 0), (0.0, 0), (1e-6, 1), (1.5, 1500)):
        assert unload_adapter_request("a", wait_s).wait_ms == wait_ms
    route = route_request("chat", {"chat@v1": 3, "other": 1.5}).route
    assert route.name == "chat"
    targets = [
        (one.model, one.HasField("version"), one.version, one.weight) for one in route.targets
    ]
    assert targets == [("chat", True, "v1", 3.0), ("other", False, "", 1.5)]
    canary = canary_request("chat", "v2", {"steps": [50, 100], "step_s": 1}).route.canary
    assert (canary.target.model, list(canary.steps), canary.step_s) == ("v2", [50.0, 100.0], 1.0)
    assert canary.min_requests == 50
    assert delete_route_request("chat").name == "chat"
