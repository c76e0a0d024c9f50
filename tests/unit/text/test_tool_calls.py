"""Tool calls in outputs of the published formats, however they are cut; grammars of the same."""

import time

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.config import DEMO_MODEL, TOOL_PARSERS
from baton.generation.structured_output import JSON_OPTIONS, LIMITS
from baton.generation.tool_call import ToolCallDelta
from baton.text.tool_calls import ToolParser
from baton.text.tool_formats import tool_format
from baton.text.tool_formats.json_calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
)

WEATHER = '{"city": "Pa\\"r}is", "at": [1, {"x": "</tool_call>"}]}'
OUTPUTS = [
    (HERMES, "It is <sunny.\n", "It is <sunny.\n", []),
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
    (HERMES, '<tool_call>{"arguments": [1], "name": "f"}</tool_call>',
     '<tool_call>{"arguments": [1], "name": "f"}</tool_call>', []),
    (HERMES, 'a <tool_call> b {"name": 1} <tool_', 'a <tool_call>b {"name": 1} <tool_', []),
    (HERMES, "<tool_call>3<tool_call>", "<tool_call>3<tool_call>", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}b "c', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"nome": "f"}</tool_call>', '<tool_call>{"nome": "f"}</tool_call>', []),
    (LLAMA3, '{"name": "f", "parameters": {"a": "1"}}', "", [("f", '{"a": "1"}')]),
    (LLAMA3, '\n{"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    (LLAMA3, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")', 'brave_search.call(query="x")', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, '
     '{"name": "g", "arguments": {}, "id": "0a1b2c3d4"}]', "", [("f", '{"a": "]"}'), ("g", "{}")]),
    (MISTRAL, "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    (MISTRAL_ARGS, 'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]0a1b2c3d4[ARGS]{}',
     "Well.", [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]0a1b2c3d4", "", [("f", "{}")]),
    (MISTRAL_ARGS, "[TOOL_CALLS], he said", "[TOOL_CALLS], he said", []),
    (MISTRAL_ARGS, f"[TOOL_CALLS]{'f' * 129}{{}}", f"[TOOL_CALLS]{'f' * 129}{{}}", []),
]  # fmt: skip


def parsed(form, parts, **options):
    """Content and calls; every first piece of a call has its id and name alone."""
    cut = options.pop("cut", False)
    parser, content, calls, ids = ToolParser(form, **options), "", [], set()
    *parts, last = parts
    pieces = [*map(parser.push, parts), parser.push(last, last=True, cut=cut)]
    for text, deltas, _ in pieces:
        content += text
        for delta in deltas:
            if delta.id:
                assert (delta.index, delta.arguments) == (len(calls), "")
                calls.append((delta.name, ""))
                ids.add(delta.id)
            else:
                name, arguments = calls[delta.index]
                calls[delta.index] = name, arguments + delta.arguments
    assert len(ids) == len(calls)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), OUTPUTS)
def test_an_output_is_parsed_the_same_however_it_is_cut(form, text, content, calls):
    assert parsed(form, [text]) == (content, calls)
    assert parsed(form, [*text, ""]) == (content, calls)
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert parsed(form, [text[:i], text[i:j], text[j:]]) == (content, calls)


CUT = [  # the whole output: content, and the calls of which a part has come
    (HERMES, 'See:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}'),
    (MISTRAL, 'See:[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
    (MISTRAL_ARGS, 'See:[TOOL_CALLS]f[ARGS]{"a": 1}'),
]


@pytest.mark.parametrize(("form", "text"), CUT)
def test_an_output_that_its_length_cuts_leaves_no_markup_in_its_content(form, text):
    for end in range(1, len(text)):
        content, calls = parsed(form, [text[:end]], cut=True)
        assert content.rstrip() in ("", "S", "Se", "See", "See:", "See:\n<", "See:[", "<", "[")
        assert parsed(form, [*text[:end], ""], cut=True) == (content, calls)
        assert all(name == "f" and '{"a": 1}'.startswith(given) for name, given in calls)


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS])
@pytest.mark.parametrize("text", ["f", " ", "<", "{", '{"name":', "[TOOL", "f ["])
def test_a_long_output_costs_little_wherever_it_stops_to_make_sense(form, text):
    """The parser runs on the router's event loop, between all streams."""
    begun = time.thread_time()
    for before in (form.call[0].partition("NAME")[0], "{}".join(form.call)):
        parsed(form, [before, *[text] * 10_000])
    assert time.thread_time() - begun < 4.0  # 0.2; 7 where each piece looks at all before it


def test_arguments_come_as_they_are_written_and_further_calls_can_be_dropped():
    parser = ToolParser(MISTRAL)
    assert parser.push('[TOOL_CALLS][{"name": "f", "arguments": ') == ("", [], "")
    _, (begun, piece), _ = parser.push('{"a')
    assert (begun.index, begun.name, begun.arguments) == (0, "f", "")
    assert len(begun.id) == 9 and begun.id.isalnum()  # all that its templates take
    assert piece == ToolCallDelta(0, "", "", '{"a')
    assert parser.push('": "x') == ("", [ToolCallDelta(0, "", "", '": "x')], "")
    two = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert parsed(HERMES, [two], single=True) == ("", [("f", "{}")])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("<|python_tag|>", LLAMA3),
        ("[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS] [ARGS]", MISTRAL_ARGS),
        ("{{ messages }}", None),
    ],
)
def test_a_chat_template_says_which_format_its_model_writes(template, form):
    assert tool_format("auto", template) is form
    assert tool_format("none", template) is None
    assert all(tool_format(name, template) for name in TOOL_PARSERS[2:])


@pytest.fixture(scope="module")
def library():
    """A tokenizer with markers as models have them: Qwen's are plain added tokens."""
    library = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in HERMES.markers])
    library.add_special_tokens([*LLAMA3.markers, *MISTRAL.markers])
    return library


TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer"}},
    },
    "now": None,
}
PARIS, NOW = ("get_weather", '{"city": "Paris", "days": 3}'), ("now", "{}")
WRITTEN = {
    HERMES: '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
    '</tool_call>|\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>|',
    LLAMA3: '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}||',
    MISTRAL: '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}|, '
    '{"name": "now", "arguments": {}}|]',
    MISTRAL_ARGS: '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}|'
    "[TOOL_CALLS]now[ARGS]{}|",
}


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
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

    first, second, end = WRITTEN[form].split("|")
    one, two = first + end, first + second + end
    assert parsed(form, [one])[1] == [PARIS] and is_whole(one, single=True)
    assert is_whole(one, single=False) and not is_whole("Hello", single=False)
    if form.parallel:
        assert parsed(form, [two])[1] == [PARIS, NOW]
        assert is_whole(two, single=False) and not is_whole(two, single=True)
    assert not is_whole(one.replace("Paris", 'Paris", "x": "'), single=True)
    assert not is_whole(one.replace("3", "3.5"), single=True)
    assert not is_whole(one.replace("get_weather", "got"), single=True)
    answer = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert is_whole('{"a": null}', single=True, answer=answer)
    marked = "<|python_tag|>" + one if form is LLAMA3 else one
    assert is_whole(marked, single=True, answer=answer) and parsed(form, [marked])[1] == [PARIS]
