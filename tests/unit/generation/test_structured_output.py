"""Restrictions of an output: what can be compiled, what cannot and where, what that may cost."""

import contextlib
import json
import random
import re
import shutil
import string
import time
from itertools import product

import jsonschema
import numpy as np
import pytest

from baton.config import DEMO_MODEL
from baton.errors import InvalidRequest, Overloaded
from baton.generation.sampling_params import (
    MAX_STRUCTURED_OUTPUT_CHARS,
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from baton.generation.structured_output import GrammarCompiler
from baton.text import load_tokenizer
from tests.processes import PYTHON, run
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
    (StructuredOutput(grammar="::= a"), "grammar cannot be read: Failed to convert"),
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
        (StructuredOutput(regex="a" * (MAX_STRUCTURED_OUTPUT_CHARS + 1)), "not 65537"),
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


def test_a_tokenizer_may_have_a_special_token_that_the_model_has_no_logits_for(tmp_path):
    stored = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    added = {**stored["added_tokens"][0], "id": VOCAB, "content": "<image>"}
    tokens = [*stored["added_tokens"], added]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**stored, "added_tokens": tokens}))
    matcher, same = (
        GrammarCompiler(path, VOCAB, {EOS}).compile(schema(OBJECT), (), 0).result(WAIT_S)
        for path in (tmp_path, DEMO_MODEL)
    )
    for text in ("", '{"a"', '{"a":12}'):
        assert allowed(matcher, ids_of(text)) == allowed(same, ids_of(text))


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
from baton.generation.sampling_params import StructuredOutput
from baton.generation.structured_output import GrammarCompiler
grammars = GrammarCompiler(Path({str(DEMO_MODEL)!r}), {VOCAB}, [{EOS}])
try:
    grammars.compile(StructuredOutput({form}=sys.stdin.read()), (), 0).result()
except InvalidRequest as error:
    print(error)
