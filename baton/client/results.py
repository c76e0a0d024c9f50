"""The values that clients return: completions, models, the state of the cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from baton.config import shown_name
from baton.errors import InvalidRequest
from baton.generation.enum_names import FinishReason
from baton.generation.tool_call import ToolCallDelta
from baton.v1 import common_pb2, fleet_pb2, inference_pb2, route_pb2, worker_pb2

C = TypeVar("C")
_RECORD = ("role", "model", "version", "incarnation", "address", "pid")
_LOAD = (
    *("queue_tokens", "running"),
    *("blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined"),
)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    rank: int | None = None  # of a prompt's token; 1 is the likeliest


@dataclass(frozen=True)
class ToolCall:
    """A call that the model requests; `arguments` is a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """New output. `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    reasoning_tokens: int = 0  # part of completion_tokens


@dataclass(frozen=True)
class Timing:
    """Durations measured by the router, milliseconds, and the bytes of KV transferred."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0


@dataclass(frozen=True)
class Route:
    """Incarnations of the workers that served a request; None for a role not needed."""

    prefill: str | None = None
    decode: str | None = None
    transport: str | None = None
    attempts: int = 0


@dataclass(frozen=True)
class LabelScore:
    """How well a label fits a prompt: the model's logit, and a score between 0 and 1; of a
    regression, the score is the logit."""

    name: str
    logit: float
    score: float


def only_score(labels: Sequence[LabelScore]) -> float:
    """The score of the only label. Raises InvalidRequest if there are several."""
    if len(labels) != 1:
        raise InvalidRequest(
            f"this model has {len(labels)} labels, and a score is of one: use classify", "model"
        )
    return labels[0].score


@dataclass(frozen=True)
class Completion:
    """A completion. Only the partial one of a failed request has no `finish_reason`.

    `stop` is the stop string that ended the output, or empty. `logprobs` and `prompt_logprobs` are
    empty unless requested; a prompt's first token has none. `reasoning` precedes the answer, which
    is `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] = ()
    labels: tuple[LabelScore, ...] = ()
    usage: Usage = Usage()
    timing: Timing = Timing()
    route: Route = Route()
    trace_id: str = ""
    request_id: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's turn, to append to the messages of the next call."""
        calls = [asdict(call) for call in self.tool_calls]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}

    def to_dict(self) -> dict[str, Any]:
        """The object that `baton generate --json` prints."""
        plain = asdict(self) | {"token_ids": list(self.token_ids)}
        names = ("text", "token_ids", "finish_reason", "usage", "timing", "route", "trace_id")
        return {name: plain[name] for name in names}


def transport_name(transport: int) -> str | None:
    """The transport's name, as "shm"; None if unspecified, the number if unknown here."""
    return _enum_name(common_pb2.Transport.DESCRIPTOR, transport) if transport else None


def delta_of(message: inference_pb2.Delta) -> Delta:
    """Converts a message of a stream."""
    logprobs = [
        TokenLogprobs(
            position.chosen.token_id,
            position.chosen.logprob,
            tuple((token.token_id, token.logprob) for token in position.top),
        )
        for position in message.logprobs
    ]
    return Delta(
        message.text,
        tuple(message.token_ids),
        tuple(logprobs),
        message.reasoning,
        tuple(from_message(ToolCallDelta, call) for call in message.tool_calls),
    )


def tool_calls_of(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    """Joins the pieces of a stream's tool calls."""
    calls: dict[int, ToolCall] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        call = calls.get(piece.index) or ToolCall(piece.id, piece.name, "")
        calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)
    return tuple(calls.values())


def prompt_logprobs_of(message: common_pb2.PromptLogprobs) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of a prompt's tokens; empty if the message is."""
    width = len(message.top_ids) // max(1, len(message.logprobs))
    likeliest = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    rows = zip(message.token_ids[1:], message.logprobs, message.ranks, strict=True)
    found = (
        TokenLogprobs(token_id, logprob, likeliest[at * width : (at + 1) * width], rank)
        for at, (token_id, logprob, rank) in enumerate(rows)
    )
    return (None, *found) if message.token_ids else ()


