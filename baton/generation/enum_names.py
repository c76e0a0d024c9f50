"""The names that APIs and files use for enum values of the protocol."""

from __future__ import annotations

from typing import Literal

from baton.v1 import common_pb2

FinishReason = Literal["stop", "length", "tool_calls"]

PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
FINISH_REASONS: dict[int, FinishReason | None] = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
