"""Tickets with which a stream that broke is resumed at any router of the cluster.

A resumed request was admitted once: it is not refused for want of room. So that nobody claims this
of a new one, a router gives each stream a ticket, signed with a key that all routers of a cluster
have in etcd. It is good for one tenant, one prompt, one request at a time and a bounded time.
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

_FIELDS = Struct(">Q16s16s")  # when it ends, Unix seconds; a number of its own; the prompt
_SPARE_S = 60  # for routers' clocks, and for a caller who waits before it resumes


class ResumeTickets:
    """Gives and takes tickets. Event-loop thread only."""

    def __init__(self, key: bytes = b"", clock: Callable[[], float] = time.time) -> None:
        """Without the cluster's key they are good at this router only."""
        self._key = key or secrets.token_bytes(32)
        self._clock = clock
        self._in_use = set[bytes]()

    def give(self, tenant: str, prompt: Sequence[int], cache_salt: str, seconds: float) -> bytes:
        """A ticket for a request that was admitted now and has so much time."""
        ends = int(self._clock() + seconds) + _SPARE_S
        fields = _FIELDS.pack(ends, secrets.token_bytes(16), _digest(prompt, cache_salt))
        return fields + self._signature(fields, tenant)

    @contextlib.contextmanager
    def taken(self, ticket: bytes, tenant: str) -> Iterator[bool]:
        """Around a request that shows a ticket: whether it is good, but for its prompt.

        While it is in use it is not good for another one.
        """
        fields, signature = ticket[: _FIELDS.size], ticket[_FIELDS.size :]
        good = hmac.compare_digest(signature, self._signature(fields, tenant))
        good = good and _FIELDS.unpack(fields)[0] >= self._clock() and ticket not in self._in_use
        if good:
            self._in_use.add(ticket)
        try:
            yield good
        finally:
            if good:
                self._in_use.remove(ticket)

    @staticmethod
    def is_for(ticket: bytes, prompt: Sequence[int], cache_salt: str) -> bool:
        """Whether a good ticket is one for this prompt."""
        found: bytes = _FIELDS.unpack(ticket[: _FIELDS.size])[2]
        return hmac.compare_digest(found, _digest(prompt, cache_salt))

    def _signature(self, fields: bytes, tenant: str) -> bytes:
        return hmac.digest(self._key, fields + tenant.encode(), "sha256")


def _digest(prompt: Sequence[int], cache_salt: str) -> bytes:
    tokens = prompt if isinstance(prompt, array) else array("I", prompt)
    return hashlib.blake2b(tokens.tobytes() + cache_salt.encode(), digest_size=16).digest()
