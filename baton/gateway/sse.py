"""Server-sent events: the bytes of events, and a stream's headers.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. A body is JSON, in which
line breaks are escaped, also those that are none in this format but to Python's str.splitlines.
"""

from __future__ import annotations

from baton.net.http_errors import Header

HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)
KEEP_ALIVE_S = 10.0  # after which an idle stream is sent something: proxies would cut it
WAITING = b": waiting\n\n"  # a comment, which clients ignore
DONE = b"data: [DONE]\n\n"  # ends OpenAI's streams of chunks


def one_line(body: bytes) -> bytes:
    """The JSON with Unicode's line breaks escaped, of which clients may take any as an end."""
    if body.isascii():
        return body
    for char in "\x85\u2028\u2029":
        body = body.replace(char.encode(), b"\\u%04x" % ord(char))
    return body


def data(body: bytes) -> bytes:
    """An event without a name."""
    return b"data: " + one_line(body) + b"\n\n"


def event(name: str, body: bytes) -> bytes:
    """An event with a name, which clients dispatch on."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), one_line(body))
