"""What answers each path, and the document at /openapi.json that describes it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.gateway import api
from baton.gateway.headers import MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER

Part = dict[str, Any]
# Of a request with a body.
ERRORS = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")
BYTES: Part = {"type": "string", "format": "binary"}
Handler = Callable[..., Awaitable[None]]  # of an `HttpExchange`, behind whom the route is bound to
_STRING: Part = {"type": "string"}
_DESCRIPTIONS = {
    "model": "The served model, which is meant too where none is named.",
    "prompt": "What to continue: a text, texts, token ids or lists of token ids.",
    "instructions": "A system message before the input.",
    "messages": "The conversation, oldest turn first; the model's chat template renders it.",
    "input": "The conversation, or what to embed: a text, or a list as its schema says.",
    "encoding_format": "float by default; base64 is of float32 numbers, little-endian.",
    "dimensions": "The first so many, normalized again; all by default.",
    "temperature": "0 is greedy. By default that of the model's generation_config.json, else 1.",
    "top_k": "Keep the k most likely tokens; 0 or -1 keeps all.",
    "min_p": "Drop what is less likely than this share of the best.",
    "repetition_penalty": "For tokens in prompt or output; 1 is none.",
    "logit_bias": "Added to the logits of these token ids.",
    "seed": "Same seed, same output. Choice i of n is drawn with seed + i.",
    "stop": "Text that ends the output, and is not part of it.",
    "ignore_eos": "Go on after end-of-sequence, up to max_tokens.",
    "max_tokens": "Refused where the context leaves fewer; by default 16, for a chat all of them. "
    "0 only with echo or prompt_logprobs.",
    "n": "Choices for each prompt.",
    "best_of": "Run so many, and return the n likeliest; not above n for streams.",
    "stream": "Send the output as it comes, as server-sent events.",
    "stream_options": "Only with stream: a last chunk has the usage.",
    "echo": "Begin the text, and the log-probabilities, with the prompt's.",
    "prompt_logprobs": "Log-probabilities of the prompt, with so many alternatives; not streamed.",
    "top_logprobs": "Alternatives to return; needs logprobs.",
    "priority": "low, normal or high; or vLLM's number: below 0 is high and above 0 is low.",
    "ttft_target_ms": "Refuse at once when the first token cannot come in time.",
    "response_format": "JSON, or JSON that a schema describes.",
    "structured_outputs": "What the output has to match; guided_* are older names of the same.",
    "tools": "Functions that the model may call.",
    "tool_choice": "auto, none, required, or the one function to call.",
    "parallel_tool_calls": "False: one call at most.",
    "max_thinking_tokens": "Then the model has to end its reasoning and answer.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "continue_final_message": "Go on with the last message instead of answering it.",
    "request_id": "Of the caller's: for logs and traces, and returned as x-request-id.",
    "cache_salt": "Shares cached prefixes only with requests of the same salt.",
    "add_special_tokens": "As the tokenizer does by default; true for a text, false for messages.",
    "skip_special_tokens": "False: special tokens of the output are text.",
    "truncate_prompt_tokens": "Of a longer prompt the last so many tokens are taken.",
    "allowed_token_ids": "No other token is sampled.",
    "bad_words": "Texts that the output must not have.",
    "suffix": "What follows the text to be written, for models that fill in the middle.",
}


@dataclass(frozen=True)
class Operation:
    """What answers a method of a path, and how that is described; without a summary it is not."""

    handler: Handler
    summary: str = ""
    answer: type | None = None  # as JSON; None: bytes
    errors: Sequence[str] = ()
    body: type | None = None  # JSON
    form: Part | None = None  # another body: its schema
    query: type | None = None
    streams: bool = False  # where the body asks for it


Routes = Mapping[str, Mapping[str, Operation]]  # by path and method


def document(routes: Routes) -> Part:
    """The whole document."""
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
    answers = [route.answer for *_, route in described if route.answer]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's API to generate text, with vLLM's extensions.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(bodies, answers),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key where the router's tenants have some
    }


def _operation(route: Operation) -> Part:
    content = _json(route.answer) if route.answer else {"application/octet-stream": _of(BYTES)}
    if route.streams:
        content["text/event-stream"] = {}
    operation: Part = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{status: _failure(status) for status in route.errors},
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


def _schemas(bodies: Sequence[type], answers: Sequence[type]) -> Part:
    _, schemas = msgspec.json.schema_components(
        (*bodies, *answers, api.Error), ref_template="#/components/schemas/{name}"
    )
    for request in bodies:
        properties = schemas[request.__name__]["properties"]
        for name in _DESCRIPTIONS.keys() & properties.keys():
            properties[name]["description"] = _DESCRIPTIONS[name]
        for name, neutral in api.unsupported_in(request).items():
            properties[name] = {"enum": [None, *neutral], "description": "Not supported."}
    return schemas


def _failure(status: str) -> Part:
    failure: Part = {"description": "Refused or failed.", "content": _json(api.Error)}
    if status in ("429", "503"):
        whole = {"type": "integer", "minimum": 1}
        failure["headers"] = {"Retry-After": {"required": True, "schema": whole}}
    return failure


def _json(struct: type) -> Part:
    return {"application/json": _of({"$ref": f"#/components/schemas/{struct.__name__}"})}


def _of(schema: Part) -> Part:
    return {"schema": schema}
