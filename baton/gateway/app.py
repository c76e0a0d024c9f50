"""The routes of the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from baton.errors import BatonError, InvalidRequest, ModelNotFound, Unavailable, quoted
from baton.gateway import fields
from baton.gateway.endpoint import Endpoint, Generation
from baton.gateway.errors import HttpError, failure_of
from baton.gateway.openapi import document
from baton.gateway.request import Body, chat_wish, completion_wish, tokenize_request
from baton.gateway.shapes import ChatShape, CompletionShape
from baton.gateway.tokens import text_of
from baton.gateway.wire import Exchange
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
    told = Told(service)
    return Starlette(
        routes=[
            _post("/v1/completions", Generation(
                service, CompletionShape(), fields.COMPLETION, completion_wish, _PROMPT)),
            _post("/v1/chat/completions", Generation(
                service, ChatShape(), fields.CHAT, chat_wish, _CHAT)),
            _post("/tokenize", Tokenizing(service)),
            _get("/v1/models", told.models),
            _get("/v1/models/{model:path}", told.model),
            _get("/health", told.health),
            _get("/ready", told.ready),
            _get("/metrics", told.metrics),
            _get("/openapi.json", told.openapi),
            *routes,
        ],
        exception_handlers={HTTPException: _refused, BatonError: _failed},
    )  # fmt: skip


class Tokenizing(Endpoint):
    """/tokenize, as vLLM has it."""

    def __init__(self, service: GenerationService) -> None:
        super().__init__(service, fields.TOKENIZE)

    async def answer(self, body: Body, caller: Caller, exchange: Exchange) -> None:
        """Tells token ids, how many they are and how many the model takes."""
        asked = tokenize_request(body)
        try:
            found = await self._service.tokenize(asked, caller)
        except InvalidRequest as error:
            field = "prompt" if asked.HasField("text") else "messages"
            raise InvalidRequest(str(error), field) from error
        tokens = list(found.token_ids)
        names = [text_of(self._service.tokenizer, token) for token in tokens]
        answer = {
            "count": len(tokens),
            "max_model_len": found.max_context,
            "tokens": tokens,
            "token_strs": names if body.get("return_token_strs") else None,
        }
        await exchange.answer(200, json.dumps(answer).encode(), exchange.names())


class Told:
    """What is told of the router without generating anything."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._openapi = document()

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

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        return JSONResponse(self._openapi)

    async def metrics(self, request: Request) -> Response:
        """The router's figures, as Prometheus reads them."""
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


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _get(path: str, endpoint: object) -> Route:
    return Route(path, endpoint)  # type: ignore[arg-type]


async def _refused(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    headers = tuple((k.encode(), v.encode()) for k, v in (error.headers or {}).items())
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _failed(request, HttpError(error.status_code, message, headers))


async def _failed(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    headers = {name.decode(): value.decode() for name, value in failure.headers}
    return Response(failure.body, failure.status, headers, "application/json")
