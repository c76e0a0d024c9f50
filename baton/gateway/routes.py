"""The HTTP application: its paths, methods and their handlers."""

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
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta, Struct

from baton.config import ApiConfig, RouterConfig
from baton.errors import InternalError, InvalidRequest, Unavailable, quoted
from baton.gateway import (
    adapters,
    answers,
    batch_store,
    batches,
    conversations,
    embeddings,
    messages_output,
    openai,
    rerank,
    responses_api,
    responses_store,
)
from baton.gateway.batches import BatchApi, query_of
from baton.gateway.chat_completions import ChatOutput, parse_chat
from baton.gateway.completions import CompletionOutput, parse_completion
from baton.gateway.conversations import ConversationApi
from baton.gateway.endpoint import Endpoint
from baton.gateway.errors import MODELS_PATH, failure_at
from baton.gateway.generation import CompletionGeneration, generate
from baton.gateway.headers import (
    ALLOW_ORIGIN,
    caller_of,
    cors_headers,
    id_headers,
    preflight_headers,
)
from baton.gateway.openapi import (
    ERRORS,
    Handler,
    Operation,
    Routes,
    document,
)
from baton.gateway.responses_api import ResponseApi
from baton.gateway.tokenize import (
    RenderedRequest,
    detokenize,
    parse_detokenize,
    parse_tokenize,
    render,
    tokenize,
)
from baton.net import http_server
from baton.net.http_errors import Failure, Header, HttpError, ServerFull, failure_of
from baton.net.http_server import HttpExchange
from router.generation_service import GenerationService
from router.main import ProtocolServer

log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_MODEL = f"{MODELS_PATH}/"  # followed by a name
_WITH_IDS = "/v1/files/", "/v1/batches/", "/v1/responses/", "/v1/conversations/"
_PAGE = Path(__file__).with_name("chat.html").read_bytes()  # a chat in the browser


def frontend(config: RouterConfig) -> ProtocolServer:
    """HTTP at `config.http_port`, for `router.main.run`.

    The port is opened here, so that a port in use is a ConfigError before anything is started.
    """
    where = config.host, config.http_port
    if config.api.batch_dir:
        batch_store.prepare(config.api.batch_dir)
    if config.api.response_dir:
        responses_store.prepare(config.api.response_dir)
    listener = http_server.listen(*where, "HTTP", "--http-port")
    return lambda service: serving(service, listener, config.api)


@contextlib.asynccontextmanager
async def serving(
    service: GenerationService, listener: socket.socket, config: ApiConfig
) -> AsyncIterator[None]:
    """Serves the API while inside."""
    app = App(service, config)
    async with (
        http_server.serving(
            app,
            listener,
            config.max_http_connections,
            config.allowed_hosts,
            failure_at=app.failure_at,
        ) as port,
        app.batches.running(),
        app.responses.running(),
    ):
        log.info("HTTP at %s", port.url)
        service.on_leave.append(port.hand_over)
        yield


