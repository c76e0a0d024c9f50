"""What survives any worker: the failover rule, usage, times, and the text of the tokens."""

import time

import pytest

from baton.generation.sampling_params import Reasoning, SamplingParams
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import HERMES, MISTRAL_ARGS
from baton.v1 import common_pb2
from router.output.text_stream import TextStream
from router.request import OutputFormat, RequestState

from .scripted_workers import request_state, tokenized
from .small_tokenizers import byte_tokenizer, ids_only_tokenizer
from .snapshots import pending


def test_a_later_attempt_continues_where_the_caller_is():
    state = request_state(cache_salt="tenant")
    first = state.spec("r-1")
    assert list(first.token_ids) == [1, 2, 3]
    assert (first.handoff_id, first.prompt_tokens, first.cache_salt) == ("r-1", 3, "tenant")
    assert first.sampling.HasField("seed") and first.sampling.HasField("max_tokens")
    state.deliver([7])
    state.deliver([8, 9])
    later = state.spec("r-2")
    assert list(later.token_ids) == [1, 2, 3, 7, 8, 9]
    assert (later.prompt_tokens, later.sampling) == (3, first.sampling)
    resumed = request_state(resumed=(7,)).spec("r-1")
    assert (list(resumed.token_ids), resumed.prompt_tokens) == ([1, 2, 3, 7], 3)


def test_settings_become_a_message_once_whatever_the_number_of_attempts(monkeypatch):
    made, to_proto = [], SamplingParams.to_proto
    monkeypatch.setattr(SamplingParams, "to_proto", lambda own: made.append(own) or to_proto(own))
    state = request_state()
    assert state.spec("r-1").sampling == state.spec("r-2").sampling
    assert made == [state.request.params]


def test_workers_get_the_virtual_finish_as_a_time_from_now_in_order_also_once_it_has_passed():
    finishes = [(9.0, 2.0), (9.0, 0.0), (9.0, -2.0), (9.0, -100.0)]
    specs = [request_state(pending=pending(*one)).spec("r") for one in finishes]
    assert [spec.virtual_finish_ms for spec in specs] == [62_000, 60_000, 58_000, 0]
    assert specs[0].prompt_us == 2_000_000


@pytest.mark.parametrize(
    ("timeout_s", "least", "most"),
    [(2.0, 1000, 2000), (-1.0, 1, 1), (1e9, (1 << 32) - 1, (1 << 32) - 1)],
)
def test_the_time_left_is_never_zero_and_always_fits(timeout_s, least, most):
    assert least <= request_state(timeout_s=timeout_s).spec("r").time_left_ms <= most


def test_what_the_caller_learns_at_the_end():
    now = time.monotonic()
    state = RequestState(tokenized(), started=now - 10.0)
    assert state.usage() == common_pb2.Usage(prompt_tokens=3)
    state.placed_at, state.first_at, state.last_at = now - 9.5, now - 9.0, now - 8.0
    state.delivered, state.prefill_queue_ms, state.cached_tokens = [1, 2, 3, 4, 5], 100.0, 2
    timing = state.timing()
    assert timing.queue_ms == pytest.approx(600.0)
    assert timing.ttft_ms == pytest.approx(1000.0)
    assert timing.tpot_ms == pytest.approx(250.0)
    assert 10_000.0 <= timing.e2e_ms < 12_000.0
    assert state.usage() == common_pb2.Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
    resumed = RequestState(tokenized())
    resumed.record_cached(80)  # with what another router delivered
    assert resumed.usage().cached_tokens == resumed.usage().prompt_tokens == 3
    state.attempts, state.route.decode = 3, "d1"
    assert state.final_route() == common_pb2.Route(decode="d1", attempts=3)
    one = request_state()
    one.deliver([1])
    assert one.timing().tpot_ms == 0.0 and one.timing().ttft_ms > 0.0


# Tokens to text: stop strings, what is held back, what is no text.


