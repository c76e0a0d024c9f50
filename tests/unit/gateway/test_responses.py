"""The Responses API, asked by OpenAI's client; the workers' model says what a test writes."""

import asyncio
import gzip
import json
import threading
from concurrent.futures import wait

import openai
import pydantic
import pytest

from baton.gateway import sse
from baton.gateway.custom_tools import CustomInput
from baton.gateway.responses import parse_response
from baton.gateway.responses_output import ItemsOutput
from baton.generation.tool_call import ToolCallDelta
from baton.v1 import common_pb2
from router.admission import prompt_tokenizer
from router.output.output_parser import ParsedOutput
from router.output.sink import Piece
from tests.waiting import WAIT_S

from .conftest import CALLS, client_of, rejected

TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "function", "name": "g", "description": "d", "strict": True},
]


def shown(items):
    """Kind and text of each item, with its status."""
    found = []
    for item in items:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        found.append((item.type, getattr(item, "name", None), text, item.status))
    return found


ITEMS = [
    ("reasoning", None, "Hm.", "completed"),
    ("message", None, "See:", "completed"),
    ("function_call", "f", '{"a": 1}', "completed"),
    ("function_call", "g", "{}", "completed"),
]


async def test_an_output_is_items_and_settings_come_back(says):
    gateway = await says(CALLS)
    async with client_of(gateway) as client:
        answer = await client.responses.create(
            model="tiny", input="Hi", instructions="Be short.", tools=TOOLS, store=True,
            metadata={"a": "b"}, temperature=0.5, top_p=0.25, max_output_tokens=200,
            reasoning={"effort": "low", "summary": "auto"}, extra_headers={"x-baton-route": "1"},
        )  # fmt: skip
    assert shown(answer.output) == ITEMS and answer.output_text == "See:"
    assert len({item.id for item in answer.output}) == len(ITEMS)
    assert (answer.object, answer.status, answer.store) == ("response", "completed", False)
    assert answer.id.startswith("resp_") and answer.completed_at >= answer.created_at
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.25, 200)
    assert (answer.metadata, answer.reasoning.effort) == ({"a": "b"}, "low")
    assert [tool.name for tool in answer.tools] == ["f", "g"] and answer.tool_choice == "auto"
    usage = answer.usage
    assert usage.output_tokens_details.reasoning_tokens == 7
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.to_dict()["baton"][0]["attempts"] == 1


async def test_a_stream_tells_each_items_beginning_pieces_and_end(says):
    gateway = await says(CALLS)
    events = []
    async with (
        client_of(gateway) as client,
        client.responses.stream(model="tiny", input="Hi", tools=TOOLS) as stream,
    ):
        async for event in stream:
            events.append(event)
        final = await stream.get_final_response()
    assert shown(final.output) == ITEMS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert sum(kind.endswith("delta") for kind in kinds) > 10
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done",
            "content_part.done", "output_item.done"]  # fmt: skip
    call = [part[0], "{0}.delta", "{0}.done", part[-1]]
    expected = ["created", "in_progress"]
    texts = [("reasoning_text", part), ("output_text", part)]
    for name, steps in [*texts, *2 * [("function_call_arguments", call)]]:
        expected += [step.format(name) for step in steps]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    assert once == [*expected, "completed"]
    places = [(event.output_index, event.item_id) for event in events if hasattr(event, "item_id")]
    assert sorted(set(places)) == [(i, item.id) for i, item in enumerate(final.output)]


PATCH = 'say "hi"\\n\t\U0001f600'
CUSTOM = [{"type": "custom", "name": "patch", "description": "Changes files."}, *TOOLS]


def custom_call(arguments):
    return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"patch": "x"}', '{"patch": "x"}'),  # the model did not write what it was told
        ("{}", ""),
    ],
)
async def test_a_custom_tools_input_is_a_text(says, arguments, text):
    gateway = await says(custom_call(arguments))
    asked = {"model": "tiny", "input": "Hi", "tools": CUSTOM}
    asked["tool_choice"] = {"type": "custom", "name": "patch"} if text == PATCH else "auto"
    async with client_of(gateway) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
    assert [tool.type for tool in whole.tools] == ["custom", "function", "function"]
    for item in (whole.output[0], events[-1].response.output[0]):
        assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", text)
    kinds = [event.type.rpartition("custom_tool_call_input.")[2] for event in events]
    deltas = [event.delta for event, kind in zip(events, kinds, strict=True) if kind == "delta"]
    assert "".join(deltas) == text and kinds.count("done") == 1
    assert text != PATCH or len(deltas) > 5


