"""The application: paths and methods."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib import metadata
from typing import Any

import msgspec

from baton import http_server
from baton.errors import InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import api
from baton.gateway.embeddings import embed, parse_embeddings
from baton.gateway.generation import Endpoint, generate
from baton.gateway.headers import caller_of, id_headers
from baton.gateway.openapi import document
from baton.gateway.output import ChatOutput, CompletionOutput, shown
from baton.gateway.request import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from baton.http_errors import HttpError
from baton.http_server import HttpExchange
from baton.v1 import inference_pb2
from router.frontend import Caller, GenerationService
from router.main import Frontend

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
MAX_REQUESTS = 2048  # that generate, waiting or running
_RETRY_AFTER_S = 1.0
_MODEL = "/v1/models/"  # and a name


def frontend(host: str, port: int, *, shared: bool = False) -> Frontend:
    """HTTP at `host`:`port`, perhaps `shared` with other processes, for `router.main.run`.

    Listens at once, so that a port in use is a ConfigError before anything has begun; where it is
    `shared` only once it serves: siblings take connections until then.
    """
    listen = partial(http_server.listen, host, port, "HTTP", "--http-port", shared=shared)
    listener = None if shared else listen()
    return lambda service: serving(service, listener or listen())


@contextlib.asynccontextmanager
async def serving(service: GenerationService, listener: socket.socket) -> AsyncIterator[None]:
    """The API over one service, while inside."""
    async with http_server.serving(App(service), listener, MAX_CONNECTIONS) as port:
        log.info("HTTP at %s", port.url)
        service.on_leave.append(port.leave)
        yield


class App:
    """The API over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._num_posts = 0  # being answered
        self._posts: dict[str, Callable[[HttpExchange], Awaitable[None]]] = {
            "/v1/completions": Endpoint(
                service, parse_completion, partial(generate, CompletionOutput)
            ),
            "/v1/chat/completions": Endpoint(service, parse_chat, partial(generate, ChatOutput)),
            "/v1/embeddings": Endpoint(service, parse_embeddings, embed),
            "/tokenize": Endpoint(service, parse_tokenize, _tokenize),
            "/detokenize": Endpoint(service, parse_detokenize, _detokenize),
        }
        openapi = document()
        self._gets: dict[str, Callable[[HttpExchange], Any]] = {
            "/v1/models": lambda exchange: api.Models(self._models(exchange)),
            "/health": lambda exchange: api.Status("ok"),
            "/ready": lambda exchange: self._ready(),
            "/version": lambda exchange: api.Version(metadata.version("baton-serving")),
            "/openapi.json": lambda exchange: openapi,
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        exchange.answer_headers = id_headers(exchange)
        method, path = exchange.method, exchange.path
        if path not in (*self._posts, *self._gets, "/metrics") and not path.startswith(_MODEL):
            raise HttpError(404, f"{method} {path}: there is no such path")
        allowed = "POST" if path in self._posts else "GET, HEAD"
        if method == "OPTIONS":  # CORS is not offered
            exchange.answer(204, b"", [(b"allow", f"{allowed}, OPTIONS".encode())])
        elif method not in allowed.split(", "):
            allow = ((b"allow", allowed.encode()),)
            raise HttpError(405, f"{method} {path}: this path takes {allowed}", allow)
        elif path in self._posts:
            await self._post(path, exchange)
        elif path == "/metrics":
            self._service.check_operator(caller_of(exchange))
            accept = exchange.headers.get(b"accept", b"").decode("latin-1")
            kind, page = self._service.metrics_page(accept)
            exchange.answer(200, page, kind=(b"content-type", kind.encode()))
        else:
            found = self._gets[path] if path in self._gets else partial(self._model, path)
            exchange.answer(200, msgspec.json.encode(found(exchange)))

    async def _post(self, path: str, exchange: HttpExchange) -> None:
        if self._num_posts >= MAX_REQUESTS:
            raise Unavailable("too many requests at a time", _RETRY_AFTER_S)
        self._num_posts += 1
        try:
            await self._posts[path](exchange)
        finally:
            self._num_posts -= 1

    def _models(self, exchange: HttpExchange) -> list[api.Model]:
        models = self._service.models(caller_of(exchange))
        return [api.Model(model.name, model.max_context) for model in models]

    def _model(self, path: str, exchange: HttpExchange) -> api.Model:
        name = path.removeprefix(_MODEL)
        for model in self._models(exchange):
            if model.id == name:
                return model
        raise ModelNotFound(f"model {quoted(name)} is not served here")

    def _ready(self) -> api.Status:
        if why_not := self._service.why_not_ready:
            raise Unavailable(why_not, _RETRY_AFTER_S)
        return api.Status("ready")


async def _tokenize(
    service: GenerationService,
    parsed: tuple[inference_pb2.TokenizeRequest, bool],
    caller: Caller,
    exchange: HttpExchange,
) -> None:
    request, with_strings = parsed
    try:
        found = await service.tokenize(request, caller)
    except InvalidRequest as error:
        field = "prompt" if request.HasField("text") else "messages"
        raise InvalidRequest(str(error), field) from error
    tokens = list(found.token_ids)
    strings = [shown(service.tokenizer, token)[0] for token in tokens] if with_strings else None
    answer = api.Tokens(len(tokens), found.max_context, tokens, strings)
    exchange.answer(200, msgspec.json.encode(answer))


async def _detokenize(
    service: GenerationService,
    asked: api.DetokenizeRequest,
    caller: Caller,
    exchange: HttpExchange,
) -> None:
    text = await service.detokenize(asked.model or "", asked.tokens, caller)
    exchange.answer(200, msgspec.json.encode(api.Detokenized(text)))
