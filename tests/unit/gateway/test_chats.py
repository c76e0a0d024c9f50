"""Tools and reasoning over HTTP, in OpenAI's shapes; the workers' model says what a test writes."""

import json

import openai
import pytest

from baton.v1 import common_pb2

from .conftest import CALLS, rejected

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "description": "d", "strict": True}},
]
PATH = "/v1/chat/completions"


async def test_reasoning_content_and_tool_calls_whole_and_streamed(says):
    gateway = await says(CALLS)
    answer = (await gateway.chat(tools=TOOLS, ignore_eos=False)).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(ids)
    assert message == {
        "role": "assistant", "content": "See:", "refusal": None,
        "reasoning": "Hm.", "reasoning_content": "Hm.",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    chunks = await gateway.events(PATH, tools=TOOLS, ignore_eos=False, max_tokens=None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "See:"
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert all(len(delta.get("tool_calls", [1])) == 1 for delta in deltas)
    first = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in first] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    pieces = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert "".join(pieces) == '{"a": 1}' and len(pieces) > 5
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "tool_calls"
    ]
    one = await gateway.chat(tools=TOOLS, ignore_eos=False, parallel_tool_calls=False)
    assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1


BEGIN, END = '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (BEGIN + '{"a": "b\nc"}' + END, STOP),
        (BEGIN + '{"a": "\\ud83d"}' + END, STOP),
        (BEGIN + "{'a': True, b: [1,]}" + END, STOP),
        (BEGIN + '{"a": "b', STOP),
        (BEGIN + '{"a": "b', LENGTH),
        ('<tool_call>{"arguments": {"a": "\\ud83d\n"}, "name": "f"}</tool_call>', STOP),
    ],
)
async def test_a_call_that_was_returned_is_json_and_comes_back(says, said, reason):
    gateway = await says(said, reason)
    fields = {"tools": TOOLS, "ignore_eos": False}
    (choice,) = (await gateway.chat(**fields)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    chunks = await gateway.events(PATH, **fields, max_tokens=None)
    deltas = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks]
    arguments = "".join(one["function"]["arguments"] for delta in deltas for one in delta)
    assert arguments == call["function"]["arguments"]
    if reason is STOP:
        json.dumps(json.loads(arguments), ensure_ascii=False).encode()
    messages = [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "x"}]
    again = await gateway.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert again.status_code == 200, again.text
    # As a release before had returned it.
    if said.startswith(BEGIN):
        call["function"]["arguments"] = said.removeprefix(BEGIN).removesuffix(END)
    again = await gateway.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert again.status_code == 200, again.text


async def test_reasoning_can_be_left_out_of_answers(says):
    gateway = await says(CALLS)
    asked = {"tools": TOOLS, "ignore_eos": False, "include_reasoning": False}
    answer = (await gateway.chat(**asked)).json()
    message = answer["choices"][0]["message"]
    assert not message.keys() & {"reasoning", "reasoning_content"}
    assert message["content"] == "See:" and len(message["tool_calls"]) == 2
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    chunks = await gateway.events(PATH, **asked, max_tokens=None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta.keys() & {"reasoning", "reasoning_content"} for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "See:"


async def test_without_tools_their_format_is_content(says):
    gateway = await says(CALLS.partition("</think>\n\n")[2])
    for chat in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await gateway.chat(**chat, ignore_eos=False)).json()["choices"]
        assert choice["message"]["content"].endswith("</tool_call>")
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


