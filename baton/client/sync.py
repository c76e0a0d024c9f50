"""The blocking client: grpc around `baton.client.call`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self, Unpack

import grpc

from baton.client.call import Attempts, BaseClient, BaseStream, GenerateCall
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
from baton.net import rpc
from baton.v1 import fleet_pb2, inference_pb2, route_pb2


class Stream(BaseStream, AbstractContextManager["Stream"]):
    """A streamed completion: an iterator of `Delta`.

    The request is sent when the iteration begins; after its end, `completion` is complete. Closing
    the stream early (`close()`, leaving its `with` block, dropping it) cancels the request.
    """

    def __init__(self, call: GenerateCall, send: Callable[[GenerateCall], Any]) -> None:
        super().__init__(call, send)
        self._closed = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """The next output. Raises BatonError, whose `partial` is the output so far."""
        while not self._call.over:
            try:
                if self._responses is None:
                    self._responses = self._send(self._call)
                    if (
                        self._call.over
                    ):  # another thread closed it before there was a call to cancel
                        self._responses.cancel()
                delta = self._call.received(next(self._responses))
            except StopIteration:
                wait_s = self._call.ended()
            except grpc.RpcError as rpc_error:
                wait_s = self._call.failed(rpc.error_of(rpc_error))
            else:
                if delta is not None:
                    return delta
                continue
            self._responses = None
            self._closed.wait(wait_s or 0)
        raise StopIteration

    def close(self) -> None:
        """Cancels the request if it has not ended; may be called from any thread."""
        self._cancel()
        self._closed.set()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client(BaseClient, AbstractContextManager["Client"]):
    """A client of one or several routers of a cluster. Safe to share between threads, not a fork.

    `target`: "host:port", several separated by commas, or a sequence of them. One is called at
    random, and another one if it is unavailable or overloaded. `ca_file`: certificates to trust,
    which turns TLS on; `cert_file` and `key_file`: for routers that need a client's certificate;
    `api_key`: sent as a bearer token.

        with baton.Client("127.0.0.1:7700") as client:
            print(client.generate("def f(", max_tokens=32).text)
            for delta in client.stream("def f(", max_tokens=32):
                print(delta.text, end="")

    Every method raises `baton.errors.BatonError`; DeadlineExceeded is also a TimeoutError.
    Unavailable and Overloaded are retried with backoff before they are raised. A broken stream
    continues behind the tokens received; see `RetryPolicy`.
    """

    _grpc: ClassVar[Any] = grpc

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Completes a text, token ids or chat messages; see `Options`.

        client.generate([{"role": "user", "content": "Hello"}], max_tokens=32, temperature=0.7)
        """
        options.setdefault("stream_interval", WHOLE_INTERVAL)
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Completion:
        """Answers a conversation: text, `tool_calls` and `reasoning`."""
        return self.generate(messages, **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Streams a completion. Raises InvalidRequest before anything is sent."""
        return Stream(self._generate_call(prompt, options), self._send)

    def embed(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[float, ...]:
        """Embeds a text, token ids or chat messages, as the checkpoint's sentence-transformers
        files say; without them, by the last token's hidden state, normalized."""
        options["max_tokens"], options["embedding"] = 0, True
        return self.generate(prompt, **options).embedding

    def classify(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[LabelScore, ...]:
        """Classifies a text, token ids or chat messages: the labels of a sequence classification
        model, by index, with their scores."""
        options["max_tokens"], options["classification"] = 0, True
        return self.generate(prompt, **options).labels

    def score(
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
        labels = self.classify(pair(query, document, instruction), **options)
        return only_score(labels)

    def tokenize(
        self, prompt: Prompt, *, model: str | None = None, timeout: float | None = 10.0
    ) -> list[int]:
        """The token ids of a text or of chat messages, as `generate` would run them."""
        request = tokenize_request(prompt, model)
        return list(self._unary("Tokenize", request, timeout).token_ids)

    def models(self, *, timeout: float | None = 10.0) -> list[Model]:
        """The models that the router serves."""
        return models_of(self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout))

    def status(self, *, timeout: float | None = 10.0) -> dict[str, Any]:
        """The router's view of the cluster: router, workers, pairs."""
        return status_of(self._unary("GetStatus", fleet_pb2.GetStatusRequest(), timeout))

    def explain(self, prompt: Prompt, **options: Unpack[Options]) -> dict[str, Any]:
        """Explains where `generate` would run a request now; nothing is run."""
        request = fleet_pb2.ExplainRequest(request=generate_request(prompt, options))
        return fields_of(self._unary("Explain", request, options.get("timeout")))

    def load_adapter(
        self, name: str, directory: str, *, model: str = "", timeout: float | None = 120.0
    ) -> dict[str, str]:
        """Loads a LoRA adapter on all workers of a model, by default the router's first.

        directory: on each worker's host. By worker why it refused, or an empty text.
        """
        request = load_adapter_request(name, directory, model)
        return adapter_results(self._unary("LoadFleetAdapter", request, timeout))

    def unload_adapter(
        self, name: str, *, wait_s: float = 0.0, timeout: float | None = 120.0
    ) -> dict[str, str]:
        """Unloads a LoRA adapter from all workers, as `load_adapter` loads it.

        wait_s: for sequences that use it; 0: as long as workers drain.
        """
        request = unload_adapter_request(name, wait_s)
        return adapter_results(self._unary("UnloadFleetAdapter", request, timeout))

    def routes(self, *, timeout: float | None = 10.0) -> list[dict[str, Any]]:
        """The routes of model names, as `baton route --json` prints them. For operators."""
        request = route_pb2.ListRoutesRequest()
        return list(map(route_of, (self._unary("ListRoutes", request, timeout)).routes))

    def set_route(
        self, name: str, targets: Mapping[str, float], *, timeout: float | None = 10.0
    ) -> dict[str, Any]:
        """Sets a route: weights by "chat@v1", by a version of `name`, or by another name."""
        request = route_request(name, targets)
        return route_of((self._unary("SetRoute", request, timeout)).route)

    def start_canary(
        self, name: str, target: str, *, timeout: float | None = 10.0, **settings: Any
    ) -> dict[str, Any]:
        """Begins a canary of a version; `settings` are fields of the message `Canary`."""
        request = canary_request(name, target, settings)
        return route_of((self._unary("SetRoute", request, timeout)).route)

    def delete_route(self, name: str, *, timeout: float | None = 10.0) -> None:
        """Removes a route."""
        self._unary("DeleteRoute", delete_route_request(name), timeout)

    def close(self) -> None:
        """Closes the connections; running calls are cancelled."""
        self._closed = True
        if self._is_away:
            return
        for channel in self._channels.values():
            channel.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _unary(self, method: str, request: Any, timeout: float | None) -> Any:
        attempts = Attempts(self, timeout)
        while True:
            try:
                return self._send_unary(attempts, method, request)
            except grpc.RpcError as rpc_error:
                wait_s = attempts.failed(rpc.error_of(rpc_error))
            threading.Event().wait(wait_s)
