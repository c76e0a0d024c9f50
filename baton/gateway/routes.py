"""The application: paths and methods."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from baton.config import ApiConfig, RouterConfig
from baton.errors import InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import api, batch_store, batches
from baton.gateway.batches import BatchApi
from baton.gateway.embeddings import embed, parse_embeddings
from baton.gateway.generation import CompletionGeneration, Endpoint, generate
from baton.gateway.headers import (
    ALLOW_ORIGIN,
    caller_of,
    cors_headers,
    id_headers,
    preflight_headers,
)
from baton.gateway.openapi import ERRORS, Handler, Route, Routes, document
from baton.gateway.output import ChatOutput, CompletionOutput, shown
from baton.gateway.output_responses import Response, ResponseGeneration
from baton.gateway.request import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from baton.gateway.responses import ResponsesRequest, parse_response
from baton.net import http_server
from baton.net.http_errors import Header, HttpError
from baton.net.http_server import HttpExchange
from baton.v1 import inference_pb2
from router.generation_service import Caller, GenerationService
from router.main import Frontend

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_MODEL = "/v1/models/"  # and a name
_PAGE = Path(__file__).with_name("chat.html").read_bytes()  # to try a model in a browser


def frontend(config: RouterConfig) -> Frontend:
    """HTTP at `config.http_port`, for `router.main.run`.

    Listens at once, so that a port in use is a ConfigError before anything has begun; connections
    wait until it serves.
    """
    where = config.host, config.http_port
    if config.api.batch_dir:
        batch_store.prepare(config.api.batch_dir)
    listener = http_server.listen(*where, "HTTP", "--http-port")
    return lambda service: serving(service, listener, config.api)


@contextlib.asynccontextmanager
async def serving(
    service: GenerationService, listener: socket.socket, config: ApiConfig
) -> AsyncIterator[None]:
    """The API over one service, while inside."""
    app = App(service, config)
    async with (
        http_server.serving(
            app, listener, config.max_http_connections, config.allowed_hosts
        ) as port,
        app.batches.running(),
    ):
        log.info("HTTP at %s", port.url)
        service.on_leave.append(port.hand_over)
        yield


def _headers_of_page() -> list[Header]:
    """Lets the page run its own script and style, and call this server; nothing else."""

    def sources(tag: bytes) -> str:
        parts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), _PAGE, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part).digest()) for part in parts)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {sources(b'script')}; style-src {sources(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]


_PAGE_HEADERS = _headers_of_page()


class App:
    """The API over one service."""

    def __init__(self, service: GenerationService, config: ApiConfig) -> None:
        self._service = service
        self._origins = config.cors_origins
        self._max_posts = config.max_http_requests
        self._num_posts = 0  # being answered
        for_batches: dict[str, Any] = {  # endpoints
            path: methods["POST"].handler
            for path, methods in ROUTES.items()
            if path.startswith("/v1/") and "POST" in methods
        }
        self.batches = BatchApi(service, config, for_batches)
        owners = (service, ROUTES), (self.batches, batches.ROUTES)
        self._handlers: dict[str, dict[str, Handler]] = {
            path: {method: partial(route.handler, owner) for method, route in methods.items()}
            for owner, routes in owners
            for path, methods in routes.items()
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        exchange.path = exchange.path.rstrip("/") or "/"
        if not self._service.joins_traces:
            exchange.headers.pop(b"traceparent", None)
        cors = cors_headers(exchange, self._origins)
        exchange.answer_headers = {**cors, **id_headers(exchange)}
        method, path = exchange.method, exchange.path
        if not (handlers := self._handlers.get(path) or self._handlers.get(_pattern(path))):
            raise HttpError(404, f"{method} {path}: there is no such path")
        allowed = ", ".join(handlers)
        if method == "OPTIONS":
            preflight = preflight_headers(exchange, allowed) if ALLOW_ORIGIN in cors else []
            exchange.answer(204, b"", [(b"allow", f"{allowed}, OPTIONS".encode()), *preflight])
        elif method not in handlers:
            allow = ((b"allow", allowed.encode()),)
            raise HttpError(405, f"{method} {path}: this path takes {allowed}", allow)
        elif method == "POST":
            await self._post(handlers[method], exchange)
        else:
            await handlers[method](exchange)

    async def _post(self, handler: Handler, exchange: HttpExchange) -> None:
        if self._num_posts >= self._max_posts:
            raise Unavailable("too many requests at a time", _RETRY_AFTER_S)
        self._num_posts += 1
        try:
            await handler(exchange)
        finally:
            self._num_posts -= 1


def _pattern(path: str) -> str:
    """A path as the routes have it; a model's name may have slashes."""
    if path.startswith(_MODEL):
        return f"{_MODEL}{{model}}"
    parts = path.split("/")
    if path.startswith(("/v1/files/", "/v1/batches/")) and parts[3]:
        parts[3] = "{id}"
    return "/".join(parts)


