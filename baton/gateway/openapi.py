"""The OpenAPI document at /openapi.json: the checked schemas, and what the answers look like."""

from __future__ import annotations

from typing import Any

from baton.gateway import fields
from baton.gateway.wire import MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER

Part = dict[str, Any]


def document() -> Part:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's API for completions and chats, with vLLM's extensions.",
        },
        "paths": {
            "/v1/completions": _post("Continue prompts.", fields.COMPLETION, "Completion", True),
            "/v1/chat/completions": _post("Answer a chat.", fields.CHAT, "ChatCompletion", True),
            "/tokenize": _post("Token ids of a prompt or a chat.", fields.TOKENIZE, "Tokens"),
            "/v1/models": _get("The served models.", "Models", "401"),
            "/v1/models/{model}": {
                "parameters": [_parameter("model", "path", {"type": "string"}, required=True)],
                **_get("One model.", "Model", "401", "404"),
            },
            "/health": _get("Whether this process answers.", "Status"),
            "/ready": _get("Whether requests are let in.", "Status", "503"),
        },
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key where the router's tenants have some
    }


def _post(text: str, body: Part, answer: str, streams: bool = False) -> Part:
    content: Part = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    errors = ("400", "401", "404", "408", "413", "429", "500", "503", "504")
    timeout = {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}
    return {
        "post": {
            "summary": text,
            "parameters": [
                _parameter(TIMEOUT_HEADER, "header", timeout, text="Seconds it may take."),
                _parameter("traceparent", "header", _STRING, text="W3C trace context."),
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "Done.", "content": content},
                **{status: _failure(status) for status in errors},
            },
        }
    }


def _get(text: str, answer: str, *errors: str) -> Part:
    content = {"application/json": {"schema": _ref(answer)}}
    return {
        "get": {
            "summary": text,
            "responses": {
                "200": {"description": "Found.", "content": content},
                **{status: _failure(status) for status in errors},
            },
        }
    }


def _failure(status: str) -> Part:
    failure: Part = {
        "description": "Refused or failed.",
        "content": {"application/json": {"schema": _ref("Error")}},
    }
    if status in ("429", "503"):
        whole = {"type": "integer", "minimum": 1}
        failure["headers"] = {"Retry-After": {"required": True, "schema": whole}}
    return failure


def _parameter(
    name: str, place: str, schema: Part, *, required: bool = False, text: str = ""
) -> Part:
    return {
        "name": name,
        "in": place,
        "required": required,
        "schema": schema,
        "description": text,
    }


def _ref(name: str) -> Part:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Part) -> Part:
    return {"type": "object", "required": list(properties), "properties": properties}


def _array(items: Part) -> Part:
    return {"type": "array", "items": items}


def _nullable(schema: Part) -> Part:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING: Part = {"type": "string"}
_NULLABLE_STRING: Part = {"type": ["string", "null"]}
_COUNT: Part = {"type": "integer", "minimum": 0}
_LOGPROB: Part = {"type": "number", "maximum": 0}
_REASON: Part = {"enum": ["stop", "length"]}
_TOKEN = {"token": _STRING, "logprob": _LOGPROB, "bytes": _array({"type": "integer"})}
_COMPLETION_LOGPROBS = _object(
    text_offset=_array(_COUNT),
    token_logprobs=_array(_LOGPROB),
    tokens=_array(_STRING),
    top_logprobs=_array({"type": "object", "additionalProperties": _LOGPROB}),
)
_CHAT_LOGPROBS = _object(
    content=_array(_object(**_TOKEN, top_logprobs=_array(_object(**_TOKEN)))),
    refusal={"type": "null"},
)
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)


def _completion(kind: str, logprobs: Part, **content: Part) -> Part:
    choice = _object(
        index=_COUNT,
        **content,
        logprobs=_nullable(logprobs),
        finish_reason=_REASON,
        stop_reason=_NULLABLE_STRING,
    )
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        choices=_array(choice),
        usage=_USAGE,
    )


_MODEL = _object(
    id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING, max_model_len=_COUNT
)
_SCHEMAS: Part = {
    "Completion": _completion("text_completion", _COMPLETION_LOGPROBS, text=_STRING),
    "ChatCompletion": _completion(
        "chat.completion",
        _CHAT_LOGPROBS,
        message=_object(role={"const": "assistant"}, content=_STRING, refusal={"type": "null"}),
    ),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_array(_COUNT),
        token_strs=_nullable(_array(_STRING)),
    ),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_array(_MODEL)),
    "Status": _object(status=_STRING),
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_NULLABLE_STRING, code=_NULLABLE_STRING)
    ),
}
