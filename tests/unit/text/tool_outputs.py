"""Outputs of the formats of tool calls, as their makers publish them, and how they are parsed."""

import json

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
from baton.text.tool_parsers.value_calls import FUNCTION_GEMMA, GEMMA4, LFM2, OLMO3, PYTHONIC
from baton.text.tool_parsers.xml_calls import (
    DEEPSEEK_V32,
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)

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
    "minimax": (
        MINIMAX_M2,
        'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a\n '
        '</parameter>\n<parameter name="size">1.50</parameter>\n</invoke>\n<invoke name="g">'
        "\n</invoke>"
        "\n</minimax:tool_call>",
        "Hm.",
        [("f", {"text": "a\n ", "size": 1.5}), ("g", {})],
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
    "kimi": (
        KIMI_K2,
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"text": "<|tool_call_end|>"}<|tool_call_end|>'
        "<|tool_call_begin|>"
        "functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Ok.",
        [("f", {"text": "<|tool_call_end|>"}), ("g", {})],
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
    "lfm2": (
        LFM2,
        'Let me check that.<|tool_call_start|>[f(text="12345", map={"k": None}), '
        "f(list=['x'],on=True), g()]<|tool_call_end|>Done.",
        "Let me check that.\nDone.",
        [
            ("f", {"text": "12345", "map": {"k": None}}),
            ("f", {"list": ["x"], "on": True}),
            ("g", {}),
        ],
    ),
    "olmo3": (
        OLMO3,
        "I look.<function_calls>f(text='Martha\\'s (1\\n', map={'a': 'b'}, size=null, on=true)\n"
        "g()\nf(list=[])</function_calls>",
        "I look.",
        [
            ("f", {"text": "Martha's (1\n", "map": {"a": "b"}, "size": None, "on": True}),
            ("g", {}),
            ("f", {"list": []}),
        ],
    ),
    "olmo3 lines": (OLMO3, "<function_calls>\ng()\n</function_calls>\n", "", [("g", {})]),
    "jamba": (
        JAMBA,
        'See.\n<tool_calls>[\n  {"name": "f", "arguments": {"a": 1}, "id": "x"},\n  '
        '{"name": "g", "arguments": {}}\n]</tool_calls>',
        "See.",
        [("f", {"a": 1}), ("g", {})],
    ),
    "nemotron": (
        NEMOTRON,
        '<TOOLCALL>[{"name": "f", "arguments": {"a": "]</TOOLCALL>"}}, {"name": "g", "arguments": '
        '"{}"}]</TOOLCALL>',
        "",
        [("f", {"a": "]</TOOLCALL>"}), ("g", {})],
    ),
    "seed": (
        SEED_OSS,
        "So.\n<seed:tool_call>\n<function=f>\n<parameter=text>value\nthat can span\nlines"
        "</parameter>\n<parameter=count>3</parameter>\n<parameter=map>{'a': True}</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n"
        "</seed:tool_call>",
        "So.",
        [("f", {"text": "value\nthat can span\nlines", "count": 3, "map": {"a": True}}), ("g", {})],
    ),
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
    "harmony not": (
        HARMONY,
        "<|channel|>commentary to=python<|message|>1 + 1<|end|>",
        "<|channel|>commentary to=python<|message|>1 + 1",
        [],
    ),
}
WEATHER = '{"city": "Pa\\"r}is", "at": [1, {"x": "</tool_call>"}]}'
JSON_OUTPUTS = [
    (HERMES, 'Let me look.\n\n<tool_call>\n{"name": "f", "arguments": ' + WEATHER
     + '}\n</tool_call>\n<tool_call>\n{"arguments": {"b": 1}, "name": "g"}\n</tool_call>\n',
     "Let me look.", [("f", WEATHER), ("g", '{"b": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call> and\n', "and\n", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call><tool_call>{"name": "g", '
     '"arguments": {}}', "", [("f", '{"a": 1}'), ("g", "{}")]),  # a brace is missing
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cu', "", [("f", '{"a": "cu"}')]),
    (HERMES, 'A.\n<tool_call>{"name": "f"}</tool_call>\n\nB. <tool_call>{"name": "g"}</tool_call>'
     "C.", "A.\nB.\nC.", [("f", "{}"), ("g", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b\nc\\ud83d", "d": True}}</tool_call>',
     "", [("f", '{"a": "b\\nc\\ufffd", "d": true}')]),
    (HERMES, '<tool_call>{"arguments": {"a": "b\nc\\ud83d", "d": NaN}, "name": "f"}</tool_call>',
     "", [("f", '{"a": "b\\nc\\ufffd", "d": null}')]),
    (HERMES, 'a <tool_call> b {"name": 1} <tool_', 'a <tool_call>b {"name": 1} <tool_', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}b "c', "", [("f", '{"a": 1}')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": "1"}}', "", [("f", '{"a": "1"}')]),
    (LLAMA3, '\n{"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")', 'brave_search.call(query="x")', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, '
     '{"name": "g", "arguments": {}, "id": "0a1b2c3d4"}]', "", [("f", '{"a": "]"}'), ("g", "{}")]),
    (MISTRAL_ARGS, 'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]0a1b2c3d4[ARGS]{}',
     "Well.", [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]0a1b2c3d4", "", [("f", "{}")]),
]  # fmt: skip
# What is no call is content, as it is.
NO_CALLS = [
    (QWEN3_CODER, "Use <function=f>(x) or <tool_call>, I say."),
    (GLM45, 'A <tool_call>{"name": 1}</tool_call>'),
    (MINIMAX_M2, "<minimax:tool_call>\n<invoke>"),
    (DEEPSEEK_V31, f"{CALLS}{CALL}f(1)"),
    (KIMI_K2, "<|tool_calls_section_begin|>none"),
    (PHI4_MINI, "See functools."),
    (PYTHONIC, "[link](f(x)) [h(a=1)]"),
    (PYTHONIC, "[h(a=1)]"),
    (GEMMA4, "<|tool_call>f{}"),
    (LFM2, "[g()] <|tool_call_start|>none"),
    (OLMO3, "<function_calls></function_calls> of g()"),
    (JAMBA, "<tool_calls>[1]</tool_calls>"),
    (SEED_OSS, "<seed:tool_call> or <function=f>"),
    (HARMONY, "and so on."),
    (HERMES, "It is <sunny.\n"),
    (HERMES, '<tool_call>{"arguments": [1], "name": "f"}</tool_call>'),
    (HERMES, "<tool_call>3<tool_call>"),
    (HERMES, '<tool_call>{"nome": "f"}</tool_call>'),
    (LLAMA3, '{"name": "Ada", "age": 36}'),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, 'See {"name": "f", "parameters": {}}'),
    (MISTRAL, "[TOOL_CALLS][1]"),
    (MISTRAL_ARGS, "[TOOL_CALLS], he said"),
    (MISTRAL_ARGS, f"[TOOL_CALLS]{'f' * 129}{{}}"),
]
JSON_OUTPUTS += [(form, text, text, []) for form, text in NO_CALLS]
OUTPUTS |= {f"{one[0].name} {i}": one for i, one in enumerate(JSON_OUTPUTS)}
THOUGHTS = {"harmony": "Need f."}


def parsed(form, parts, schemas=SCHEMAS, **options):
    """Content, calls with arguments as text, and reasoning.

    Every first piece of a call has its id and name alone.
    """
    cut, unique = options.pop("cut", False), options.pop("unique", True)
    parser, contents, calls, thoughts = form.parser(schemas, **options), "", [], ""
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
        inner = json.dumps(arguments, ensure_ascii=False)
        if hasattr(form, "element"):
            inner = "".join(
                (value if isinstance(value, str) else json.dumps(value))
                .join(form.element)
                .replace("KEY", key)
                .replace("STRING", json.dumps(isinstance(value, str)))
                for key, value in arguments.items()
            )
        elif hasattr(form, "pair"):
            pairs = [form.pair.replace("KEY", k) + _value(form, v) for k, v in arguments.items()]
            inner = form.comma.join(pairs)
        texts.append((before + inner + behind).replace("INDEX", str(number)))
    return first + between.join(texts) + last


def _value(form, value):
    """One of a format whose calls are not JSON: Python's, or with quotes of its own."""
    quote = getattr(form, "quote", "")
    if quote and isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_value(form, one)}" for key, one in value.items()) + "}"
    if quote and isinstance(value, list):
        return "[" + ",".join(_value(form, one) for one in value) + "]"
    if quote and isinstance(value, str):
        return quote + value + quote
    return json.dumps(value, ensure_ascii=False)