print("alive")
"""
    done = run([*PYTHON, script], input=text)
    assert done.out.endswith("alive\n"), (done.status, done.err[-300:])


def test_too_many_that_wait_are_refused(grammars, monkeypatch):
    monkeypatch.setattr("baton.generation.structured_output.MAX_WAITING", 2)
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


INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
ENDLESS = {
    "$defs": {
        "x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}, "required": ["y"]}
    }
}
NO_NAME_LEFT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "patternProperties": {"^a$": {"type": "integer"}},
    "additionalProperties": False,
}
NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


SCHEMAS = [
    (NAMED, '{"a":1,"b":"x"}', r'{"\u0061":"x"}'),  # the name is a
    ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":2}', '{"a":1,"a":2}'),
    ({"exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
    ({"pattern": "^[^\\x00-\\x1f]$"}, '"a"', r'"\n"'),
    ({"const": 9007199254740994}, "9007199254740994", "9007199254740993"),
    (INT64, "9223372036854775807", "9223372036854775808"),
    (INT64, "-9223372036854774784", "-9223372036854775809"),
    ({"type": "integer", "maximum": (1 << 64) - 1, "minimum": 0}, "18", "-1"),
    ({"type": "number", "minimum": -(1 << 63)}, "-1.5", "-1e3"),
    ({"type": "integer", "minimum": 10**18}, str(10**18), str(10**18 - 1)),
    ({"type": "integer", "exclusiveMaximum": 1 << 63}, "5", "9223372036854775808"),
    # Optional, and without a finite instance.
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, **ENDLESS}, '{"b":1}', '{"a":{"y":{}}}'),
    ({"items": {"$ref": "#/$defs/x"}, "type": "array", **ENDLESS}, "[]", "[{}]"),
    ({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], **ENDLESS}, "null", "{}"),
    # A further property would need a name, and none is left.
    (NO_NAME_LEFT, '{"a":1}', '{"a":1,"a":1}'),
    ({**NO_NAME_LEFT, "properties": {}, "required": ["a"]}, '{"a":1}', '{"a":"x"}'),
    ({"type": "object", "patternProperties": {"": False}}, "{}", '{"a":1}'),
]


@pytest.mark.parametrize(
    ("output", "right", "wrong"),
    [*MATCHING, *((schema(value), right, wrong) for value, right, wrong in SCHEMAS)],
)
def test_each_form_accepts_what_matches_and_nothing_else(grammars, output, right, wrong):
    matcher = grammars.compile(output, (), 0).result(WAIT_S)
    tokens = ids_of(right)
    assert matcher.accepts(tokens) == len(tokens)
    assert EOS not in allowed(matcher)
    assert EOS in allowed(matcher, tokens)
    others = ids_of(wrong)
    taken = matcher.accepts(others)
    assert taken < len(others) or EOS not in allowed(matcher, others)


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
        ({"const": 9007199254740993}, "/const: as a float64 it is another number"),
        ({"const": -(1 << 63)}, "/const: as a float64"),  # llguidance's stack would overflow
        ({"enum": [1, {"a": [10**30]}]}, "/enum: as a float64"),
        ({"const": 123456789.12345679}, "/const: as a float64"),  # llguidance reads ...68
        ({"type": "integer", "const": 1e22}, "/const: as a float64"),
        ({"minimum": 9007199254740993}, "/minimum: as a float64"),
        ({"exclusiveMinimum": 1 << 53}, "/exclusiveMinimum: a bound that is excluded"),
        ({"type": "integer", "minimum": -1e300, "maximum": -1e300}, "/maximum: numbers have 64"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
         "/properties/a: nothing matches it"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}, **ENDLESS},
         "/$defs/x/properties/y: nothing matches it"),
        ({"type": "object", "patternProperties": {"": False}, "minProperties": 1},
         "its root: nothing matches it"),
        ({"patternProperties": {f"^a{n}$": {} for n in range(33)}},
         "/patternProperties: a schema has 32 of these at most"),
        ({"patternProperties": {f"^a{n}$": {} for n in range(40)},
          "properties": {f"b{n}": {} for n in range(40)}}, "/patternProperties: times the prop"),
        ({"patternProperties": {f"^a{n}$": {} for n in range(30)},
          "required": [f"b{n}" for n in range(40)]}, "/patternProperties: times the prop"),
    ],
)  # fmt: skip
def test_what_would_not_be_kept_to_is_refused_with_its_place(grammars, value, place):
    with pytest.raises(InvalidRequest, match=f"^json_schema at {re.escape(place)}"):
        grammars.compile(schema(value), (), 0).result(WAIT_S)


class RandomSchemas:
    """Schemas of which many have no instance, or have some whose parts have none."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def schema(self, depth):
        one = self.random.choice
        if depth == 0:
            leaves = ({"type": "integer"}, {"type": "string"}, False, {"const": 1}, {"enum": ["x"]})
            return one(leaves)
        make = one((self.reference, self.joined, self.number, self.array, *[self.object] * 4))
        return make(depth - 1)

    def maybe(self, chance, **keywords):
        return {k: make() for k, make in keywords.items() if self.random.random() < chance}

    def reference(self, _depth):
        return {"$ref": f"#/$defs/{self.random.choice('xy')}"}

    def joined(self, depth):
        keyword = self.random.choice(("anyOf", "allOf"))
        return {keyword: [self.schema(depth) for _ in range(self.random.randint(1, 2))]}

    def number(self, _depth):
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        values = {key: lambda: self.random.choice((0, 1, -1, 5, 2.5)) for key in bounds}
        return {
            "type": self.random.choice(("integer", "number")),
            **self.maybe(0.4, **values, multipleOf=lambda: self.random.choice((2, 7, 0.5))),
        }

    def array(self, depth):
        return {
            "type": "array",
            **self.maybe(
                0.5,
                items=lambda: self.schema(depth),
                prefixItems=lambda: [self.schema(depth)],
                minItems=lambda: self.random.randint(0, 2),
                maxItems=lambda: self.random.randint(0, 2),
            ),
        }

    def object(self, depth):
        patterns = ("^a$", "^a", "^(a|b)$", ".*", "b")
        return {
            "type": "object",
            **self.maybe(
                0.6,
                properties=lambda: {name: self.schema(depth) for name in "ab"},
                patternProperties=lambda: {self.random.choice(patterns): self.schema(depth)},
                additionalProperties=lambda: self.random.choice((False, self.schema(depth))),
                required=lambda: self.random.sample("abc", 1),
                minProperties=lambda: self.random.randint(0, 1),
            ),
        }

    def token(self, matcher):
        """A token that may follow; those that end something more often."""
        found = sorted(allowed(matcher))
        ends = [t for t in found if t == EOS or TOKENIZER.decode([t]).strip() in tuple('}]"01')]
        return self.random.choice(ends if ends and self.random.random() < 0.6 else found)


def test_no_schema_that_is_compiled_comes_to_a_dead_end(grammars):
    """Of those that are refused since nothing matches them, nothing does."""
    values = [None, 0, 1, 2, 7, 0.5, -1, 5, "x", "a", [], [1], ["x"], [1, 1], {}]
    values += [{k: v} for k in "abc" for v in values] + [{"a": v, "b": 1} for v in (1, "x", {})]
    compiled = refused = 0
    for seed in range(250):
        made = RandomSchemas(seed)
        value = {"allOf": [made.schema(3)], "$defs": {name: made.schema(2) for name in "xy"}}
        try:
            matcher = grammars.compile(schema(value), (), 0).result(WAIT_S)
        except InvalidRequest as error:
            if str(error).endswith("nothing matches it"):
                refused += 1
                with contextlib.suppress(RecursionError):  # a definition that is itself
                    assert not any(map(jsonschema.Draft202012Validator(value).is_valid, values))
            continue
        compiled, tokens = compiled + 1, []
        while len(tokens) < 60 and (token := made.token(matcher)) != EOS:
            tokens.append(token)
            matcher.advance(tokens, len(tokens))
            allowed(matcher)
            assert not matcher.failure, (value, TOKENIZER.decode(tokens))
    assert compiled > 100 and refused > 5