@pytest.fixture
def tokenizer(tmp_path):
    return byte_tokenizer(tmp_path)


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
        ("ab\0", "stop", {}, ["a", "b", ""], None),  # end of sequence
    ],
)
def test_text_comes_as_soon_as_it_is_certain(tokenizer, text, reason, fields, parts, stop):
    stream, said = TextStream(tokenizer, tokenized(**fields)), []
    tokens = [token for char in text for token in (tokenizer.encode(char) if char != "\0" else [0])]
    for index, token in enumerate(tokens):
        said.append(stream.advance([token], reason if index + 1 == len(tokens) else None)[0])
        if stream.stop is not None:
            break
    assert (said, stream.stop) == (parts, stop)


def test_half_characters_at_the_ends_of_a_stream(tokenizer):
    first, second = tokenizer.encode("é")
    begun = TextStream(tokenizer, tokenized(prompt=(first,)))  # by the prompt
    assert begun.advance([second], "length") == ("é", 1)
    resumed = TextStream(tokenizer, tokenized(resumed=(first,)))
    assert resumed.advance([second], "length") == ("é", 1)
    unfinished = TextStream(tokenizer, tokenized())
    assert unfinished.advance([first], None) == ("", 1)
    assert unfinished.advance([], "length") == ("\ufffd", 0)
    stopped = TextStream(tokenizer, tokenized(stop=("a\ufffd",)))
    stopped.advance(tokenizer.encode("a"), None)
    assert (stopped.advance([first], "length")[0], stopped.stop) == ("", "a\ufffd")


def test_after_a_stop_string_there_is_no_text_and_token_ids_alone_have_none(tokenizer, tmp_path):
    stream = TextStream(tokenizer, tokenized(stop=("b",)))
    assert stream.advance(tokenizer.encode("abc"), None) == ("a", 2)
    assert stream.advance(tokenizer.encode("d"), "length")[0] == ""
    stream = TextStream(ids_only_tokenizer(tmp_path), tokenized())
    assert [stream.advance([1, 2, 3], None), stream.advance([4], "length")] == [("", 3), ("", 1)]


# Reasoning and tool calls: a function of the tokens, however they come.

TOKENS = ["<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def read(tokenizer, text, cuts, reason="stop", resumed=0, **fields):
    """(content, reasoning, arguments, reasoning tokens, stop string) of an output cut in pieces."""
    tokens = [*tokenizer.encode(text), 0]
    stream = TextStream(tokenizer, tokenized(resumed=tuple(tokens[:resumed]), **fields))
    said = []
    for start, end in zip((resumed, *cuts), (*cuts, len(tokens)), strict=True):
        content, _ = stream.advance(tokens[start:end], reason if end == len(tokens) else None)
        said.append((content, stream.parsed.reasoning, stream.parsed.tool_calls))
        if stream.stop is not None:
            break
    content, reasoning = ("".join(parts) for parts in list(zip(*said, strict=True))[:2])
    arguments = "".join(call.arguments for *_, calls in said for call in calls)
    return content, reasoning, arguments, stream.reasoning_tokens, stream.stop


def assert_parted(tokenizer, text, *expected, **fields):
    """However it comes; what another stream gave out does not come again."""
    count = len(tokenizer.encode(text))
    for cuts in ((), *((cut,) for cut in range(1, count + 1)), range(1, count + 1)):
        assert read(tokenizer, text, cuts, **fields) == expected
    for resumed in range(1, count):
        rest = read(tokenizer, text, (), resumed=resumed, **fields)
        assert rest[3:] == expected[3:]
        assert all(part.endswith(more) for part, more in zip(expected[:3], rest[:3], strict=True))


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("<think>\nOne\n\ntwo é \n</think>\n\nThree \n", {}, ("Three \n", "One\n\ntwo é", "", 16)),
        ("One</think>\n", {"begun": True}, ("", "One", "", 4)),
        ("<think>One", {}, ("", "One", "", 4)),  # cut by its length
        ("One <think>", {}, ("One ", "", "", 0)),  # it answers at once
        (f"<think>{CALL}</think>Look:\n{CALL}", {}, ("Look:", CALL, '{"a": "é"}', 66)),
        # Stops end the answer.
        ("<think>END</think>aENDb", {"stop": ("END",)}, ("a", "END", "", 5)),
    ],
)
def test_an_output_is_parted_the_same_however_it_comes(tmp_path, text, given, expected):
    tokenizer = byte_tokenizer(tmp_path, added=TOKENS)
    begin, end = map(tokenizer.added_token, TOKENS[:2])
    reasoning = Reasoning(begin, end, begun=given.get("begun", False))
    form, stop = OutputFormat(tokenizer.pieces, reasoning, tools=HERMES), given.get("stop", ())
    ended = "END" if stop else None
    assert_parted(tokenizer, text, *expected, ended, output_format=form, stop=stop)


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_half_a_character_at_the_end_of_reasoning_is_no_answer(tmp_path, cuts):
    tokenizer = byte_tokenizer(tmp_path, added=TOKENS)
    reasoning = Reasoning(*map(tokenizer.added_token, TOKENS[:2]), begun=True)
    output = OutputFormat(tokenizer.pieces, reasoning)
    stream = TextStream(tokenizer, tokenized(output_format=output))
    tokens = [*tokenizer.encode("aé")[:2], 0]
    content = thought = ""
    for start, end in zip((0, *cuts), (*cuts, 3), strict=True):
        content += stream.advance(tokens[start:end], "stop" if end == 3 else None)[0]
        thought += stream.parsed.reasoning
    assert (content, thought, stream.reasoning_tokens) == ("", "a\ufffd", 2)


