"""HTTP headers: caller, deadline, trace, request ids and CORS."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from baton.errors import InvalidRequest
from baton.gateway.errors import MESSAGES_PATH
from baton.net.http_errors import Header
from baton.net.http_server import HttpExchange
from baton.telemetry import propagation, tracing
from router.admission.tenants import Tenant
from router.generation_service import CALLERS_ID, Caller, is_callers_id

TIMEOUT_HEADER = "x-request-timeout"
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86400.0
ALLOW_ORIGIN = b"access-control-allow-origin"
_REQUEST_ID, _TRACE_ID = b"x-request-id", b"x-trace-id"
_API_KEY = b"x-api-key"
# What agents and gateways name a conversation with: in general, Codex, OpenCode, Claude Code.
_SESSION_HEADERS = (
    b"x-session-id", b"session-id", b"session_id", b"x-session-affinity",
    b"x-claude-code-session-id",
)  # fmt: skip
MAX_SESSION_CHARS = 1024
_EXPOSED = (
    b"x-request-id, request-id, x-trace-id, traceparent, retry-after, retry-after-ms, "
    b"x-baton-dropped-tools, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-tokens, anthropic-ratelimit-requests-limit, "
    b"anthropic-ratelimit-requests-remaining, anthropic-ratelimit-requests-reset, "
    b"anthropic-ratelimit-tokens-limit, anthropic-ratelimit-tokens-remaining, "
    b"anthropic-ratelimit-tokens-reset"
)


def caller_of(exchange: HttpExchange, *, timed: bool = True) -> Caller:
    """The caller's key, trace and, if `timed`, deadline.

    Raises InvalidRequest for an invalid deadline.
    """
    headers, metadata = exchange.headers, _trace_of(exchange)
    if (key := headers.get(b"authorization")) is not None:
        metadata.append(("authorization", key))
    elif (key := headers.get(_API_KEY)) is not None:  # Anthropic's clients send it
        metadata.append(("authorization", b"Bearer " + key))
    if (request_id := headers.get(_REQUEST_ID)) is not None:
        metadata.append((CALLERS_ID, request_id.decode("latin-1")))
    return Caller(
        tuple(metadata),
        _deadline_of(headers.get(TIMEOUT_HEADER.encode())) if timed else None,
        own_id=exchange.request_id,
        unread_bytes=lambda: exchange.unread_bytes,
    )


def _trace_of(exchange: HttpExchange) -> list[tuple[str, str | bytes]]:
    """The headers that name the caller's trace."""
    found = ((name, exchange.headers.get(name.encode())) for name in ("traceparent", "tracestate"))
    return [(name, value.decode("latin-1")) for name, value in found if value is not None]


def session_of(exchange: HttpExchange) -> str:
    """The session that a header names, or empty."""
    found = (exchange.headers.get(name, b"").decode("latin-1") for name in _SESSION_HEADERS)
    return next((name for name in found if name and len(name) <= MAX_SESSION_CHARS), "")


def id_headers(exchange: HttpExchange, trace_id: str = "") -> dict[bytes, bytes]:
    """Response headers with the ids of the request and its trace; a caller's own id is kept."""
    given = exchange.headers.get(_REQUEST_ID, b"").decode("latin-1")
    request_id = given if is_callers_id(given) else exchange.request_id
    headers = {_REQUEST_ID: request_id.encode()}
    if exchange.path.startswith(MESSAGES_PATH):
        headers[b"request-id"] = exchange.request_id.encode()
    if b"traceparent" in exchange.headers:
        parent = propagation.extract(_trace_of(exchange))
        if found := tracing.trace_id_in(parent):
            trace_id = found
            headers[b"traceparent"] = dict(propagation.inject(parent))["traceparent"].encode()
    if trace_id:
        headers[_TRACE_ID] = trace_id.encode()
    return headers


def limit_headers(tenant: Tenant, path: str) -> dict[bytes, bytes]:
    """Response headers with what is left of the tenant's rate limits, as the path's API names them:
    `x-ratelimit-limit-tokens`, or for messages `anthropic-ratelimit-tokens-limit`."""
    is_message, now = path.startswith(MESSAGES_PATH), datetime.now(UTC)
    headers = {}
    for one in tenant.rate_limits():
        full_at = (now + timedelta(seconds=math.ceil(one.reset_s))).strftime("%Y-%m-%dT%H:%M:%SZ")
        reset = full_at if is_message else f"{one.reset_s:.3f}s"
        values = {"limit": one.limit, "remaining": one.remaining, "reset": reset}
        for kind, value in values.items():
            name = f"x-ratelimit-{kind}-{one.name}"
            if is_message:
                name = f"anthropic-ratelimit-{one.name}-{kind}"
            headers[name.encode()] = f"{value}".encode()
    return headers


def with_request_id(exchange: HttpExchange, caller: Caller, request_id: str | None) -> Caller:
    """Adds a request id from the body; an id in the headers takes precedence."""
    if not request_id or is_callers_id(exchange.headers.get(_REQUEST_ID, b"").decode("latin-1")):
        return caller
    exchange.headers[_REQUEST_ID] = request_id.encode()
    exchange.answer_headers |= id_headers(exchange)
    return replace(caller, metadata=(*caller.metadata, (CALLERS_ID, request_id)))


def cors_headers(exchange: HttpExchange, origins: Collection[str]) -> dict[bytes, bytes]:
    """Response headers that let a web page of one of `origins` read the answer."""
    if not origins:
        return {}
    origin = exchange.headers.get(b"origin", b"")
    headers = {b"access-control-expose-headers": _EXPOSED}
    if "*" in origins:
        return {ALLOW_ORIGIN: b"*", **headers}
    if origin.decode("latin-1") in origins:
        return {ALLOW_ORIGIN: origin, b"vary": b"origin", **headers}
    return {b"vary": b"origin"}


def preflight_headers(exchange: HttpExchange, methods: str) -> list[Header]:
    """Response headers of a CORS preflight; see `cors_headers`.

    All request headers are allowed: keys are headers, and cookies are ignored.
    """
    requested = exchange.headers.get(b"access-control-request-headers", b"")
    return [
        (b"access-control-allow-methods", methods.encode()),
        *([(b"access-control-allow-headers", requested)] if requested else []),
        (b"access-control-max-age", b"7200"),
    ]


def _deadline_of(text: bytes | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be seconds between {MIN_TIMEOUT_S} and {MAX_TIMEOUT_S:.0f}",
            TIMEOUT_HEADER,
        )
    return time.monotonic() + seconds
