"""The asyncio client: grpc.aio around `baton.client.call`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Self, Unpack

import grpc

from baton.client.call import Attempts, BaseClient, BaseStream
from baton.client.request import (
    WHOLE_INTERVAL,
    Messages,
    Options,
    Prompt,
    canary_request,
    delete_route_request,
    generate_request,
    load_adapter_request,
    pair,
    route_request,
    tokenize_request,
    unload_adapter_request,
)
from baton.client.results import (
    Completion,
    Delta,
    LabelScore,
    Model,
    adapter_results,
    fields_of,
    models_of,
    only_score,
    route_of,
    status_of,
)
from baton.errors import Cancelled
from baton.net import rpc
from baton.v1 import fleet_pb2, inference_pb2, route_pb2

_CLOSED = "the client was closed while the call ran"  # gRPC cancels the task that awaits the call


class AsyncStream(BaseStream, AbstractAsyncContextManager["AsyncStream"]):
    """`baton.client.Stream` for asyncio: an asynchronous iterator of `Delta`.

    Cancelling the task that iterates it cancels the request.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next output. Raises BatonError, whose `partial` is the output so far."""
        while not self._call.over:
            try:
                if self._responses is None:
                    self._responses = self._send(self._call)
                response = await self._responses.read()
            except grpc.RpcError as rpc_error:
                wait_s = self._call.failed(rpc.error_of(rpc_error))
            except asyncio.CancelledError:
                # A call that close() cancels raises the same error in its reader as a cancelled
                # task does; only the task's own cancellation goes on.
                if not _task_is_cancelled() and (
                    self._call.over or self._call.failed(Cancelled(_CLOSED)) is None
                ):
                    break
                self._cancel()
                raise
            else:
                if response is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    if (delta := self._call.received(response)) is not None:
                        return delta
                    continue
                wait_s = self._call.ended()
            self._responses = None
            await asyncio.sleep(wait_s or 0)
        raise StopAsyncIteration

    async def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._cancel()

    async def __aexit__(self, *error: object) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()  # not all versions of grpc.aio cancel a call that is dropped


class AsyncClient(BaseClient, AbstractAsyncContextManager["AsyncClient"]):
    """`baton.Client` for asyncio, with the same methods and parameters, for one event loop.

    async with baton.AsyncClient("127.0.0.1:7700") as client:
        done = await client.generate("def f(", max_tokens=32)
        async for delta in client.stream("def f(", max_tokens=32):
            print(delta.text, end="")
    """

    _grpc: ClassVar[Any] = grpc.aio

    def _here(self) -> Any:
        return super()._here(), asyncio.get_running_loop()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Completes a text, token ids or chat messages; see `Options`."""
        options.setdefault("stream_interval", WHOLE_INTERVAL)
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def chat(self, messages: Messages, **options: Unpack[Options]) -> Completion:
        """Answers a conversation: text, `tool_calls` and `reasoning`."""
        return await self.generate(messages, **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Streams a completion. Raises InvalidRequest before anything is sent."""
        return AsyncStream(self._generate_call(prompt, options), self._send)

    async def embed(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[float, ...]:
        """Embeds a text, token ids or chat messages, as the checkpoint's sentence-transformers
        files say; without them, by the last token's hidden state, normalized."""
        options["max_tokens"], options["embedding"] = 0, True
        return (await self.generate(prompt, **options)).embedding

    async def classify(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[LabelScore, ...]:
        """Classifies a text, token ids or chat messages: the labels of a sequence classification
        model, by index, with their scores."""
        options["max_tokens"], options["classification"] = 0, True
        return (await self.generate(prompt, **options)).labels

    async def score(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        **options: Unpack[Options],
    ) -> float:
        """How relevant a document is for a query, between 0 and 1, as a reranker sees it.

        instruction: what makes it relevant, for rerankers that take one. Raises InvalidRequest for
        a model that has several labels.
        """
        labels = await self.classify(pair(query, document, instruction), **options)
        return only_score(labels)

    async def tokenize(
        self, prompt: Prompt, *, model: str | None = None, timeout: float | None = 10.0
    ) -> list[int]:
        """The token ids of a text or of chat messages, as `generate` would run them."""
        request = tokenize_request(prompt, model)
        return list((await self._unary("Tokenize", request, timeout)).token_ids)

    async def models(self, *, timeout: float | None = 10.0) -> list[Model]:
        """The models that the router serves."""
        request = inference_pb2.ListModelsRequest()
        return models_of(await self._unary("ListModels", request, timeout))

    async def status(self, *, timeout: float | None = 10.0) -> dict[str, Any]:
        """The router's view of the cluster: router, workers, pairs."""
        return status_of(await self._unary("GetStatus", fleet_pb2.GetStatusRequest(), timeout))

    async def explain(self, prompt: Prompt, **options: Unpack[Options]) -> dict[str, Any]:
        """Explains where `generate` would run a request now; nothing is run."""
        request = fleet_pb2.ExplainRequest(request=generate_request(prompt, options))
        return fields_of(await self._unary("Explain", request, options.get("timeout")))

    async def load_adapter(
        self, name: str, directory: str, *, model: str = "", timeout: float | None = 120.0
    ) -> dict[str, str]:
        """Loads a LoRA adapter on all workers of a model, by default the router's first.

        directory: on each worker's host. By worker why it refused, or an empty text.
        """
        request = load_adapter_request(name, directory, model)
        return adapter_results(await self._unary("LoadFleetAdapter", request, timeout))

    async def unload_adapter(
        self, name: str, *, wait_s: float = 0.0, timeout: float | None = 120.0
    ) -> dict[str, str]:
        """Unloads a LoRA adapter from all workers, as `load_adapter` loads it.

        wait_s: for sequences that use it; 0: as long as workers drain.
        """
        request = unload_adapter_request(name, wait_s)
        return adapter_results(await self._unary("UnloadFleetAdapter", request, timeout))

    async def routes(self, *, timeout: float | None = 10.0) -> list[dict[str, Any]]:
        """The routes of model names, as `baton route --json` prints them. For operators."""
        request = route_pb2.ListRoutesRequest()
        return list(map(route_of, (await self._unary("ListRoutes", request, timeout)).routes))

    async def set_route(
        self, name: str, targets: Mapping[str, float], *, timeout: float | None = 10.0
    ) -> dict[str, Any]:
        """Sets a route: weights by "chat@v1", by a version of `name`, or by another name."""
        request = route_request(name, targets)
        return route_of((await self._unary("SetRoute", request, timeout)).route)

    async def start_canary(
        self, name: str, target: str, *, timeout: float | None = 10.0, **settings: Any
    ) -> dict[str, Any]:
        """Begins a canary of a version; `settings` are fields of the message `Canary`."""
        request = canary_request(name, target, settings)
        return route_of((await self._unary("SetRoute", request, timeout)).route)

    async def delete_route(self, name: str, *, timeout: float | None = 10.0) -> None:
        """Removes a route."""
        await self._unary("DeleteRoute", delete_route_request(name), timeout)

    async def close(self) -> None:
        """Closes the connections; running calls are cancelled."""
        self._closed = True
        if self._is_away:
            return
        for call in list(self._calls):  # gRPC does not end all of them
            call.cancel()
        for channel in self._channels.values():
            await channel.close(None)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _unary(self, method: str, request: Any, timeout: float | None) -> Any:
        attempts = Attempts(self, timeout)
        while True:
            try:
                return await self._send_unary(attempts, method, request)
            except grpc.RpcError as rpc_error:
                wait_s = attempts.failed(rpc.error_of(rpc_error))
            except asyncio.CancelledError:
                if self._closed and not _task_is_cancelled():
                    raise Cancelled(_CLOSED) from None
                raise
            await asyncio.sleep(wait_s)


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
