"""Grammars of tool calls: what they have is what the parser of the same format takes."""

import json

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.config import DEMO_MODEL
from baton.errors import InvalidRequest
from baton.generation.sampling_params import StructuredOutput
from baton.generation.structured_output import JSON_OPTIONS, LIMITS
from baton.text.tool_parsers import FORMATS
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import LLAMA3

from .tool_outputs import GIVEN, TOOLS, parsed, written


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def library(request):
    """A tokenizer with all markers as added tokens, which are special in some models."""
    library = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    markers = {marker for form in FORMATS for marker in form.markers}
    added = [tokenizers.AddedToken(text, normalized=False) for text in sorted(markers)]
    (library.add_special_tokens if request.param else library.add_tokens)(added)
    return library


def acceptor(library):
    """Whether a grammar has a text."""
    vocabulary = LLTokenizer(library.to_str(), library.get_vocab_size(), [1])

    def accepts(grammar, text):
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        ids = library.encode(text, add_special_tokens=False).ids
        taken = matcher.validate_tokens(ids)
        return taken == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return accepts


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_grammar_has_calls_of_its_own_format_alone(library, form):
    special = {text: library.token_to_id(text) for text in form.markers}
    accepts = acceptor(library)

    def is_whole(text, **options):
        grammar = form.grammar(TOOLS, special, {"x-guidance": JSON_OPTIONS}, **options)
        return accepts(grammar, text)

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


def test_channels_of_an_answer_that_a_grammar_restricts(library):
    special = {text: library.token_to_id(text) for text in HARMONY.markers}
    accepts = acceptor(library)
    thought = "<|channel|>analysis<|message|>Any text.<|end|><|start|>assistant"
    for output, good, bad in (
        (StructuredOutput(json_schema="{}"), '{"a": 1}', "{"),
        (StructuredOutput(regex="[a-z]+/\\d"), "ab/3", "ab/x"),
        (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
    ):
        grammar = HARMONY.answer_grammar(output, special, '{"type": "object"}')
        for before in ("", thought, thought * 2):
            for answer, whole in ((good, True), (bad, False)):
                text = f"{before}<|channel|>final<|message|>{answer}"
                assert accepts(grammar, text) is whole
    with pytest.raises(InvalidRequest, match="JSON schema"):
        HARMONY.answer_grammar(StructuredOutput(grammar="start: /a/"), special, "")
