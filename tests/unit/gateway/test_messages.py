"""The Messages API, asked by Anthropic's client; the workers' model says what a test writes."""

import asyncio
import json

import anthropic
import pytest

from baton.errors import InvalidRequest
from baton.gateway.messages import parse_message
from baton.v1 import common_pb2, inference_pb2
from tests.unit.router.scripted_workers import seen

from .conftest import CALLS, rejected, tenants_of

TOOLS = [
    {"name": "f", "description": "d", "input_schema": {"type": "object"}},
    {"name": "g", "type": "custom", "input_schema": {"type": "object"}, "strict": True},
]
USER = {"role": "user", "content": "Hi"}
ASKED = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
BLOCKS = [("thinking", "Hm."), ("text", "See:"), ("tool_use", {"a": 1}), ("tool_use", {})]
CUT_IN_A_TEXT = '<tool_call>{"name": "f", "arguments": {"path": "/tm'
LENGTH = common_pb2.FINISH_REASON_LENGTH


def client_of(gateway, **settings):
    """Anthropic's client for a gateway; what it gets must be what its types say."""
    settings = {"api_key": "any", "max_retries": 0, **settings}
    return anthropic.AsyncAnthropic(
        base_url=gateway.url, _strict_response_validation=True, **settings
    )


def shown(content):
    """Type and content of each block."""
    return [(b.type, b.input if b.type == "tool_use" else getattr(b, b.type)) for b in content]


async def test_an_output_is_blocks_with_usage_and_reason(says):
    gateway = await says(CALLS)
    async with client_of(gateway) as client:
        answer = await client.messages.create(
            **ASKED, tools=TOOLS, system="Be short.", extra_headers={"x-baton-route": "1"}
        )
    assert shown(answer.content) == BLOCKS
    assert [b.name for b in answer.content[2:]] == ["f", "g"]
    assert len({b.id for b in answer.content[2:]}) == 2 and answer.content[0].signature
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert answer.id == f"msg_{answer._request_id}"
    usage = answer.usage
    assert usage.output_tokens_details.thinking_tokens == 7
    assert usage.input_tokens + usage.cache_read_input_tokens > 10
    assert usage.to_dict()["baton"][0]["attempts"] == 1


async def test_the_stream_of_anthropics_client_is_the_whole_answer(says):
    gateway = await says(CALLS)
    async with client_of(gateway) as client:
        whole = await client.messages.create(**ASKED, tools=TOOLS)
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            helped = [event.type async for event in stream]
            final = await stream.get_final_message()
        raw = [e async for e in await client.messages.create(**ASKED, tools=TOOLS, stream=True)]
    assert shown(final.content) == shown(whole.content) == BLOCKS
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert {"thinking", "text", "input_json", "signature"} <= set(helped)
    kinds = [getattr(getattr(e, "delta", None), "type", None) or e.type for e in raw]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    begin, end = "content_block_start", "content_block_stop"
    expected = [begin, "thinking_delta", "signature_delta", end, begin, "text_delta", end]
    expected += [begin, "input_json_delta", end] * 2
    assert once == ["message_start", *expected, "message_delta", "message_stop"]
    assert [e.index for e in raw if e.type == begin] == [0, 1, 2, 3]
    assert raw[0].message.content == [] and raw[0].message.stop_reason is None
    assert kinds.count("input_json_delta") > 5


# A letter for each message, and what the formats are detected by.
LETTERS = "{% for m in messages %}{{ m.role[0] }}{% endfor %}{# tools #}<tool_call></think>"
TURNS = 20


def count(prompt):
    """What a model says that counts its tools' results, and has no more to call after TURNS."""
    number = prompt.partition("<")[0].count("t")
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {number}}}}}\n</tool_call>'
    return f"<think>Step {number}.</think>{call if number < TURNS else 'Done.'}"


