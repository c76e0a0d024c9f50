"""Tenants: API keys, limits, share of the fleet and cache isolation.

Tenants come from a TOML file, read once at start. Without a file there is one tenant, "default",
without limits, and keys are ignored.

    [tenants.search]
    keys = ["sha256:…"]            # printf %s KEY | sha256sum
    key_files = ["search.key"]     # or the key itself in a file, found from this file's directory
    weight = 2.0                   # share of the fleet next to other active tenants
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
import math
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    RetryableError,
    Unauthenticated,
)
from baton.v1 import common_pb2
from router.admission.fair_queue import FairQueue, Flow, PendingPrompt
from router.admission.rate_limit import TokenBucket

PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
DEFAULT = "default"  # the tenant of callers without a key
_RESERVED_OUTPUT = 256  # tokens charged at the start of a choice; more are charged as they come
_BUSY_RETRY_S = 1.0  # at max_running: when a request will end is not known
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")

Clock = Callable[[], float]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class TenantLimits:
    """What a tenant may use; the defaults limit nothing."""

    weight: float = 1.0
    priority: common_pb2.Priority = common_pb2.PRIORITY_NORMAL
    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    burst_s: float = 60.0
    max_prompt_tokens: int = 0  # 0: what the router takes
    max_running: float = math.inf


@dataclass(frozen=True)
class TenantEntry:
    """One tenant as the file has it."""

    name: str
    limits: TenantLimits
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    is_default: bool = False  # callers without a key


class Tenant:
    """One tenant's limits and what of them is in use. Event-loop thread only."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        fair_queue: FairQueue,
        clock: Clock,
        *,
        salted: bool = True,
    ) -> None:
        self.name = name
        self.limits = limits
        self._salted = salted
        self._fair_queue = fair_queue
        self._flow = Flow(name, limits.weight, limits.priority)
        self._running = 0
        self._requests = TokenBucket(limits.requests_per_minute, limits.burst_s, clock)
        self._tokens = TokenBucket(limits.tokens_per_minute, limits.burst_s, clock)

    def salt(self, cache_salt: str) -> str:
        """Isolates the tenant's cached prefixes, whatever salt the request has."""
        return f"{self.name}/{cache_salt}" if self._salted else cache_salt

    def enter(
        self,
        prompt_tokens: int,
        max_tokens: int,
        seconds_of_work: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
        *,
        choices: int = 1,
    ) -> AdmissionLease:
        """Charges a request and gives it its virtual finish; leaving the lease's block ends it.

        With several choices it is the first of so many; 0 is a further one, which costs no request.
        Raises Overloaded, with the time until it fits, at a limit; InvalidRequest where it never
        fits.
        """
        total = prompt_tokens + max_tokens * max(1, choices)
        if total > self._tokens.size:
            raise InvalidRequest(
                f"prompt and output may take {total} tokens and this tenant gets "
                f"{self._tokens.size:.0f} at once: ask for fewer",
                "sampling.max_tokens",
            )
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
        prompt = self._fair_queue.add(self._flow, seconds_of_work, priority)
        return AdmissionLease(self, prompt, requests, prompt_tokens, reserved)

    def virtual_finish_now(
        self,
        seconds_of_work: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
    ) -> float:
        """The virtual finish of a request that came now (time.monotonic()); nothing is charged."""
        return self._fair_queue.preview(self._flow, seconds_of_work, priority).virtual_finish

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

    def charge_tokenize(self) -> None:
        """Charges a request that is answered at once; `use` charges its tokens afterwards."""
        self.check_requests()
        self._check_tokens(0)
        self._requests.take(1)

    def use(self, tokens: int) -> None:
        """Charges tokens that were not reserved; later requests wait if they are not there."""
        self._tokens.take(tokens)

    def computed(self, prompt: PendingPrompt) -> None:
        """A request's prompt is computed."""
        self._fair_queue.remove(prompt)

    def leave(self, prompt: PendingPrompt, unused_requests: int, unused_tokens: int) -> None:
        """A request has ended: gives back what was charged and not used."""
        self._running -= 1
        self._fair_queue.remove(prompt)
        self._requests.give(unused_requests)
        self._tokens.give(unused_tokens)

    def _check_tokens(self, tokens: int) -> None:
        if (wait_s := self._tokens.wait_s(tokens)) > 0:
            raise Overloaded("this tenant's tokens a minute are used up", wait_s)


