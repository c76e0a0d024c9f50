"""Tool calls in the format of each family: outputs as their makers publish them, however cut."""

import json
import re
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.config import DEMO_MODEL, TOOL_PARSERS
from baton.errors import InvalidRequest
from baton.generation.sampling_params import StructuredOutput
from baton.generation.structured_output import JSON_OPTIONS, LIMITS
from baton.text.chat_template import ChatTemplate
from baton.text.tool_calls import ToolParser
from baton.text.tool_formats import FORMATS, tool_format
from baton.text.tool_formats.harmony import HARMONY
from baton.text.tool_formats.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    PHI4_MINI,
)
from baton.text.tool_formats.value_calls import FUNCTION_GEMMA, GEMMA4, PYTHONIC
from baton.text.tool_formats.xml_calls import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER

TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": ["number", "null"]},
    "on": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/text"}]},
    "list": {"type": "array"},
    "map": {"$ref": "#/$defs/map"},
    "free": {},
}
SCHEMA = {
    "type": "object",
    "properties": TYPES,
    "$defs": {"map": {"type": "object"}, "text": {"type": "string"}},
}
SCHEMAS = {"f": SCHEMA, "g": None, "get_weather": SCHEMA}
D = "\uff5cDSML\uff5c"
CALLS, CALLS_END, CALL, CALL_END, SEP = DEEPSEEK_V3.markers
OUTPUTS = {
    "qwen3": (
        QWEN3_CODER,
        "Let me see.\n\n<tool_call>\n<function=f>\n<parameter=text>\nif a < b:\n  "
        '"x"\n\n</parameter>\n<parameter=count>\n3\n</parameter>\n<parameter=on>'
        "\nTrue\n</parameter>\n"
        "<parameter=list>\n[1, {\"a\": 'b'}]\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n"
        "<function=g>\n</function>\n</tool_call>",
        "Let me see.",
        [
            ("f", {"text": 'if a < b:\n  "x"\n', "count": 3, "on": True, "list": [1, {"a": "b"}]}),
            ("g", {}),
        ],
    ),
    "qwen3 bare": (
        QWEN3_CODER,
        "<function=f>\n<parameter=text>\n</parameter>\n<parameter=size>null"
        "</parameter></function></tool_call>After",
        "After",
        [("f", {"text": "", "size": None})],
    ),
    "qwen3 not": (
        QWEN3_CODER,
        "Use <function=f>(x) or <tool_call>, I say.",
        "Use <function=f>(x) or <tool_call>, I say.",
        [],
    ),
    "qwen3 other text": (
        QWEN3_CODER,
        "<tool_call><function=f><parameter=count>three</parameter> or so</function></tool_call>",
        "or so</function></tool_call>",
        [("f", {"count": "three"})],
    ),
    "glm": (
        GLM45,
        "Well.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>"
        "g</tool_call>",
        "Well.",
        [("f", {"text": "12", "count": 12}), ("g", {})],
    ),
    "glm compact": (
        GLM45,
        "<tool_call>f<arg_key>free</arg_key><arg_value>[1]</arg_value><arg_key>on"
        "</arg_key><arg_value>off</arg_value></tool_call>",
        "",
        [("f", {"free": [1], "on": "off"})],
    ),
    "glm not": (
        GLM45,
        'A <tool_call>{"name": 1}</tool_call>',
        'A <tool_call>{"name": 1}</tool_call>',
        [],
    ),
    "minimax": (
        MINIMAX_M2,
        'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a\n '
        '</parameter>\n<parameter name="size">1.50</parameter>\n</invoke>\n<invoke name="g">'
        "\n</invoke>"
        "\n</minimax:tool_call>",
        "Hm.",
        [("f", {"text": "a\n ", "size": 1.5}), ("g", {})],
    ),
    "minimax not": (
        MINIMAX_M2,
        "<minimax:tool_call>\n<invoke>",
        "<minimax:tool_call>\n<invoke>",
        [],
    ),
    "dsml": (
        DEEPSEEK_V32,
        f'I look.\n\n<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter '
        f'name="text" string="true">5 < 6</{D}parameter>\n<{D}parameter name="x" '
        f'string="false">[5]</{D}'
        f'parameter>\n</{D}invoke>\n<{D}invoke name="g">\n</{D}invoke>\n</{D}function_calls>',
        "I look.",
        [("f", {"text": "5 < 6", "x": [5]}), ("g", {})],
    ),
    "deepseek v3": (
        DEEPSEEK_V3,
        f"So.{CALLS}{CALL}function{SEP}f\n```json\n"
        f'{{"text": "```"}}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}'
        f"{CALLS_END}",
        "So.",
        [("f", {"text": "```"}), ("g", {})],
    ),
    "deepseek v3.1": (
        DEEPSEEK_V31,
        f'{CALLS}{CALL}f{SEP}{{"count": 1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}',
        "",
        [("f", {"count": 1}), ("g", {})],
    ),
    "deepseek not": (DEEPSEEK_V31, f"{CALLS}{CALL}f(1)", f"{CALLS}{CALL}f(1)", []),
    "kimi": (
        KIMI_K2,
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"text": "<|tool_call_end|>"}<|tool_call_end|>'
        "<|tool_call_begin|>"
        "functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Ok.",
        [("f", {"text": "<|tool_call_end|>"}), ("g", {})],
    ),
    "kimi not": (
        KIMI_K2,
        "<|tool_calls_section_begin|>none",
        "<|tool_calls_section_begin|>none",
        [],
    ),
    "granite": (
        GRANITE,
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    "granite text": (GRANITE, '<tool_call>[{"arguments": {}, "name": "g"}]', "", [("g", {})]),
    "phi": (
        PHI4_MINI,
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
        "",
        [("f", {"a": 1})],
    ),
    "phi one": (
        PHI4_MINI,
        '<|tool_call|>{"name": "g", "arguments": {}}<|/tool_call|>',
        "",
        [("g", {})],
    ),
    "phi text": (PHI4_MINI, 'functools[{"name": "g", "arguments": {}}]', "", [("g", {})]),
    "phi not": (PHI4_MINI, "See functools.", "See functools.", []),
    "pythonic": (
        PYTHONIC,
        "[f(text='it\\'s (1, \"2\")', size=-1.5, map={'a': [True, None]}, on=False), g()]",
        "",
        [
            (
                "f",
                {"text": 'it\'s (1, "2")', "size": -1.5, "map": {"a": [True, None]}, "on": False},
            ),
            ("g", {}),
        ],
    ),
    "pythonic marked": (
        PYTHONIC,
        'Wait.\n<|python_start|>[ f(text="x" , count = 1 ) ]<|python_end|>',
        "Wait.",
        [("f", {"text": "x", "count": 1})],
    ),
    "pythonic not": (PYTHONIC, "[link](f(x)) [h(a=1)]", "[link](f(x)) [h(a=1)]", []),
    "pythonic unknown": (PYTHONIC, "[h(a=1)]", "[h(a=1)]", []),
    "functiongemma": (
        FUNCTION_GEMMA,
        '<start_function_call>call:f{text:<escape>a {b}: "c"\n<escape>'
        ",count:3,map:{a:[<escape>x<escape>,true]}}<end_function_call><start_function_call>call:g{}"
        "<end_function_call>",
        "",
        [("f", {"text": 'a {b}: "c"\n', "count": 3, "map": {"a": ["x", True]}}), ("g", {})],
    ),
    "gemma4": (
        GEMMA4,
        'Yes.<|tool_call>call:f{text:<|"|>it\'s<|"|>,size:1.5}<tool_call|>',
        "Yes.",
        [("f", {"text": "it's", "size": 1.5})],
    ),
    "gemma4 not": (GEMMA4, "<|tool_call>f{}", "<|tool_call>f{}", []),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.f "
        '<|constrain|>json<|message|>{"text": "<|end|>", "count": 3}',
        "Let me see.",
        [("f", {"text": "<|end|>", "count": 3})],
    ),
    "harmony template": (
        HARMONY,
        " to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        "",
        [("g", {})],
    ),
    "harmony final": (
        HARMONY,
        "<|channel|>final<|message|>It is\n\n<b>6</b>.\n<|return|>",
        "It is\n\n<b>6</b>.\n",
        [],
    ),
    "harmony plain": (HARMONY, "and so on.", "and so on.", []),
    "harmony not": (
        HARMONY,
        "<|channel|>commentary to=python<|message|>1 + 1<|end|>",
        "<|channel|>commentary to=python<|message|>1 + 1",
        [],
    ),
}
THOUGHTS = {"harmony": "Need f."}


