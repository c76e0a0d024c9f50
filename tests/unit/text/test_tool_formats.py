"""Tool calls in the format of each family, however an output is cut."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import TOOL_PARSERS
from baton.generation.tool_call import ToolCallDelta
from baton.text.chat_template import ChatTemplate
from baton.text.tool_parsers import FORMATS, tool_format
from baton.text.tool_parsers.format import AllowedCalls, GrammarTerms
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    JAMBA,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    PHI4_MINI,
)
from baton.text.tool_parsers.schemas import types_of
from baton.text.tool_parsers.value_calls import FUNCTION_GEMMA, GEMMA4, LFM2, OLMO3, PYTHONIC
from baton.text.tool_parsers.xml_calls import (
    DEEPSEEK_V32,
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)

from .tool_outputs import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    GIVEN,
    OUTPUTS,
    SEP,
    THOUGHTS,
    TOOLS,
    D,
    parsed,
    written,
)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_parsed_the_same_however_it_is_cut(name):
    form, text, content, calls = OUTPUTS[name]
    whole = parsed(form, [text])
    assert whole[0] == content and whole[2] == THOUGHTS.get(name, "")
    for found, expected in zip(whole[1], calls, strict=True):
        as_text = isinstance(expected[1], str)  # where the text is JSON, it is unchanged
        assert (found if as_text else (found[0], json.loads(found[1]))) == expected
    assert parsed(form, [*text, ""]) == whole
    for i in range(len(text)):
        for j in range(i, len(text)) if len(text) < 100 else (i, i + 7):
            assert parsed(form, [text[:i], text[i:j], text[j:]]) == whole
    if len(calls) > 1:
        assert parsed(form, [*text, ""], single=True)[1] == whole[1][:1]


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_its_length_cuts_has_a_beginning_of_its_parts(name):
    form, text, *_ = OUTPUTS[name]
    content, calls, thoughts = parsed(form, [text])
    for end in range(1, len(text)):
        begun = parsed(form, [text[:end]], cut=True)
        assert parsed(form, [*text[:end], ""], cut=True) == begun
        shown = begun[0].rstrip().rstrip("<[").rstrip()  # a character of a marker is common
        assert content.startswith(shown) or text.startswith(shown)
        assert thoughts.startswith(begun[2])
        if begun[1]:
            *whole, (last, arguments) = begun[1]
            assert whole == calls[: len(whole)] and last == calls[len(whole)][0]
            assert calls[len(whole)][1].startswith(arguments)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("text", ["f", " ", "{", '"', "a=", "<|", "<parameter="])
def test_a_long_output_costs_little_wherever_it_stops_to_make_sense(form, text):
    """The parser runs on the router's event loop, between all streams."""
    begun = time.thread_time()
    for before in ("", form.written.partition("NAME")[0], form.written.replace("NAME", "f")[:-3]):
        parsed(form, [before, *[text] * 1_250])
    assert time.thread_time() - begun < 0.5  # 0.02; 1.2 where each piece looks at all before it


def test_arguments_come_as_they_are_written_and_further_calls_can_be_dropped():
    parser = MISTRAL.parser()
    assert parser.push('[TOOL_CALLS][{"name": "f", "arguments": ') == ("", [], "")
    _, (begun, piece), _ = parser.push('{"a')
    assert (begun.index, begun.name, begun.arguments) == (0, "f", "")
    assert len(begun.id) == 9 and begun.id.isalnum()  # all that its templates take
    assert piece == ToolCallDelta(0, "", "", '{"a')
    assert parser.push('": "x') == ("", [ToolCallDelta(0, "", "", '": "x')], "")
    two = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert parsed(HERMES, [two], single=True) == ("", [("f", "{}")], "")


# The assistant's turn as the makers' templates write it, reduced to calls with their arguments.
TURN = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}BODY{% endfor %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}BODY{% endfor %}"
JSON = "{{ f.arguments | tojson }}"
VALUE = "{{ v if v is string else v | tojson }}"
ITEMS = "{% for k, v in f.arguments.items() %}BODY{% endfor %}"
COMMA = "{{ ', ' if not loop.last }}"
GEMMA = (
    "{% macro show(v) %}{% if v is string %}QvQ{% elif v is mapping %}{{ '{' }}{% for k, w in v"
    " | dictsort %}{{ k }}:{{ show(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is"
    " sequence %}[{% for w in v %}{{ show(w) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}"
    "{{ v | tojson }}{% endif %}{% endmacro %}"
).replace("QvQ", "{{ 'Q' + v + 'Q' }}")


def each(body):
    return calls("", body, "")


def calls(before, one, behind):
    return TURN.replace("BODY", before + EACH.replace("BODY", one) + behind)