def loop(url):
    """An agent's loop with Anthropic's synchronous client; returns the conversation."""
    messages, stop = [{"role": "user", "content": "Count."}], "tool_use"
    system = [{"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}}]
    with anthropic.Anthropic(base_url=url, auth_token="any", max_retries=0) as client:
        while stop == "tool_use":
            with client.messages.stream(
                **{**ASKED, "messages": messages}, tools=TOOLS, system=system,
                thinking={"type": "enabled", "budget_tokens": 1024},
            ) as stream:  # fmt: skip
                answer = stream.get_final_message()
            stop = answer.stop_reason
            messages.append({"role": "assistant", "content": answer.content})
            if calls := [block for block in answer.content if block.type == "tool_use"]:
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
    return messages, stop


async def test_an_agents_loop_of_20_turns_ends_with_its_answer(says):
    gateway = await says(count, template=LETTERS)
    messages, stop = await asyncio.to_thread(loop, gateway.url)
    *turns, last = messages[1::2]
    assert [shown(turn["content"]) for turn in turns] == [
        [("thinking", f"Step {n}."), ("tool_use", {"n": n})] for n in range(TURNS)
    ]
    assert shown(last["content"]) == [("thinking", f"Step {TURNS}."), ("text", "Done.")]
    assert stop == "end_turn"
    assert len({turn["content"][1].id for turn in turns}) == TURNS


async def test_an_output_passed_back_is_one_turn_of_a_chat(says):
    gateway = await says(CALLS)
    async with client_of(gateway) as client:
        first = await client.messages.create(**ASKED, tools=TOOLS)
    content = [block.to_dict() for block in first.content]
    ids = [block.id for block in first.content[2:]]
    content[1:1] = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "is_error": True, "content": [
            {"type": "text", "text": "no"}, {"type": "text", "text": "f"}]},
        {"type": "tool_result", "tool_use_id": ids[1]},
    ]  # fmt: skip
    text = {"type": "text", "text": "So?"}
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
              {"type": "text", "text": "Be short."}]  # fmt: skip
    body = {**ASKED, "system": system, "messages": [
        USER, {"role": "assistant", "content": content},
        {"role": "user", "content": [*results, text]}, USER, {"role": "system", "content": "!"},
        {"role": "assistant", "content": "It"},
    ]}  # fmt: skip
    parsed = parse_message(json.dumps(body).encode())
    chat = parsed.base.chat
    assert [(m.role, m.content, m.tool_call_id) for m in chat.messages] == [
        ("system", "Be short.", ""), ("user", "Hi", ""), ("assistant", "See:", ""),
        ("tool", "Error: no\nf", ids[0]), ("tool", "", ids[1]), ("user", "So?\nHi", ""),
        ("system", "!", ""), ("assistant", "It", ""),
    ]  # fmt: skip
    turn = chat.messages[2]
    assert turn.reasoning == "Hm." and chat.continue_final_message
    assert [(c.id, c.name, json.loads(c.arguments)) for c in turn.tool_calls] == [
        (ids[0], "f", {"a": 1}), (ids[1], "g", {}),
    ]  # fmt: skip


