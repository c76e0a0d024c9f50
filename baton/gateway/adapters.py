"""vLLM's paths that load and unload LoRA adapters on all workers; for operators."""

from __future__ import annotations

import time
from typing import ClassVar

from msgspec import Struct

from baton.errors import DeadlineExceeded, Unavailable
from baton.gateway import openai
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.v1 import fleet_pb2
from router import adapters


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
    began = time.monotonic()
    results = await adapters.load(call.service.models, request, call.caller.time_left_s)
    _answer(call, began, "load", results)


async def _unload(body: UnloadLoraAdapter, call: Call) -> None:
    call.service.check_operator(call.caller)
    request = fleet_pb2.UnloadFleetAdapterRequest(name=body.lora_name)
    began = time.monotonic()
    results = await adapters.unload(call.service.models, request, call.caller.time_left_s)
    _answer(call, began, "unload", results)


def _answer(call: Call, began: float, change: str, results: list[fleet_pb2.AdapterResult]) -> None:
    if failed := [f"{one.worker}: {one.error}" for one in results if one.error]:
        text = f"not all workers did {change} the adapter: {'; '.join(failed)}"
        limit_s = call.caller.time_left_s
        is_late = limit_s is not None and time.monotonic() - began >= limit_s
        raise DeadlineExceeded(text) if is_late else Unavailable(text)
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
