"""What a request may have in it, as JSON Schema: checked by `schema`, published by `openapi`.

OpenAI's fields and, where vLLM has more, vLLM's by the same names. What would change the meaning of
an answer and is not there is refused by name; what only hints (`user`, `store`) is ignored.
"""

from __future__ import annotations

from typing import Any

from baton.gateway.schema import DIGITS, UNSUPPORTED
from baton.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from baton.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS
from router.admission.admission import MAX_MESSAGES

MAX_CHOICES = 1024  # prompts times n
MAX_CHOICES_SIZE = 4 << 20  # n times the characters or token ids of the prompts, where n > 1
MAX_N = 128
MAX_PROMPTS = 1024
_UINT32 = (1 << 32) - 1
_DEFAULT_MAX_TOKENS = 16

Table = dict[str, dict[str, Any]]


def _number(text: str, **limits: float) -> dict[str, Any]:
    return {"type": ["number", "null"], "description": text, **limits}


def _integer(text: str, minimum: int, maximum: int = _UINT32, **more: Any) -> dict[str, Any]:
    bounds = {"minimum": minimum, "maximum": maximum}
    return {"type": ["integer", "null"], "description": text, **bounds, **more}


def _flag(text: str, default: bool = False) -> dict[str, Any]:
    return {"type": ["boolean", "null"], "description": text, "default": default}


def _text(text: str) -> dict[str, Any]:
    return {"type": ["string", "null"], "description": text}


def _only(*neutral: Any) -> dict[str, Any]:
    """A feature that is not there: only the values that mean "without it" are taken."""
    text = "Not supported; refused unless it says that it is not wanted."
    return {UNSUPPORTED: True, "enum": [None, *neutral], "description": text}


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
        "properties": {"include_usage": _flag("A last chunk tells the usage.")},
    },
    "return_token_ids": _flag("Tell the output's token ids too."),
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
    "prompt_logprobs": _only(),
    "truncate_prompt_tokens": _only(),
    "allowed_token_ids": _only([]),
    "bad_words": _only([]),
    "logits_processors": _only([]),
    "structured_outputs": _only(),
    "guided_json": _only(),
    "guided_regex": _only(),
    "guided_choice": _only(),
    "guided_grammar": _only(),
    "response_format": _only({"type": "text"}),
    "skip_special_tokens": _only(True),
    "detokenize": _only(True),
    "kv_transfer_params": _only(),
}

COMPLETION: dict[str, Any] = {
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
        "max_tokens": _integer("Most tokens of each choice.", 1, default=_DEFAULT_MAX_TOKENS),
        "logprobs": _integer("Alternatives to tell for each token.", 0, MAX_TOP_LOGPROBS),
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

MESSAGES: dict[str, Any] = {
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
                                "type": {"enum": ["text"]},
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
CHAT: dict[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": MESSAGES,
        "max_completion_tokens": _integer("Most tokens; what the context holds by default.", 1),
        "max_tokens": _integer("The same, by its older name.", 1),
        "logprobs": _flag("Tell the log-probability of each token."),
        "top_logprobs": _integer("Alternatives to tell; needs logprobs.", 0, MAX_TOP_LOGPROBS),
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

TOKENIZE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": _SERVING["model"],
        "prompt": {"type": ["string", "null"], "description": "A text; or else give messages."},
        "messages": {"anyOf": [MESSAGES, {"type": "null"}]},
        "return_token_strs": _flag("Tell what each token stands for."),
        **_TEMPLATE,
        "add_special_tokens": {
            "type": ["boolean", "null"],
            "description": "Only the default: true for a prompt, false for messages.",
        },
    },
}
