"""Tickets with which an interrupted stream is resumed at any router of the cluster.

A resumed request was admitted once, so it is not refused for lack of room. To prevent new requests
from claiming that, a router issues a ticket for each stream, signed with a key that all routers of
a cluster read from etcd. It is valid for one tenant, one prompt, one request at a time and a
bounded time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct

_FIELDS = Struct(">Q16s16s")  # expiry (Unix seconds), nonce, digest of the prompt
_MARGIN_S = 60  # for differences of clocks, and for a caller that waits before it resumes


class ResumeTickets:
    """Issues and checks tickets. Event-loop thread only."""

    def __init__(self, key: bytes = b"", clock: Callable[[], float] = time.time) -> None:
        """`key`: the cluster's; without it tickets are valid at this router only."""
        self._key = key or secrets.token_bytes(32)
        self._clock = clock
        self._in_use = set[bytes]()

    def issue(self, tenant: str, prompt: Sequence[int], cache_salt: str, seconds: float) -> bytes:
        """A ticket for a request that was admitted now and has `seconds` left."""
        expires = int(self._clock() + seconds) + _MARGIN_S
        fields = _FIELDS.pack(expires, secrets.token_bytes(16), _digest(prompt, cache_salt))
        return fields + self._signature(fields, tenant)

    @contextlib.contextmanager
    def use(self, ticket: bytes, tenant: str) -> Iterator[bool]:
        """Context of a request that shows a ticket; yields whether it is valid, except its prompt.

        A ticket in use is not valid for a second request.
        """
        fields, signature = ticket[: _FIELDS.size], ticket[_FIELDS.size :]
        valid = hmac.compare_digest(signature, self._signature(fields, tenant))
        valid = valid and _FIELDS.unpack(fields)[0] >= self._clock() and ticket not in self._in_use
        if valid:
            self._in_use.add(ticket)
        try:
            yield valid
        finally:
            if valid:
                self._in_use.remove(ticket)

    @staticmethod
    def is_for(ticket: bytes, prompt: Sequence[int], cache_salt: str) -> bool:
        """Whether a valid ticket was issued for this prompt."""
        found: bytes = _FIELDS.unpack(ticket[: _FIELDS.size])[2]
        return hmac.compare_digest(found, _digest(prompt, cache_salt))

    def _signature(self, fields: bytes, tenant: str) -> bytes:
        return hmac.digest(self._key, fields + tenant.encode(), "sha256")


def _digest(prompt: Sequence[int], cache_salt: str) -> bytes:
    tokens = prompt if isinstance(prompt, array) else array("I", prompt)
    return hashlib.blake2b(tokens.tobytes() + cache_salt.encode(), digest_size=16).digest()
