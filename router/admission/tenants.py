"""Tenants: API keys, limits, share of the fleet and cache isolation.

Tenants come from a TOML file, read again when it or a key's file changes; docs/security.md lists
its fields. Without a file there is one tenant, "default", without limits, and keys are ignored.

A body with several prompts or choices is one request. Its tokens are charged as they are used:
each prompt once, and every choice's output, of which a little is reserved beforehand.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from baton.config.watched_files import WatchedFiles
from baton.errors import ConfigError, InvalidRequest, Overloaded, RetryableError, Unauthenticated
from baton.v1 import common_pb2
from router.admission.fair_queue import FairQueue, Flow, PendingPrompt
from router.shared_state import SharedState, Usage

log = logging.getLogger(__name__)

PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
DEFAULT = "default"  # the tenant of callers without a key
_RESERVED_OUTPUT = 256  # tokens charged at the start of a choice; more are charged as they come,
_LOT = 64  # so many at a time: what is not used comes back at the end
_BUSY_RETRY_S = 1.0  # at max_running: when a request will end is not known
_RELOAD_S = 1.0  # between two looks at the files
_ROUNDING = 1e-6  # a caller that comes back at the given time must not lack a millionth

Clock = Callable[[], float]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class TenantConfig:
    """One tenant as the file has it; the defaults limit nothing."""

    name: str
    weight: float = 1.0
    priority: str = "normal"
    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    burst_seconds: float = 60.0
    max_prompt_tokens: int = 0  # 0: what the router takes
    max_running: float = math.inf
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)  # SHA-256
    keyless: bool = False  # takes callers without a key


class TokenBucket:
    """Refills at `per_minute` up to what `burst_s` seconds bring; infinite rates limit nothing.

    `state` holds what was spent and has not come back, and the time of that: zeros are a full
    bucket. Buckets of several processes may have it in common.
    """

    def __init__(
        self,
        per_minute: float,
        burst_s: float,
        clock: Clock = time.monotonic,
        state: memoryview[float] | None = None,
    ) -> None:
        self._per_s = per_minute / 60
        self.size = self._per_s * burst_s
        self._clock = clock
        self._state = Usage().requests if state is None else state

    @property
    def level(self) -> float:
        """What may be taken now; below 0 where more was taken than there was."""
        return self.size - self._spent(self._clock())

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing that is taken makes a difference."""
        return self._per_s == math.inf

    def set_rate(self, per_minute: float, burst_s: float) -> None:
        """From now on; what was spent comes back at the new rate."""
        self.take(0.0)
        self._per_s = per_minute / 60
        self.size = self._per_s * burst_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` fits, 0 if it does now; it must not exceed the bucket's size."""
        missing = amount - self.level
        return missing / self._per_s if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Charges; more may be spent than fits. A negative amount is given back."""
        now = self._clock()
        self._state[0], self._state[1] = max(0.0, self._spent(now) + amount), now

    def _spent(self, now: float) -> float:
        spent, at = self._state
        return max(0.0, spent - (now - at) * self._per_s) if spent > 0 and now > at else spent


class LimitReached(Overloaded):
    """A limit of the tenant's own, of which it may be told."""


class Tenant:
    """One tenant's limits and what of them is in use. Event-loop thread only."""

    def __init__(
        self,
        config: TenantConfig,
        fair_queue: FairQueue,
        clock: Clock,
        usage: Usage,
        *,
        salted: bool = True,
    ) -> None:
        self.name = config.name
        self.fair_queue = fair_queue
        self._salted = salted
        self._usage = usage
        self._requests = TokenBucket(
            config.requests_per_minute, config.burst_seconds, clock, usage.requests
        )
        self._tokens = TokenBucket(
            config.tokens_per_minute, config.burst_seconds, clock, usage.tokens
        )
        self.configure(config)

    def configure(self, config: TenantConfig) -> None:
        """New limits and a new share, for what comes from now on."""
        self.config = config
        self.flow = Flow(config.name, config.weight, PRIORITIES[config.priority])
        with self._usage.lock:
            self._requests.set_rate(config.requests_per_minute, config.burst_seconds)
            self._tokens.set_rate(config.tokens_per_minute, config.burst_seconds)

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests runs in this process."""
        return not self._usage.running_here

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
        before: int = 0,
    ) -> AdmissionLease:
        """Charges a request and gives it its virtual finish; leaving the lease's block ends it.

        With several choices it is the first of so many, all of which run from now on; 0 is a
        further one, which costs no request and has the tokens of those `before` it, all outputs
        included. It does not wait for what is used up: the first would have run for nothing. Raises
        Overloaded, with the time until it fits, at a limit; InvalidRequest where it never fits.
        """
        total = before + prompt_tokens + max_tokens * choices
        if total > self._tokens.size:
            raise InvalidRequest(
                f"prompt and output may take {total} tokens and this tenant gets "
                f"{self._tokens.size:.0f} at once: ask for fewer",
                "sampling.max_tokens" if max_tokens * choices else "input",
            )
        reserved = min(max_tokens, _RESERVED_OUTPUT)
        requests = min(1, choices)
        with self._usage.lock:
            if choices:
                self._check(choices, prompt_tokens + reserved * choices)
            self._charge(requests, prompt_tokens + reserved)
            self._usage.add_running(choices)
        prompt = self.fair_queue.add(self.flow, seconds_of_work, priority)
        return AdmissionLease(self, prompt, requests, prompt_tokens, reserved)

    def check(self, choices: int = 1, tokens: int | None = None) -> None:
        """Raises Overloaded while no such request may enter: cheap, before any other work.

        InvalidRequest where so many choices may never run at once.
        """
        with self._usage.lock:
            self._check(choices, tokens)

    def charge_request(self) -> None:
        """Takes a request that is not going to run; raises Overloaded at a limit."""
        with self._usage.lock:
            self._check(1, 0)
            self._charge(1, 0)

    def charge_tokens(self, tokens: int) -> None:
        """Takes tokens, whether or not they are there."""
        if tokens and not self._tokens.is_unlimited:
            with self._usage.lock:
                self._charge(0, tokens)

    def leave(self, requests: int, tokens: int) -> None:
        """A choice has ended; so many requests and tokens are given back."""
        with self._usage.lock:
            self._usage.add_running(-1)
            self._charge(-requests, -tokens)

    def free(self, choices: int) -> None:
        """So many choices of a request are not going to enter."""
        with self._usage.lock:
            self._usage.add_running(-choices)

    def _check(self, choices: int, tokens: int | None) -> None:
        most, running = self.config.max_running, self._usage.running
        if choices > most:
            raise InvalidRequest(
                f"{choices} choices run at once and this tenant may run {most}: ask for fewer", "n"
            )
        if running + choices > most:
            raise LimitReached(f"{running} requests of this tenant run already", _BUSY_RETRY_S)
        if (wait_s := self._requests.wait_s(1)) > 0:
            raise LimitReached("this tenant's requests a minute are used up", wait_s)
        if tokens is not None and (wait_s := self._tokens.wait_s(tokens)) > 0:
            raise LimitReached("this tenant's tokens a minute are used up", wait_s)

    def _charge(self, requests: int, tokens: int) -> None:
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if amount and not bucket.is_unlimited:
                bucket.take(amount)

    def most_output(self, prompt_tokens: int, choices: int) -> int:
        """Most output tokens of each choice where the request leaves that open; at least 1."""
        size = min(self._tokens.size, sys.maxsize)
        return max(1, int(size - prompt_tokens) // choices)


@dataclass
class AdmissionLease:
    """An admitted request: what its tenant was charged, and its place in the fair queue.

    `with tenant.enter(...) as lease:` around the request. At the end reserved tokens that were not
    used are given back; all of it, and the request too, if it was refused before its first token.
    """

    _tenant: Tenant
    prompt: PendingPrompt
    _requests: int
    _prompt_tokens: int
    _reserved: int  # output tokens, charged and not delivered yet
    _began: bool = False

    def delivered(self, count: int) -> None:
        """So many more tokens went to the caller; later requests wait if they were not there."""
        if not self._began:
            self._began = True
            self._tenant.fair_queue.remove(self.prompt, computed=True)
        if count > self._reserved:
            lot = max(_LOT, count - self._reserved)
            self._tenant.charge_tokens(lot)
            self._reserved += lot
        self._reserved -= count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        tenant = self._tenant
        tenant.fair_queue.remove(self.prompt)
        refused = isinstance(error, RetryableError) and not self._began
        tenant.leave(self._requests * refused, self._reserved + self._prompt_tokens * refused)


@dataclass
class Places:
    """Of the choices of one body that run, for their tenant, and have not entered yet."""

    tokens: int = 0  # of what has entered, with the outputs of all
    _tenant: Tenant | None = None
    _count: int = 0

    def entered(self, tenant: Tenant, choices: int, tokens: int) -> None:
        """One has, which as the first stands for all `choices`; see `Tenant.enter`."""
        self._tenant = tenant
        self._count += choices - 1
        self.tokens += tokens

    def free(self) -> None:
        """No more of them are going to enter."""
        if self._tenant is not None:
            self._tenant.free(self._count)
            self._count = 0


class Tenants:
    """All tenants and operators, by API key. Event-loop thread only."""

    def __init__(
        self,
        path: Path | None = None,
        clock: Clock = time.monotonic,
        admin_keys: Iterable[str] = (),
        api_keys: Iterable[str] = (),
        shared: SharedState | None = None,
    ) -> None:
        """From the file, or without one. Raises ConfigError naming file, tenant and field.

        `admin_keys`, as the file has them, are those of operators whom the file does not name;
        `api_keys`, in place of a file, those of the only tenant and of operators. With `shared`,
        limits hold over all processes of this router together.
        """
        if path and api_keys:
            raise ConfigError("--api-key and --tenants do not go together: add the key to the file")
        self._clock, self._shared = clock, shared
        self._fair_queue = FairQueue(clock)
        self._file = _TenantsFile(path) if path else None
        self._more_admins = _digests(admin_keys, "--admin-key")
        self._unlimited = Tenant(TenantConfig(""), self._fair_queue, clock, Usage())
        self._known: dict[str, Tenant] = {}  # by name; of those that the file has no more, some
        self._names: Sequence[str] = ()
        digests = _digests(api_keys, "--api-key")
        self.is_open = not (path or digests)  # keys are ignored then
        only = TenantConfig(DEFAULT, keyless=not digests, key_digests=digests)
        self._configure(self._file.read() if self._file else _Content([only], digests))

    async def follow(self) -> None:
        """Takes up the files' changes until cancelled; with a mistake in them nothing changes."""
        while self._file:
            await asyncio.sleep(_RELOAD_S)
            try:
                if changed := await asyncio.to_thread(self._file.read_changed):
                    self._configure(changed)
                    log.info("%s: tenants are %s", self._file.path, ", ".join(self._names))
            except ConfigError as error:
                log.error("tenants stay as they were: %s", error)

    def _configure(self, content: _Content) -> None:
        """A tenant of the same name goes on with its running requests, charges and pending prompts.

        One that is gone takes no requests; those that run end as usual.
        """
        names = [config.name for config in content.tenants]
        self._forget_all_but({*self._names, *names})
        for config in content.tenants:  # before any change: there may be no room for one more
            if config.name not in self._known:
                self._known[config.name] = self._newcomer(config)
        self._keyless: Tenant | None = None
        self._by_digest: dict[bytes, Tenant] = {}
        self._names_admins = bool(content.admin_digests)
        self._admins = {*content.admin_digests, *self._more_admins}
        self._names = names
        for config in content.tenants:
            tenant = self._known[config.name]
            if config != tenant.config:
                tenant.configure(config)
            if config.keyless:
                self._keyless = tenant
            self._by_digest |= dict.fromkeys(config.key_digests, tenant)
        self._forget_all_but(names)

    def _forget_all_but(self, names: Collection[str]) -> None:
        """Tenants of which nothing runs here. Others are forgotten at a later change."""
        for name in self._known.keys() - names:
            if self._known[name].is_idle:
                del self._known[name]
                self._fair_queue.forget(name)
                if self._shared is not None:
                    self._shared.release(name)

    def _newcomer(self, config: TenantConfig) -> Tenant:
        usage = Usage()
        if self._shared is not None and not self.is_open:
            usage = self._shared.usage(config.name)
        return Tenant(config, self._fair_queue, self._clock, usage, salted=not self.is_open)

    def of(self, metadata: Metadata | None) -> Tenant:
        """The tenant whose key the call carries. Raises Unauthenticated."""
        key = None if self.is_open else _key(metadata or ())
        if key is None:
            if self._keyless is None:
                raise Unauthenticated("this router needs an API key: authorization: Bearer KEY")
            return self._keyless
        # How long a look-up takes may depend on the digest: who does not know a key cannot choose
        # its digest's bits, so that nothing is learnt from that.
        if (tenant := self._by_digest.get(digest := hashlib.sha256(key).digest())) is None:
            if digest in self._admins:
                raise Unauthenticated("the API key is an operator's: requests need a tenant's")
            raise Unauthenticated("the API key is unknown")
        return tenant

    def named(self, name: str) -> Tenant:
        """The tenant of that name. Raises Unauthenticated where the file has it no more."""
        if name not in self._names:
            raise Unauthenticated(f"there is no tenant {name!r}")
        return self._known[name]

    def of_operator(self, metadata: Metadata | None) -> Tenant:
        """As whom an operator asks: the key's tenant, the keyless one, or one without limits."""
        try:
            return self.of(metadata)
        except Unauthenticated:
            return self._keyless or self._unlimited

    def is_admin(self, metadata: Metadata | None) -> bool:
        """Whether the call carries an operator's key. Raises Unauthenticated if malformed."""
        key = _key(metadata or ()) if self._admins else None  # else keys are ignored
        return key is not None and hashlib.sha256(key).digest() in self._admins

    def is_operator(self, metadata: Metadata | None) -> bool:
        """Whether the call may see how the cluster is made up; without a file all may."""
        return self.is_open or self.is_admin(metadata)

    def check_admin(self, metadata: Metadata | None) -> None:
        """Raises Unauthenticated for a call without an operator's key, where keys are needed."""
        if self.is_operator(metadata):
            return
        missing = "" if self._names_admins else ", which has none yet"
        what = "this is for operators: send the API key"
        if self._file:
            what = f"this is for operators: send a key of [admin] in the tenants file{missing}"
        raise Unauthenticated(
            f"{what} (BATON_API_KEY or --api-key-file; authorization: Bearer KEY)"
        )


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


# The file. A field's value is never shown: it might be a key.

_Rule = tuple[str, Callable[[Any], bool]]  # what a field must be
_ABOVE_0: _Rule = (
    "a number above 0",
    lambda value: type(value) in (int, float) and 0 < value < math.inf,
)
_COUNT: _Rule = ("a whole number above 0", lambda value: type(value) is int and value > 0)
_TEXTS: _Rule = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
_PRIORITY: _Rule = (
    f"one of {', '.join(PRIORITIES)}",
    lambda value: isinstance(value, str) and value in PRIORITIES,
)
_TABLE: _Rule = ("a table", lambda value: isinstance(value, dict))
_FILE = {"tenants": _TABLE, "default": _TABLE, "admin": _TABLE}
_KEYS = {"keys": _TEXTS, "key_files": _TEXTS}
_LIMITS = {
    "weight": _ABOVE_0, "priority": _PRIORITY, "requests_per_minute": _ABOVE_0,
    "tokens_per_minute": _ABOVE_0, "burst_seconds": _ABOVE_0, "max_prompt_tokens": _COUNT,
    "max_running": _COUNT,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class _Content:
    tenants: Sequence[TenantConfig]
    admin_digests: Sequence[bytes] = ()


class _TenantsFile:
    """The file and those of keys that it names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched = WatchedFiles()

    def read_changed(self) -> _Content | None:
        """The content if a file has changed. Raises ConfigError, once for each change."""
        return self.read() if self._watched.changed else None

    def read(self) -> _Content:
        """Raises ConfigError naming file, tenant and field."""
        self._watched, path = WatchedFiles(), self.path
        try:
            content = tomllib.loads(self._watched.read(path).decode())
        except OSError as error:
            raise ConfigError(f"tenants file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"tenants file {path} is not TOML: {error}") from error
        try:
            return self._parsed(content)
        except ConfigError as error:
            raise ConfigError(f"tenants file {path}: {error}") from None

    def _parsed(self, content: dict[str, Any]) -> _Content:
        _check(content, "the file", _FILE)
        tables = content.get("tenants", {})
        _check(tables, "tenants", dict.fromkeys(tables, _TABLE))
        configs = [self._tenant(name, table) for name, table in tables.items()]
        if "default" in content:
            if DEFAULT in tables:
                raise ConfigError("give [default] or [tenants.default], not both")
            configs.append(_limited("[default]", content["default"], DEFAULT, keyless=True))
        if not configs:
            raise ConfigError("there is no tenant: give [tenants.NAME] or [default]")
        owners: dict[bytes, str] = {}
        for config in configs:
            for digest in config.key_digests:
                if (other := owners.setdefault(digest, config.name)) != config.name:
                    raise ConfigError(
                        f"keys of [tenants.{other}] and [tenants.{config.name}] must differ"
                    )
        admins: tuple[bytes, ...] = ()
        if "admin" in content:
            _check(content["admin"], "[admin]", _KEYS)
            admins = self._keys(content["admin"], "[admin]")
        return _Content(configs, admins)

    def _tenant(self, name: str, table: dict[str, Any]) -> TenantConfig:
        where = f"[tenants.{name}]"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name of {where} must be letters, digits and . _ -, no sign first"
            )
        _check(table, where, {**_KEYS, **_LIMITS})
        return _limited(where, table, name, key_digests=self._keys(table, where))

    def _keys(self, table: dict[str, Any], where: str) -> tuple[bytes, ...]:
        """Takes the keys out of a table; their digests."""
        digests = list(_digests(table.pop("keys", ()), f"keys of {where}"))
        for file in table.pop("key_files", ()):
            try:
                key = self._watched.read(self.path.parent / Path(file).expanduser()).strip()
            except (OSError, ValueError, RuntimeError) as error:
                why = getattr(error, "strerror", error)
                raise ConfigError(
                    f"key_files of {where} must be readable: {file}: {why}"
                ) from error
            if not key or b"\n" in key:
                raise ConfigError(f"key_files of {where} must have one key each; {file} has not")
            digests.append(hashlib.sha256(key).digest())
        if not digests:
            raise ConfigError(f"keys of {where} must be given, or key_files")
        return tuple(digests)


def _digests(keys: Iterable[str], where: str) -> tuple[bytes, ...]:
    matches = [_DIGEST.fullmatch(key) for key in keys]
    if not all(matches):
        raise ConfigError(f'{where} must be "sha256:" and 64 hexadecimal digits each')
    return tuple(bytes.fromhex(match[1]) for match in matches if match)


def _check(table: Mapping[str, Any], where: str, rules: Mapping[str, _Rule]) -> None:
    for name, value in table.items():
        if name not in rules:
            raise ConfigError(f"{where} has an unknown field {name!r}")
        wanted, is_valid = rules[name]
        if not is_valid(value):
            raise ConfigError(f"{name} of {where} must be {wanted}")


def _limited(where: str, table: Mapping[str, Any], name: str, **more: Any) -> TenantConfig:
    _check(table, where, _LIMITS)
    config = TenantConfig(name, **table, **more)
    for rate in ("requests_per_minute", "tokens_per_minute"):
        if getattr(config, rate) * config.burst_seconds < 60:  # not even one fits, ever
            raise ConfigError(f"{rate} of {where} must let burst_seconds bring at least one")
    return config
