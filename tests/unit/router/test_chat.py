"""Chats with tools and reasoning: what templates get, what outputs are held to, what is refused."""

import json
import math

import pytest

from baton.config import DEMO_MODEL
from baton.errors import ConfigError, InvalidRequest
from baton.generation.sampling_params import Reasoning
from baton.generation.structured_output import GrammarCompiler
from baton.text.tool_parsers.harmony import HARMONY
from baton.v1 import common_pb2, inference_pb2
from router.admission.admission import PromptChoices
from router.admission.chat import ChatFormats

from .small_tokenizers import admission, byte_tokenizer

SHOWN = (
    "{{ [messages, tools, enable_thinking | default(none), add_generation_prompt] | tojson }}"
    "<tool_call>{# </think> #}"
)
OPENED = "{{ messages[0].content }}<think>\n{# </think> <tool_call> tools #}"
THINK = ["<think>", "</think>"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "f", "description": "d", "parameters": json.dumps(CITY)}, {"name": "g"}]
REQUIRED = inference_pb2.TOOL_CHOICE_REQUIRED


@pytest.fixture
async def admission_of(tmp_path):
    made = []

    def make(template=SHOWN, added=THINK, **settings):
        tokenizer = byte_tokenizer(
            tmp_path, added=added, template=template, max_position_embeddings=1 << 20
        )
        grammars = GrammarCompiler(DEMO_MODEL, 4096, {1})
        made.append(admission(tokenizer, grammars=grammars, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def admit(admission, *messages, sampling=None, **chat):
    turns = messages or ({"role": "user", "content": "Hi"},)
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=turns, **chat), sampling=sampling
    )
    return await admission.admit(
        request, math.inf, 0, "r", admission.tenants.tenant_for(()), PromptChoices(cut_output=True)
    )


async def shown(admission, *messages, **chat):
    """What the template got."""
    prompt = admission.tokenizer.decode((await admit(admission, *messages, **chat)).prompt)
    return json.loads(prompt.partition("<tool_call>")[0])