async def test_fields_of_chats_reach_the_template_and_the_workers(says):
    gateway = await says("{}")
    history = [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12"}]},
    ]  # fmt: skip
    fields = {"messages": history, "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    prompt = (await gateway.post("/tokenize", fields, return_token_strs=True)).json()
    shown = "".join(prompt["token_strs"])
    assert "'reasoning_content': 'Hm.'" in shown and "'arguments': {}" in shown
    assert "'content': '12', 'tool_call_id': 'call_1'" in shown
    named = {"type": "function", "function": {"name": "g"}}
    asked = await gateway.chat(**fields, tool_choice=named, max_thinking_tokens=3, ignore_eos=False)
    assert asked.status_code == 200, asked.text
    spec = gateway.cluster.prefills[0].requests[-1].sequence
    assert spec.sampling.reasoning.max_tokens == 3 and not spec.sampling.reasoning.begun
    assert "call_0" in spec.sampling.structured_output.grammar
    assert len(spec.token_ids) == prompt["count"]
    for budget, most in ((5, 5), (-1, None)):  # vLLM's name of the same
        assert (await gateway.chat(thinking_token_budget=budget)).status_code == 200
        reasoning = gateway.cluster.prefills[0].requests[-1].sequence.sampling.reasoning
        assert (reasoning.max_tokens if reasoning.HasField("max_tokens") else None) == most


async def test_the_model_is_told_of_allowed_tools_only(says):
    gateway = await says("{}")

    def allowed(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def grammar():
        return gateway.cluster.prefills[0].requests[-1].sequence.sampling.structured_output.grammar

    for mode in ("auto", "required"):
        asked = await gateway.chat(tools=TOOLS, tool_choice=allowed(mode, "g"), ignore_eos=False)
        assert asked.status_code == 200, asked.text
        assert ("call_0" in grammar()) is (mode == "required")
    wrong = {"type": "function", "function": {"name": "w", "parameters": {"required": 5}}}
    refused = await gateway.chat(tools=[*TOOLS, wrong], tool_choice=allowed("auto", "w"))
    param = f"tools[{len(TOOLS)}].function.parameters"
    assert rejected(refused) == (400, param)
    of_allowed = grammar()
    await gateway.chat(tools=TOOLS[1:], tool_choice="required", ignore_eos=False)
    assert grammar() == of_allowed
    for bad in (allowed("auto", "h"), allowed("none", "g"), allowed("auto")):
        refused = await gateway.chat(tools=TOOLS, tool_choice=bad)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("tool_choice")


async def test_reasoning_between_texts_whole_and_streamed(says):
    """Of a model whose markers are no tokens; stop strings are not searched for in it."""
    template = "{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}{# </think> #}"
    text = "<think>\nHm, an end.\n</think>\n\nYes, the end."
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    gateway = await says(lambda prompt: text + call, template=template, added=[])

    async def parts(**asked):
        answer = (await gateway.chat(**asked)).json()
        message = answer["choices"][0]["message"]
        chunks = await gateway.events(PATH, max_tokens=None, **asked)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        names = ("reasoning", "content")
        streamed = ["".join(delta.get(name) or "" for delta in deltas) for name in names]
        assert streamed == [message.get(name) or "" for name in names]
        details = answer["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})
        return *streamed, len(message.get("tool_calls", ())), details["reasoning_tokens"]

    asked = {"ignore_eos": False, "messages": [{"role": "user", "content": "Hi"}]}
    inside = len("<think>\nHm, an end.\n</think>")
    assert await parts(**asked, tools=TOOLS) == ("Hm, an end.", "Yes, the end.", 1, inside)
    assert await parts(**asked, stop="end") == ("Hm, an end.", "Yes, the ", 0, inside)
    required = await parts(**asked, tools=TOOLS, tool_choice="required")
    assert required == ("", text, 1, 0)  # a grammar would have had no reasoning
    opened = [{"role": "user", "content": "Hi<think>\n"}]
    gateway = await says("Hm.</think>Yes.", template=template, added=[])
    found = await parts(messages=opened, ignore_eos=False)
    assert found == ("Hm.", "Yes.", 0, len("Hm.</think>"))


CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": ".*"}},
    },
}


@pytest.mark.parametrize("arguments", ['{"input": "a\\n\\"b\\""}', '{"text": 1}'])
async def test_a_custom_tool_is_called_with_a_text(says, arguments):
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    gateway = await says(call % ("patch", arguments) + call % ("f", '{"a": 1}'))
    text = json.loads(arguments).get("input", arguments)
    for choice in ({"type": "custom", "custom": {"name": "patch"}}, "auto"):
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [*TOOLS, CUSTOM],
            "tool_choice": choice,
        }
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            chunks = [chunk.choices[0].delta.tool_calls async for chunk in stream]
        custom, *rest = whole.choices[0].message.tool_calls
        assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", text)
        deltas = [delta for chunk in chunks for delta in chunk or ()]
        first = next(one for one in deltas if one.type == "custom")
        assert first.custom["name"] == "patch" and first.index == 0
        pieces = [one.custom["input"] for one in deltas if getattr(one, "custom", None)]
        assert "".join(pieces) == text
        if choice == "auto":
            assert (rest[0].type, rest[0].function.arguments) == ("function", '{"a": 1}')
            others = [one.function for one in deltas if one.index == 1]
            assert "".join(one.arguments for one in others) == '{"a": 1}'
    sent = gateway.cluster.prefills[0].requests[0].sequence.sampling.structured_output.grammar
    assert "patch" in sent and "input" in sent