async def _page(service: GenerationService, exchange: HttpExchange) -> None:
    exchange.answer(200, _PAGE, _PAGE_HEADERS, (b"content-type", b"text/html"))


async def _metrics(service: GenerationService, exchange: HttpExchange) -> None:
    service.check_operator(caller_of(exchange))
    accept = exchange.headers.get(b"accept", b"").decode("latin-1")
    kind, page = service.metrics_page(accept)
    exchange.answer(200, page, kind=(b"content-type", kind.encode()))


def _models(service: GenerationService, exchange: HttpExchange) -> api.Models:
    models = service.models(caller_of(exchange))
    # Clients wait for this path before their first request, as other servers open no port before.
    if why_not := service.fleet.snapshot().why_not_ready:
        raise Unavailable(why_not, _RETRY_AFTER_S)
    return api.Models([api.Model(model.name, model.max_context) for model in models])


def _model(service: GenerationService, exchange: HttpExchange) -> api.Model:
    name = exchange.path.removeprefix(_MODEL)
    for model in _models(service, exchange).data:
        if model.id == name:
            return model
    raise ModelNotFound(f"model {quoted(name)} is not served here")


def _ready(service: GenerationService, exchange: HttpExchange) -> api.Status:
    if why_not := service.why_not_ready:
        raise service.shown(Unavailable(why_not, _RETRY_AFTER_S), caller_of(exchange))
    return api.Status("ready")


def _version(service: GenerationService, exchange: HttpExchange) -> api.Version:
    return api.Version(metadata.version("baton-serving"))


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
        raise error.renamed(field) from error
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


def _get(
    find: Callable[[GenerationService, HttpExchange], Any],
    summary: str = "",
    answer: type | None = None,
    *errors: str,
) -> dict[str, Route]:
    """Answers with what `find` returns, in JSON."""

    async def handler(service: GenerationService, exchange: HttpExchange) -> None:
        exchange.answer(200, msgspec.json.encode(find(service, exchange)))

    return _reading(Route(handler, summary, answer, errors))


def _reading(route: Route) -> dict[str, Route]:
    return {"GET": route, "HEAD": replace(route, summary="")}


@functools.cache
def _described() -> Raw:
    return Raw(msgspec.json.encode(document({**ROUTES, **batches.ROUTES})))


_completion = partial(CompletionGeneration, kind=CompletionOutput)
_chat = partial(CompletionGeneration, kind=ChatOutput)
ROUTES: Routes = {
    "/": _reading(Route(_page)),
    "/v1/completions": {"POST": Route(
        Endpoint(parse_completion, partial(generate, _completion)),
        "Continue prompts.", api.Completion, ERRORS, api.CompletionRequest, streams=True,
    )},
    "/v1/chat/completions": {"POST": Route(
        Endpoint(parse_chat, partial(generate, _chat)),
        "Answer a chat.", api.ChatCompletion, ERRORS, api.ChatRequest, streams=True,
    )},
    "/v1/responses": {"POST": Route(
        Endpoint(parse_response, partial(generate, ResponseGeneration)),
        "Answer a conversation.", Response, ERRORS, ResponsesRequest, streams=True,
    )},
    "/v1/embeddings": {"POST": Route(
        Endpoint(parse_embeddings, embed),
        "Embed texts.", api.Embeddings, ERRORS, api.EmbeddingRequest,
    )},
    "/tokenize": {"POST": Route(
        Endpoint(parse_tokenize, _tokenize),
        "Token ids of a prompt or a chat.", api.Tokens, ERRORS, api.TokenizeRequest,
    )},
    "/detokenize": {"POST": Route(
        Endpoint(parse_detokenize, _detokenize),
        "The text of token ids.", api.Detokenized, ERRORS, api.DetokenizeRequest,
    )},
    "/v1/models": _get(_models, "The served models.", api.Models, "401", "503"),
    f"{_MODEL}{{model}}": _get(_model, "One model.", api.Model, "401", "404", "503"),
    "/health": _get(lambda *_: api.Status("ok"), "Whether this process answers.", api.Status),
    "/ready": _get(_ready, "Whether requests are let in.", api.Status, "503"),
    "/version": _get(_version, "The server's version.", api.Version),
    "/openapi.json": _get(lambda *_: _described()),
    "/metrics": _reading(Route(_metrics)),
}  # fmt: skip
