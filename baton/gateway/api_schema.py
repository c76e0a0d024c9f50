"""The API's description: what a request may have in it, as JSON Schema, and what answers look like.

`json_schema` checks requests against it, and /openapi.json publishes it.

OpenAI's fields and, where vLLM has more, vLLM's by the same names. What would change the meaning of
an answer and is not there is refused by name; what only hints (`user`, `store`) is ignored.
"""

from __future__ import annotations

from typing import Any

from baton.gateway.http_exchange import MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER
from baton.gateway.json_schema import DIGITS, UNSUPPORTED
from baton.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from baton.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS
from router.admission.admission import MAX_MESSAGES

MAX_CHOICES = 1024  # prompts times n
MAX_CHOICES_SIZE = 4 << 20  # n times the characters or token ids of the prompts, where n > 1
MAX_N = 128
MAX_PROMPTS = 1024
_UINT32 = (1 << 32) - 1
_DEFAULT_MAX_TOKENS = 16

Part = dict[str, Any]
Table = dict[str, Part]


def _number(text: str, **limits: float) -> Part:
    return {"type": ["number", "null"], "description": text, **limits}


def _integer(text: str, minimum: int, maximum: int = _UINT32, **more: Any) -> Part:
    bounds = {"minimum": minimum, "maximum": maximum}
    return {"type": ["integer", "null"], "description": text, **bounds, **more}


def _flag(text: str, default: bool = False) -> Part:
    return {"type": ["boolean", "null"], "description": text, "default": default}


def _text(text: str) -> Part:
    return {"type": ["string", "null"], "description": text}


def _only(*neutral: Any) -> Part:
    """A feature that is not there: only the values that mean "without it" are taken."""
    text = "Not supported; refused unless it says that it is not wanted."
    return {UNSUPPORTED: True, "enum": [None, *neutral], "description": text}


_TEXT_ONLY = "must be 'text': images are not supported, nor are audio and files"
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": _UINT32}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

_SAMPLING: Table = {
    "temperature": _number("0 is greedy. 1 by default.", minimum=0, maximum=100),
    "top_p": _number("Nucleus sampling. 1 by default.", exclusiveMinimum=0, maximum=1),
    "top_k": _integer("Keep the k most likely tokens; 0 or -1 keeps all.", -1),
    "min_p": _number("Drop what is less likely than this share of the best.", minimum=0, maximum=1),
    "presence_penalty": _number("For tokens in the output.", minimum=-2, maximum=2),
    "frequency_penalty": _number("For each occurrence in the output.", minimum=-2, maximum=2),
    "repetition_penalty": _number(
        "For tokens in prompt or output; 1 is none.", exclusiveMinimum=0, maximum=100
    ),
    "logit_bias": {
        "type": ["object", "null"],
        "description": "Added to the logits of these token ids.",
        "propertyNames": {"pattern": DIGITS, "maxLength": 9},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "seed": _integer(
        "Same seed, same output. Choice i of n is drawn with seed + i.", -(1 << 63), (1 << 64) - 1
    ),
    "stop": {
        "description": "Text that ends the output, and is not part of it.",
        "anyOf": [
            _STOP,
            {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            {"type": "null"},
        ],
    },
    "stop_token_ids": {
        "type": ["array", "null"],
        "description": "Tokens that end the output.",
        "items": _TOKEN_ID,
        "maxItems": MAX_STOP_TOKEN_IDS,
    },
    "include_stop_str_in_output": _flag("Keep the stop string in the text."),
    "ignore_eos": _flag("Go on after end-of-sequence, up to max_tokens."),
    "min_tokens": _integer("No end before so many tokens.", 0),
}
_ANSWER: Table = {
    "n": _integer("Choices for each prompt.", 1, MAX_N, default=1),
    "stream": _flag("Send the output as it comes, as server-sent events."),
    "stream_options": {
        "type": ["object", "null"],
        "description": "Only with stream.",
        "properties": {"include_usage": _flag("A last chunk has the usage.")},
    },
    "return_token_ids": _flag("Return the output's token ids too."),
}
_SERVING: Table = {
    "model": _text("The served model, which is meant too where none is named."),
    "priority": {
        "description": "How urgent it is: low, normal or high; or vLLM's number, where below 0 is "
        "high and above 0 is low. The tenant's own by default.",
        "anyOf": [
            {"type": "string", "enum": ["low", "normal", "high"]},
            {"type": "integer", "minimum": -(1 << 31), "maximum": (1 << 31) - 1},
            {"type": "null"},
        ],
    },
    "ttft_target_ms": _integer("Refuse at once when the first token cannot come in time.", 0),
    "cache_salt": _text("Shares cached prefixes only with requests of the same salt."),
}
_REFUSED: Table = {
    "echo": _only(False),
    "use_beam_search": _only(False),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "kv_transfer_params"), _only()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors"), _only([])),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _only()),
    "structured_outputs": _only(),
    "response_format": _only({"type": "text"}),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), _only(True)),
}

