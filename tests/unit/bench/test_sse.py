"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.sse import EventReader

STREAM = (
    'data: {"a": 1}\n\n: ping\n\nevent: x\ndata:two\ndata: lines\n\ndata: é✓\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"two\nlines", "é✓".encode(), b"[DONE]"]


def read(stream: bytes, *cuts: int) -> list[bytes]:
    """The events of a stream that comes in pieces."""
    reader, ends = EventReader(), [*sorted(cuts), len(stream)]
    begins = [0, *ends]
    return [e for b, end in zip(begins, ends, strict=False) for e in reader.feed(stream[b:end])]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
class TestCuts:
    def test_at_every_place(self, end: str) -> None:
        stream = stream_of(end)
        assert all(read(stream, cut) == EVENTS for cut in range(len(stream)))
        assert read(stream, *range(len(stream))) == EVENTS

    @given(st.lists(st.integers(0, len(STREAM)), max_size=8))
    def test_anywhere(self, end: str, cuts: list[int]) -> None:
        assert read(stream_of(end), *cuts) == EVENTS


def stream_of(end: str) -> bytes:
    """The stream with such line ends. A lone CR is one only when no LF follows: something must."""
    return STREAM.replace("\n", end).encode() + b":"


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\ndata: tw")) == [b"one"]
    assert list(reader.feed(b"o\n\n")) == [b"two"]


def test_an_unfinished_event_is_none() -> None:
    assert read(b"data: one\n\ndata: two\n") == [b"one"]
