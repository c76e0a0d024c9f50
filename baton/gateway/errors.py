"""Errors as the API of a path formats them: Anthropic's below /v1/messages, OpenAI's elsewhere.

Below /v1/models, which both have, clients of Anthropic are known by their header.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from baton.errors import ContextOverflow, InvalidRequest, Overloaded
from baton.gateway import answers
from baton.net.http_errors import Failure, failure_of
from baton.net.http_server import HttpExchange
from router.request import LimitReached

MESSAGES_PATH, MODELS_PATH = "/v1/messages", "/v1/models"
VERSION_HEADER = b"anthropic-version"
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
OVERLOADED = 529  # Anthropic's: the service is full, not the caller over its limit
# Types by status; other statuses below 500 are invalid_request_error, others api_error.
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class MessageErrorDetails(Struct):
    """Why a request was refused or failed; the message begins with the field, if one is wrong."""

    type: ErrorType
    message: str


class MessageError(Struct, tag="error"):
    """The body of an error, and the data of an `error` event."""

    error: MessageErrorDetails
    request_id: str


def failure_at(exchange: HttpExchange, error: Exception) -> Failure:
    """Status, headers and body for `error` at the path; an unexpected one is logged."""
    failure = failure_of(error)
    both = exchange.path.startswith(MODELS_PATH) and VERSION_HEADER in exchange.headers
    if not (both or exchange.path.startswith(MESSAGES_PATH)):
        return failure
    status = failure.status
    if isinstance(error, Overloaded) and not isinstance(error, LimitReached):
        status = OVERLOADED
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = msgspec.json.decode(failure.body, type=answers.Error).error.message
    if isinstance(error, ContextOverflow):
        text = f"prompt is too long: {error}"  # agents look for these words, and compact
    elif isinstance(error, InvalidRequest) and error.field and error.field not in text:
        text = f"{error.field}: {text}"
    body = msgspec.json.encode(MessageError(MessageErrorDetails(kind, text), exchange.request_id))
    return Failure(status, failure.headers, body)