def parsed(form, parts, schemas=SCHEMAS, **options):
    """Content, calls with arguments as text, and reasoning."""
    cut, unique = options.pop("cut", False), options.pop("unique", True)
    parser, contents, calls, thoughts = ToolParser(form, schemas, **options), "", [], ""
    *parts, last = parts
    for one in [*map(parser.push, parts), parser.push(last, last=True, cut=cut)]:
        contents, thoughts = contents + one.content, thoughts + one.reasoning
        for delta in one.tool_calls:
            if delta.id:
                assert (delta.index, delta.arguments) == (len(calls), "")
                calls.append([delta.name, "", delta.id])
            else:
                calls[delta.index][1] += delta.arguments
    assert len({call[2] for call in calls}) == len(calls) or not unique
    return contents, [(name, arguments) for name, arguments, _ in calls], thoughts


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_parsed_the_same_however_it_is_cut(name):
    form, text, content, calls = OUTPUTS[name]
    whole = parsed(form, [text])
    assert whole[0] == content and whole[2] == THOUGHTS.get(name, "")
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls
    assert parsed(form, [*text, ""]) == whole
    for at in range(len(text)):
        assert parsed(form, [text[:at], text[at:]]) == whole
        assert parsed(form, [text[:at], text[at : at + 7], text[at + 7 :]]) == whole
    if len(calls) > 1:
        assert parsed(form, [*text, ""], single=True)[1] == whole[1][:1]


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_its_length_cuts_has_a_beginning_of_its_parts(name):
    form, text, *_ = OUTPUTS[name]
    content, calls, thoughts = parsed(form, [text])
    for end in range(1, len(text)):
        begun = parsed(form, [text[:end]], cut=True)
        assert parsed(form, [*text[:end], ""], cut=True) == begun
        shown = begun[0].removesuffix("<").rstrip()
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
        parsed(form, [before, *[text] * 5_000])
    assert time.thread_time() - begun < 6.0  # 0.2; 20 where each piece looks at all before it


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
    return TURN.replace("BODY", EACH.replace("BODY", body))


