"""vLLM's paths that load and unload LoRA adapters on all workers; for operators."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from msgspec import Struct

from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from baton.gateway import openai
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.headers import TIMEOUT_HEADER
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.net import rpc
from baton.v1 import fleet_pb2
from router import adapters

# Fields of bodies by those of the workers' and the router's errors.
_FIELDS = {"name": "lora_name", "directory": "lora_path", "model": "base_model_name"}


class LoadLoraAdapter(Struct, kw_only=True):
    """An adapter's name for requests, and its directory on each worker's host."""

    unsupported: ClassVar[openai.Unsupported] = {}

    lora_name: openai.ModelName
    lora_path: str
    base_model_name: openai.ModelName | None = None


class UnloadLoraAdapter(Struct, kw_only=True):
    """The name of an adapter."""

    unsupported: ClassVar[openai.Unsupported] = {}

    lora_name: openai.ModelName


class AdapterChanged(Struct):
    """The error of each worker by incarnation; empty where it succeeded."""

    object: str
    workers: dict[str, str]


async def _load(body: LoadLoraAdapter, call: Call) -> None:
    call.service.check_operator(call.caller)
    request = fleet_pb2.LoadFleetAdapterRequest(
        name=body.lora_name, directory=body.lora_path, model=body.base_model_name or ""
    )
    with _fields_of_body():
        results = await adapters.load(call.service.models, request, _time_left_s(call))
        _answer(call, "load", results)


async def _unload(body: UnloadLoraAdapter, call: Call) -> None:
    call.service.check_operator(call.caller)
    request = fleet_pb2.UnloadFleetAdapterRequest(name=body.lora_name)
    with _fields_of_body(model="lora_name"):
        results = await adapters.unload(call.service.models, request, _time_left_s(call))
        _answer(call, "unload", results)


def _time_left_s(call: Call) -> float | None:
    """None where the caller has no deadline: adapters may take longer than what is generated."""
    if TIMEOUT_HEADER.encode() not in call.exchange.headers:
        return None
    return max(0.0, call.service.deadline_of(call.caller) - time.monotonic())


@contextmanager
def _fields_of_body(model: str = "base_model_name") -> Iterator[None]:
    """Names the fields of errors as the body does; `model`: that of a model not found."""
    try:
        yield
    except InvalidRequest as error:
        raise error.renamed(_FIELDS.get(error.field, error.field)) from error
    except ModelNotFound as error:
        raise ModelNotFound(str(error), model) from error


def _answer(call: Call, change: str, results: list[fleet_pb2.AdapterResult]) -> None:
    """Raises the error of a worker if one refused: one that will recur before one that may not."""
    if failed := [one for one in results if one.error]:
        reasons = "; ".join(f"{one.worker}: {one.error}" for one in failed)
        text = f"not all workers did {change} the adapter: {reasons}"
        kinds = {rpc.error_class(one.code): one.field for one in failed}
        if InvalidRequest in kinds:
            raise InvalidRequest(text, kinds[InvalidRequest])
        if ModelNotFound in kinds:
            raise ModelNotFound(text)
        raise DeadlineExceeded(text) if DeadlineExceeded in kinds else Unavailable(text)
    workers = {one.worker: one.error for one in results}
    call.answer(AdapterChanged("adapter", workers))


ROUTES: Routes = {
    "/v1/load_lora_adapter": {"POST": Operation(
        Endpoint(lambda body: openai.decode(LoadLoraAdapter, body), _load),
        "Load a LoRA adapter on all workers.", AdapterChanged, ERRORS, LoadLoraAdapter,
    )},
    "/v1/unload_lora_adapter": {"POST": Operation(
        Endpoint(lambda body: openai.decode(UnloadLoraAdapter, body), _unload),
        "Unload a LoRA adapter.", AdapterChanged, ERRORS, UnloadLoraAdapter,
    )},
}  # fmt: skip
