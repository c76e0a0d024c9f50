"""What a router says about itself: models and the state of the cluster, as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from baton.client.completion import transport_name
from baton.v1 import common_pb2, fleet_pb2, inference_pb2, worker_pb2


@dataclass(frozen=True)
class Model:
    """A model that is served."""

    name: str
    max_context: int  # longest sequence in tokens, prompt and output together
    vocab_size: int
    chat: bool  # whether chat messages can be used


def models_of(response: inference_pb2.ListModelsResponse) -> list[Model]:
    """The models a router listed."""
    return [Model(m.name, m.max_context, m.vocab_size, m.chat) for m in response.models]


def status_of(response: fleet_pb2.GetStatusResponse) -> dict[str, Any]:
    """The object that `baton status --json` prints."""
    return {
        "router": _fields(response.router),
        "workers": [_worker(worker) for worker in response.workers],
        "pairs": [_pair(pair) for pair in response.pairs],
    }


def explanation_of(response: fleet_pb2.ExplainResponse) -> dict[str, Any]:
    """The object that `baton explain --json` prints."""
    return _fields(response)


def device_of(record: common_pb2.WorkerRecord) -> str:
    """What a worker computes on: "H100 80GB HBM3", "cpu"."""
    return record.hardware.gpu.name.removeprefix("NVIDIA ") or "cpu"


def _worker(worker: fleet_pb2.WorkerStatus) -> dict[str, Any]:
    record, load = worker.record, worker.load
    return {
        "role": _enum_name(record.DESCRIPTOR.fields_by_name["role"].enum_type, record.role),
        "incarnation": record.incarnation,
        "address": record.address,
        "pid": record.pid,
        "state": worker.state,
        "reason": worker.reason,
        "device": device_of(record),
        "queue_tokens": load.queue_tokens,
        "running": load.running,
        # A worker that has not reported its load yet has registered its pool's size.
        "blocks_total": load.blocks_total or record.blocks_total,
        "blocks_free": load.blocks_free,
        "blocks_cached": load.blocks_cached,
        "blocks_held": load.blocks_held,
        "blocks_quarantined": load.blocks_quarantined,
    }


def _pair(pair: worker_pb2.PairStatus) -> dict[str, Any]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "transport": transport_name(pair.transport),
        "state": pair.state,
    }


def _fields(message: Message) -> dict[str, Any]:
    fields = message.DESCRIPTOR.fields
    return {field.name: _plain(field, getattr(message, field.name)) for field in fields}


def _plain(field: Any, value: Any) -> Any:
    """A field's value as JSON can hold it."""
    if isinstance(value, Message):
        return _fields(value)
    if isinstance(value, Mapping):  # of scalars
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_item(field, item) for item in value]
    return _plain_item(field, value)


def _plain_item(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return _fields(value)
    if field.enum_type is None:
        return value
    return _enum_name(field.enum_type, value)


def _enum_name(enum: Any, value: int) -> str:
    """ "prefill" for WORKER_ROLE_PREFILL; the number where only a newer version has a name."""
    if (known := enum.values_by_number.get(value)) is None:
        return str(value)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return str(known.name).removeprefix(prefix).lower()
