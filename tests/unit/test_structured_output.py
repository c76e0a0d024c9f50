"""Restrictions of an output: what can be compiled, what cannot and where, what that may cost."""

import json
import re
import shutil
import string
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pytest

from baton.config import DEMO_MODEL
from baton.errors import InvalidRequest, Overloaded
from baton.sampling import (
    MAX_STRUCTURED_OUTPUT_CHARS,
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from baton.structured_output import GrammarCompiler
from baton.text import load_tokenizer
from tests.waiting import WAIT_S

VOCAB, EOS = 4096, 1
TOKENIZER = load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def grammars():
    return GrammarCompiler(DEMO_MODEL, VOCAB, {EOS})


def allowed(matcher, guesses=()):
    words = np.zeros(VOCAB // 32, np.int32)
    matcher.fill(words, guesses)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def ids_of(text):
    return TOKENIZER.encode(text)[1:]  # without the start of a prompt


def schema(value):
    return StructuredOutput(json_schema=json.dumps(value))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MATCHING = [
    (schema(OBJECT), '{"a": 12}', '{"b": 12}'),
    (schema({"$defs": {"x": OBJECT}, "items": {"$ref": "#/$defs/x"}}), '[{"a":1}]', "[{}]"),
    (StructuredOutput(regex=r"\d+/[é☃]"), "42/☃", "42/x"),
    (StructuredOutput(choice=("yes", 'no "way"\n\\é\u2028/.*')), 'no "way"\n\\é\u2028/.*', "no"),
    (StructuredOutput(grammar='start: "a" start | "b"'), "aab", "aac"),
    (StructuredOutput(grammar='root ::= "a" root | "b"'), "aab", "aac"),
]


@pytest.mark.parametrize(("output", "right", "wrong"), MATCHING)
def test_each_form_accepts_what_matches_and_nothing_else(grammars, output, right, wrong):
    matcher = grammars.compile(output, (), 0).result(WAIT_S)
    tokens = ids_of(right)
    assert matcher.accepts(tokens) == len(tokens)
    assert EOS not in allowed(matcher)
    assert EOS in allowed(matcher, tokens)
    others = ids_of(wrong)
    taken = matcher.accepts(others)
    assert taken < len(others) or EOS not in allowed(matcher, others)


def test_a_mask_has_what_may_follow_and_guesses_leave_no_trace(grammars):
    matcher = grammars.compile(StructuredOutput(choice=("ab", "ac")), (), 0).result(WAIT_S)
    first = allowed(matcher)
    (a,), (b,) = ids_of("a"), ids_of("b")
    assert a in first
    after_a = allowed(matcher, [a])
    assert {TOKENIZER.decode([token]) for token in after_a} == {"b", "c"}
    assert allowed(matcher, [b]) == set(range(VOCAB))  # wrong: what is sampled there is dropped
    assert allowed(matcher, [a, b, EOS]) == set(range(VOCAB))
    assert matcher.accepts([a, b, EOS]) == 2
    assert allowed(matcher) == first
    matcher.advance([a], 1)
    assert allowed(matcher) == after_a
    assert allowed(matcher, [b]) == {EOS}
    # Nor where what follows a wrong guess is as far in the grammar as the guess was.
    any_object, prefix = schema({"type": "object"}), ids_of('{"a":')
    matcher, other = (grammars.compile(any_object, prefix, 0).result(WAIT_S) for _ in "ab")
    (wrong,), (right,) = ids_of(' {"'), ids_of(' ["')
    allowed(matcher, [wrong])
    for each in (matcher, other):
        each.advance([*prefix, right], len(prefix) + 1)
    assert allowed(matcher) == allowed(other)


def test_an_output_that_leaves_its_grammar_has_failed(grammars):
    matcher = grammars.compile(StructuredOutput(choice=("ab", "ac")), (), 0).result(WAIT_S)
    (a,) = ids_of("a")
    matcher.advance([a, 99], 2)
    assert matcher.failure.startswith("structured output: behind 2 tokens of output: ")


BEGIN, END = 10, 11  # of reasoning


def test_a_grammar_holds_behind_reasoning_which_is_free_up_to_its_limit(grammars):
    asked, (a,), (b,) = StructuredOutput(choice=("ab", "ac")), ids_of("a"), ids_of("b")
    everything = set(range(VOCAB))
    matcher = grammars.compile(asked, [5], 1, Reasoning(BEGIN, END, max_tokens=2)).result(WAIT_S)
    starts = allowed(matcher)
    assert BEGIN in starts and a in starts and b not in starts
    assert allowed(matcher, [BEGIN]) == everything - {EOS}
    assert allowed(matcher, [BEGIN, 7, 8]) == {END}
    assert allowed(matcher, [BEGIN, 7, 8, END, a]) == allowed(matcher, [a])
    assert matcher.accepts([BEGIN, 7, 8, 9, END]) == 3
    assert matcher.accepts([BEGIN, 7, END, a, b, EOS]) == 5
    assert matcher.accepts([BEGIN, EOS]) == 1
    assert matcher.accepts([a, BEGIN]) == 1
    assert allowed(matcher) == starts  # guesses leave no trace
    tokens = [5, BEGIN, 7, END]
    matcher.advance(tokens, 3)
    assert allowed(matcher) == everything - {EOS}
    matcher.advance(tokens, 4)
    assert allowed(matcher) == starts - {BEGIN}
    # Whoever gets the tokens later has the same state.
    for known in range(1, 5):
        later = grammars.compile(asked, tokens[:known], 1, Reasoning(BEGIN, END, False, 2))
        later = later.result(WAIT_S)
        later.advance(tokens, 4)
        assert allowed(later) == allowed(matcher)
    begun = grammars.compile(asked, [5], 1, Reasoning(BEGIN, END, begun=True)).result(WAIT_S)
    assert allowed(begun) == everything - {EOS}
    assert allowed(begun, [END]) == allowed(matcher)


def test_reasoning_alone_can_be_limited(grammars):
    for most in (0, 3):
        reasoning = Reasoning(BEGIN, END, begun=True, max_tokens=most)
        matcher = grammars.compile(None, [5], 1, reasoning).result(WAIT_S)
        assert allowed(matcher, [7] * most) == {END}
        assert allowed(matcher, [*[7] * most, END]) == set(range(VOCAB))
        assert matcher.accepts([7] * 5) == most
        params = SamplingParams(reasoning=reasoning)
        assert SamplingParams.from_proto(params.to_proto()) == params


BAD = [
    ('{"type": 1', "not JSON at line 1, column 11"),
    ("[1]", "json_schema must be a JSON object"),
    ("[" * 5000, "recursion"),
    ({"type": "objekt"}, "json_schema at its root: Invalid type: objekt"),
    ({"properties": {"a": {}, "b": {"items": {"type": "x"}}}}, "at /properties/b/items: "),
    ({"properties": {"a/b": {"anyOf": [{}, {"not": {}}]}}}, "at /properties/a~1b/anyOf/1: "),
    ({"$defs": {"d": {"minimum": "x"}}, "$ref": "#/$defs/d"}, "at /$defs/d: "),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "at /properties/a: Pointer '/$defs/x'"),
    ({"properties": {"a": {"pattern": "x(a", "type": "string"}}}, "/a: at character 2 of the patt"),
    ({"$ref": "#"}, "nothing matches it"),
]
BAD_OTHERS = [
    (StructuredOutput(regex="ab(c"), "regex: at character 3 of the pattern: unclosed group"),
    (StructuredOutput(regex="a(?=b)"), "regex: at character 2 of the pattern: look-around"),
    (StructuredOutput(grammar='start: "a" b'), 'grammar: line 1, column 8: unknown name: "b"'),
    (StructuredOutput(grammar='root ::= "a'), "line 1"),
    (StructuredOutput(grammar="start: start"), "nothing matches it"),
    (StructuredOutput(regex="(?:a?b?c?)*" * 5000), "regex: it is too complex, make it simpler"),
]


@pytest.mark.parametrize(
    ("output", "place"),
    [
        *((StructuredOutput(json_schema=s), p) for s, p in BAD[:3]),
        *((schema(s), p) for s, p in BAD[3:]),
        *BAD_OTHERS,
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(grammars, output, place):
    with pytest.raises(InvalidRequest) as failed:
        grammars.compile(output, (), 0).result(WAIT_S)
    assert place in str(failed.value)
    assert failed.value.field == "sampling.structured_output"


def test_it_is_one_form_of_a_bounded_size():
    for output, reason in (
        (StructuredOutput(), "exactly one"),
        (StructuredOutput(regex="a", grammar="b"), "exactly one"),
        (StructuredOutput(choice=("a", "")), "empty"),
        (StructuredOutput(regex="a" * (MAX_STRUCTURED_OUTPUT_CHARS + 1)), "65537 characters"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            SamplingParams(structured_output=output).validate(VOCAB)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(structured_output=StructuredOutput(regex="a"), ignore_eos=True).validate(9)


def test_it_survives_the_wire():
    for output in (StructuredOutput(choice=("a", "b")), schema(OBJECT), None):
        params = SamplingParams(structured_output=output)
        assert SamplingParams.from_proto(params.to_proto()) == params


def test_output_that_does_not_match_cannot_be_resumed(grammars):
    output = StructuredOutput(choice=("yes",))
    prompt, yes = [5, 6], ids_of("yes")
    assert allowed(grammars.compile(output, prompt + yes, 2).result(WAIT_S)) == {EOS}
    with pytest.raises(InvalidRequest, match="behind 1 tokens of output") as failed:
        grammars.compile(output, [*prompt, 99], 2).result(WAIT_S)
    assert failed.value.field == "resumed_token_ids"


def test_a_model_that_cannot_do_it_says_why(tmp_path):
    asked, needs = StructuredOutput(regex="a"), "structured output needs"
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text('{"a": 1}')
    named = tmp_path / "named"
    named.mkdir()
    (named / "tokenizer.json").write_text(str(DEMO_MODEL / "tokenizer.json"))
    for path, vocab, ends, reason in (
        (tmp_path, VOCAB, (), "an end-of-sequence token, and the model has none"),
        (tmp_path / "none", VOCAB, {EOS}, "the model's tokenizer.json: it has none"),
        (tmp_path / "tokenizer.json", VOCAB, {EOS}, "the model's tokenizer.json: it has none"),
        (tmp_path, 100, {EOS}, "tokenizer.json: vocab size too small; 100 vs 4096"),
        (broken, VOCAB, {EOS}, "tokenizer.json: error loading tokenizer"),
        (named, VOCAB, {EOS}, "tokenizer.json: it is no JSON object"),
    ):
        with pytest.raises(InvalidRequest, match=f"{needs} .*{reason}"):
            GrammarCompiler(path, vocab, ends).compile(asked, (), 0).result(WAIT_S)


def names():
    return map("".join, (p for n in (1, 2, 3) for p in product(string.ascii_lowercase, repeat=n)))


def chain(line, last):
    """Lines that refer to the next one each, as many as a request may hold."""
    lines, size, found = [], 0, names()
    name = next(found)
    while size < MAX_STRUCTURED_OUTPUT_CHARS - 200:
        following = next(found)
        lines.append(line(name, following))
        size += len(lines[-1]) + 1
        name = following
    return [*lines, last(name)]


def nested(name, following):
    return f'"{name}":' + '{"items":' * 30 + f'{{"$ref":"#/$defs/{following}"}}' + "}" * 30


HOSTILE = {
    "rules": "\n".join(["start: a", *chain("{}:{}".format, '{}:"x"'.format)]),
    "alternatives": "\n".join(
        ["start: a", *chain(lambda a, b: f'{a}: "z" | {b} "k" | {b}?', '{}:"x"'.format)]
    ),
    "terminals": "\n".join(
        ["start: A", *chain(lambda a, b: f"{a}:{b}".upper(), lambda a: f'{a.upper()}:"x"')]
    ),
    "definitions": '{"$ref":"#/$defs/a","$defs":{'
    + ",".join(chain('"{}":{{"$ref":"#/$defs/{}"}}'.format, '"{}":{{}}'.format))
    + "}}",
    "nested": '{"$ref":"#/$defs/a","$defs":{' + ",".join(chain(nested, '"{}":{{}}'.format)) + "}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_chains_of_references_do_not_end_the_process(name):
    """llguidance recurs through them; a thread's usual stack holds about a thousand."""
    text = HOSTILE[name]
    assert len(text) <= MAX_STRUCTURED_OUTPUT_CHARS + 9
    form = "json_schema" if text.startswith("{") else "grammar"
    script = f"""
import sys
from pathlib import Path
from baton.errors import InvalidRequest
from baton.sampling import StructuredOutput
from baton.structured_output import GrammarCompiler
grammars = GrammarCompiler(Path({str(DEMO_MODEL)!r}), {VOCAB}, [{EOS}])
try:
    grammars.compile(StructuredOutput({form}=sys.stdin.read()), (), 0).result()
except InvalidRequest as error:
    print(error)
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input=text, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-300:])


def test_too_many_that_wait_are_refused(grammars, monkeypatch):
    monkeypatch.setattr("baton.structured_output.MAX_WAITING", 2)
    started = [grammars.compile(StructuredOutput(regex=f"a{{{n}}}" * 900), (), 0) for n in (7, 8)]
    with pytest.raises(Overloaded, match="2 grammars wait"):
        grammars.compile(StructuredOutput(regex="x"), (), 0)
    for future in started:
        future.result(WAIT_S)


def test_a_router_checks_a_restriction_once(grammars):
    output = schema({"enum": [f"value {n}" for n in range(2000)]})
    before = grammars._checked.cache_info().misses
    for _ in range(2):
        grammars.check(output, ()).result(WAIT_S)
    assert grammars._checked.cache_info().misses == before + 1


def test_what_an_output_can_reach_does_not_depend_on_others(grammars):
    """Copies of a compiled grammar would share a limit: a common one would fail for all one day."""
    output, (a,) = StructuredOutput(regex="(?:.|\n)*a(?:.|\n){400}"), ids_of("a")
    reached = []
    for _ in range(3):
        matcher, tokens = grammars.compile(output, (), 0).result(WAIT_S), []
        while not matcher.failure and len(tokens) < 2000:
            tokens.append(a if len(tokens) % 3 else 200 + len(tokens) % 1000)
            matcher.advance(tokens, len(tokens))
            allowed(matcher)
        reached.append(len(tokens))
    assert reached[0] == reached[1] == reached[2] < 2000


def test_another_thread_runs_while_a_large_one_is_compiled(grammars):
    """A worker's event loop beside it must go on: llguidance gives up the interpreter's lock."""
    large = schema(
        {
            "type": "object",
            "properties": {f"k{n}": {"pattern": "^[a-z]{1,99}$"} for n in range(900)},
        }
    )
    future, turns = grammars.compile(large, (), 0), 0
    while not future.done():
        time.sleep(0.001)
        turns += 1
    assert turns > 3


NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        (NAMED, '{"a":1,"b":"x"}', r'{"\u0061":"x"}'),  # the name is a
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":2}', '{"a":1,"a":2}'),
        ({"exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"pattern": "^[^\\x00-\\x1f]$"}, '"a"', r'"\n"'),
    ],
)  # fmt: skip
def test_what_is_compiled_is_kept_to(grammars, value, right, wrong):
    matcher = grammars.compile(schema(value), (), 0).result(WAIT_S)
    assert matcher.accepts(ids_of(right)) == len(ids_of(right))
    assert EOS in allowed(matcher, ids_of(right))
    assert matcher.accepts(ids_of(wrong)) < len(ids_of(wrong)) or EOS not in allowed(
        matcher, ids_of(wrong)
    )


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"items": {"minProperties": 2}}, "/items/minProperties: 1 at most"),
        ({"anyOf": [{}, {"minProperties": 4, "required": ["a", "b"]}]}, "/anyOf/1/minProp"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "/exclusiveMinimum: a whole number"),
        ({"x": {"exclusiveMaximum": -10, "minimum": -10.5}}, "/x/exclusiveMaximum: a whole"),
        ({"enum": ["a\x00b"]}, "'/enum/0': there can be no control"),
        ({"properties": {"\x01": {}}}, "'/properties/\\x01': there can be no control"),
        ({"pattern": "^a\\x01b$"}, "/pattern: there can be no control"),
        ({"patternProperties": {"[\\u0001]": {}}}, "/patternProperties: there can be no control"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "/x-guidance: it is not taken"),
    ],
)  # fmt: skip
def test_what_would_not_be_kept_to_is_refused_with_its_place(grammars, value, place):
    with pytest.raises(InvalidRequest, match=f"^json_schema at {re.escape(place)}"):
        grammars.compile(schema(value), (), 0).result(WAIT_S)