async def test_a_custom_tools_input_matches_its_grammar(says):
    """What the workers enforce: with a call that is required, as the format marks calls by text."""
    gateway = await says(custom_call(json.dumps({"input": "12"})))
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "1" /[0-9]/'}
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}

    async def enforced(form, choice):
        tools = [{"type": "custom", "name": "patch", "format": form}, *TOOLS]
        async with client_of(gateway) as client:
            answer = await client.responses.create(
                model="tiny", input="Hi", tools=tools, tool_choice=choice
            )
        assert (answer.output[0].name, answer.output[0].input) == ("patch", "12")
        assert answer.tools[0].format.to_dict() == form
        return gateway.cluster.prefills[0].requests[-1].sequence.sampling.structured_output.grammar

    assert "/[0-9]/" in await enforced(lark, "required")
    assert "/[0-9]+/" in await enforced(regex, {"type": "custom", "name": "patch"})
    assert await enforced(regex, "auto") == ""


async def test_tools_of_a_namespace_are_called_by_it(says):
    """The prompt has its name before theirs; agents have a namespace for each MCP server."""
    function = {"type": "function", "name": "f", "description": "d", "parameters": {}}
    space = {
        "type": "namespace", "name": "docs", "description": "Of documents.",
        "tools": [function, {"type": "custom", "name": "patch"}, {"type": "mcp"}],
    }  # fmt: skip
    more = {"type": "additional_tools", "role": "developer", "tools": [{**function, "name": "g"}]}
    call = '<tool_call>\n{"name": "%s", "arguments": {"input": "x"}}\n</tool_call>'
    gateway = await says("".join(call % n for n in ("docs.f", "docs.patch", "docs.patch", "g")))
    asked = {"model": "tiny", "input": [more, {"role": "user", "content": "Hi"}], "tools": [space]}
    async with client_of(gateway) as client:
        answer = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        back = [answer.output[1].to_dict(), asked["input"][1]]
        await client.responses.create(model="tiny", input=back)
    for one in (answer, streamed):
        items = [(item.type, item.namespace, item.name) for item in one.output]
        assert items == [
            ("function_call", "docs", "f"),
            *2 * [("custom_tool_call", "docs", "patch")],
            ("function_call", None, "g"),
        ]
        assert [item.input for item in one.output[1:3]] == ["x", "x"]
        assert [tool.type for tool in one.tools] == ["namespace"]
    prompt = gateway.cluster.prefills[0].requests[-1].sequence.token_ids
    assert "docs.patch" in gateway.tokenizer.decode(list(prompt))


