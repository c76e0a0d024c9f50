"""What survives any worker: the failover rule, usage and times."""

import time

import pytest

from baton.v1 import common_pb2
from router.dispatch.request_state import RequestState, TextStream

from .scripted_workers import request_state, tokenized
from .small_tokenizers import byte_tokenizer, ids_only_tokenizer


def test_the_first_attempt_asks_for_the_prompt():
    spec = request_state(cache_salt="tenant").spec("r-1")
    assert list(spec.token_ids) == [1, 2, 3]
    assert (spec.handoff_id, spec.prompt_tokens, spec.cache_salt) == ("r-1", 3, "tenant")
    assert spec.sampling.HasField("seed")
    assert spec.sampling.HasField("max_tokens")


def test_a_later_attempt_goes_on_where_the_caller_is():
    state = request_state()
    state.deliver([7])
    state.deliver([8, 9])
    first, later = state.spec("r-1"), state.spec("r-2")
    assert list(later.token_ids) == [1, 2, 3, 7, 8, 9]
    assert later.prompt_tokens == 3
    assert later.sampling == first.sampling
    assert later.sampling.seed == 7


@pytest.mark.parametrize(
    ("timeout_s", "least", "most"),
    [(2.0, 1000, 2000), (-1.0, 1, 1), (1e9, (1 << 32) - 1, (1 << 32) - 1)],
)
def test_the_time_left_is_never_none_and_always_fits(timeout_s, least, most):
    assert least <= request_state(timeout_s=timeout_s).spec("r").time_left_ms <= most


def test_usage_counts_tokens_once():
    state = request_state()
    assert state.usage() == common_pb2.Usage(prompt_tokens=3)
    state.deliver([7, 8])
    state.cached_tokens = 2
    assert state.usage() == common_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)


def test_times_are_from_arrival_and_between_tokens():
    now = time.monotonic()
    state = RequestState(tokenized(), started=now - 10.0)
    state.placed_at, state.first_at, state.last_at = now - 9.5, now - 9.0, now - 8.0
    state.delivered, state.prefill_queue_ms = [1, 2, 3, 4, 5], 100.0
    state.transfer_bytes, state.transfer_ms = 4096, 12.5
    timing = state.timing()
    assert timing.queue_ms == pytest.approx(600.0)
    assert timing.ttft_ms == pytest.approx(1000.0)
    assert timing.tpot_ms == pytest.approx(250.0)
    assert 10_000.0 <= timing.e2e_ms < 12_000.0
    assert (timing.transfer_bytes, timing.transfer_ms) == (4096, 12.5)


def test_one_token_has_no_time_between_tokens():
    state = request_state()
    state.deliver([1])
    assert state.timing().tpot_ms == 0.0
    assert state.timing().ttft_ms > 0.0


def test_the_route_is_the_last_attempts_with_the_count_of_all():
    state = request_state()
    state.attempts, state.route.decode = 3, "d1"
    assert state.final_route() == common_pb2.Route(decode="d1", attempts=3)
    assert state.route.attempts == 0


# Tokens to text: stop strings, what is held back, what is no text.


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


KEPT = {"stop": ("END",), "include_stop": True}


@pytest.mark.parametrize(
    ("text", "reason", "fields", "parts", "stop"),
    [
        ("abc", "length", {}, ["a", "b", "c"], None),
        ("né", "length", {}, ["n", "", "é"], None),  # half a character waits for the other half
        ("1 END 2", None, {"stop": ("END",)}, ["1", " ", "", "", ""], "END"),
        ("1 END 2", None, KEPT, ["1", " ", "", "", "END"], "END"),
        ("oneEN", "length", {"stop": ("END",)}, ["o", "n", "e", "", "EN"], None),
        ("oneEND", "length", {"stop": ("END",)}, ["o", "n", "e", "", "", ""], "END"),
        ("ab!", "stop", {}, ["a", "b", ""], None),  # the token that ended it is no text
        ("ab!", "length", {}, ["a", "b", "!"], None),
        ("ab", "stop", {"eos": True}, ["a", "b", ""], None),
    ],
)
def test_text_comes_as_soon_as_it_is_certain(tokenizer, text, reason, fields, parts, stop):
    assert feed(tokenizer, text, reason, **fields) == (parts, stop)


def test_a_character_that_is_never_finished_is_told_at_the_end(tokenizer):
    stream = TextStream(tokenizer, tokenized())
    first_half = tokenizer.encode("é")[0]
    assert stream.advance([first_half], None) == ""
    assert stream.advance([], "length") == "\ufffd"


def test_a_stop_string_in_an_unfinished_characters_place_counts(tokenizer):
    stream = TextStream(tokenizer, tokenized(stop=("a\ufffd",)))
    stream.advance(tokenizer.encode("a"), None)
    assert stream.advance(tokenizer.encode("é")[:1], "length") == ""
    assert stream.stop == "a\ufffd"


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