class AdmissionLease:
    """An admitted request: what its tenant was charged, and its place in the fair queue.

    `with tenant.enter(...) as lease:` around the request. At the end reserved tokens that were not
    used are given back; all of it, and the request too, if it was refused before its first token.
    """

    def __init__(
        self,
        tenant: Tenant,
        prompt: PendingPrompt,
        requests: int,
        prompt_tokens: int,
        reserved: int,
    ) -> None:
        self.virtual_finish = prompt.virtual_finish  # time.monotonic()
        self._tenant = tenant
        self._prompt = prompt
        self._requests = requests
        self._prompt_tokens = prompt_tokens
        self._reserved = reserved  # output tokens, charged and not delivered yet
        self._began = False

    def delivered(self, count: int) -> None:
        """So many more tokens went to the caller."""
        if not self._began:
            self._began = True
            self._tenant.computed(self._prompt)
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
        refused = isinstance(error, RetryableError) and not self._began
        unused = self._reserved + self._prompt_tokens * refused
        self._tenant.leave(self._prompt, self._requests * refused, unused)


class Tenants:
    """All tenants, by API key."""

    def __init__(
        self, entries: Iterable[TenantEntry] | None, clock: Clock = time.monotonic
    ) -> None:
        """`entries` as in the file; None is the one tenant that a router without a file has."""
        fair_queue = FairQueue(clock)
        self._open = entries is None
        self._keyless: Tenant | None = None
        self._by_digest: list[tuple[bytes, Tenant]] = []
        if entries is None:
            self._keyless = Tenant(DEFAULT, TenantLimits(), fair_queue, clock, salted=False)
        for entry in entries or ():
            tenant = Tenant(entry.name, entry.limits, fair_queue, clock)
            if entry.is_default:
                self._keyless = tenant
            self._by_digest += [(digest, tenant) for digest in entry.key_digests]

    @classmethod
    def load(cls, path: Path | None, clock: Clock = time.monotonic) -> Tenants:
        """From the file, or without one. Raises ConfigError naming file, tenant and field."""
        return cls(None if path is None else read_tenants(path), clock)

    def of(self, metadata: Metadata | None) -> Tenant:
        """The tenant whose key the call carries. Raises Unauthenticated."""
        key = None if self._open else _key(metadata or ())
        if key is None:
            if self._keyless is None:
                raise Unauthenticated("this router needs an API key: authorization: Bearer KEY")
            return self._keyless
        found = None
        digest = hashlib.sha256(key).digest()
        for known, tenant in self._by_digest:  # all of them: constant time
            if hmac.compare_digest(digest, known):
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


# The file. Every mistake in it is reported with file, tenant and field.


