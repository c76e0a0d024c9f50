"""The document at /openapi.json: `api`'s structs and the paths that take and answer them."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.gateway import api
from baton.gateway.batch_store import (
    Batch,
    Batches,
    BatchesQuery,
    BatchRequest,
    File,
    FileDeleted,
    Files,
    FilesQuery,
)
from baton.gateway.headers import MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER
from baton.gateway.output_responses import Response
from baton.gateway.responses import ResponsesRequest

Part = dict[str, Any]
_REQUESTS = (
    *(api.CompletionRequest, api.ChatRequest, ResponsesRequest, api.EmbeddingRequest),
    *(api.TokenizeRequest, api.DetokenizeRequest, BatchRequest),
)
_ANSWERS = (
    *(api.Completion, api.ChatCompletion, Response, api.Embeddings, api.Tokens, api.Detokenized),
    *(api.Models, api.Model, api.Status, api.Version, api.Error),
    *(File, Files, FileDeleted, Batch, Batches),
)
_STRING: Part = {"type": "string"}
_DESCRIPTIONS = {
    "model": "The served model, which is meant too where none is named.",
    "prompt": "What to continue: a text, texts, token ids or lists of token ids.",
    "instructions": "A system message before the input.",
    "messages": "The conversation, oldest turn first; the model's chat template renders it.",
    "input": "The conversation, or what to embed: a text, or a list as its schema says.",
    "encoding_format": "float by default; base64 is of float32 numbers, little-endian.",
    "dimensions": "The first so many, normalized again; all by default.",
    "temperature": "0 is greedy. 1 by default.",
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
    "cache_salt": "Shares cached prefixes only with requests of the same salt.",
    "add_special_tokens": "As the tokenizer does by default; true for a text, false for messages.",
    "skip_special_tokens": "False: special tokens of the output are text.",
    "truncate_prompt_tokens": "Of a longer prompt the last so many tokens are taken.",
    "allowed_token_ids": "No other token is sampled.",
    "bad_words": "Texts that the output must not have.",
    "suffix": "What follows the text to be written, for models that fill in the middle.",
}
_ERRORS = ("400", "401", "404", "408", "413", "429", "500", "503", "504")


def document() -> Part:
    """The whole document."""
    completion, chat, responses, embedding, tokenize, detokenize, batch = _REQUESTS
    model = {"name": "model", "in": "path", "required": True, "schema": _STRING}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's API to generate text, with vLLM's extensions.",
        },
        "paths": {
            "/v1/completions": _post("Continue prompts.", completion, api.Completion, streams=True),
            "/v1/chat/completions": _post("Answer a chat.", chat, api.ChatCompletion, streams=True),
            "/v1/embeddings": _post("Embed texts.", embedding, api.Embeddings),
            "/v1/responses": _post("Answer a conversation.", responses, Response, streams=True),
            "/tokenize": _post("Token ids of a prompt or a chat.", tokenize, api.Tokens),
            "/detokenize": _post("The text of token ids.", detokenize, api.Detokenized),
            "/v1/models": _get("The served models.", api.Models, "401"),
            "/v1/models/{model}": {
                "parameters": [model],
                **_get("One model.", api.Model, "401", "404"),
            },
            **_batch_paths(batch),
            "/health": _get("Whether this process answers.", api.Status),
            "/ready": _get("Whether requests are let in.", api.Status, "503"),
            "/version": _get("The server's version.", api.Version),
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key where the router's tenants have some
    }


def _batch_paths(batch: type) -> Part:
    """Those of files and batches, which are 404 where the router has no folder for them."""
    file_id = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": _STRING}]}
    binary = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "required": ["purpose", "file"],
        "properties": {"purpose": {"enum": ["batch"]}, "file": binary},
    }
    content = _operation("A file's content.", File, ("401", "404"))
    content["responses"]["200"]["content"] = {"application/octet-stream": {"schema": binary}}
    cancel = _operation("Cancel a batch.", Batch, (*_ERRORS, "409"))
    return {
        "/v1/files": {
            "post": {
                **_operation("Upload a file of requests.", File, _ERRORS),
                "requestBody": {
                    "required": True,
                    "content": {"multipart/form-data": {"schema": form}},
                },
            },
            "get": {
                **_operation("The caller's files.", Files, ("400", "401", "404")),
                "parameters": _query(FilesQuery),
            },
        },
        "/v1/files/{id}": {
            **file_id,
            **_get("One file.", File, "401", "404"),
            "delete": _operation("Delete a file.", FileDeleted, ("401", "404", "409")),
        },
        "/v1/files/{id}/content": {**file_id, "get": content},
        "/v1/batches": {
            **_post("Run a file of requests.", batch, Batch),
            "get": {
                **_operation("The caller's batches.", Batches, ("400", "401", "404")),
                "parameters": _query(BatchesQuery),
            },
        },
        "/v1/batches/{id}": {**file_id, **_get("One batch.", Batch, "401", "404")},
        "/v1/batches/{id}/cancel": {**file_id, "post": cancel},
    }


def _query(kind: type) -> list[Part]:
    _, schemas = msgspec.json.schema_components((kind,))
    fields = schemas[kind.__name__]["properties"].items()
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields]


def _schemas() -> Part:
    _, schemas = msgspec.json.schema_components(
        (*_REQUESTS, *_ANSWERS), ref_template="#/components/schemas/{name}"
    )
    for request in _REQUESTS:
        properties = schemas[request.__name__]["properties"]
        for name in _DESCRIPTIONS.keys() & properties.keys():
            properties[name]["description"] = _DESCRIPTIONS[name]
        for name, neutral in api.unsupported_in(request).items():
            properties[name] = {"enum": [None, *neutral], "description": "Not supported."}
    return schemas


def _post(text: str, body: type, answer: type, *, streams: bool = False) -> Part:
    timeout = {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}
    operation = _operation(text, answer, _ERRORS)
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return {
        "post": {
            **operation,
            "parameters": [
                {"name": TIMEOUT_HEADER, "in": "header", "schema": timeout},
                {"name": "traceparent", "in": "header", "schema": _STRING},
            ],
            "requestBody": {"required": True, "content": _json(body)},
        }
    }


def _get(text: str, answer: type, *errors: str) -> Part:
    return {"get": _operation(text, answer, errors)}


def _operation(text: str, answer: type, errors: tuple[str, ...]) -> Part:
    return {
        "summary": text,
        "responses": {
            "200": {"description": "Done.", "content": _json(answer)},
            **{status: _failure(status) for status in errors},
        },
    }


def _failure(status: str) -> Part:
    failure: Part = {"description": "Refused or failed.", "content": _json(api.Error)}
    if status in ("429", "503"):
        whole = {"type": "integer", "minimum": 1}
        failure["headers"] = {"Retry-After": {"required": True, "schema": whole}}
    return failure


def _json(struct: type) -> Part:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}}
