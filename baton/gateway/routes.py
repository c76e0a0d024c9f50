"""The routes of the HTTP API."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import api
from baton.gateway.generation import Endpoint, generate
from baton.gateway.http_exchange import HttpError, HttpExchange, failure_of
from baton.gateway.openapi import document
from baton.gateway.output import ChatOutput, CompletionOutput, text_of
from baton.gateway.request import parse_chat, parse_completion, parse_tokenize
from baton.v1 import inference_pb2
from router.frontend import Caller, GenerationService

_RETRY_AFTER_S = 1.0


def app_of(service: GenerationService) -> Starlette:
    """The API over one service."""
    posts: dict[str, Endpoint[Any]] = {
        "/v1/completions": Endpoint(service, parse_completion, partial(generate, CompletionOutput)),
        "/v1/chat/completions": Endpoint(service, parse_chat, partial(generate, ChatOutput)),
        "/tokenize": Endpoint(service, parse_tokenize, _tokenize),
    }
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *_info_routes(service),
        ],
        exception_handlers={HTTPException: _not_routed, BatonError: _failed},
    )


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
    strings = [text_of(service.tokenizer, token) for token in tokens] if with_strings else None
    answer = api.Tokens(len(tokens), found.max_context, tokens, strings)
    await exchange.answer(200, msgspec.json.encode(answer), exchange.id_headers())


def _info_routes(service: GenerationService) -> list[Route]:
    """What can be read of the router without generating anything."""
    openapi = document()

    def known(request: Request) -> list[api.Model]:
        key = request.headers.get("authorization")
        metadata = () if key is None else (("authorization", key.encode("latin-1")),)
        models = service.models(Caller(metadata))
        return [api.Model(model.name, model.max_context) for model in models]

    async def models(request: Request) -> Response:
        return _json(api.Models(known(request)))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        for found in known(request):
            if found.id == name:
                return _json(found)
        raise ModelNotFound(f"model {quoted(name)} is not served here")

    async def health(request: Request) -> Response:
        return _json(api.Status("ok"))

    async def ready(request: Request) -> Response:
        if why_not := service.why_not_ready:
            raise Unavailable(why_not, _RETRY_AFTER_S)
        return _json(api.Status("ready"))

    async def version(request: Request) -> Response:
        return _json(api.Version(metadata.version("baton-serving")))

    async def description(request: Request) -> Response:
        return _json(openapi)

    async def metrics(request: Request) -> Response:
        kind, page = service.metrics_page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/openapi.json", description),
    ]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _not_routed(request: Request, error: Exception) -> Response:
    """Unknown paths and methods. OPTIONS says which methods a path has; CORS is not offered."""
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})
    headers = tuple((k.encode(), v.encode()) for k, v in (error.headers or {}).items())
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _failed(request, HttpError(error.status_code, message, headers))


async def _failed(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    headers = {name.decode(): value.decode() for name, value in failure.headers}
    return Response(failure.body, failure.status, headers, "application/json")
