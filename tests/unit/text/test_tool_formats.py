"""Tool calls in the format of each family, however an output is cut."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import TOOL_PARSERS
from baton.generation.tool_call import ToolCallDelta
from baton.text.tool_parsers import FORMATS, tool_format
from baton.text.tool_parsers.format import AllowedCalls, GrammarTerms
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import HERMES, LLAMA3, MISTRAL
from baton.text.tool_parsers.schemas import types_of
from baton.text.tool_parsers.value_calls import PYTHONIC

from .tool_outputs import GIVEN, OUTPUTS, THOUGHTS, TOOLS, parsed, written


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
        assert thoughts.startswith(begun[2])
        shown = begun[0].rstrip()
        if not begun[1]:
            shown = shown.rstrip("<[").rstrip()  # a character of a marker is common
            assert content.startswith(shown) or text.startswith(shown)
        else:
            assert content.startswith(shown)
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
def test_calls_as_templates_write_them_are_what_the_parser_returns_at_any_cuts(form, data):
    calls = data.draw(st.lists(ARGUMENTS, min_size=1, max_size=3 if form.parallel else 1))
    marked = form.parallel and form is not PYTHONIC  # others are calls at the beginning alone
    content = data.draw(st.sampled_from(["", "Let me see."])) if marked else ""
    between = data.draw(st.sampled_from(["", "\n", "\n\n"])) if marked else ""
    text = content + between + written(form, *(("f", arguments) for arguments in calls))
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
    return [*form.markers, *calls, *sorted(set(pieces)), *" \n{\"\\<'", "text"]


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
            assert tool_format("none", " ".join(texts)) is None
    assert {form.name for form in FORMATS} == set(TOOL_PARSERS[2:])
    assert tool_format("auto", "{{ messages }}") is None
    for name in TOOL_PARSERS[2:]:
        assert tool_format(name, "{{ messages }}").name == name


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
