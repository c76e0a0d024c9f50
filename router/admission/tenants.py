"""Who asks, and what that caller may have: keys, limits, share and cache of each tenant.

Tenants come from a TOML file, read once at start. Without a file there is one tenant, "default",
without limits, and keys are ignored.

    [tenants.search]
    keys = ["sha256:…"]            # printf %s KEY | sha256sum
    key_files = ["search.key"]     # or the key itself in a file, found from this file's directory
    weight = 2.0                   # share of the fleet next to other tenants that want some
    priority = "high"              # low: a quarter of the share; high: four times
    requests_per_minute = 600
    tokens_per_minute = 1000000    # prompt and output
    burst_seconds = 60             # so many seconds' worth may come at once
    max_prompt_tokens = 8192
    max_running = 32               # choices count one by one
    [default]                      # callers without a key; without this table they are refused

A body with several prompts or choices is one request. Its tokens are charged as they are used:
each prompt once, and every choice's output, of which a little is reserved beforehand.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.errors import InvalidRequest, Overloaded, RetryableError, Unauthenticated
from baton.v1 import common_pb2
from router.admission.fair_queue import Claim, Turn, Turns
from router.admission.rate_limit import Bucket
from router.admission.tenant_file import DEFAULT, Limits, TenantEntry, read_tenants

_RESERVED_OUTPUT = 256  # tokens charged at the start of a choice; more are charged as they come
_BUSY_RETRY_S = 1.0  # when as many run as may: one of them ends, nobody knows when

Clock = Callable[[], float]
Metadata = Iterable[tuple[str, str | bytes]]


class Tenant:
    """One tenant's limits and what of them is in use. Event-loop thread only."""

    def __init__(
        self, name: str, limits: Limits, turns: Turns, clock: Clock, *, salted: bool = True
    ) -> None:
        self.name = name
        self.limits = limits
        self._salted = salted
        self._turns = turns
        self._claim = Claim(name, limits.weight, limits.priority)
        self._running = 0
        self._requests = Bucket(limits.requests_per_minute, limits.burst_s, clock)
        self._tokens = Bucket(limits.tokens_per_minute, limits.burst_s, clock)

    def salt(self, cache_salt: str) -> str:
        """Keeps the tenant's prefixes to itself, whatever salt the request has."""
        return f"{self.name}/{cache_salt}" if self._salted else cache_salt

    def enter(
        self,
        prompt_tokens: int,
        max_tokens: int,
        seconds_of_work: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
        *,
        choices: int = 1,
    ) -> Visit:
        """Lets a request in: charges it and gives it its turn; leave the Visit's block to end it.

        With several choices it is the first of so many; 0 is a further one, which costs no request.
        Raises Overloaded, with the time until it fits, at a limit; InvalidRequest where it never
        fits.
        """
        self._check_size(prompt_tokens + max_tokens * max(1, choices))
        reserved = min(max_tokens, _RESERVED_OUTPUT)
        if choices:
            self.check_requests(choices)
        else:
            self.check_running()
        self._check_tokens(prompt_tokens + reserved * max(1, choices))
        requests = min(1, choices)
        self._requests.take(requests)
        self._tokens.take(prompt_tokens + reserved)
        self._running += 1
        turn = self._turns.take(self._claim, seconds_of_work, priority)
        return Visit(self, turn, requests, prompt_tokens, reserved)

    def due_now(
        self,
        seconds_of_work: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> float:
        """When a request that came now would be due (time.monotonic()); nothing is charged."""
        return self._turns.look(self._claim, seconds_of_work, priority).due

    def check_requests(self, choices: int = 1) -> None:
        """Raises Overloaded while no such request may enter: cheap, before any other work."""
        self.check_running(choices)
        if (wait_s := self._requests.wait_s(1)) > 0:
            raise Overloaded("this tenant's requests a minute are used up", wait_s)

    def check_running(self, choices: int = 1) -> None:
        """Raises Overloaded while so many more may not run, InvalidRequest if they never may."""
        if choices > self.limits.max_running:
            raise InvalidRequest(
                f"{choices} choices run at once and this tenant may run {self.limits.max_running}: "
                "ask for fewer",
                "n",
            )
        if self._running + choices > self.limits.max_running:
            raise Overloaded(f"{self._running} requests of this tenant run already", _BUSY_RETRY_S)

    def most_output(self, prompt_tokens: int, choices: int) -> int:
        """Most output tokens of each choice where the request leaves that open; at least 1."""
        size = min(self._tokens.size, sys.maxsize)
        return max(1, int(size - prompt_tokens) // choices)

    def tokenized(self) -> None:
        """Charges a request that is answered at once; `use` charges its tokens afterwards."""
        self.check_requests()
        self._check_tokens(0)
        self._requests.take(1)

    def use(self, tokens: int) -> None:
        """Charges tokens that were not reserved; where they are not there, the next ones wait."""
        self._tokens.take(tokens)

    def _check_size(self, tokens: int) -> None:
        if tokens > self._tokens.size:
            raise InvalidRequest(
                f"prompt and output may take {tokens} tokens and this tenant gets "
                f"{self._tokens.size:.0f} at once: ask for fewer",
                "sampling.max_tokens",
            )

    def _check_tokens(self, tokens: int) -> None:
        if (wait_s := self._tokens.wait_s(tokens)) > 0:
            raise Overloaded("this tenant's tokens a minute are used up", wait_s)

    def refund(self, requests: int, tokens: int) -> None:
        """Gives back what was charged and not used."""
        self._requests.give(requests)
        self._tokens.give(tokens)

    def leave(self, turn: Turn) -> None:
        """A request has ended."""
        self._running -= 1
        self._turns.end(turn)

    def computed(self, turn: Turn) -> None:
        """A request's prompt is computed: it stands in nobody's way any more."""
        self._turns.end(turn)


class Visit:
    """A request's stay with its tenant: what it was charged, and its turn.

    `with tenant.enter(...) as visit:` around the request. At the end reserved tokens that were not
    used are given back; all of it, and the request too, if it was refused before its first token.
    """

    def __init__(
        self, tenant: Tenant, turn: Turn, requests: int, prompt_tokens: int, reserved: int
    ) -> None:
        self.due = turn.due  # time.monotonic()
        self._tenant = tenant
        self._turn = turn
        self._requests = requests
        self._prompt_tokens = prompt_tokens
        self._reserved = reserved  # output tokens, charged and not delivered yet
        self._began = False

    def delivered(self, count: int) -> None:
        """So many more tokens went to the caller."""
        if not self._began:
            self._began = True
            self._tenant.computed(self._turn)
        self._tenant.use(max(0, count - self._reserved))
        self._reserved = max(0, self._reserved - count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tenant.leave(self._turn)
        refused = isinstance(error, RetryableError) and not self._began
        self._tenant.refund(
            self._requests * refused, self._reserved + self._prompt_tokens * refused
        )


class Tenants:
    """All tenants, by the keys they show."""

    def __init__(
        self, entries: Iterable[TenantEntry] | None, clock: Clock = time.monotonic
    ) -> None:
        """`entries` as in the file; None is the one tenant that a router without a file has."""
        turns = Turns(clock)
        self._open = entries is None
        self._keyless: Tenant | None = None
        self._by_digest: list[tuple[bytes, Tenant]] = []
        if entries is None:
            self._keyless = Tenant(DEFAULT, Limits(), turns, clock, salted=False)
        for entry in entries or ():
            tenant = Tenant(entry.name, entry.limits, turns, clock)
            if entry.is_default:
                self._keyless = tenant
            self._by_digest += [(digest, tenant) for digest in entry.key_digests]

    @classmethod
    def load(cls, path: Path | None, clock: Clock = time.monotonic) -> Tenants:
        """From the file, or without one. Raises ConfigError naming file, tenant and field."""
        return cls(None if path is None else read_tenants(path), clock)

    def of(self, metadata: Metadata | None) -> Tenant:
        """The tenant whose key the call shows. Raises Unauthenticated."""
        key = None if self._open else _key(metadata or ())
        if key is None:
            if self._keyless is None:
                raise Unauthenticated("this router needs an API key: authorization: Bearer KEY")
            return self._keyless
        found = None
        shown = hashlib.sha256(key).digest()
        for digest, tenant in self._by_digest:  # all of them: the time taken tells nothing
            if hmac.compare_digest(shown, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found


def _key(metadata: Metadata) -> bytes | None:
    """The key in `authorization: Bearer KEY`; None where there is no such entry."""
    for name, value in metadata:
        if name.lower() != "authorization":
            continue
        text = value.encode() if isinstance(value, str) else value
        scheme, _, key = text.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthenticated("authorization must be: Bearer KEY")
        return key.strip()
    return None