def elements(before, body, behind):
    return each(before + ITEMS.replace("BODY", body) + behind)


def gemma(begin, end, quote):
    values = "{{ f.name }}{{ show(f.arguments) }}"
    return GEMMA.replace("Q", quote) + each(f"{begin}call:{values}{end}")


TEMPLATES = {
    HERMES: each(
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + JSON + "}\n</tool_call>"
    ),
    LLAMA3: TURN.replace(
        "BODY",
        "{% set f = m.tool_calls[0].function %}<|python_tag|>"
        '{"name": "{{ f.name }}", "parameters": ' + JSON + "}",
    ),
    MISTRAL: TURN.replace(
        "BODY",
        "[TOOL_CALLS] ["
        + EACH.replace(
            "BODY",
            f'{{"name": "{{{{ f.name }}}}", "arguments": {JSON}, "id": "{{{{ c.id }}}}"}}{COMMA}',
        )
        + "]",
    ),
    MISTRAL_ARGS: each("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON),
    GRANITE: TURN.replace(
        "BODY",
        "<|tool_call|>["
        + EACH.replace("BODY", '{"name": "{{ f.name }}", "arguments": ' + JSON + "}" + COMMA)
        + "]",
    ),
    PHI4_MINI: each(
        '<|tool_call|>{"name": "{{ f.name }}", "arguments": ' + JSON + "}<|/tool_call|>"
    ),
    DEEPSEEK_V3: TURN.replace(
        "BODY",
        CALLS
        + EACH.replace(
            "BODY",
            f"{{{{ '\\n' if not loop.first }}}}{CALL}function{SEP}{{{{ f.name }}}}\n```json\n"
            f"{JSON}\n```{CALL_END}",
        )
        + CALLS_END,
    ),
    DEEPSEEK_V31: TURN.replace(
        "BODY",
        CALLS + EACH.replace("BODY", f"{CALL}{{{{ f.name }}}}{SEP}{JSON}{CALL_END}") + CALLS_END,
    ),
    KIMI_K2: TURN.replace(
        "BODY",
        "<|tool_calls_section_begin|>"
        + EACH.replace(
            "BODY",
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            + JSON
            + "<|tool_call_end|>",
        )
        + "<|tool_calls_section_end|>",
    ),
    PYTHONIC: TURN.replace(
        "BODY",
        "<|python_start|>["
        + EACH.replace(
            "BODY",
            "{{ f.name }}("
            + ITEMS.replace("BODY", "{{ k }}={{ v | tojson }}" + COMMA)
            + ")"
            + COMMA,
        )
        + "]<|python_end|>",
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
    MINIMAX_M2: TURN.replace(
        "BODY",
        "\n<minimax:tool_call>\n"
        + EACH.replace(
            "BODY",
            '<invoke name="{{ f.name }}">\n'
            + ITEMS.replace("BODY", f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n')
            + "</invoke>\n",
        )
        + "</minimax:tool_call>",
    ),
    DEEPSEEK_V32: TURN.replace(
        "BODY",
        f"\n\n<{D}function_calls>\n"
        + EACH.replace(
            "BODY",
            f'<{D}invoke name="{{{{ f.name }}}}">\n'
            + ITEMS.replace(
                "BODY",
                f'<{D}parameter name="{{{{ k }}}}" string="{{{{ v is string | '
                f'tojson }}}}">{VALUE}</{D}'
                "parameter>\n",
            )
            + f"</{D}invoke>\n",
        )
        + f"</{D}function_calls>",
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
@settings(max_examples=40, deadline=None)
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


TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["km", "mi"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["text", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer"}},
    },
    "g": None,
}
GIVEN = {"text": "Paris", "unit": "km", "days": 3}


def written(form, *calls):
    """Calls as the format's grammar has them."""
    first, between, last = form.around
    texts = []
    for number, (name, arguments) in enumerate(calls):
        before, behind = (text.replace("NAME", name) for text in form.call)
        inner = json.dumps(arguments)
        if hasattr(form, "element"):
            inner = "".join(
                (value if isinstance(value, str) else json.dumps(value))
                .join(form.element)
                .replace("KEY", key)
                .replace("STRING", json.dumps(isinstance(value, str)))
                for key, value in arguments.items()
            )
        elif hasattr(form, "pair"):
            quote = getattr(form, "quote", '"')
            inner = form.comma.join(
                form.pair.replace("KEY", key)
                + (quote + value + quote if isinstance(value, str) else json.dumps(value))
                for key, value in arguments.items()
            )
        texts.append((before + inner + behind).replace("INDEX", str(number)))
    return first + between.join(texts) + last


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


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def library(request):
    """A tokenizer with all markers as added tokens, which are special in some models."""
    library = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    markers = {marker for form in FORMATS for marker in form.markers}
    added = [tokenizers.AddedToken(text, normalized=False) for text in sorted(markers)]
    (library.add_special_tokens if request.param else library.add_tokens)(added)
    return library


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_grammar_has_calls_of_its_own_format_alone(library, form):
    special = {text: library.token_to_id(text) for text in form.markers}
    vocabulary = LLTokenizer(library.to_str(), library.get_vocab_size(), [1])

    def is_whole(text, **options):
        grammar = form.grammar(TOOLS, special, {"x-guidance": JSON_OPTIONS}, **options)
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        ids = library.encode(text, add_special_tokens=False).ids
        taken = matcher.validate_tokens(ids)
        return taken == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    calls = [("f", GIVEN), ("g", {})]
    one, two = written(form, calls[0]), written(form, *calls)
    assert is_whole(one, single=True) and is_whole(one, single=False)
    found = parsed(form, [one], TOOLS)
    assert found[0] == "" and [(n, json.loads(a)) for n, a in found[1]] == calls[:1]
    if form.parallel:
        assert is_whole(two, single=False) and not is_whole(two, single=True)
        found = parsed(form, [two], TOOLS)
        assert [(n, json.loads(a)) for n, a in found[1]] == calls
    assert is_whole(written(form, ("f", {"text": "a < b </p", "days": 3})), single=True)
    assert is_whole(written(form, ("g", {})), single=True)
    for wrong in ({"more": 1}, {"days": "x"}, {"days": 1.5}, {"unit": "cm"}):
        assert not is_whole(written(form, ("f", {**GIVEN, **wrong})), single=True)
    assert not is_whole(written(form, ("f", {"text": "Paris"})), single=True)
    assert not is_whole(written(form, ("h", {})), single=True)
    assert not is_whole("Hello", single=True)
    answer = {"type": "object", "properties": {"a": {"type": "null"}}}
    final = '{"a": null}'
    final = f"<|channel|>final<|message|>{final}" if form is HARMONY else final
    assert is_whole(final, single=True, answer=answer)


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


def test_channels_of_an_answer_that_a_grammar_restricts(library):
    special = {text: library.token_to_id(text) for text in HARMONY.markers}
    vocabulary = LLTokenizer(library.to_str(), library.get_vocab_size(), [1])
    thought = "<|channel|>analysis<|message|>Any text.<|end|><|start|>assistant"
    for output, good, bad in (
        (StructuredOutput(json_schema="{}"), '{"a": 1}', "{"),
        (StructuredOutput(regex="[a-z]+/\\d"), "ab/3", "ab/x"),
        (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
    ):
        grammar = HARMONY.answer_grammar(output, special, '{"type": "object"}')
        for before in ("", thought, thought * 2):
            for answer, whole in ((good, True), (bad, False)):
                matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), limits=LIMITS)
                text = f"{before}<|channel|>final<|message|>{answer}"
                ids = library.encode(text, add_special_tokens=False).ids
                assert (matcher.consume_tokens(ids) and matcher.is_accepting()) is whole
    with pytest.raises(InvalidRequest, match="JSON schema"):
        HARMONY.answer_grammar(StructuredOutput(grammar="start: /a/"), special, "")


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
