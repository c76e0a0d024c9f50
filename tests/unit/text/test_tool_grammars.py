"""Grammars of tool calls: what they have is what the parser of the same format takes."""

import functools
import json
import re

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.config import DEMO_MODEL
from baton.errors import InvalidRequest
from baton.generation.sampling_params import StructuredOutput
from baton.generation.structured_output import JSON_OPTIONS, LIMITS
from baton.text.tool_parsers import FORMATS
from baton.text.tool_parsers.format import AllowedCalls, GrammarTerms
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import LLAMA3
from baton.text.tool_parsers.text_grammars import COMMON, text_grammar
from baton.text.tool_parsers.value_calls import PYTHONIC
from baton.text.tool_parsers.xml_calls import QWEN3_CODER

from .tool_outputs import GIVEN, TOOLS, parsed, written


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def library(request):
    """A tokenizer with all markers as added tokens, which are special in some models."""
    library = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    markers = {marker for form in FORMATS for marker in form.markers}
    added = [tokenizers.AddedToken(text, normalized=False) for text in sorted(markers)]
    (library.add_special_tokens if request.param else library.add_tokens)(added)
    return library


@pytest.fixture(scope="module")
def accepts(library):
    """Whether a grammar has a text."""
    vocabulary = LLTokenizer(library.to_str(), library.get_vocab_size(), [1])

    @functools.lru_cache(1)
    def compiled(grammar):
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(grammar, text):
        matcher = compiled(grammar).deep_copy()
        ids = library.encode(text, add_special_tokens=False).ids
        taken = matcher.validate_tokens(ids)
        return taken == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return accepts


def terms_of(library, form):
    special = {text: library.token_to_id(text) for text in form.markers}
    return GrammarTerms(special, {"x-guidance": JSON_OPTIONS})


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_grammar_has_calls_of_its_own_format_alone(library, accepts, form):
    terms = terms_of(library, form)

    def is_whole(text, **options):
        return accepts(form.grammar(AllowedCalls(tools=TOOLS, **options), terms), text)

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
    if form is LLAMA3:
        assert is_whole("<|python_tag|>" + one, single=True, answer=answer)


@pytest.mark.parametrize("form", [QWEN3_CODER, PYTHONIC], ids=lambda form: form.name)
def test_a_grammar_that_repeats_definitions_too_often_is_refused_before_it_is_made(form):
    tool = {"$defs": {"x" * 8192: {}}, "properties": {f"p{at}": {} for at in range(1000)}}
    terms = GrammarTerms({}, {})
    with pytest.raises(InvalidRequest, match="more than 65536 characters") as refused:
        form.grammar(AllowedCalls(tools={"f": tool}), terms)
    assert refused.value.field == "chat.tools"
    assert terms.num_chars < 65536 + 8192 + 100