async def test_what_agents_send_beside_texts_is_dropped_and_named(says):
    gateway = await says("abc")
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "x"}},
        {"type": "tool_search_call", "arguments": {}, "call_id": "1", "status": "completed"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "user", "content": "Why?"},
    ]
    other = {"type": "custom", "name": "apply_patch", "format": {"type": "diff"}}
    tools = [*TOOLS, other, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [tools[0], tools[-1]]}
    body = {
        "input": items, "tools": tools, "tool_choice": choice, "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }  # fmt: skip
    answer = await gateway.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    dropped = "custom.diff, web_search, web_search_call, tool_search_call"
    assert answer.headers["x-baton-dropped-tools"] == dropped
    assert [tool["name"] for tool in answer.json()["tools"]] == ["f", "g"]
    prompt = gateway.cluster.prefills[0].requests[-1].sequence.token_ids
    assert "'No'" in gateway.tokenizer.decode(list(prompt))
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    wrong = [
        ({"type": "function", "name": "w", "parameters": {"required": 5}}, "parameters"),
        ({"type": "custom", "name": "w", "format": grammar}, "format.definition"),
    ]
    for tool, field in wrong:
        choice = {"type": "allowed_tools", "mode": "required", "tools": [tool]}
        tools = [{"type": "web_search"}, *TOOLS, tool]
        refused = await gateway.post(
            "/v1/responses", {"input": "Hi", "tools": tools, "tool_choice": choice}
        )
        param = f"tools[{len(tools) - 1}].{field}"
        assert rejected(refused) == (400, param)
    missing = [{"role": "user", "content": [{"type": "input_text"}]}]
    refused = await gateway.post("/v1/responses", {"input": missing})
    assert refused.json()["error"]["param"] == "input[0].content[0].text"


async def test_a_custom_tools_call_and_its_output_go_back(says):
    gateway = await says(lambda prompt: prompt.partition("<tool_call></think>")[0])
    call = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": PATCH}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    async with client_of(gateway) as client:
        answer = await client.responses.create(model="tiny", input=[call, output], tools=CUSTOM)
    shown = answer.output_text
    assert repr({"input": PATCH}) in shown and "done" in shown


def test_a_custom_input_is_the_same_at_every_cut():
    arguments = json.dumps({"input": PATCH + "\udcff\u00e9"})
    for cut in range(len(arguments)):
        for second in range(cut, len(arguments)):
            found = CustomInput()
            pieces = arguments[:cut], arguments[cut:second], arguments[second:]
            text = "".join(map(found.push, pieces)) + found.close()
            assert text == PATCH + "\ufffd\u00e9"


async def test_tokenizing_ends_with_the_deadline(says, monkeypatch):
    gateway = await says("a")

    async def never(text, share):
        await asyncio.Event().wait()

    monkeypatch.setattr(prompt_tokenizer, "MAX_CHARS_AT_ONCE", 0)
    monkeypatch.setattr(gateway.admission.prompts.pool, "encode", never)
    model, messages = {"model": "tiny"}, [{"role": "user", "content": "Hi"}]
    for path, body in {
        "/v1/responses": {**model, "input": "Hi", "truncation": "auto"},
        "/v1/responses/input_tokens": {**model, "input": "Hi"},
        "/v1/messages/count_tokens": {**model, "messages": messages},
        "/tokenize": {**model, "prompt": "Hi"},
    }.items():
        answer = await gateway.post(path, body, {"x-request-timeout": "0.2"})
        assert answer.status_code == 504 and "the deadline passed" in answer.text, path


async def test_work_on_threads_ends_with_the_deadline(says):
    """A long body, a compressed one, tools' grammars and bad words wait behind those of others.

    What is short is done at once.
    """
    gateway = await says("a")
    busy, threads = threading.Event(), gateway.admission.prompts._threads
    taken = [threads.submit(busy.wait) for _ in range(2)]
    late, message = {"x-request-timeout": "0.2"}, {"role": "user", "content": "Hi"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bodies = [
        {"messages": [{**message, "content": "a" * (1 << 17)}]},
        {"messages": [message], "tools": [tool], "tool_choice": "required"},
        {"messages": [message], "response_format": {"type": "json_object"}},
        {"messages": [message], "bad_words": ["x" * 200] * 100},
    ]
    try:
        assert (await gateway.chat({"x-request-timeout": "20"})).status_code == 200
        for body in bodies:
            sent = gateway.client.post("/v1/chat/completions", json=body, headers=late)
            answer = await asyncio.wait_for(sent, WAIT_S)
            assert (answer.status_code, "the deadline passed" in answer.text) == (504, True)
        zipped = {**late, "content-encoding": "gzip"}
        packed = gzip.compress(json.dumps({"messages": [message]}).encode())
        sent = gateway.client.post("/v1/chat/completions", content=packed, headers=zipped)
        assert (await asyncio.wait_for(sent, WAIT_S)).status_code == 504
    finally:
        busy.set()
        wait(taken)


LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("said", "reason", "items"),
    [
        (CALLS.partition("1}}")[0], LENGTH,
         [*ITEMS[:2], ("function_call", "f", '{"a": ', "incomplete")]),
        ("<think>Hm.</think>", STOP, [ITEMS[0], ("message", None, "", "completed")]),
        ("<think>", LENGTH, []),  # all that there was is the beginning of reasoning
    ],
    ids=["a cut call", "no text", "nothing"],
)  # fmt: skip
async def test_an_output_may_be_cut_or_empty(says, said, reason, items):
    gateway = await says(said, reason)
    asked = {"model": "tiny", "input": "Hi", "tools": TOOLS}
    async with client_of(gateway) as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    status = "incomplete" if reason == LENGTH else "completed"
    assert events[-1].type == f"response.{status}"
    assert (len(events) == 3) is (not items)  # its beginning, and its end
    for answer in (whole, events[-1].response):
        assert answer.status == status
        assert reason == STOP or answer.incomplete_details.reason == "max_output_tokens"
        assert shown(answer.output) == items


async def test_text_is_parsed_by_its_schema(says):
    class Person(pydantic.BaseModel):
        name: str

    gateway = await says('{"name": "Jo"}')
    async with client_of(gateway) as client:
        answer = await client.responses.parse(model="tiny", input="Hi", text_format=Person)
    assert answer.output_parsed == Person(name="Jo") and answer.text.format.name == "Person"
    (spec,) = [request.sequence for request in gateway.cluster.prefills[0].requests]
    assert json.loads(spec.sampling.structured_output.json_schema)["required"] == ["name"]


async def test_an_output_passed_back_is_one_turn_of_a_chat(says):
    gateway = await says(CALLS)
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    async with client_of(gateway) as client:
        first = await client.responses.create(model="tiny", tools=TOOLS, input=[user])
    output = [item.to_dict() for item in first.output]
    calls = [item.call_id for item in first.output[2:]]
    answers = [
        {"type": "function_call_output", "call_id": c, "output": "yes", "role": role}
        for c, role in zip(calls, (None, "assistant"), strict=True)  # which says nothing there
    ]
    body = {"input": [user, *output, *answers, *output[:2], output[1]], "instructions": "Be short."}
    parsed = parse_response(json.dumps(body).encode())
    system, user, turn, *answers, last, after = parsed.base.chat.messages
    assert [(m.role, m.content) for m in (system, user, turn, last, after)] == [
        ("system", "Be short."), ("user", "Hi"), *3 * [("assistant", "See:")],
    ]  # fmt: skip
    assert (turn.reasoning, last.reasoning, list(last.tool_calls)) == ("Hm.", "Hm.", [])
    assert [(call.id, call.name) for call in turn.tool_calls] == [*zip(calls, "fg", strict=True)]
    assert [(m.role, m.content, m.tool_call_id) for m in answers] == [
        ("tool", "yes", call) for call in calls
    ]


async def test_a_failure_ends_the_stream_with_what_was_done(says, monkeypatch):
    gateway = await says(CALLS)

    def fail(self, finish):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("baton.gateway.responses_output.ItemsOutput.finish", fail)
    async with client_of(gateway) as client:
        stream = await client.responses.create(model="tiny", input="Hi", tools=TOOLS, stream=True)
        events = [event async for event in stream]
    failed = events[-1]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert "by zero" in failed.response.error.message
    assert shown(failed.response.output) == ITEMS


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("abc", [("message", None, "abc", "incomplete")]),
        ("<think>Hm.", [("reasoning", None, "Hm.", "incomplete")]),
        (CALLS.partition("1}}")[0],
         [*ITEMS[:2], ("function_call", "f", '{"a": ', "incomplete")]),
    ],
)  # fmt: skip
async def test_a_failure_within_an_item_keeps_what_it_has(says, monkeypatch, said, expected):
    gateway = await says(said, common_pb2.FINISH_REASON_LENGTH)  # which completes nothing
    put = ItemsOutput.put

    def fail_at_the_end(self, piece):
        put(self, piece._replace(finish_reason=0))
        if piece.finish_reason:
            raise ZeroDivisionError("by zero")

    monkeypatch.setattr(ItemsOutput, "put", fail_at_the_end)
    async with client_of(gateway) as client:
        stream = await client.responses.create(model="tiny", input="Hi", tools=TOOLS, stream=True)
        events = [event async for event in stream]
    failed = events[-1]
    assert failed.type == "response.failed" and shown(failed.response.output) == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    assert "".join(deltas).endswith(expected[-1][2])