async def test_a_custom_tools_call_goes_back(says):
    gateway = await says(lambda prompt: prompt.partition("<tool_call></think>")[0])
    called = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": 'a"b'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    answer = await gateway.chat(messages=messages, tools=[CUSTOM])
    assert repr({"input": 'a"b'}) in answer.json()["choices"][0]["message"]["content"]
    del called["custom"]
    refused = await gateway.chat(messages=messages, tools=[CUSTOM])
    assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].custom"
    wrong = {"type": "custom", "custom": {**CUSTOM["custom"]}}
    wrong["custom"]["format"] = {
        "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}
    }  # fmt: skip
    refused = await gateway.chat(tools=[*TOOLS, wrong], tool_choice="required", ignore_eos=False)
    param = f"tools[{len(TOOLS)}].custom.format.grammar.definition"
    assert rejected(refused) == (400, param), refused.text


async def test_documents_and_a_template_of_the_routers_reach_the_prompt(says, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for d in documents %}<{{ d.title }}>{% endfor %}{{ messages[0].content }}"
    )
    gateway = await says("{}", chat_template=tmp_path / "own.jinja")
    asked = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"title": "T"}]}

    async def shown(**more):
        found = await gateway.post("/tokenize", asked, return_token_strs=True, **more)
        return "".join(found.json()["token_strs"])

    assert await shown() == "<T>Hi"
    long = {"messages": [{"role": "user", "content": "x" * 5000}]}  # another process renders it
    assert await shown(**long) == "<T>" + "x" * 5000
    assert (await gateway.chat(**asked)).status_code == 200
    spec = gateway.cluster.prefills[0].requests[-1].sequence
    assert gateway.tokenizer.decode(spec.token_ids[: spec.prompt_tokens]) == "<T>Hi"
    for documents in ({}, ["a"]):
        refused = await gateway.chat(documents=documents)
        assert refused.json()["error"]["param"].startswith("documents")
    gateway = await says("{}")  # a template that shows none
    assert rejected(await gateway.chat(documents=[{"title": "T"}])) == (400, "documents")
    assert (await gateway.chat(documents=[])).status_code == 200


async def test_the_system_fingerprint_stands_for_the_routers_template_too(says, tmp_path):
    own = tmp_path / "own.jinja"
    found = []
    for text in ("{{ messages[0].content }}", "{{ messages[0].content }}!", None):
        own.write_text(text or "")
        gateway = await says("{}", **({"chat_template": own} if text else {}))
        found.append((await gateway.chat()).json()["system_fingerprint"])
    assert len(set(found)) == 3


WRONG = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 2, "max_thinking_tokens": 2}, "thinking_token_budget"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"repetition_detection": {}}, "repetition_detection"),
    ({"best_of": 2}, "best_of"),
    ({"regex": "a"}, "regex"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
]  # fmt: skip


async def test_a_bad_field_of_a_chat_is_refused_by_its_name_here(says):
    gateway = await says("x")
    for fields, param in WRONG:
        assert rejected(await gateway.chat(**fields)) == (400, param), fields


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")],
)
async def test_reasoning_is_between_the_tokens_that_the_template_shows(says, begin, end):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# " + end + " #}"
    gateway = await says(f"{begin}Hm.{end}Yes.", template=template, added=[begin, end])
    answer = (await gateway.chat(ignore_eos=False, max_tokens=None)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