def from_message(cls: type[C], message: Message) -> C:
    """Builds a dataclass from the message's fields of the same names."""
    return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Model:
    """A served model."""

    name: str
    max_context: int  # longest sequence in tokens, prompt and output together
    vocab_size: int
    chat: bool  # whether it accepts chat messages
    root: str = ""  # what the name stands for, as "chat@v1"
    parent: str = ""  # of a LoRA adapter, the model that it adapts


def models_of(response: inference_pb2.ListModelsResponse) -> list[Model]:
    """Converts a list of models."""
    return [from_message(Model, model) for model in response.models]


def adapter_results(
    response: fleet_pb2.LoadFleetAdapterResponse | fleet_pb2.UnloadFleetAdapterResponse,
) -> dict[str, str]:
    """The error of each worker by incarnation; empty where it succeeded."""
    return {one.worker: one.error for one in response.results}


def status_of(response: fleet_pb2.GetStatusResponse) -> dict[str, Any]:
    """The object that `baton status --json` prints."""
    return {
        "router": _router(response.router),
        "workers": [_worker(worker) for worker in response.workers],
        "pairs": [_pair(pair) for pair in response.pairs],
        "siblings": [_router(router) for router in response.siblings],
    }


def _router(router: fleet_pb2.RouterStatus) -> dict[str, Any]:
    plan = fields_of(router.plan) if router.HasField("plan") else None
    return {
        **fields_of(router),
        "routes": [route_of(one) for one in router.routes],
        "plan": plan,
    }


def device_of(record: common_pb2.WorkerRecord) -> str:
    """A worker's device: "H100 80GB HBM3", "2 H100 80GB HBM3" for two ranks, or "cpu"."""
    name = record.hardware.gpu.name.removeprefix("NVIDIA ")
    return f"{record.kv_pools} {name}" if name and record.kv_pools > 1 else name or "cpu"


def _worker(worker: fleet_pb2.WorkerStatus) -> dict[str, Any]:
    record, load = fields_of(worker.record), fields_of(worker.load)
    return {
        **{name: record[name] for name in _RECORD},
        "state": worker.state,
        "reason": worker.reason,
        "device": device_of(worker.record),
        "adapters": record["adapters"],
        **{name: load[name] for name in _LOAD},
        # Before its first load report, a worker's record has the size of its pool.
        "blocks_total": load["blocks_total"] or record["blocks_total"],
    }


def route_of(route: route_pb2.ModelRoute) -> dict[str, Any]:
    """A route as `baton route --json` prints it: percents by target, and its canary or None."""
    canary = None
    if route.HasField("canary"):
        canary = fields_of(route.canary)
        canary["target"] = _target_name(route.canary.target)
        canary["before"] = _shares(route.canary.before)
    return {
        "name": route.name,
        "targets": _shares(route.targets),
        "canary": canary,
        "changed_ms": route.changed_ms,
    }


def _shares(targets: Sequence[route_pb2.RouteTarget]) -> dict[str, float]:
    total = sum(one.weight for one in targets) or 1.0
    return {_target_name(one): 100 * one.weight / total for one in targets}


def _target_name(target: route_pb2.RouteTarget) -> str:
    return shown_name(target.model, target.version)


def _pair(pair: worker_pb2.PairStatus) -> dict[str, Any]:
    names = ("prefill", "decode", "state", "sent_bytes", "fallback")
    return {
        **{name: getattr(pair, name) for name in names},
        "transport": transport_name(pair.transport),
        "gb_per_s": gb_per_s(pair),
    }


def gb_per_s(pair: worker_pb2.PairStatus) -> float | None:
    """The mean rate of a link's transfers; None before the first handoff."""
    return round(pair.sent_bytes / pair.sent_ms / 1e6, 3) if pair.sent_ms else None


def fields_of(message: Message) -> dict[str, Any]:
    """Converts a message to values for JSON, as `baton explain --json` prints them."""
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return fields_of(value)
    if isinstance(value, Mapping):  # a map of scalars
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(field, item) for item in value]
    return value if field.enum_type is None else _enum_name(field.enum_type, value)


def _enum_name(enum: Any, value: int) -> str:
    """The short name, as "prefill" for WORKER_ROLE_PREFILL; the number if unknown here."""
    if (known := enum.values_by_number.get(value)) is None:
        return str(value)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return str(known.name).removeprefix(prefix).lower()
