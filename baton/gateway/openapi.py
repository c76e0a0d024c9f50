"""Operations by path and method, and the document /openapi.json about them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.gateway import answers, openai
from baton.gateway.errors import OVERLOADED
from baton.gateway.headers import MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER

Part = dict[str, Any]
# Error statuses of a request with a body.
ERRORS = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")
MESSAGE_ERRORS = (*ERRORS, str(OVERLOADED))
BYTES: Part = {"type": "string", "format": "binary"}
Handler = Callable[
    ..., Awaitable[None]
]  # takes the object that owns the route, and the HttpExchange
_STRING: Part = {"type": "string"}
_DESCRIPTIONS = {
    "model": "The served model; the default if omitted.",
    "prompt": "Text to continue: a text, texts, token ids or lists of token ids.",
    "instructions": "A system message before the input.",
    "messages": "The conversation, oldest turn first; the model's chat template renders it.",
    "input": "The conversation, or the inputs to embed: a text, or a list.",
    "encoding_format": "float (default), or base64 of little-endian float32 numbers.",
    "dimensions": "Number of leading dimensions to keep, normalized again; default: all.",
    "temperature": "0 is greedy. Default: the model's generation_config.json, else 1.",
    "top_k": "Keep the k most likely tokens; 0 or -1 keeps all.",
    "min_p": "Drop tokens less likely than this fraction of the most likely one.",
    "repetition_penalty": "Penalty for tokens in prompt or output; 1 is none.",
    "logit_bias": "Added to the logits of these token ids.",
    "seed": "The same seed gives the same output. Choice i is sampled with seed + i.",
    "stop": "Texts that end the output and are not part of it.",
    "ignore_eos": "Continue after end-of-sequence, up to max_tokens.",
    "max_tokens": "An error if the context has less room; default: 16, for a chat the rest of "
    "the context. 0 only with echo or prompt_logprobs.",
    "n": "Choices for each prompt.",
    "best_of": "Choices to run, of which the n likeliest are returned; at most n in streams.",
    "stream": "Send output as server-sent events while it is generated.",
    "stream_options": "With stream only: include_usage adds a last chunk with the usage.",
    "echo": "Begin text and log-probabilities with those of the prompt.",
    "prompt_logprobs": "Number of alternatives in the prompt's log-probabilities; not streamed.",
    "top_logprobs": "Number of alternatives to return; needs logprobs.",
    "priority": "low, normal or high; or vLLM's number: below 0 is high, above 0 is low.",
    "ttft_target_ms": "Refuse at once if the first token cannot be ready in this time.",
    "response_format": "JSON, or JSON that matches a schema.",
    "structured_outputs": "What the output must match; guided_* are older names.",
    "tools": "Functions that the model may call.",
    "tool_choice": "auto, none, required, or the one function to call.",
    "parallel_tool_calls": "False: at most one call.",
    "max_thinking_tokens": "Number of reasoning tokens after which the model must answer.",
    "chat_template_kwargs": "Additional variables of the chat template.",
    "continue_final_message": "Continue the last message instead of answering it.",
    "request_id": "The caller's id for logs and traces, returned as x-request-id.",
    "cache_salt": "Share cached prefixes only with requests of the same salt.",
    "prompt_cache_key": "Session: its requests get the same version of a model.",
    "user": "End user: those of a tenant have equal shares. The session, too, if none is given.",
    "safety_identifier": "As user, which takes precedence.",
    "add_special_tokens": "Add the tokenizer's special tokens; default: to text, not to messages.",
    "skip_special_tokens": "False: show special tokens in the text.",
    "truncate_prompt_tokens": "Keep this number of tokens at the prompt's end; -1: what fits.",
    "allowed_token_ids": "Sample these tokens only.",
    "bad_words": "Texts that the output must not contain.",
    "suffix": "Text after the output, for fill-in-the-middle models.",
}


@dataclass(frozen=True)
class Operation:
    """The handler of a method of a path, and its description; without a summary it has none."""

    handler: Handler
    summary: str = ""
    answer: type | None = None  # JSON; None: bytes
    errors: Sequence[str] = ()
    body: type | None = None  # JSON
    form: Part | None = None  # schema of a form
    query: type | None = None
    streams: bool = False  # if the body has `stream`
    error: type = answers.Error
    runs: bool = False  # on workers: counted among the router's requests


Routes = Mapping[str, Mapping[str, Operation]]  # by path and method


def document(routes: Routes) -> Part:
    """Builds the document."""
    described = [
        (path, method, route)
        for path, methods in routes.items()
        for method, route in methods.items()
        if route.summary
    ]
    paths: dict[str, Part] = {}
    for path, method, route in described:
        names = re.findall(r"{(\w+)}", path)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": _STRING} for name in names
        ]
        item = paths.setdefault(path, {"parameters": parameters} if names else {})
        item[method.lower()] = _operation(route)
    bodies = [route.body for *_, route in described if route.body]
    sent = [route.answer for *_, route in described if route.answer]
    sent += {route.error for *_, route in described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's API to generate text, with vLLM's extensions, and Anthropic's "
            "Messages.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(bodies, sent),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key is needed if the router has tenants
    }


def _operation(route: Operation) -> Part:
    content = _json(route.answer) if route.answer else {"application/octet-stream": _of(BYTES)}
    if route.streams:
        content["text/event-stream"] = {}
    operation: Part = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{status: _failure(status, route.error) for status in route.errors},
        },
    }
    if parameters := list(_parameters(route)):
        operation["parameters"] = parameters
    if route.body:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    if route.form:
        form = {"multipart/form-data": _of(route.form)}
        operation["requestBody"] = {"required": True, "content": form}
    return operation


def _parameters(route: Operation) -> Iterator[Part]:
    if route.body:
        timeout = {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}
        yield {"name": TIMEOUT_HEADER, "in": "header", "schema": timeout}
        yield {"name": "traceparent", "in": "header", "schema": _STRING}
    if route.query:
        _, schemas = msgspec.json.schema_components((route.query,))
        for name, schema in schemas[route.query.__name__]["properties"].items():
            yield {"name": name, "in": "query", "schema": schema}


def _schemas(bodies: Sequence[type], sent: Sequence[type]) -> Part:
    _, schemas = msgspec.json.schema_components(
        (*bodies, *sent), ref_template="#/components/schemas/{name}"
    )
    for request in bodies:
        properties = schemas[request.__name__]["properties"]
        for name in _DESCRIPTIONS.keys() & properties.keys():
            properties[name]["description"] = _DESCRIPTIONS[name]
        for name, neutral in openai.unsupported_in(request).items():
            properties[name] = {"enum": [None, *neutral], "description": "Not supported."}
    return schemas


def _failure(status: str, error: type) -> Part:
    failure: Part = {"description": "Refused or failed.", "content": _json(error)}
    if status in ("429", "503", str(OVERLOADED)):
        whole = {"type": "integer", "minimum": 1}
        failure["headers"] = {"Retry-After": {"required": True, "schema": whole}}
    return failure


def _json(struct: type) -> Part:
    return {"application/json": _of({"$ref": f"#/components/schemas/{struct.__name__}"})}


def _of(schema: Part) -> Part:
    return {"schema": schema}
