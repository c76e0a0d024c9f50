"""What etcd's failures mean. Its status codes alone do not tell, so its texts are read as well."""

from __future__ import annotations

import asyncio

import grpc

from baton.errors import (
    BatonError,
    ConfigError,
    InternalError,
    Overloaded,
    Stale,
    Unauthenticated,
    Unavailable,
)

# Unauthenticated asks for a new login, ConfigError for a person, Unavailable for patience.
_TEXTS: list[tuple[str, type[BatonError], str]] = [
    ("invalid auth token", Unauthenticated, "does not know our token"),
    ("revision of auth store is old", Unauthenticated, "wants a newer token"),
    ("user name is empty", Unauthenticated, "asks for a user: set --etcd-user"),
    ("authentication failed", ConfigError, "refuses user {user!r} or its password"),
    ("permission denied", ConfigError, "denies user {user!r} access to Baton's keys"),
    ("lease not found", Stale, "does not know our lease"),
    ("CERTIFICATE_VERIFY_FAILED", ConfigError, "has a certificate that --etcd-ca did not sign"),
    ("Hostname Verification", ConfigError, "has a certificate for another name"),
    ("ALERT_BAD_CERTIFICATE", ConfigError, "wants another client certificate: see --etcd-cert"),
    ("CERTIFICATE_REQUIRED", ConfigError, "wants a client certificate: set --etcd-cert"),
    ("SSL_ERROR_SSL", ConfigError, "and we find no common TLS"),
]
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


def error_of(
    error: grpc.aio.AioRpcError | asyncio.InvalidStateError, endpoint: str, user: str
) -> BatonError:
    """The Baton error that a failed call to `endpoint` as `user` stands for."""
    if isinstance(error, asyncio.InvalidStateError):  # grpc.aio: a write on a call that has ended
        return Unavailable(f"etcd at {endpoint} ended the call")
    code, text = error.code(), error.details() or ""
    for sign, cls, meaning in _TEXTS:
        if sign in text:
            return cls(f"etcd at {endpoint} {meaning.format(user=user)} ({text})")
    if code in _GONE:
        return Unavailable(f"etcd at {endpoint} does not answer: {text or code.name}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(f"etcd at {endpoint} has no room or time: {text}")
    return InternalError(f"etcd at {endpoint} failed with {code.name}: {text}")
