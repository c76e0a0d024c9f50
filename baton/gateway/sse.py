"""Server-sent events: the bytes of events, and a stream's headers.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. A body is JSON, in which
line breaks are escaped.
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


def data(body: bytes) -> bytes:
    """An event without a name."""
    return b"data: " + body + b"\n\n"


def event(name: str, body: bytes) -> bytes:
    """An event with a name, which clients dispatch on."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