COMPLETION: Part = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "description": "What to continue: a text, texts, token ids or lists of token ids.",
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
        },
        "max_tokens": _integer(
            "Most tokens of each choice; refused where the context leaves fewer.",
            1,
            default=_DEFAULT_MAX_TOKENS,
        ),
        "logprobs": _integer("Alternatives to return for each token.", 0, MAX_TOP_LOGPROBS),
        "best_of": _integer("Only where it equals n.", 1, MAX_N),
        **_SAMPLING,
        **_ANSWER,
        **_SERVING,
        **_REFUSED,
        "echo": _flag("Begin the text with the prompt; not together with logprobs."),
        "suffix": _only(""),
        "prompt_embeds": _only(),
        "add_special_tokens": _only(True),
    },
}

MESSAGES: Part = {
    "type": "array",
    "description": "The conversation, oldest turn first; the model's chat template renders it.",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "description": "The text; several parts are joined by line breaks.",
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {
                                "type": {"enum": ["text"], UNSUPPORTED: _TEXT_ONLY},
                                "text": {"type": "string"},
                            },
                        },
                    },
                    {"type": "null"},
                ],
            },
            "tool_calls": _only([]),
            "function_call": _only(),
            "audio": _only(),
        },
    },
}
_TEMPLATE: Table = {
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
    "add_special_tokens": _only(False),
    "chat_template": _only(),
    "chat_template_kwargs": _only({}),
    "documents": _only([]),
    "tools": _only([]),
}
CHAT: Part = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": MESSAGES,
        "max_completion_tokens": _integer(
            "Most tokens; what the context leaves by default, and refused above it.", 1
        ),
        "max_tokens": _integer("The same, by its older name.", 1),
        "logprobs": _flag("Return the log-probability of each token."),
        "top_logprobs": _integer("Alternatives to return; needs logprobs.", 0, MAX_TOP_LOGPROBS),
        **_SAMPLING,
        **_ANSWER,
        **_SERVING,
        **_REFUSED,
        **_TEMPLATE,
        "tool_choice": _only("none", "auto"),
        "parallel_tool_calls": _only(True, False),
        "functions": _only([]),
        "function_call": _only("none", "auto"),
        "audio": _only(),
        "modalities": _only(["text"]),
        "web_search_options": _only(),
    },
}

TOKENIZE: Part = {
    "type": "object",
    "properties": {
        "model": _SERVING["model"],
        "prompt": {"type": ["string", "null"], "description": "A text; or else give messages."},
        "messages": {"anyOf": [MESSAGES, {"type": "null"}]},
        "return_token_strs": _flag("Return the text of each token."),
        **_TEMPLATE,
        "add_special_tokens": {
            "type": ["boolean", "null"],
            "description": "Only the default: true for a prompt, false for messages.",
        },
    },
}


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
            "/v1/completions": _post("Continue prompts.", COMPLETION, "Completion", True),
            "/v1/chat/completions": _post("Answer a chat.", CHAT, "ChatCompletion", True),
            "/tokenize": _post("Token ids of a prompt or a chat.", TOKENIZE, "Tokens"),
            "/v1/models": _get("The served models.", "Models", "401"),
            "/v1/models/{model}": {
                "parameters": [_parameter("model", "path", {"type": "string"}, required=True)],
                **_get("One model.", "Model", "401", "404"),
            },
            "/health": _get("Whether this process answers.", "Status"),
            "/ready": _get("Whether requests are let in.", "Status", "503"),
            "/version": _get("The server's version.", "Version"),
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
    return {"name": name, "in": place, "required": required, "schema": schema, "description": text}


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
    "Version": _object(version=_STRING),
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_NULLABLE_STRING, code=_NULLABLE_STRING)
    ),
}
