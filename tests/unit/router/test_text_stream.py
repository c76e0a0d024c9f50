"""Tokens to text at the router: stop strings, what is held back, what is no text."""

import pytest

from router.dispatch.request_state import TextStream

from .scripted_workers import tokenized
from .tokenizers_made import byte_tokenizer, ids_only_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return byte_tokenizer(tmp_path)


def feed(tokenizer, text, reason, eos=False, **fields):
    """What a stream says of each byte of `text`, the last with a reason; and its stop string."""
    stream = TextStream(tokenizer, tokenized(**fields))
    tokens = tokenizer.encode(text) + [0] * eos
    said = []
    for index, token in enumerate(tokens):
        said.append(stream.advance([token], reason if index + 1 == len(tokens) else None))
        if stream.stop is not None:
            break
    return said, stream.stop


def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    assert feed(tokenizer, "abc", "length") == (["a", "b", "c"], None)


def test_half_a_character_waits_for_the_other_half(tokenizer):
    assert feed(tokenizer, "né", "length") == (["n", "", "é"], None)


def test_a_character_that_is_never_finished_is_told_at_the_end(tokenizer):
    stream = TextStream(tokenizer, tokenized())
    first_half = tokenizer.encode("é")[0]
    assert stream.advance([first_half], None) == ""
    assert stream.advance([], "length") == "\ufffd"


def test_a_stop_string_ends_the_text_before_it(tokenizer):
    assert feed(tokenizer, "one END two", None, stop=("END",)) == (
        ["o", "n", "e", " ", "", "", ""],
        "END",
    )


def test_a_stop_string_can_be_kept(tokenizer):
    said, stop = feed(tokenizer, "one END two", None, stop=("END",), include_stop=True)
    assert ("".join(said), stop) == ("one END", "END")


def test_what_could_have_become_a_stop_string_is_told_at_the_end(tokenizer):
    assert feed(tokenizer, "oneEN", "length", stop=("END",)) == (["o", "n", "e", "", "EN"], None)


def test_a_stop_string_that_the_last_token_completes_counts(tokenizer):
    said, stop = feed(tokenizer, "oneEND", "length", stop=("END",))
    assert ("".join(said), stop) == ("one", "END")


def test_a_stop_string_in_an_unfinished_characters_place_counts(tokenizer):
    stream = TextStream(tokenizer, tokenized(stop=("a\ufffd",)))
    stream.advance(tokenizer.encode("a"), None)
    assert stream.advance(tokenizer.encode("é")[:1], "length") == ""
    assert stream.stop == "a\ufffd"


def test_the_token_that_ended_the_sequence_is_no_text(tokenizer):
    assert feed(tokenizer, "ab!", "stop") == (["a", "b", ""], None)
    assert feed(tokenizer, "ab!", "length") == (["a", "b", "!"], None)
    assert feed(tokenizer, "ab", "stop", eos=True) == (["a", "b", ""], None)


def test_nothing_is_said_after_a_stop_string(tokenizer):
    stream = TextStream(tokenizer, tokenized(stop=("b",)))
    assert stream.advance(tokenizer.encode("abc"), None) == "a"
    assert stream.advance(tokenizer.encode("d"), "length") == ""


def test_a_character_that_the_prompt_began_is_finished(tokenizer):
    first, second = tokenizer.encode("é")
    stream = TextStream(tokenizer, tokenized(prompt=(first,)))
    assert stream.advance([second], "length") == "é"


def test_token_ids_alone_have_no_text(tmp_path):
    stream = TextStream(ids_only_tokenizer(tmp_path), tokenized())
    assert stream.advance([1, 2, 3], None) == ""
    assert stream.advance([4], "length") == ""