def test_texts_of_documents_and_results_are_shown_and_references_dropped():
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "One."}}
    parts = [{"type": "text", "text": "Two."}, {"type": "text", "text": "Three."}]
    found = {"type": "search_result", "title": "S", "source": "http://x", "content": parts}
    inner = {**document, "source": {"type": "content", "content": parts}}
    calls = [
        {"type": "server_tool_use", "id": "s", "name": "search", "input": {}},
        {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"type": "x"}},
        {"type": "compaction", "content": "So far."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    ]
    parts = [{"type": "tool_reference", "tool_name": "g"}, inner]
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
    messages = [
        {"role": "user", "content": [document, found]},
        {"role": "assistant", "content": calls},
        {
            "role": "user",
            "content": [result],
        },
    ]
    thinking = {"type": "adaptive", "budget_tokens": 0}
    body = {**ASKED, "messages": messages, "tools": TOOLS, "thinking": thinking}
    chat = parse_message(json.dumps(body).encode()).base.chat
    assert [message.content for message in chat.messages] == [
        "T\nOne.\nS\nhttp://x\nTwo.\nThree.", "So far.", "T\nTwo.\nThree.",
    ]  # fmt: skip
    assert not chat.HasField("max_thinking_tokens")
    thinking["type"] = "enabled"
    chat = parse_message(json.dumps(body).encode()).base.chat
    assert chat.HasField("max_thinking_tokens") and chat.max_thinking_tokens == 0
    result["content"] = {"type": "text", "text": "x"}
    with pytest.raises(InvalidRequest, match="text or blocks"):
        parse_message(json.dumps(body).encode())
    image = {"type": "image", "source": {"type": "base64", "data": "AA"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "AA"}}
    for block in (image, pdf):
        body["messages"] = [{"role": "user", "content": [block]}]
        with pytest.raises(InvalidRequest, match=block["type"]) as refused:
            parse_message(json.dumps(body).encode())
        assert refused.value.field == "messages[0].content[0].type"


def test_settings_are_those_of_a_chat():
    body = {
        **ASKED, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto",
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "tools": TOOLS, "context_management": {"edits": []}, "cache_control": {"type": "x"},
    }  # fmt: skip
    parsed = parse_message(json.dumps(body).encode())
    request = parsed.base
    assert (request.session, list(request.stop), request.sampling.top_k) == ("u", ["x"], 5)
    assert request.sampling.max_tokens == 200 and not parsed.max_tokens_given
    assert json.loads(request.sampling.structured_output.json_schema) == {}
    chat = request.chat
    assert (chat.tool_name, chat.single_tool_call, chat.max_thinking_tokens) == ("f", True, 1024)
    assert json.loads(chat.template_kwargs) == {
        "enable_thinking": True, "thinking": True, "reasoning_effort": "low",
    }  # fmt: skip
    for choice, expected in (
        ("any", inference_pb2.TOOL_CHOICE_REQUIRED),
        ("none", inference_pb2.TOOL_CHOICE_NONE),
        ("auto", inference_pb2.TOOL_CHOICE_UNSPECIFIED),
    ):
        body = {**ASKED, "tools": TOOLS, "tool_choice": {"type": choice}}
        chat = parse_message(json.dumps(body).encode()).base.chat
        assert (chat.tool_choice, chat.single_tool_call) == (expected, False)


@pytest.mark.parametrize(
    ("said", "reason", "asked", "expected"),
    [
        ("abc", None, {"stop_sequences": ["b"]}, ("stop_sequence", "b", [("text", "a")])),
        ("abc", None, {}, ("end_turn", None, [("text", "abc")])),
        ("abc", LENGTH, {"max_tokens": 3}, ("max_tokens", None, [("text", "abc")])),
        (CALLS.partition("1}}")[0], LENGTH, {"tools": TOOLS},
         ("max_tokens", None, [*BLOCKS[:2], ("tool_use", {})])),
        (CUT_IN_A_TEXT, LENGTH, {"tools": TOOLS}, ("max_tokens", None, [("tool_use", {})])),
        (CALLS.partition("}\n")[0], LENGTH, {"tools": TOOLS},
         ("max_tokens", None, BLOCKS[:3])),
        ("<think>", LENGTH, {}, ("max_tokens", None, [])),
        (CALLS, None, {"tools": TOOLS, "stop_sequences": ["1}"]},
         ("stop_sequence", "1}", [*BLOCKS[:2], ("tool_use", {})])),
        (CALLS, None, {"tools": TOOLS, "stop_sequences": ["\n</tool_call>\n"]},
         ("tool_use", None, BLOCKS[:3])),
    ],
)  # fmt: skip
async def test_why_an_output_ended(says, said, reason, asked, expected):
    gateway = await says(said, *[reason] * (reason is not None))
    async with client_of(gateway) as client:
        whole = await client.messages.create(**{**ASKED, **asked})
        async with client.messages.stream(**{**ASKED, **asked}) as stream:
            streamed = await stream.get_final_message()
    found = (whole.stop_reason, whole.stop_sequence, shown(whole.content))
    assert (streamed.stop_reason, streamed.stop_sequence) == found[:2]
    assert found[:2] == expected[:2] and len(found[2]) == len(expected[2])
    assert found[2] == expected[2]
    if ("tool_use", {}) not in found[2]:  # a cut call is streamed as far as it came
        assert shown(streamed.content) == expected[2]