def elements(before, body, behind):
    return each(before + ITEMS.replace("BODY", body) + behind)


def objects(before, behind):
    return calls(before, f'{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}{COMMA}', behind)


def keywords(before, between, behind):
    values = ITEMS.replace("BODY", "{{ k }}={{ v | tojson }}" + COMMA)
    return calls(before, "{{ f.name }}(" + values + ")" + between, behind)


def gemma(begin, end, quote):
    values = "{{ f.name }}{{ show(f.arguments) }}"
    return GEMMA.replace("Q", quote) + each(f"{begin}call:{values}{end}")


GIVEN_AS = 'name="{{ k }}" string="{{ v is string | tojson }}"'
TEMPLATES = {
    HERMES: each(
        f'\n<tool_call>\n{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}\n</tool_call>'
    ),
    LLAMA3: TURN.replace(
        "BODY",
        "{% set f = m.tool_calls[0].function %}<|python_tag|>"
        '{"name": "{{ f.name }}", "parameters": ' + JSON + "}",
    ),
    MISTRAL: calls(
        "[TOOL_CALLS] [",
        f'{{"name": "{{{{ f.name }}}}", "arguments": {JSON}, "id": "{{{{ c.id }}}}"}}{COMMA}',
        "]",
    ),
    MISTRAL_ARGS: each("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON),
    GRANITE: objects("<|tool_call|>[", "]"),
    PHI4_MINI: each(
        f'<|tool_call|>{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}<|/tool_call|>'
    ),
    DEEPSEEK_V3: calls(
        CALLS,
        f"{{{{ '\\n' if not loop.first }}}}{CALL}function{SEP}{{{{ f.name }}}}\n```json\n"
        f"{JSON}\n```{CALL_END}",
        CALLS_END,
    ),
    DEEPSEEK_V31: calls(CALLS, f"{CALL}{{{{ f.name }}}}{SEP}{JSON}{CALL_END}", CALLS_END),
    KIMI_K2: calls(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    PYTHONIC: keywords("<|python_start|>[", COMMA, "]<|python_end|>"),
    LFM2: keywords("<|tool_call_start|>[", COMMA, "]<|tool_call_end|>"),
    OLMO3: keywords("<function_calls>", "{{ '\\n' if not loop.last }}", "</function_calls>"),
    JAMBA: objects("\n<tool_calls>[", "]</tool_calls>"),
    NEMOTRON: objects("\n\n<TOOLCALL>[", "]</TOOLCALL>"),
    SEED_OSS: elements(
        "\n\n<seed:tool_call>\n<function={{ f.name }}>\n",
        f"<parameter={{{{ k }}}}>{VALUE}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    FUNCTION_GEMMA: gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    GEMMA4: gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    QWEN3_CODER: elements(
        "\n<tool_call>\n<function={{ f.name }}>\n",
        f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    GLM45: elements(
        "\n<tool_call>{{ f.name }}\n",
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n",
        "</tool_call>",
    ),
    MINIMAX_M2: calls(
        "\n<minimax:tool_call>\n",
        '<invoke name="{{ f.name }}">\n'
        + ITEMS.replace("BODY", f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n')
        + "</invoke>\n",
        "</minimax:tool_call>",
    ),
    DEEPSEEK_V32: calls(
        f"\n\n<{D}function_calls>\n",
        f'<{D}invoke name="{{{{ f.name }}}}">\n'
        + ITEMS.replace("BODY", f"<{D}parameter {GIVEN_AS}>{VALUE}</{D}parameter>\n")
        + f"</{D}invoke>\n",
        f"</{D}function_calls>",
    ),
    HARMONY: TURN.replace("{{ m.content }}", "").replace(
        "BODY",
        "{% set f = m.tool_calls[0].function"
        " %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>"
        "assistant"
        "{% endif %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        + JSON
        + "<|call|>",
    ),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\n", " a\n", '"', "\\", "\\n", "3", "null", "true", "[1]", "{", "<", "</", "</parameter", "'"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
ANYTHING = st.recursive(
    SCALARS | TEXTS,
    lambda one: (
        st.lists(one, max_size=3) | st.dictionaries(st.sampled_from("abc"), one, max_size=3)
    ),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "size": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "on": st.booleans() | st.sampled_from(["", "off", "<"]),
        "list": st.lists(ANYTHING, max_size=3),
        "map": st.dictionaries(st.sampled_from("abc"), ANYTHING, max_size=3),
        "free": SCALARS | st.just("a text"),
    },
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_a_template_writes_is_what_the_parser_returns_at_any_cuts(form, data):
    calls = data.draw(st.lists(ARGUMENTS, min_size=1, max_size=3 if form.parallel else 1))
    content = data.draw(st.sampled_from(["", "Let me see."])) if form.parallel else ""
    made = [
        {"id": f"functions.f:{i}", "type": "function", "function": {"name": "f", "arguments": one}}
        for i, one in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    text = ChatTemplate(TEMPLATES[form], {}, "t").render(form.history([turn], shown=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, found, _ = parsed(form, parts)
    assert shown == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        ("f", arguments) for arguments in calls
    ]
    assert parsed(form, [*text, ""]) == (shown, found, "")


def fragments(form):
    """Pieces of outputs in a format, from which right and wrong ones are made."""
    calls = [written(form, ("f", GIVEN)), written(form, ("g", {}))]
    pieces = re.findall(r"\w+|\s+|<[^<>\s]*>?|[^\w\s<]", "".join(calls))
    return [
        *form.markers,
        *calls,
        *sorted(set(pieces)),
        " ",
        "\n",
        "text",
        "{",
        '"',
        "\\",
        "<",
        "'",
    ]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_output_is_parsed_alike_at_any_cuts_and_nothing_but_calls_is_lost(form, data):
    pieces = data.draw(st.lists(st.sampled_from(fragments(form)), max_size=25))
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(form, [text], TOOLS, unique=False)
    assert parsed(form, parts, TOOLS, unique=False) == whole
    assert parsed(form, [*text, ""], TOOLS, unique=False) == whole
    cut = parsed(form, [text], TOOLS, unique=False, cut=True)
    assert parsed(form, [*text, ""], TOOLS, unique=False, cut=True) == cut
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
    if not whole[1] and form not in (HARMONY, LLAMA3):  # whose markers are not content
        assert "".join(whole[0].split()) == "".join(text.split())


def test_a_template_belongs_to_the_format_of_which_it_has_the_texts():
    for form in FORMATS:
        for texts in form.templates:
            assert tool_format("auto", " ".join(texts)) is form
        assert tool_format("auto", TEMPLATES[form].replace("\n", " ")) in (
            form,
            LLAMA3,
            GRANITE,
            None,
        )
    assert {form.name for form in FORMATS} == set(TOOL_PARSERS[2:])
    assert tool_format("auto", "{{ messages }}") is None
    for name in TOOL_PARSERS[2:]:
        assert tool_format(name, "{{ messages }}").name == name
        assert tool_format("none", TEMPLATES[tool_format(name, "")]) is None


def test_a_message_with_several_calls_is_parted_where_templates_take_one():
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "fg"]
    said = {"role": "assistant", "content": "See.", "tool_calls": calls}
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "gf"]
    turns = LLAMA3.history([said, *results], shown=True)
    assert turns == [
        {**said, "tool_calls": calls[:1]},
        results[1],
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        results[0],
    ]
    assert HERMES.history([said, *results], shown=True) == [said, *results]
    unnamed = [{"role": "tool", "content": content} for content in "123"]
    turns = LLAMA3.history([said, *unnamed], shown=True)
    assert [turn["content"] for turn in turns] == ["See.", "1", "", "2", "3"]


class Counted(dict):
    """A part of a schema that counts how often parts are read."""

    reads = 0

    def get(self, *args):
        Counted.reads += 1
        return super().get(*args)


def test_the_types_of_a_schema_cost_little_however_often_its_parts_are_referred_to():
    definitions = {
        f"d{at}": Counted(anyOf=[Counted({"$ref": f"#/$defs/d{at + 1}"})] * 5) for at in range(7)
    }
    root = {"$defs": {**definitions, "d7": {"type": "string"}}}
    Counted.reads = 0
    types_of({"$ref": "#/$defs/d0"}, root)
    assert Counted.reads < 1 << 13
    # Few references are all followed, the same one more than once.
    assert types_of({"anyOf": [{"$ref": "#/$defs/d6"}] * 2 + [{"type": "null"}]}, root) == {
        "string", "null",
    }  # fmt: skip


@pytest.mark.parametrize("value", [5, "x", {"x": 1}, [5], [[]], None])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_schema_whose_keywords_have_other_types_says_nothing(form, value):
    keywords = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties")
    schemas = [{"properties": {"x": {keyword: value}}} for keyword in keywords]
    schemas += [{"properties": value}, {"properties": {"x": value}}, {"required": value}]
    schemas.append({"properties": {"x": {"type": "string", "enum": value}}})
    for schema in schemas:
        _, calls, _ = parsed(form, [written(form, ("f", {"x": "a"}))], {"f": schema})
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"x": "a"})]
        form.grammar(AllowedCalls(tools={"f": schema}), GrammarTerms({}, {}))
