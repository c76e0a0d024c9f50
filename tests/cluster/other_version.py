"""`python -m tests.cluster.other_version KIND router|prefill-worker|decode-worker …`.

The real command, but what it sends, to processes and to etcd, is what another version would send:

newer         every message, and every message within one, has a field that this version lacks
older         optional fields are missing
incompatible  KV blocks are laid out in another way

For the first message of each type it prints a line, "sends TYPE".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from baton.net import message_stream

# Field 1999 of type string: its key, length and value.
_UNKNOWN = b"\xfa\x7c\x05newer"
# What a receiver must do without: measurements, reports, and what stands for "not given".
_OPTIONAL = {
    "WorkerRecord": ("hardware",),
    "Load": ("step_age_ms", "tokens_computed", "tokens_generated", "preemptions"),
    "SequenceSpec": ("virtual_finish_ms", "prompt_us"),
    "ReserveRequest": ("local_prefill_max_tokens",),
    "OfferRequest": ("reachable_gpus",),
    "PrefillStarted": ("queue_ms",),
    "PrefillCommitted": ("transfer_ms",),
    "LoadReport": ("pairs",),
    "DescribeResponse": ("pairs",),
    "GenerateRequest": ("ttft_target_ms", "priority"),
    "RouterStatus": ("counts", "latency", "events", "otlp"),
    "Timing": ("transfer_ms",),
}


def changed(message: Any, kind: str) -> Any:
    """A copy as a process of that version would send it."""
    copy = type(message)()
    copy.CopyFrom(message)
    _change(copy, kind)
    return copy


def _change(message: Any, kind: str) -> None:
    name = message.DESCRIPTOR.name
    for field in _OPTIONAL.get(name, ()) if kind == "older" else ():
        message.ClearField(field)
    if kind == "incompatible" and name == "KvDescriptor":
        message.layout_version += 1
    for _, value in message.ListFields():
        for part in [value] if isinstance(value, Message) else _elements(value):
            _change(part, kind)
    if kind == "newer":
        message.MergeFromString(_UNKNOWN)


def _elements(value: Any) -> list[Any]:
    """The messages of a repeated field."""
    repeated = list(value) if hasattr(value, "append") else []
    return [one for one in repeated if isinstance(one, Message)]


def install(kind: str) -> None:
    """From now on this process sends what that version would."""
    seen = set()

    def says(message: Any) -> None:
        if message.DESCRIPTOR.name not in seen:
            seen.add(message.DESCRIPTOR.name)
            print(f"sends {message.DESCRIPTOR.name}", flush=True)

    def speaking(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def serialized(message: Any) -> bytes:
            says(message)
            return serialize(changed(message, kind))

        return serialized

    for shape in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        _wrap(grpc, f"{shape}_rpc_method_handler", "response_serializer", speaking)
        _wrap(grpc.aio._channel.Channel, shape, "request_serializer", speaking)
    serialized = message_stream.serialized

    def serialized_message(message: Any) -> bytes:
        says(message)
        return serialized(changed(message, kind))

    message_stream.serialized = serialized_message
    to_json = json_format.MessageToJson

    def record(message: Any, **options: Any) -> str:
        fields = json.loads(to_json(changed(message, kind), **options))
        return json.dumps({**fields, **({"newerField": {"a": [1]}} if kind == "newer" else {})})

    json_format.MessageToJson = record


def _wrap(owner: Any, name: str, argument: str, wrap: Callable[[Any], Any]) -> None:
    """`owner.name` with what its callers give for `argument` wrapped."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if options.get(argument) is not None:
            options[argument] = wrap(options[argument])
        return original(*args, **options)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    install(sys.argv.pop(1))
    from baton.cli.main import main

    sys.exit(main())