async def test_thinking_that_is_omitted_is_an_empty_block(says):
    gateway = await says(CALLS)
    thinking = {"type": "adaptive", "display": "omitted"}
    async with client_of(gateway) as client:
        whole = await client.messages.create(**ASKED, thinking=thinking)
        async with client.messages.stream(**ASKED, thinking=thinking) as stream:
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.content[0].thinking == "" and answer.content[0].signature


async def test_tools_that_are_not_here_are_dropped_and_named(says, caplog):
    caplog.set_level("INFO")
    gateway = await says("abc")
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"}, *TOOLS,
    ]  # fmt: skip
    async with client_of(gateway) as client:
        answer = await client.messages.with_raw_response.create(**ASKED, tools=tools)
    assert answer.headers["x-baton-dropped-tools"] == "web_search_20250305, bash_20250124"
    assert "web_search_20250305" in caplog.text
    (request,) = gateway.cluster.prefills[0].requests
    parsed = parse_message(json.dumps({**ASKED, "tools": tools}).encode())
    assert [tool.name for tool in parsed.base.chat.tools] == ["f", "g"] and request


async def test_tokens_are_counted_as_they_are_used(says):
    gateway = await says("abc")
    asked = {**ASKED, "system": "Be short.", "tools": TOOLS}
    async with client_of(gateway) as client:
        answer = await client.messages.create(**asked)
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_an_idle_stream_gets_pings_after_its_beginning(gateway_of, says, monkeypatch):
    gateway = await says("abc")
    monkeypatch.setattr("baton.gateway.sse.KEEP_ALIVE_S", 0.02)
    await gateway.cluster.fill()
    sent = {**ASKED, "stream": True}
    async with gateway.client.stream("POST", "/v1/messages", json=sent) as response:
        lines, pings = [], 0
        async for line in response.aiter_lines():
            lines.append(line)
            pings += line == "event: ping"
            if pings == 3:
                gateway.service.give_up()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds[0] == "message_start" and kinds[-1] == "error" and pings >= 3
    error = json.loads(lines[-2].removeprefix("data: "))
    assert error["type"] == "error" and error["error"]["type"] == "api_error"


async def test_a_failure_within_a_stream_is_an_error_of_the_client(says, monkeypatch):
    gateway = await says(CALLS)

    def fail(self, finish):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("baton.gateway.output.ItemSink.finish", fail)
    async with client_of(gateway) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="by zero"):
            _ = [event async for event in stream]