def test_channels_of_an_answer_that_a_grammar_restricts(library, accepts):
    terms = terms_of(library, HARMONY)
    thought = "<|channel|>analysis<|message|>Any text.<|end|><|start|>assistant"
    for output, good, bad in (
        (StructuredOutput(json_schema="{}"), '{"a": 1}', "{"),
        (StructuredOutput(regex="[a-z]+/\\d"), "ab/3", "ab/x"),
        (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
    ):
        grammar = HARMONY.answer_grammar(output, terms, '{"type": "object"}')
        for before in ("", thought, thought * 2):
            for answer, whole in ((good, True), (bad, False)):
                text = f"{before}<|channel|>final<|message|>{answer}"
                assert accepts(grammar, text) is whole
    with pytest.raises(InvalidRequest, match="JSON schema"):
        HARMONY.answer_grammar(StructuredOutput(grammar="start: /a/"), terms, "")


# OpenAI's grammar of patches, as its agents send it.
PATCHES = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = (
    '*** Begin Patch\n*** Update File: a/"b" c.py\n@@ def f():\n'
    '-\treturn "\\x" </p\n+\treturn \u00e9\n'
    "*** Add File: x\n+\n*** End Patch"
)
# Recursive, with white space.
VALUES = r"""
?start: value  // a value
value: dict | "[" [value ("," value)*] "]" | STRING | NUMBER | "true"i
     | A_TO_C
dict: "{" (STRING ":" value ("," STRING ":" value)*)? "}"
STRING: "\"" /[^"\n]*/ "\""
A_TO_C: "a".."c"~2..3
%import common (NUMBER, WS)
%ignore WS
"""
TEXTS = {
    "patches": (
        StructuredOutput(grammar=PATCHES),
        [PATCH, PATCH + "\n"],
        ["", "Patch", PATCH + "x", PATCH.replace("@@", "@"), PATCH.replace(" End", "")],
    ),
    "values": (
        StructuredOutput(grammar=VALUES),
        ['{"a/":  [1, 2,\n{"\u00e9\\n": "x"}]}', "[ TRUE]", "[]", " abc", "ab"],
        ["[", '{"a"}', "a", "abcd", "[1 2]"],
    ),
    "regex": (
        StructuredOutput(regex=r'"\w+/[^"]*"\s\d{2}(?i:x|\n)[\x{41}-C\t]\p{Lu}?'),
        ['"ab/c" 12XA', '"a/\\"\n12\nB\u00c9', '"a/" 12x\t'],
        ['"a/" 12', '"/" 12xA', '"a/" 12x\n', '"a/" 12xA\u00e9'],
    ),
    "line": (StructuredOutput(regex=".*"), ['a"</parameter', ""], ["a\nb"]),
    "any": (StructuredOutput(regex="(?s).+"), ['a\n\n"<', "{"], [""]),
    "list": (StructuredOutput(grammar='start: A ("," A)*\nA: /[^,\\n]+/'), ["a,b'\""], ["a,"]),
}


INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_tools_text_matches_its_own_grammar(library, accepts, form):
    terms = terms_of(library, form)
    for restriction, good, bad in TEXTS.values():
        allowed = AllowedCalls(tools={"h": INPUT}, inputs={"h": restriction}, single=True)
        grammar = form.grammar(allowed, terms)
        for text in (*good, *bad):
            output = written(form, ("h", {"input": text}))
            assert accepts(grammar, output) is (text in good), (text, grammar)
            if text in good:
                ((called, arguments),) = parsed(form, [output], {"h": INPUT})[1]
                assert (called, json.loads(arguments)) == ("h", {"input": text})


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_that_are_optional_match_behind_any_text(library, accepts, form):
    """Behind their first special token, which no text has."""
    terms = terms_of(library, form)
    if not form.marks_calls(terms.special):
        return
    inputs = {"h": StructuredOutput(regex="[0-9]+")}
    allowed = AllowedCalls(tools={"h": INPUT, "g": None}, inputs=inputs, optional=True)
    grammar = form.grammar(allowed, terms)
    before = (
        "<|channel|>commentary<|message|>Now.<|end|><|start|>assistant"
        if form is HARMONY
        else "No\n"
    )
    final = "<|channel|>final<|message|>Yes." if form is HARMONY else "Yes."
    good, bad = (written(form, ("h", {"input": text})) for text in ("12", "x"))
    assert accepts(grammar, before + good) and accepts(grammar, good) and accepts(grammar, final)
    assert accepts(grammar, before + written(form, ("g", {})))
    special = any(library.get_added_tokens_decoder()[i].special for i in terms.special.values())
    assert not special or not accepts(grammar, before + bad)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: A", "A is not defined"),
        ("begin: /a/", "needs a rule start"),
        ("start: /a/\nstart: /b/", "start is defined twice"),
        ("start: /a/ (start | /b/", "bracket"),
        ("start: /a/\n  %json {}", "line 2: '%json {}'"),
        ("start: /[a[b]]/", "character 1 of /[a[b]]/: a class within a class"),
        ("start: X\n%import common.Y -> X", "there is no common.Y"),
        ("start: /\\x01/", "control character"),
        ('start: "\\u0001"', "control character"),
        ("start: /(?x)a/", "(?x) is not supported"),
        ("start: /[z-a]/", "bad character range"),
        ("start: /\\P{L}/", "use \\p{L}"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_stand_in_json_is_refused(grammar, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        text_grammar(StructuredOutput(grammar=grammar), "t", in_json=True)


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals_are_the_librarys(accepts, name):
    # fmt: off
    texts = ["", " ", " \t", "\r\n\f", "\n", "\r", "\r\n\n", "1", "-1.5e3", ".5", "1.", "1e5", "+2",
             "a", "f", "A", "aZ", "_a1", "#a", "//a", "/*a*b**/", "/**/", "--a", '"a\\"b"', '"a"b"']
    # fmt: on
    lark = f"start: {name}\n%import common.{name}"
    rules = text_grammar(StructuredOutput(grammar=lark), "t", in_json=False)
    in_json = text_grammar(StructuredOutput(grammar=lark), "t", in_json=True)
    for text in texts:
        expected = accepts(lark, text)
        assert accepts("\n".join(["start: t", *rules]), text) is expected
        shown = json.dumps(text)
        assert accepts("\n".join(['start: "\\"" t "\\""', *in_json]), shown) is expected
