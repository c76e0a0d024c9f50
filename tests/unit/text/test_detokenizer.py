"""The text of a stream is the text of the whole, however it was cut, and never broken."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.text import Detokenizer

FAMILIES = ["byte_level", "byte_fallback", "word_piece"]
BYTE_FAMILIES = ["byte_level", "byte_fallback", "hidden_bytes"]

TEXTS = st.text(
    st.one_of(
        st.sampled_from([*" abcdehilo,.\n", "é", "ü", "世", "界", "👩", "\u200d", "👧", "\u0301"]),
        # Not what spells out a special token, nor what stands for a space in a vocabulary.
        st.characters(exclude_categories=["Cs"], exclude_characters="<▁"),
    ),
    max_size=24,
)
# The two families' first 420 ids hold special, byte, plain and added tokens, and unknown ids.
IDS = st.lists(st.integers(0, 420), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=5)
FAMILY_EMOJI = "👩\u200d👩\u200d👧 世界 e\u0301 हिन्दी"


def stream(tokenizer, prompt, output, cuts):
    """What a detokenizer makes of `output`, pushed in pieces that end at `cuts`."""
    detokenizer = Detokenizer(tokenizer.pieces, prompt)
    edges = [0, *sorted(cut for cut in cuts if cut < len(output)), len(output)]
    pushed = [detokenizer.push(output[a:b]) for a, b in pairwise(edges)]
    return "".join(pushed) + detokenizer.flush()


@pytest.mark.parametrize("family", FAMILIES)
@given(ids=IDS, cuts=CUTS)
@example(ids=[], cuts=[])
@settings(max_examples=150, deadline=None)
def test_any_ids_stream_to_the_whole_as_the_library_decodes_it(tokenizer_of, family, ids, cuts):
    tokenizer = tokenizer_of(family)
    text = tokenizer.decode(ids)
    assert stream(tokenizer, [], ids, cuts) == text
    library_text = tokenizer.pieces.decode(ids)
    if family != "byte_fallback" or "\ufffd" not in library_text:  # not of malformed bytes
        assert text == library_text


@pytest.mark.parametrize("family", BYTE_FAMILIES)
@given(prompt=TEXTS, output=TEXTS, cuts=CUTS)
@example(prompt="Hello", output=FAMILY_EMOJI, cuts=[1, 2, 3])
@example(prompt="", output=" x", cuts=[])
@settings(max_examples=150, deadline=None)
def test_output_continues_the_prompts_text(tokenizer_of, family, prompt, output, cuts):
    tokenizer = tokenizer_of(family)
    before, after = tokenizer.encode(prompt), tokenizer.encode(output)
    whole = tokenizer.decode(before + after)
    assert tokenizer.decode(before) + stream(tokenizer, before, after, cuts) == whole


@pytest.mark.parametrize("family", BYTE_FAMILIES)
@given(text=TEXTS)
@example(text=FAMILY_EMOJI)
@example(text="\ufffd👩\ufffd")
@settings(max_examples=100, deadline=None)
def test_no_push_gives_a_broken_character(tokenizer_of, family, text):
    tokenizer = tokenizer_of(family)
    detokenizer = Detokenizer(tokenizer.pieces)
    ids = tokenizer.encode(text)
    # An added token, as U+FFFD is here, can cost a tokenizer of Llama 2's kind an extra space.
    whole = text if "\ufffd" not in text else tokenizer.decode(ids)
    so_far = ""
    for token in ids:
        so_far += detokenizer.push([token])
        assert whole.startswith(so_far)
    assert so_far + detokenizer.flush() == whole


@given(st.binary(max_size=24))
@example("é".encode() + b"\xf0\x9f\x41\xff")
@example(b"  ")
@settings(max_examples=200, deadline=None)
def test_malformed_byte_tokens_become_replacement_characters(tokenizer_of, run):
    """One for each maximal invalid part, between text that stays as it is."""
    tokenizer = tokenizer_of("byte_fallback")
    ids = [5 + byte for byte in run]  # after <unk> and four special tokens come the bytes
    text, hello = run.decode(errors="replace"), tokenizer.encode("hello")
    assert stream(tokenizer, [], ids, []) == text.removeprefix(" ")
    assert stream(tokenizer, [], [*hello, *ids, *hello], []) == f"hello{text} hello"


@pytest.mark.parametrize("family", BYTE_FAMILIES)
def test_a_truncated_character_ends_in_one_replacement_character(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    detokenizer = Detokenizer(tokenizer.pieces)
    assert detokenizer.push(tokenizer.encode("ab👩")[:-1]) == "ab"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("given_to_prompt", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_given_whole(tokenizer_of, family, given_to_prompt):
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode("world👩!")
    split = len(ids) - 5 + given_to_prompt
    detokenizer = Detokenizer(tokenizer.pieces, ids[:split])
    assert detokenizer.push(ids[split:]) + detokenizer.flush() == "👩!"


def test_special_tokens_and_unknown_ids_have_no_text_and_added_ones_have(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    first, *rest = tokenizer.encode("é")
    assert stream(tokenizer, [], [0, first, 1, 10_000, *rest, 3], []) == "é"
    ids = tokenizer.encode("a<tool call><思考>")
    assert len(ids) == 3
    assert stream(tokenizer, [], ids, [1, 2]) == "a<tool call><思考>"
    tokenizer = tokenizer_of("byte_fallback")
    own = tokenizer.encode("\ufffd")[-1]  # a token, and not a byte that is wrong
    ids = [own, *(5 + byte for byte in "é".encode()), own]
    assert stream(tokenizer, [], ids, [1, 2, 3]) == "\ufffdé\ufffd"


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_single_tokens_are_shown_with_their_spaces_bytes_and_names(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    assert tokenizer.pieces is not None
    shown = [tokenizer.pieces.shown(token) for token in tokenizer.encode("a é🦊")]
    shown = [one for one in shown if one[0] != "<s>"]
    start = " " if family == "byte_fallback" else ""  # which that tokenizer puts before a text
    assert b"".join(piece for _, piece in shown).decode() == start + "a é🦊"
    assert "".join(text for text, _ in shown).startswith(start + "a ")
    assert ("\ufffd", "🦊".encode()[:1]) in shown
    end = tokenizer.encode("</s>")[-1]
    assert tokenizer.pieces.shown(end) == ("</s>", b"")
    assert tokenizer.pieces.shown(10_000) == ("", b"")


@pytest.mark.parametrize("kind", ["bad_bytes", "replacement", "text"])
def test_a_token_costs_the_same_however_long_the_output(tokenizer_of, monkeypatch, kind):
    tokenizer = tokenizer_of("byte_fallback")
    decoded: list[int] = []
    decode = tokenizer.pieces.decode

    def counting(ids):
        decoded.append(len(ids))
        return decode(ids)

    text = {"replacement": "\ufffd", "text": "hello world "}.get(kind, "") * 200
    ids = tokenizer.encode(text) if text else [5 + 0x80] * 500
    monkeypatch.setattr(tokenizer.pieces, "decode", counting)
    Detokenizer(tokenizer.pieces, ids).push(ids)
    assert sum(decoded) <= 24 * len(ids)
