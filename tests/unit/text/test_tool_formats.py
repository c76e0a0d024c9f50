"""Tool calls in the format of each family: outputs as their makers publish them, however cut."""

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.config import DEMO_MODEL, TOOL_PARSERS
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
    "qwen3": (QWEN3_CODER, 'Let me see.\n\n<tool_call>\n<function=f>\n<parameter=text>\nif a < b:\n  '
     '"x"\n\n</parameter>\n<parameter=count>\n3\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n'
     '<parameter=list>\n[1, {"a": \'b\'}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n'
     '<function=g>\n</function>\n</tool_call>', "Let me see.",
     [("f", {"text": 'if a < b:\n  "x"\n', "count": 3, "on": True, "list": [1, {"a": "b"}]}),
      ("g", {})]),
    "qwen3 bare": (QWEN3_CODER, "<function=f>\n<parameter=text>\n</parameter>\n<parameter=size>null"
     "</parameter></function></tool_call>After", "After", [("f", {"text": "", "size": None})]),
    "qwen3 not": (QWEN3_CODER, "Use <function=f>(x) or <tool_call>, I say.",
     "Use <function=f>(x) or <tool_call>, I say.", []),
    "qwen3 other text": (QWEN3_CODER, "<tool_call><function=f><parameter=count>three</parameter> or "
     "so</function></tool_call>", "or so</function></tool_call>", [("f", {"count": "three"})]),
    "glm": (GLM45, "Well.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n"
     "<arg_key>count</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
     "Well.", [("f", {"text": "12", "count": 12}), ("g", {})]),
    "glm compact": (GLM45, "<tool_call>f<arg_key>free</arg_key><arg_value>[1]</arg_value><arg_key>on"
     "</arg_key><arg_value>off</arg_value></tool_call>", "", [("f", {"free": [1], "on": "off"})]),
    "glm not": (GLM45, 'A <tool_call>{"name": 1}</tool_call>', 'A <tool_call>{"name": 1}</tool_call>',
     []),
    "minimax": (MINIMAX_M2, 'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a\n '
     '</parameter>\n<parameter name="size">1.50</parameter>\n</invoke>\n<invoke name="g">\n</invoke>'
     "\n</minimax:tool_call>", "Hm.", [("f", {"text": "a\n ", "size": 1.5}), ("g", {})]),
    "minimax not": (MINIMAX_M2, "<minimax:tool_call>\n<invoke>", "<minimax:tool_call>\n<invoke>", []),
    "dsml": (DEEPSEEK_V32, f'I look.\n\n<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter '
     f'name="text" string="true">5 < 6</{D}parameter>\n<{D}parameter name="x" string="false">[5]</{D}'
     f'parameter>\n</{D}invoke>\n<{D}invoke name="g">\n</{D}invoke>\n</{D}function_calls>',
     "I look.", [("f", {"text": "5 < 6", "x": [5]}), ("g", {})]),
    "deepseek v3": (DEEPSEEK_V3, f"So.{CALLS}{CALL}function{SEP}f\n```json\n"
     f'{{"text": "```"}}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}'
     f"{CALLS_END}", "So.", [("f", {"text": "```"}), ("g", {})]),
    "deepseek v3.1": (DEEPSEEK_V31, f'{CALLS}{CALL}f{SEP}{{"count": 1}}{CALL_END}{CALL}g{SEP}{{}}'
     f"{CALL_END}{CALLS_END}", "", [("f", {"count": 1}), ("g", {})]),
    "deepseek not": (DEEPSEEK_V31, f"{CALLS}{CALL}f(1)", f"{CALLS}{CALL}f(1)", []),
    "kimi": (KIMI_K2, 'Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0'
     '<|tool_call_argument_begin|>{"text": "<|tool_call_end|>"}<|tool_call_end|><|tool_call_begin|>'
     "functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "Ok.",
     [("f", {"text": "<|tool_call_end|>"}), ("g", {})]),
    "kimi not": (KIMI_K2, "<|tool_calls_section_begin|>none", "<|tool_calls_section_begin|>none", []),
    "granite": (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", '
     '"arguments": {}}]', "", [("f", {"a": 1}), ("g", {})]),
    "granite text": (GRANITE, '<tool_call>[{"arguments": {}, "name": "g"}]', "", [("g", {})]),
    "phi": (PHI4_MINI, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "",
     [("f", {"a": 1})]),
    "phi one": (PHI4_MINI, '<|tool_call|>{"name": "g", "arguments": {}}<|/tool_call|>', "",
     [("g", {})]),
    "phi text": (PHI4_MINI, 'functools[{"name": "g", "arguments": {}}]', "", [("g", {})]),
    "phi not": (PHI4_MINI, "See functools.", "See functools.", []),
    "pythonic": (PYTHONIC, "[f(text='it\\'s (1, \"2\")', size=-1.5, map={'a': [True, None]}, on=False"
     "), g()]", "", [("f", {"text": 'it\'s (1, "2")', "size": -1.5, "map": {"a": [True, None]},
     "on": False}), ("g", {})]),
    "pythonic marked": (PYTHONIC, 'Wait.\n<|python_start|>[ f(text="x" , count = 1 ) ]<|python_end|>',
     "Wait.", [("f", {"text": "x", "count": 1})]),
    "pythonic not": (PYTHONIC, "[link](f(x)) [h(a=1)]", "[link](f(x)) [h(a=1)]", []),
    "pythonic unknown": (PYTHONIC, "[h(a=1)]", "[h(a=1)]", []),
    "functiongemma": (FUNCTION_GEMMA, '<start_function_call>call:f{text:<escape>a {b}: "c"\n<escape>'
     ",count:3,map:{a:[<escape>x<escape>,true]}}<end_function_call><start_function_call>call:g{}"
     "<end_function_call>", "",
     [("f", {"text": 'a {b}: "c"\n', "count": 3, "map": {"a": ["x", True]}}), ("g", {})]),
    "gemma4": (GEMMA4, 'Yes.<|tool_call>call:f{text:<|"|>it\'s<|"|>,size:1.5}<tool_call|>', "Yes.",
     [("f", {"text": "it's", "size": 1.5})]),
    "gemma4 not": (GEMMA4, "<|tool_call>f{}", "<|tool_call>f{}", []),
    "harmony": (HARMONY, "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>"
     "commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"text": "<|end|>", "count": 3}', "Let me see.",
     [("f", {"text": "<|end|>", "count": 3})]),
    "harmony template": (HARMONY, " to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
     "", [("g", {})]),
    "harmony final": (HARMONY, "<|channel|>final<|message|>It is\n\n<b>6</b>.\n<|return|>",
     "It is\n\n<b>6</b>.\n", []),
    "harmony plain": (HARMONY, "and so on.", "and so on.", []),
    "harmony not": (HARMONY, "<|channel|>commentary to=python<|message|>1 + 1<|end|>",
     "<|channel|>commentary to=python<|message|>1 + 1", []),
}  # fmt: skip
THOUGHTS = {"harmony": "Need f."}


def parsed(form, parts, schemas=SCHEMAS, **options):
    """Content, calls with arguments as text, and reasoning."""
    cut = options.pop("cut", False)
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
    assert len({call[2] for call in calls}) == len(calls)
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