async def test_a_failure_before_any_output_is_an_error_event(gateway, monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    await gateway.cluster.fill()
    async with client_of(gateway) as client:
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        gateway.service.give_up()
        (event,) = [event async for event in stream]
    assert (event.type, event.code, event.sequence_number) == ("error", "server_error", 0)


def test_of_one_step_the_rest_of_a_call_comes_before_text_and_text_before_the_next_call():
    output = ItemsOutput(lambda started: None, lambda kind, **members: None)
    calls = [ToolCallDelta(0, "1", "f", ""), ToolCallDelta(0, "", "", "{")]
    output.put(Piece("", parsed=ParsedOutput("Hm.", calls)))
    calls = [ToolCallDelta(0, "", "", "}"), ToolCallDelta(1, "2", "g", "")]
    output.put(Piece("So:", parsed=ParsedOutput("", calls)))
    output.put(Piece("", finish_reason=common_pb2.FINISH_REASON_TOOL_CALLS))
    reasoning, first, message, second = output.items
    assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "So:")
    assert [(call.name, call.arguments) for call in (first, second)] == [("f", "{}"), ("g", "")]


def test_log_probabilities_of_a_text_are_those_of_its_tokens():
    def piece(text, *token_ids, reasoning="", reason=0):
        positions = [
            common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=t, logprob=-t))
            for t in token_ids
        ]
        parsed = ParsedOutput(reasoning)
        return Piece(text, token_ids, positions, finish_reason=reason, parsed=parsed)

    events = []
    output = ItemsOutput(
        lambda started: None,
        lambda kind, **members: events.append((kind, members)),
        lambda token_id: (str(token_id), b""),
    )
    stop = common_pb2.FINISH_REASON_STOP
    for one in (piece("", 1, reasoning="Hm."), piece("", 2), piece("ab", 3), piece("c", 4, 5),
                piece("", 6, reason=stop)):  # fmt: skip
        output.put(one)
    found = [
        ([t.token for t in members["logprobs"]], members.get("delta", members.get("text")))
        for kind, members in events if kind.startswith("response.output_text")
    ]  # fmt: skip
    assert found == [(["2", "3"], "ab"), (["4", "5"], "c"), (["2", "3", "4", "5"], "abc")]
    logprobs = output.items[1].content[0].logprobs
    assert [(t.token, t.logprob) for t in logprobs] == [(str(n), -n) for n in (2, 3, 4, 5)]


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns(says):
    def texts(prompt):
        return "".join(letter for letter in prompt if letter.isupper())

    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}<tool_call></think>"
    gateway = await says(texts, template=template, max_context=400)
    turns = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": letter + "x" * 100}
        for number, letter in enumerate("ABCDEFG")
    ]
    asked = {"model": "tiny", "input": turns, "instructions": "S", "max_output_tokens": 20}
    async with client_of(gateway) as client:
        kept = await client.responses.create(**asked, truncation="auto")
        assert (kept.output_text, kept.truncation) == ("SEFG", "auto")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**asked)
        with pytest.raises(openai.BadRequestError):  # one turn is left, and is too long
            one = {**asked, "input": "x" * 500}
            await client.responses.create(**one, truncation="auto")


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}
WRONG_GRAMMARS = [
    ({"syntax": "lark", "definition": "start: A"}, "definition"),
    ({"syntax": "lark", "definition": "start: (/a/"}, "definition"),
    ({"syntax": "regex", "definition": "("}, "definition"),
    ({"syntax": "regex", "definition": "(?=a)"}, "definition"),
    ({"syntax": "lark"}, "definition"),
    ({"definition": "start: /a/"}, "syntax"),
    ({"syntax": "ebnf", "definition": "start: /a/"}, "syntax"),
    ({"syntax": "regex", "definition": ""}, "definition"),
]


