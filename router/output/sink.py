"""The interface to a protocol: where the output of one request goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.errors import Cancelled
from baton.v1 import common_pb2, inference_pb2
from router.output.output_parser import ParsedOutput

# Limits on output that waits because a caller reads slowly.
MAX_UNREAD_BYTES = 1 << 20
UNREAD_S = 10.0


class Piece(NamedTuple):
    """New output of one request."""

    text: str  # content
    token_ids: Sequence[int] = ()
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    stop: str = ""  # the stop string that ended the output
    parsed: ParsedOutput | None = None  # reasoning and tool calls, if the output has a format


class Sink(Protocol):
    """Receives the output of one request. Event-loop thread only."""

    def start(self, started: inference_pb2.Started) -> None:
        """Called when the request is admitted."""

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        """Receives the prompt's log-probabilities, if requested, before any output."""

    def put(self, piece: Piece) -> None:
        """Receives new output, without waiting. Raises Cancelled if too much of it is unread."""

    async def finish(self, finish: inference_pb2.Finish) -> None:
        """Returns when the caller has received everything, as far as that can be known.

        Raises Cancelled if it does not read for too long.
        """


class UnreadLimit:
    """Limits how much output a caller leaves unread, and for how long."""

    def __init__(self) -> None:
        self._waiting = 0
        self._max_bytes = MAX_UNREAD_BYTES
        self._read_at = 0.0  # when the caller was last seen to read

    def allow(self, num_bytes: int) -> None:
        """Raises the limit for a burst, which arrives faster than any client reads."""
        self._max_bytes += num_bytes

    def add(self, waiting: int, new: int) -> None:
        """Counts `new` bytes of output behind `waiting` unread ones.

        Raises Cancelled if that is too much, or if nothing was read for too long.
        """
        now = time.monotonic()
        if not waiting or waiting < self._waiting or not self._waiting:  # or it is the first
            self._read_at = now
        self._waiting = waiting + new
        if self._waiting > self._max_bytes:
            raise Cancelled(f"the caller left {self._max_bytes >> 10} KiB of output unread")
        if now - self._read_at > UNREAD_S:
            raise unread_too_long()


def unread_too_long() -> Cancelled:
    """The error that ends a request whose caller reads nothing."""
    return Cancelled(f"the caller did not read its output for {UNREAD_S:.0f} s")