async def test_a_bad_field_is_refused_by_its_name_here(says):
    gateway = await says("x")
    for fields, named in (
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type: a block 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
         "'thinking'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type: a block 'image'"),
        ({"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "add their results"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web", "name": "w"}, {"name": "f"}]}, "tools[1].input_schema"),
        ({"tools": [{"type": "a\r\nb: c", "name": "w"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}, "tool_choice"),
        ({"tools": [{"type": "web", "name": "w"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop": "x"}, "stop"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 20000}]}, "prompt is too long"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "intger"}}}},
         "output_config.format"),
        ({"tools": [{"type": "web", "name": "w"}], "tool_choice": {"type": "any"}},
         "tool_choice: required calls need a function, not tools that are no functions: web"),
    ):  # fmt: skip
        body = {name: value for name, value in {**ASKED, **fields}.items() if value is not None}
        response = await gateway.post("/v1/messages", body)
        answer = response.json()
        assert (response.status_code, answer["type"]) == (400, "error"), named
        assert answer["error"]["type"] == "invalid_request_error", named
        assert named in answer["error"]["message"]


async def test_refusals_are_in_anthropics_format(gateway_of, tmp_path):
    limited = '[tenants.a]\nkey_files = ["secret"]\nrequests_per_minute = 2'
    gateway = await gateway_of(tenants=tenants_of(tmp_path, limited, "secret"))

    async def refused(key="secret", path="/v1/messages", **settings):
        body = {**ASKED, "max_tokens": 2, **settings}
        headers = {"x-api-key": key, "host": settings.pop("host", "localhost")}
        answer = await gateway.client.post(path, json=body, headers=headers)
        details = answer.json()
        assert set(details) == {"type", "error", "request_id"} and details["type"] == "error"
        assert answer.headers.get("request-id", details["request_id"]) == details["request_id"]
        return answer.status_code, details["error"]["type"]

    assert await refused("wrong") == (401, "authentication_error")
    assert await refused(model="other") == (404, "not_found_error")
    assert await refused(path="/v1/messages/batches") == (404, "not_found_error")
    assert await refused(host="evil.example") == (403, "permission_error")
    assert await refused(system="x" * (3 << 20)) == (413, "request_too_large")
    async with client_of(gateway, api_key=None, auth_token="secret") as client:
        with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
            old = {"anthropic-version": "2023-01-01"}
            await client.messages.create(**ASKED, extra_headers=old)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("no")
        assert unknown.value.type == "not_found_error" and unknown.value.body["request_id"]
        with pytest.raises(anthropic.NotFoundError) as unknown:
            given = {"x-request-id": "mine"}
            await client.messages.create(**{**ASKED, "model": "no"}, extra_headers=given)
        assert unknown.value.response.headers["x-request-id"] == "mine"
        assert unknown.value.request_id == unknown.value.body["request_id"]
        await client.messages.create(**{**ASKED, "max_tokens": 2})
        await client.messages.count_tokens(model="tiny", messages=[USER])
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(**ASKED)
        assert limited.value.response.headers["retry-after"]
        assert limited.value.type == "rate_limit_error"


async def test_an_overload_is_529(gateway_of):
    gateway = await gateway_of(cluster={"max_queue": 1})
    await gateway.cluster.fill()
    async with client_of(gateway) as client:
        waiting = asyncio.create_task(gateway.complete())
        await seen(lambda: gateway.service.queued)
        with pytest.raises(anthropic.OverloadedError) as full:
            await client.messages.create(**ASKED)
        gateway.service.give_up()
        await waiting
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
    assert full.value.response.headers["retry-after"]


async def test_models_are_listed_in_pages_where_they_are_asked_for(gateway):
    names = ["tiny", "b", "c", "d", "e", "f"]
    gateway.service.models._aliases.update(dict.fromkeys(names[1:], "tiny"))
    async with client_of(gateway) as client:
        listed = (await client.models.list()).data
        assert [one.id for one in listed] == names
        tiny = listed[0]
        assert (tiny.display_name, tiny.max_input_tokens) == ("tiny", 32)
        assert await client.models.retrieve("tiny") == tiny
        page = await client.models.list(limit=4)
        assert [one.id for one in page.data] == names[:4] and page.has_more
        assert [one.id async for one in page] == names
        page = await client.models.list(limit=2, before_id=names[5])
        assert [one.id for one in page.data] == names[3:5] and page.has_more
        assert [one.id for one in (await client.models.list(before_id=names[1])).data] == names[:1]
        page = await client.models.list(limit=1, after_id=names[5])
        assert (page.data, page.has_more, page.last_id) == ([], False, None)
    for field, value in (("limit", "0"), ("limit", "x"), ("after_id", "z"), ("before_id", "z")):
        answer = await gateway.client.get("/v1/models", params={field: value})
        assert rejected(answer) == (400, field)