def test_markers_of_tool_calls_that_are_special_tokens_are_read_and_not_shown(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, added=TOKENS)
    text = "So.[TOOL_CALLS]f[ARGS]{}"
    stream = TextStream(tokenizer, tokenized())
    assert stream.advance(tokenizer.encode(text), "length")[0] == "So.f{}"
    form = OutputFormat(tokenizer.showing(MISTRAL_ARGS.markers), tools=MISTRAL_ARGS)
    assert read(tokenizer, text, (3, 5), output_format=form) == ("So.", "", "{}", 0, None)


@pytest.mark.parametrize("thought", ["<think>Hm. ", "<think>Hm. </think>", "<think>", ""])
def test_the_marker_of_a_call_may_end_reasoning(tmp_path, thought):
    tokenizer = byte_tokenizer(tmp_path, added=TOKENS)
    begin, end, marker, _ = map(tokenizer.added_token, TOKENS)
    pieces = tokenizer.showing(MISTRAL_ARGS.markers)
    reasoning = Reasoning(begin, end)
    form = OutputFormat(pieces, reasoning, tools=MISTRAL_ARGS, implied_end=marker)
    text = f'{thought}[TOOL_CALLS]f[ARGS]{{"a": "é"}}'
    expected = ("", thought[7:10], '{"a": "é"}', len(tokenizer.encode(thought)), None)
    assert_parted(tokenizer, text, *expected, output_format=form)
    # A worker waits for </think>.
    held = read(tokenizer, text, (), output_format=form, reasoning=form.reasoning)
    assert (held[2] == "") == (thought in ("<think>Hm. ", "<think>"))


SAID = (
    "<|channel|>analysis<|message|>Hé? END<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Look. <|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"a": "END"}'
)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (SAID, (), ("Look.", "Hé? END", '{"a": "END"}', 8, None)),
        (SAID, ("END", "channel", "|>"), ("Look.", "Hé? END", '{"a": "END"}', 8, None)),
        (SAID, ("k. ",), ("Loo", "Hé? END", "", 8, "k. ")),
        ("<|channel|>final<|message|>aENDb", ("END",), ("a", "", "", 0, "END")),
        ("aENDb", ("END",), ("a", "", "", 0, "END")),  # it goes on with a message
    ],
)
def test_channels_are_parted_the_same_however_they_come(tmp_path, text, stop, expected):
    tokenizer = byte_tokenizer(tmp_path, added=HARMONY.markers)
    pieces = tokenizer.showing(HARMONY.markers)
    form = OutputFormat(pieces, tools=HARMONY, tool_schemas={"f": {}})
    assert_parted(tokenizer, text, *expected, output_format=form, stop=stop)