def _headers_of_page() -> list[Header]:
    """Content security policy: only the page's own script and style, only this server."""

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
    """Dispatches requests to the handlers of their paths."""

    def __init__(self, service: GenerationService, config: ApiConfig) -> None:
        self._service = service
        self._origins = config.cors_origins
        self._max_posts = config.max_http_requests
        self._num_posts = 0  # POSTs being answered
        for_batches: dict[str, Any] = {  # endpoints of lines
            path: methods["POST"].handler
            for path, methods in ROUTES.items()
            if path.startswith("/v1/") and "POST" in methods
        }
        self.responses = ResponseApi(service, config)
        for_batches["/v1/responses"] = self.responses.create
        self.batches = BatchApi(service, config, for_batches)
        owners = (
            (service, ROUTES),
            (service, adapters.ROUTES),
            (self.batches, batches.ROUTES),
            (self.responses, responses_api.ROUTES),
            (ConversationApi(self.responses), conversations.ROUTES),
        )
        self._handlers: dict[str, dict[str, Handler]] = {
            path: {method: partial(route.handler, owner) for method, route in methods.items()}
            for owner, routes in owners
            for path, methods in routes.items()
        }
        self._run_paths = {
            path
            for _, routes in owners
            for path, methods in routes.items()
            if "POST" in methods and methods["POST"].runs
        }

    def failure_at(self, exchange: HttpExchange | None, error: Exception) -> Failure:
        """The answer to what `error` ended, which is counted unless the service has done that.

        Where a connection is refused there is no exchange; what it would have asked counts as one
        request. What is not HTTP is not counted.
        """
        if exchange is None:
            if not isinstance(error, HttpError):
                self._service.refused(error)
            return failure_of(error)
        is_run = exchange.method == "POST" and exchange.path.rstrip("/") in self._run_paths
        if is_run and not exchange.is_counted:
            cause = error
            if isinstance(error, HttpError):
                cause = (InvalidRequest if error.status < 500 else InternalError)(str(error))
            self._service.refused(cause, caller_of(exchange, timed=False))
        return failure_at(exchange, error)

    async def __call__(self, exchange: HttpExchange) -> None:
        exchange.path = exchange.path.rstrip("/") or "/"
        if not self._service.joins_traces:
            exchange.headers.pop(b"traceparent", None)
        cors = cors_headers(exchange, self._origins)
        exchange.answer_headers = {**cors, **id_headers(exchange)}
        method, path = exchange.method, exchange.path
        if not (handlers := self._handlers.get(path) or self._handlers.get(_pattern(path))):
            raise HttpError(404, f"{method} {path}: unknown path")
        allowed = ", ".join(handlers)
        if method == "OPTIONS":
            preflight = preflight_headers(exchange, allowed) if ALLOW_ORIGIN in cors else []
            exchange.answer(204, b"", [(b"allow", f"{allowed}, OPTIONS".encode()), *preflight])
        elif method not in handlers:
            allow = ((b"allow", allowed.encode()),)
            raise HttpError(405, f"{method} {path}: this path supports {allowed}", allow)
        elif method == "POST":
            await self._post(handlers[method], exchange)
        else:
            await handlers[method](exchange)

    async def _post(self, handler: Handler, exchange: HttpExchange) -> None:
        if self._num_posts >= self._max_posts:
            raise ServerFull("the router has too many HTTP requests: try again", _RETRY_AFTER_S)
        self._num_posts += 1
        try:
            await handler(exchange)
        finally:
            self._num_posts -= 1


def _pattern(path: str) -> str:
    """The key of a path in `ROUTES`; a model's name may contain slashes."""
    if path.startswith(_MODEL):
        return f"{_MODEL}{{model}}"
    parts = path.split("/")
    if path.startswith(_WITH_IDS) and parts[3]:
        parts[3] = "{id}"
        if parts[4:5] == ["items"] and len(parts) > 5:
            parts[5] = "{item}"
    return "/".join(parts)


async def _page(service: GenerationService, exchange: HttpExchange) -> None:
    exchange.answer(200, _PAGE, _PAGE_HEADERS, (b"content-type", b"text/html"))


async def _metrics(service: GenerationService, exchange: HttpExchange) -> None:
    service.check_operator(caller_of(exchange))
    accept = exchange.headers.get(b"accept", b"").decode("latin-1")
    kind, page = service.metrics_page(accept)
    exchange.answer(200, page, kind=(b"content-type", kind.encode()))


class ModelsQuery(Struct):
    """Which models to list, as Anthropic's clients ask; without parameters all."""

    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    after_id: str = ""
    before_id: str = ""


def _models(service: GenerationService, exchange: HttpExchange) -> answers.ModelList:
    cards, query = _cards(service, exchange), query_of(ModelsQuery, exchange)
    names, start, end = [card.id for card in cards], 0, len(cards)
    for field in ("after_id", "before_id"):
        if (name := getattr(query, field)) and name not in names:
            raise InvalidRequest(f"{field}: no model {quoted(name)} is served", field)
    if query.after_id:
        start = names.index(query.after_id) + 1
    if query.before_id:
        end = names.index(query.before_id)
    found = cards[start:end]
    most = len(found) if query.limit is None else query.limit
    if query.before_id and not query.after_id:  # the page that ends there
        page = found[max(0, len(found) - most) :]
    else:
        page = found[:most]
    return answers.ModelList(page, has_more=len(page) < len(found))


def _cards(service: GenerationService, exchange: HttpExchange) -> list[answers.ModelCard]:
    models = service.list_models(caller_of(exchange))
    # Clients poll this path before their first request.
    if why_not := service.models.why_not_ready:
        raise Unavailable(why_not, _RETRY_AFTER_S)
    return [
        answers.ModelCard(
            model.name, model.max_context, root=model.root, parent=model.parent or None
        )
        for model in models
    ]


def _model(service: GenerationService, exchange: HttpExchange) -> answers.ModelCard:
    name = exchange.path.removeprefix(_MODEL)
    for model in _cards(service, exchange):
        if model.id == name:
            return model
    raise service.models.not_found(name)


def _ready(service: GenerationService, exchange: HttpExchange) -> answers.Status:
    if why_not := service.why_not_ready:
        raise service.shown(Unavailable(why_not, _RETRY_AFTER_S), caller_of(exchange))
    return answers.Status("ready")


