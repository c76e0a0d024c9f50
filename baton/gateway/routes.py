"""The application: paths and methods."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from baton import http_server
from baton.config import ApiConfig, RouterConfig
from baton.errors import InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import api, batch_store
from baton.gateway.batches import BatchApi, Handler
from baton.gateway.embeddings import embed, parse_embeddings
from baton.gateway.generation import Endpoint, generate
from baton.gateway.headers import (
    ALLOW_ORIGIN,
    caller_of,
    cors_headers,
    id_headers,
    preflight_headers,
)
from baton.gateway.openapi import document
from baton.gateway.output import ChatOutput, CompletionOutput, shown
from baton.gateway.output_responses import respond
from baton.gateway.request import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from baton.gateway.responses import parse_response
from baton.http_errors import Header, HttpError
from baton.http_server import HttpExchange
from baton.v1 import inference_pb2
from router.frontend import Caller, GenerationService
from router.main import Frontend

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
MAX_REQUESTS = 2048  # that generate, waiting or running
_RETRY_AFTER_S = 1.0
_MODEL = "/v1/models/"  # and a name
_PAGE = Path(__file__).with_name("chat.html").read_bytes()  # to try a model in a browser


def frontend(config: RouterConfig, *, shared: bool = False) -> Frontend:
    """HTTP at `config.http_port`, perhaps `shared` with other processes, for `router.main.run`.

    Listens at once, so that a port in use is a ConfigError before anything has begun; where it is
    `shared` only once it serves: siblings take connections until then.
    """
    where = config.host, config.http_port
    if config.batch_dir:
        batch_store.prepare(config.batch_dir)
    listen = partial(http_server.listen, *where, "HTTP", "--http-port", shared=shared)
    listener = None if shared else listen()
    return lambda service: serving(service, listener or listen(), config)


@contextlib.asynccontextmanager
async def serving(
    service: GenerationService, listener: socket.socket, config: ApiConfig
) -> AsyncIterator[None]:
    """The API over one service, while inside."""
    app = App(service, config)
    async with (
        http_server.serving(app, listener, MAX_CONNECTIONS) as port,
        app.batches.running(),
    ):
        log.info("HTTP at %s", port.url)
        service.on_leave.append(port.leave)
        yield


def _page_headers() -> list[Header]:
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


class App:
    """The API over one service."""

    def __init__(self, service: GenerationService, config: ApiConfig) -> None:
        self._service = service
        self._origins = config.cors_origins
        self._num_posts = 0  # being answered
        posts: dict[str, Endpoint[Any]] = {
            "/v1/completions": Endpoint(
                service, parse_completion, partial(generate, CompletionOutput)
            ),
            "/v1/chat/completions": Endpoint(service, parse_chat, partial(generate, ChatOutput)),
            "/v1/embeddings": Endpoint(service, parse_embeddings, embed),
            "/v1/responses": Endpoint(service, parse_response, respond),
            "/tokenize": Endpoint(service, parse_tokenize, _tokenize),
            "/detokenize": Endpoint(service, parse_detokenize, _detokenize),
        }
        for_batches = {path: one for path, one in posts.items() if path.startswith("/v1/")}
        self.batches = BatchApi(service, config, for_batches)
        self._page_headers = _page_headers()
        openapi = document()
        gets: dict[str, Callable[[HttpExchange], Any]] = {
            "/v1/models": lambda exchange: api.Models(self._models(exchange)),
            "/health": lambda exchange: api.Status("ok"),
            "/ready": lambda exchange: self._ready(),
            "/version": lambda exchange: api.Version(metadata.version("baton-serving")),
            "/openapi.json": lambda exchange: openapi,
            _MODEL: self._model,
        }
        self._routes: dict[str, dict[str, Handler]] = {
            **{path: {"POST": endpoint} for path, endpoint in posts.items()},
            **{path: _reading(partial(_answer, found)) for path, found in gets.items()},
            "/": _reading(self._page),
            "/metrics": _reading(self._metrics),
            **self.batches.routes,
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        cors = cors_headers(exchange, self._origins)
        exchange.answer_headers = {**cors, **id_headers(exchange)}
        method, path = exchange.method, exchange.path
        if not (handlers := self._routes.get(path) or self._routes.get(_pattern(path))):
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
        if self._num_posts >= MAX_REQUESTS:
            raise Unavailable("too many requests at a time", _RETRY_AFTER_S)
        self._num_posts += 1
        try:
            await handler(exchange)
        finally:
            self._num_posts -= 1

    async def _page(self, exchange: HttpExchange) -> None:
        exchange.answer(200, _PAGE, self._page_headers, (b"content-type", b"text/html"))

    async def _metrics(self, exchange: HttpExchange) -> None:
        self._service.check_operator(caller_of(exchange))
        accept = exchange.headers.get(b"accept", b"").decode("latin-1")
        kind, page = self._service.metrics_page(accept)
        exchange.answer(200, page, kind=(b"content-type", kind.encode()))

    def _models(self, exchange: HttpExchange) -> list[api.Model]:
        models = self._service.models(caller_of(exchange))
        return [api.Model(model.name, model.max_context) for model in models]

    def _model(self, exchange: HttpExchange) -> api.Model:
        name = exchange.path.removeprefix(_MODEL)
        for model in self._models(exchange):
            if model.id == name:
                return model
        raise ModelNotFound(f"model {quoted(name)} is not served here")

    def _ready(self) -> api.Status:
        if why_not := self._service.why_not_ready:
            raise Unavailable(why_not, _RETRY_AFTER_S)
        return api.Status("ready")


def _pattern(path: str) -> str:
    """A path as the routes have it; a model's name may have slashes."""
    if path.startswith(_MODEL):
        return _MODEL
    parts = path.split("/")
    if path.startswith(("/v1/files/", "/v1/batches/")) and parts[3]:
        parts[3] = "{id}"
    return "/".join(parts)


def _reading(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}


async def _answer(found: Callable[[HttpExchange], Any], exchange: HttpExchange) -> None:
    exchange.answer(200, msgspec.json.encode(found(exchange)))


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