def read_tenants(path: Path) -> list[TenantEntry]:
    """All tenants of the file. Raises ConfigError."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"tenants file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants file {path} is not TOML: {error}") from error
    top = _Table(path, "the file", content)
    tables = top.take("tenants", "tables of their own, as [tenants.NAME]", _is_table, {})
    default = top.take("default", "a table", _is_table, None)
    top.finish()
    entries = [_tenant(path, name, table) for name, table in tables.items()]
    if default is not None:
        table = _Table(path, "[default]", default)
        if DEFAULT in tables:
            raise table.error("NAME", "given once: there is a [tenants.default] too")
        entries.append(TenantEntry(DEFAULT, _limits(table), is_default=True))
        table.finish()
    if not entries:
        raise ConfigError(f"tenants file {path} has no tenant: give [tenants.NAME] or [default]")
    owners: dict[bytes, str] = {}
    for entry in entries:
        for digest in entry.key_digests:
            if (other := owners.setdefault(digest, entry.name)) != entry.name:
                raise ConfigError(
                    f"tenants file {path}: keys of [tenants.{other}] and [tenants.{entry.name}] "
                    "must differ"
                )
    return entries


def _tenant(path: Path, name: str, content: Any) -> TenantEntry:
    if not _is_table(content):
        raise ConfigError(f"tenants file {path}: [tenants.{name}] must be a table")
    table = _Table(path, f"[tenants.{name}]", content)
    if not _NAME.fullmatch(name):
        raise table.error("NAME", "letters, digits and . _ - only, beginning with one of the first")
    digests = [
        *map(table.digest, table.take("keys", "a list of texts", _are_texts, [])),
        *map(table.file_digest, table.take("key_files", "a list of texts", _are_texts, [])),
    ]
    if not digests:
        raise table.error("keys", "given, or key_files")
    entry = TenantEntry(name, _limits(table), tuple(digests))
    table.finish()
    return entry


def _limits(table: _Table) -> TenantLimits:
    found = {
        attribute: table.take(name, wanted, is_valid, None)
        for name, attribute, wanted, is_valid in _FIELDS
    }
    if found["priority"]:
        found["priority"] = PRIORITIES[found["priority"]]
    limits = TenantLimits(**{name: value for name, value in found.items() if value is not None})
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(limits, name) * limits.burst_s < 60:  # not even one fits, ever
            raise table.error(name, "so much that burst_seconds bring at least one")
    return limits


class _Table:
    """A table of the file, read field by field."""

    def __init__(self, path: Path, name: str, content: Mapping[str, Any]) -> None:
        self._path = path
        self._name = name
        self._left = dict(content)

    def take(self, field: str, wanted: str, is_valid: Callable[[Any], bool], default: Any) -> Any:
        """A field's value; the default where it is missing."""
        value = self._left.pop(field, None)  # TOML has no null
        if value is not None and not is_valid(value):
            raise self.error(field, wanted)  # the value might be a key: it is not shown
        return default if value is None else value

    def digest(self, key: str) -> bytes:
        """SHA-256 of a key, as `keys` has it."""
        match = _DIGEST.fullmatch(key)
        if not match:
            raise self.error("keys", '"sha256:" and 64 hexadecimal digits each')
        return bytes.fromhex(match[1])

    def file_digest(self, name: str) -> bytes:
        """SHA-256 of the key that a file holds."""
        try:
            key = (self._path.parent / Path(name).expanduser()).read_bytes().strip()
        except OSError as error:
            raise self.error("key_files", f"readable: {name}: {error.strerror}") from error
        if not key or b"\n" in key:
            raise self.error("key_files", f"files with one key each; {name} has another content")
        return hashlib.sha256(key).digest()

    def finish(self) -> None:
        """Raises ConfigError for an unknown field."""
        for field_name in self._left:
            raise ConfigError(
                f"tenants file {self._path}: {self._name} has an unknown field {field_name!r}"
            )

    def error(self, field: str, wanted: str) -> ConfigError:
        """What is wrong with a field."""
        return ConfigError(f"tenants file {self._path}: {field} of {self._name} must be {wanted}")


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_priority(value: Any) -> bool:
    return isinstance(value, str) and value in PRIORITIES


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


_ABOVE_0, _WHOLE = "a number above 0", "a whole number above 0"
_FIELDS = (  # name in the file, attribute of TenantLimits, what it must be
    ("weight", "weight", _ABOVE_0, _is_positive),
    ("priority", "priority", f"one of {', '.join(PRIORITIES)}", _is_priority),
    ("requests_per_minute", "requests_per_minute", _ABOVE_0, _is_positive),
    ("tokens_per_minute", "tokens_per_minute", _ABOVE_0, _is_positive),
    ("burst_seconds", "burst_s", _ABOVE_0, _is_positive),
    ("max_prompt_tokens", "max_prompt_tokens", _WHOLE, _is_count),
    ("max_running", "max_running", _WHOLE, _is_count),
)