def _version(service: GenerationService, exchange: HttpExchange) -> answers.Version:
    return answers.Version(metadata.version("baton-serving"))


def _tokenizer_info(service: GenerationService, exchange: HttpExchange) -> answers.TokenizerInfo:
    names = parse_qs(exchange.query.decode("latin-1")).get("model", [""])
    version = service.resolve(names[0], "", caller_of(exchange)).version
    tokenizer = version.admission.tokenizer
    return answers.TokenizerInfo(
        names[0] or version.name,
        tokenizer.vocab_size,
        version.max_context,
        sorted(tokenizer.eos_token_ids),
        dict(tokenizer.special_tokens),
        tokenizer.template.source if tokenizer.template else None,
    )


async def _ping(service: GenerationService, exchange: HttpExchange) -> None:
    exchange.answer(200, b"")


def _get(
    find: Callable[[GenerationService, HttpExchange], Any],
    summary: str = "",
    answer: type | None = None,
    *errors: str,
    query: type | None = None,
) -> dict[str, Operation]:
    """An operation that answers with the result of `find`, in JSON."""

    async def handler(service: GenerationService, exchange: HttpExchange) -> None:
        exchange.answer(200, msgspec.json.encode(find(service, exchange)))

    return _get_and_head(Operation(handler, summary, answer, errors, query=query))


def _get_and_head(route: Operation) -> dict[str, Operation]:
    return {"GET": route, "HEAD": replace(route, summary="")}


@functools.cache
def _described() -> bytes:
    return msgspec.json.encode(document(ALL_ROUTES))


async def _openapi(service: GenerationService, exchange: HttpExchange) -> None:
    exchange.answer(200, await service.run_in_thread(_described))


_completion = partial(CompletionGeneration, kind=CompletionOutput)
_chat = partial(CompletionGeneration, kind=ChatOutput)
ROUTES: Routes = {
    "/": _get_and_head(Operation(_page)),
    "/v1/completions": {"POST": Operation(
        Endpoint(parse_completion, partial(generate, _completion)),
        "Continue prompts.", answers.Completion, ERRORS, openai.CompletionRequest, streams=True,
        runs=True,
    )},
    "/v1/chat/completions": {"POST": Operation(
        Endpoint(parse_chat, partial(generate, _chat)),
        "Answer a chat.", answers.ChatCompletion, ERRORS, openai.ChatRequest, streams=True,
        runs=True,
    )},
    "/v1/completions/render": {"POST": Operation(
        Endpoint(parse_completion, render),
        "The tokens of prompts; nothing runs.", list[RenderedRequest], ERRORS,
        openai.CompletionRequest,
    )},
    "/v1/chat/completions/render": {"POST": Operation(
        Endpoint(parse_chat, render),
        "The tokens of a chat; nothing runs.", RenderedRequest, ERRORS, openai.ChatRequest,
    )},
    **messages_output.ROUTES,
    **embeddings.ROUTES,
    **rerank.ROUTES,
    "/tokenize": {"POST": Operation(
        Endpoint(parse_tokenize, tokenize),
        "Token ids of a prompt or a chat.", answers.Tokens, ERRORS, openai.TokenizeRequest,
    )},
    "/detokenize": {"POST": Operation(
        Endpoint(parse_detokenize, detokenize),
        "The text of token ids.", answers.Detokenized, ERRORS, openai.DetokenizeRequest,
    )},
    MODELS_PATH: _get(
        _models, "The served models.", answers.ModelList, "400", "401", "503", query=ModelsQuery
    ),
    f"{_MODEL}{{model}}": _get(_model, "One model.", answers.ModelCard, "401", "404", "503"),
    "/health": _get(lambda *_: answers.Status("ok"), "Liveness of this process.", answers.Status),
    "/ready": _get(_ready, "Readiness for requests.", answers.Status, "503"),
    "/ping": {**_get_and_head(Operation(_ping)), "POST": Operation(_ping)},  # SageMaker's
    "/load": _get(
        lambda service, _: answers.Load(service.running), "Requests of this process.", answers.Load
    ),
    "/tokenizer_info": _get(
        _tokenizer_info, "A model's tokenizer, by ?model=NAME.", answers.TokenizerInfo, "401", "404"
    ),
    "/version": _get(_version, "The server's version.", answers.Version),
    "/openapi.json": _get_and_head(Operation(_openapi)),
    "/metrics": _get_and_head(Operation(_metrics)),
}  # fmt: skip
ALL_ROUTES: Routes = {
    **ROUTES, **adapters.ROUTES, **batches.ROUTES, **responses_api.ROUTES, **conversations.ROUTES
}  # fmt: skip