def with_grammar(**form):
    """Fields with a custom tool that must be called."""
    tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", **form}}
    return {"tools": [tool], "tool_choice": "required"}


WRONG = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "some"}, "truncation"),
    ({"include": ["x" * 65]}, "include[0]"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"max_tokens": 2}, "max_tokens"),
    ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
    ({"input": "x" * 20000}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x"}, CALL]}, "input[1].arguments"),
    ({"input": [{**CALL, "name": ""}]}, "input[0].name"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
    ({"tools": [{"type": "web\r\nsearch"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [{"type": "mcp"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "intger"}}}},
     "text.format"),
    *((with_grammar(**form), f"tools[0].format.{param}") for form, param in WRONG_GRAMMARS),
]  # fmt: skip


async def test_a_bad_field_is_refused_by_its_name_here(says):
    gateway = await says("x")
    for fields, param in WRONG:
        response = await gateway.post("/v1/responses", {"input": "Hi", **fields})
        assert rejected(response) == (400, param), response.text


async def test_tools_that_are_not_here_may_be_refused(says):
    gateway = await says("abc", unknown_tools="refuse")
    tools = [{"type": "web_search"}, *TOOLS]
    response = await gateway.post("/v1/responses", {"input": "Hi", "tools": tools})
    assert response.status_code == 400 and "web_search" in response.text


async def test_tools_may_be_allowed(says):
    gateway = await says("{}")
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}],
    }
    async with client_of(gateway) as client:
        answer = await client.responses.create(
            model="tiny", input="Hi", tools=TOOLS, tool_choice=choice, max_output_tokens=30
        )
    assert answer.tool_choice.mode == "required"
    sampling = gateway.cluster.prefills[0].requests[-1].sequence.sampling
    assert "call_0" in sampling.structured_output.grammar
    assert '"f"' not in sampling.structured_output.grammar
    choice["tools"][0]["name"] = "h"
    refused = await gateway.post(
        "/v1/responses", {"input": "Hi", "tools": TOOLS, "tool_choice": choice}
    )
    assert rejected(refused) == (400, "tool_choice")
