"""The routes of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from baton.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import api_schema
from baton.gateway.generation import Endpoint, GenerationEndpoint
from baton.gateway.http_exchange import HttpError, HttpExchange, failure_of
from baton.gateway.request import Body, parse_chat, parse_completion, parse_tokenize
from baton.gateway.response_format import CHAT_FORMAT, COMPLETION_FORMAT, text_of
from baton.v1 import inference_pb2
from router.frontend import Caller, GenerationService

_RETRY_AFTER_S = 1.0
_PROMPT = {"input": ("prompt",), "text": ("prompt",), "token_ids": ("prompt",)}
_CHAT = {
    **dict.fromkeys(("input", "chat", "token_ids"), ("messages",)),
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs", "logprobs"),
    "include_stop": ("include_stop_str_in_output",),
}


def app_of(service: GenerationService, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The API over one service; `routes` come after our own."""
    info = InfoRoutes(service)
    completions = GenerationEndpoint(
        service, COMPLETION_FORMAT, api_schema.COMPLETION, parse_completion, _PROMPT
    )
    chats = GenerationEndpoint(service, CHAT_FORMAT, api_schema.CHAT, parse_chat, _CHAT)
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/tokenize", TokenizeEndpoint(service), methods=["POST"]),
            Route("/v1/models", info.models),
            Route("/v1/models/{model:path}", info.model),
            Route("/health", info.health),
            Route("/ready", info.ready),
            Route("/version", info.version),
            Route("/metrics", info.metrics),
            Route("/openapi.json", info.openapi),
            *routes,
        ],
        exception_handlers={HTTPException: _not_routed, BatonError: _failed},
    )


class TokenizeEndpoint(Endpoint):
    """/tokenize, as vLLM has it."""

    def __init__(self, service: GenerationService) -> None:
        super().__init__(service, api_schema.TOKENIZE)

    async def answer(self, body: Body, caller: Caller, exchange: HttpExchange) -> None:
        """Token ids, their number and the model's context."""
        parsed = parse_tokenize(body)
        try:
            found = await self._service.tokenize(parsed, caller)
        except InvalidRequest as error:
            field = "prompt" if parsed.HasField("text") else "messages"
            raise InvalidRequest(str(error), field) from error
        tokens = list(found.token_ids)
        names = [text_of(self._service.tokenizer, token) for token in tokens]
        answer = {
            "count": len(tokens),
            "max_model_len": found.max_context,
            "tokens": tokens,
            "token_strs": names if body.get("return_token_strs") else None,
        }
        await exchange.answer(200, json.dumps(answer).encode(), exchange.id_headers())


class InfoRoutes:
    """What can be read of the router without generating anything."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._openapi = api_schema.document()

    async def models(self, request: Request) -> Response:
        """The served models."""
        models = [_model(model) for model in self._known(request)]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        for model in self._known(request):
            if model.name == name:
                return JSONResponse(_model(model))
        raise ModelNotFound(f"model {quoted(name)} is not served here")

    async def health(self, request: Request) -> Response:
        """That this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request would be let in, and if not, why not."""
        if why_not := self._service.why_not_ready:
            raise Unavailable(why_not, _RETRY_AFTER_S)
        return JSONResponse({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """Baton's version."""
        return JSONResponse({"version": metadata.version("baton-serving")})

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        return JSONResponse(self._openapi)

    async def metrics(self, request: Request) -> Response:
        """The router's metrics, as Prometheus reads them."""
        kind, page = self._service.metrics_page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    def _known(self, request: Request) -> list[inference_pb2.Model]:
        key = request.headers.get("authorization")
        metadata = () if key is None else (("authorization", key.encode("latin-1")),)
        return self._service.models(Caller(metadata))


def _model(model: inference_pb2.Model) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "baton",
        "max_model_len": model.max_context,
    }


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