async def test_a_template_gets_a_conversation_as_transformers_gives_it(admission_of):
    call = {"id": "call_1", "name": "f", "arguments": '{"city": "Paris"}'}
    messages, tools, thinking, opens = await shown(
        admission_of(),
        {"role": "developer", "content": "Be brief.", "name": "Ada"},
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        tools=TOOLS,
        template_kwargs='{"enable_thinking": false}',
    )
    function = {"name": "f", "arguments": {"city": "Paris"}}
    assert messages == [
        {"role": "system", "content": "Be brief.", "name": "Ada"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]  # fmt: skip
    described = {"name": "f", "description": "d", "parameters": CITY}
    assert [tool["function"] for tool in tools] == [described, {"name": "g"}]
    assert (thinking, opens) == (False, True)
    none = inference_pb2.TOOL_CHOICE_NONE
    assert (await shown(admission_of(), tools=TOOLS, tool_choice=none))[1] is None
    own = admission_of("{% if messages[0].role == 'developer' %}yes{% endif %}")
    prompt = (await admit(own, {"role": "developer", "content": "x"})).prompt
    assert own.tokenizer.decode(prompt) == "yes"


async def test_the_last_message_can_be_continued(admission_of):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi yo"}]
    admission = admission_of(template)
    prompt = (await admit(admission, *turns, continue_final_message=True)).prompt
    assert admission.tokenizer.decode(prompt) == "user:Hi;assistant:Hi yo"


async def test_tools_that_must_be_called_are_a_grammar_and_other_chats_have_none(admission_of):
    admission = admission_of()
    begin, end = map(admission.tokenizer.added_token, THINK)
    plain = await admit(admission)
    assert plain.params.structured_output is None and plain.params.reasoning is None
    assert plain.output_format.reasoning == Reasoning(begin, end)
    assert plain.output_format.tools is None
    may = await admit(admission, tools=TOOLS)
    assert may.params.structured_output is None and may.output_format.tools.name == "hermes"
    must = await admit(admission, tools=TOOLS, tool_choice=REQUIRED)
    assert {"call_0", "call_1"} <= set(must.params.structured_output.grammar.split())
    assert must.params.reasoning == Reasoning(begin, end)
    one = (await admit(admission, tools=TOOLS, tool_name="g")).params.structured_output.grammar
    assert '"g' in one.replace("\\", "") and "city" not in one
    answer = common_pb2.SamplingParams(structured_output={"json_schema": '{"type": "object"}'})
    either = await admit(admission, tools=TOOLS, sampling=answer)
    assert "calls | answer" in either.params.structured_output.grammar
    none = admission_of("{{ messages }}")
    assert (await admit(none)).output_format is None


async def test_arguments_of_required_calls_are_objects_also_where_the_schema_is_silent(
    admission_of,
):
    admission = admission_of()

    async def grammar(schema):
        tools = [{"name": "f", "parameters": json.dumps(schema)}]
        admitted = await admit(admission, tools=tools, tool_choice=REQUIRED)
        return admitted.params.structured_output.grammar

    either = {"anyOf": [CITY, {"type": "string"}]}
    for schema in ({}, {"description": "d"}, {"properties": CITY["properties"]}, either):
        assert await grammar(schema) == await grammar({**schema, "type": "object"})
    assert await grammar({"type": ["object", "null"]}) == await grammar({"type": "object"})


async def test_reasoning_that_the_prompt_opens_and_its_limit(admission_of):
    admission = admission_of(OPENED)
    reasoning = (await admit(admission, max_thinking_tokens=5)).params.reasoning
    assert (reasoning.begun, reasoning.max_tokens) == (True, 5)
    for alone in ({"allowed_token_ids": [5]}, {"bad_words": [{"token_ids": [5]}]}):
        with pytest.raises(InvalidRequest, match="or max_thinking_tokens"):
            await admit(
                admission, max_thinking_tokens=5, sampling=common_pb2.SamplingParams(**alone)
            )
    admission = admission_of(OPENED + "\n</think>\n\n")
    assert not (await admit(admission, max_thinking_tokens=0)).params.reasoning.begun
    admission = admission_of("{{ messages[0].content }}", reasoning_parser="deepseek_r1")
    said = {"role": "user", "content": "<think>"}
    assert (await admit(admission, said)).output_format.reasoning.begun
    admission = admission_of("{{ messages[0].content }}", reasoning_parser="none")
    assert (await admit(admission)).output_format is None
    with pytest.raises(ConfigError, match="--reasoning-parser qwen3 needs a model whose tokeniz"):
        admission_of(added=[], reasoning_parser="qwen3")


async def test_required_calls_and_restricted_answers_come_at_once_where_the_prompt_closes_reasoning(
    admission_of,
):
    template = "{{ messages[0].content }}{# <tool_call> tools #}<think>\n\n</think>\n\n"
    answer = common_pb2.SamplingParams(structured_output={"regex": "a"})
    for parser in ("auto", "deepseek_r1"):
        admission = admission_of(template, reasoning_parser=parser)
        for asked in ({"tools": TOOLS, "tool_choice": REQUIRED}, {"sampling": answer}):
            for limit in ({}, {"max_thinking_tokens": 5}):
                admitted = await admit(admission, **asked, **limit)
                assert admitted.params.structured_output and admitted.params.reasoning is None
                assert not admitted.output_format.reasoning.begun
    reopened = admission_of(template + "<think>")
    assert (await admit(reopened, sampling=answer)).params.reasoning.begun
    answered = admission_of(template + "So")
    assert (await admit(answered, sampling=answer)).params.reasoning


async def test_effort_turns_reasoning_on_and_off_where_a_template_has_a_switch_alone(admission_of):
    for template, effort, expected in (
        ("{{ [enable_thinking | default(none)] }}", "none", "[False]"),
        ("{{ [enable_thinking | default(none)] }}", "high", "[True]"),
        ("{{ [thinking | default(none)] }}", "low", "[True]"),
        ("{{ [reasoning_effort, enable_thinking | default(none)] }}", "low", "['low', None]"),
        ("{{ messages[0].content }}", "low", "Hi"),
    ):
        admission = admission_of(template)
        kwargs = json.dumps({"reasoning_effort": effort})
        prompt = (await admit(admission, template_kwargs=kwargs)).prompt
        assert admission.tokenizer.decode(prompt) == expected
    admission = admission_of("{{ [enable_thinking] }}")
    kwargs = json.dumps({"reasoning_effort": "none", "enable_thinking": True})
    assert admission.tokenizer.decode((await admit(admission, template_kwargs=kwargs)).prompt) == (
        "[True]"
    )


CONCATENATED = (
    "{% for m in messages %}{% for c in m.tool_calls %}"
    "{{ '<tool_call>' + c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("written", ["null", " null\n", "None", ""])
async def test_arguments_that_are_null_are_an_empty_object(admission_of, written):
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": written}]}
    messages, *_ = await shown(admission_of(), called, tools=TOOLS)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {}


async def test_a_template_that_takes_arguments_as_a_text_gets_a_text(admission_of):
    admission = admission_of(CONCATENATED)
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a":  "é"}'}]}
    prompt = (await admit(admission, called)).prompt
    assert admission.tokenizer.decode(prompt) == '<tool_call>f{"a": "é"}'


async def test_a_template_that_shows_no_calls_gets_them_as_content(admission_of):
    admission = admission_of("{{ messages[-1].content }}{# <|tool_call|> tools #}")
    calls = [{"name": "f", "arguments": '{"a": "é"}'}, {"name": "g"}]
    called = {"role": "assistant", "content": "See.", "tool_calls": calls}
    prompt = (await admit(admission, called)).prompt
    assert admission.tokenizer.decode(prompt) == (
        'See.<|tool_call|>[{"name": "f", "arguments": {"a": "é"}}, {"name": "g", "arguments": {}}]'
    )


CHANNELS = "{{ messages | tojson }}{# <|channel|> <|message|> tools #}"


async def test_a_template_of_channels_gets_one_call_a_message_and_one_thought(admission_of):
    admission = admission_of(CHANNELS, added=HARMONY.markers)
    calls = [{"id": f"call_{name}", "name": name, "arguments": "{}"} for name in "fg"]
    admitted = await admit(
        admission,
        {"role": "assistant", "content": "See.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "call_g"},
        {"role": "tool", "content": "1", "tool_call_id": "call_f"},
        {"role": "tool", "content": "0", "tool_call_id": "call_h"},
        {"role": "assistant", "content": "Done.", "reasoning": "Ok."},
    )
    turns = json.loads(admission.tokenizer.decode(admitted.prompt))
    assert [turn["role"] for turn in turns] == ["assistant", "tool"] * 2 + ["tool", "assistant"]
    assert [turn.get("thinking") for turn in turns] == ["Hm.\nSee.", *[None] * 4, "Ok."]
    assert [turn["content"] for turn in turns] == ["", "1", "", "2", "0", "Done."]
    assert all(len(turn.get("tool_calls", [1])) == 1 for turn in turns)
    # Channels are there without tools, and restricted answers are in one of them.
    assert admitted.output_format.tools is HARMONY and not admitted.output_format.tool_schemas
    assert admitted.output_format.reasoning is None
    answer = common_pb2.SamplingParams(structured_output={"json_schema": json.dumps(CITY)})
    grammar = (await admit(admission, sampling=answer)).params.structured_output.grammar
    assert grammar.startswith("start: analysis* final") and "city" in grammar
    must = await admit(admission, tools=TOOLS, tool_choice=REQUIRED)
    assert must.params.structured_output.grammar.startswith("start: analysis* call\n")
    ends = {admission.tokenizer.added_token(text) for text in HARMONY.stops}
    assert must.params.stop_token_ids == ends and "f" in must.output_format.tool_schemas
    free = await admit(admission, sampling=common_pb2.SamplingParams(ignore_eos=True))
    assert not free.params.stop_token_ids
    with pytest.raises(InvalidRequest, match="set reasoning_effort"):
        await admit(admission, max_thinking_tokens=5)
    with pytest.raises(InvalidRequest, match="cannot restrict one channel"):
        await admit(admission, sampling=GRAMMAR)


GRAMMAR = common_pb2.SamplingParams(structured_output={"grammar": "start: /a/"})
NOT_KEPT = json.dumps({"minProperties": 3})
BAD_SCHEMA = json.dumps({"properties": {"a": {"type": "intger"}}})
WRONG_KEYWORDS = [
    {"properties": []}, {"required": 5}, {"required": [5]}, {"type": 5},
    {"properties": {"a": {"type": [5]}}},
]  # fmt: skip
CALLED = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}
UNNAMED = {"role": "assistant", "tool_calls": [{"arguments": "{}"}]}
REGEX = common_pb2.SamplingParams(structured_output={"regex": "a"})
NOT_JSON = common_pb2.SamplingParams(structured_output={"json_schema": "{"})


@pytest.mark.parametrize(
    ("messages", "chat", "field"),
    [
        ((), {"tools": [{"name": "a b"}]}, "chat.tools[0].name"),
        ((), {"tools": [{"name": "f"}, {"name": "f"}]}, "chat.tools[1].name"),
        ((), {"tools": [{"name": "f", "parameters": "[]"}]}, "chat.tools[0].parameters"),
        *(((), {"tools": [{"name": "g"}, {"name": "f", "parameters": json.dumps(wrong)}]},
           "chat.tools[1].parameters") for wrong in WRONG_KEYWORDS),
        ((), {"tools": [{"name": f"f{i}"} for i in range(129)]}, "chat.tools"),
        ((), {"tools": [{"name": "f", "description": "x" * (1 << 18)}]}, "chat.tools"),
        ((), {"tools": [{"name": "f", "parameters": BAD_SCHEMA}], "tool_choice": REQUIRED},
         "chat.tools[0].parameters"),
        ((), {"tools": [{"name": "f", "parameters": NOT_KEPT}], "tool_choice": REQUIRED},
         "chat.tools[0].parameters"),
        *(((), {"tools": [{"name": "f", "parameters": json.dumps({"type": types})}],
                "tool_choice": REQUIRED}, "chat.tools[0].parameters")
          for types in ("string", ["array", "null"], None)),
        ((), {"tools": [{"name": "f", "parameters": f'{{"title": "{"x" * (1 << 16)}"}}'}],
              "tool_name": "f"}, "chat.tools"),
        ((), {"tool_choice": REQUIRED}, "chat.tool_choice"),
        ((), {"tools": TOOLS, "tool_name": "h"}, "chat.tool_name"),
        ((), {"tools": TOOLS, "sampling": REGEX}, "sampling.structured_output"),
        ((), {"tools": TOOLS, "sampling": NOT_JSON}, "sampling.structured_output"),
        ((), {"template_kwargs": "[]"}, "chat.template_kwargs"),
        ((), {"template_kwargs": '{"messages": 1}'}, "chat.template_kwargs"),
        ((), {"template_kwargs": f'{{"a": "{"x" * (1 << 14)}"}}'}, "chat.template_kwargs"),
        ((CALLED,), {}, "chat.messages[0].tool_calls[0].arguments"),
        ((UNNAMED,), {}, "chat.messages[0].tool_calls[0].name"),
    ],
)  # fmt: skip
async def test_a_bad_chat_is_refused_with_its_field(admission_of, messages, chat, field):
    with pytest.raises(InvalidRequest) as refused:
        await admit(admission_of(), *messages, **chat)
    assert refused.value.field == field


async def test_a_model_without_tools_or_reasoning_says_so(admission_of):
    for template, chat, reason in (
        ("{{ messages }}", {"tools": TOOLS}, "chat template has no tools"),
        ("{{ tools }}", {"tools": TOOLS}, "--tool-parser"),
        ("{{ messages }}", {"max_thinking_tokens": 1}, "no reasoning of this model is known"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await admit(admission_of(template), **chat)
    formats = ChatFormats.from_tokenizer(
        admission_of("{{ tools }}", tool_parser="llama3").tokenizer, "llama3"
    )
    assert formats.tools.name == "llama3"
