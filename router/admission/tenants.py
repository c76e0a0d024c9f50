"""Tenants: API keys, limits, share of the fleet and cache isolation.

Tenants come from a TOML file, which is read again when it or a key file changes; docs/security.md
lists its fields. Without a file there is one tenant, "default", without limits, and keys are
ignored.

A body with several prompts or choices is one request. Its tokens are charged as they are used: each
prompt once, and every choice's output, part of which is reserved in advance.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from baton.errors import ConfigError, InvalidRequest, RetryableError, Unauthenticated
from baton.generation.enum_names import PRIORITIES
from baton.log_format import audit
from baton.v1 import common_pb2
from router.admission.rate_limit import Clock, RateLimit, TokenBucket
from router.admission.tenants_file import (
    DEFAULT_TENANT,
    TenantConfig,
    TenantsContent,
    TenantsFile,
    key_digests,
)
from router.queueing.fair_queue import FairQueue
from router.request import LimitReached, PendingPrompt, TenantShare
from router.shared_state import LimitUsage, SharedState

log = logging.getLogger(__name__)

_RESERVED_OUTPUT = 256  # tokens charged when a choice starts; more are charged as they are used
_OUTPUT_BATCH = 64  # tokens charged at a time; unused ones are returned at the end
_BUSY_RETRY_S = 1.0  # at max_running: when a request will end is not known
_RELOAD_S = 1.0  # between two checks of the files

Metadata = Iterable[tuple[str, str | bytes]]


class Tenant:
    """One tenant's limits and their usage. Event-loop thread only."""

    def __init__(
        self,
        config: TenantConfig,
        fair_queue: Callable[[str], FairQueue],
        clock: Clock,
        usage: LimitUsage,
        *,
        salted: bool = True,
    ) -> None:
        self.name = config.name
        self.fair_queue = fair_queue  # of a model, by its full name
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
        """Sets new limits and a new share for requests from now on."""
        self.config = config
        self.share = TenantShare(config.name, config.weight, PRIORITIES[config.priority])
        with self._usage.lock:
            self._requests.set_rate(config.requests_per_minute, config.burst_seconds)
            self._tokens.set_rate(config.tokens_per_minute, config.burst_seconds)

    @property
    def is_idle(self) -> bool:
        """Whether none of its requests runs in this process."""
        return not self._usage.running_here

    def salt(self, cache_salt: str) -> str:
        """The cache salt for a request; no two tenants share cached prefixes."""
        return f"{self.name}/{cache_salt}" if self._salted else cache_salt

    def enter(
        self,
        prompt_tokens: int,
        max_tokens: int,
        seconds_of_work: float,
        priority: common_pb2.Priority = common_pb2.PRIORITY_UNSPECIFIED,
        *,
        choices: int = 1,
        earlier_tokens: int = 0,
        model: str = "",
        user: str = "",
    ) -> AdmissionLease:
        """Charges a choice of a request and queues its prompt; leaving the lease's block ends it.

        `choices`: number of choices of the request, all of which count as running from now on, if
        this is the first one; 0 for a further choice, which is not charged as a request and does
        not wait for used-up tokens, as the first choice would have run in vain.
        `earlier_tokens`: prompts and outputs of the choices entered before it. `model`: whose
        workers compute the prompt, which waits for its tenant's share of them, and of that for its
        end `user`'s. Raises Overloaded at
        a limit, with the time until it fits; InvalidRequest if it never fits.
        """
        total = earlier_tokens + prompt_tokens + max_tokens * choices
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
        queue = self.fair_queue(model)
        prompt = queue.add(self.share, seconds_of_work, priority, user)
        return AdmissionLease(self, queue, prompt, requests, prompt_tokens, reserved)

    def check(self, choices: int = 1, tokens: int | None = None) -> None:
        """Raises Overloaded while such a request may not enter; cheap, before any other work.

        Raises InvalidRequest if that number of choices may never run at once.
        """
        with self._usage.lock:
            self._check(choices, tokens)

    def charge_request(self) -> None:
        """Charges a request that does not run on workers; raises Overloaded at a limit."""
        with self._usage.lock:
            self._check(1, 0)
            self._charge(1, 0)

    def charge_tokens(self, tokens: int) -> None:
        """Charges tokens, also more than are available."""
        if tokens and not self._tokens.is_unlimited:
            with self._usage.lock:
                self._charge(0, tokens)

    def leave(self, choices: int, refund_requests: int = 0, refund_tokens: int = 0) -> None:
        """Ends choices, or those that will not enter, and returns what was charged too much."""
        with self._usage.lock:
            self._usage.add_running(-choices)
            self._charge(-refund_requests, -refund_tokens)

    def rate_limits(self) -> list[RateLimit]:
        """What is left of the tenant's limits; those that are unlimited are left out."""
        named = ("requests", self._requests), ("tokens", self._tokens)
        limited = [(name, bucket) for name, bucket in named if not bucket.is_unlimited]
        if not limited:
            return []
        with self._usage.lock:
            return [
                RateLimit(name, int(one.size), max(0, int(one.level)), one.wait_s(one.size))
                for name, one in limited
            ]

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
                bucket.spend(amount)

    def max_output(self, prompt_tokens: int, choices: int) -> int:
        """Limit on the output tokens of each choice of a request that sets none; at least 1."""
        size = min(self._tokens.size, sys.maxsize)
        return max(1, int(size - prompt_tokens) // choices)


@dataclass
class AdmissionLease:
    """An admitted request: what its tenant was charged, and its prompt in the fair queue.

    Used as `with tenant.enter(...) as lease:` around the request. At the end unused reserved tokens
    are returned; all tokens and the request, too, if it was refused before its first token.
    """

    _tenant: Tenant
    _queue: FairQueue
    prompt: PendingPrompt
    _requests: int
    _prompt_tokens: int
    _reserved: int  # output tokens charged and not delivered yet
    _has_begun: bool = False

    def delivered(self, count: int) -> None:
        """Counts delivered tokens; those beyond the limit delay the tenant's later requests."""
        if not self._has_begun:
            self._has_begun = True
            self._queue.remove(self.prompt, computed=True)
        if count > self._reserved:
            batch = max(_OUTPUT_BATCH, count - self._reserved)
            self._tenant.charge_tokens(batch)
            self._reserved += batch
        self._reserved -= count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        tenant = self._tenant
        self._queue.remove(self.prompt)
        refused = isinstance(error, RetryableError) and not self._has_begun
        tenant.leave(1, self._requests * refused, self._reserved + self._prompt_tokens * refused)


@dataclass
class ReservedChoices:
    """Places among a tenant's running requests for the choices of a body that have not entered."""

    tokens: int = 0  # prompts that have entered, and the outputs of all choices
    _tenant: Tenant | None = None
    _count: int = 0

    def entered(self, tenant: Tenant, choices: int, tokens: int) -> None:
        """Records that a choice has entered; `choices` as for `Tenant.enter`."""
        self._tenant = tenant
        self._count += choices - 1
        self.tokens += tokens

    def release(self) -> None:
        """Releases the remaining places; no more choices will enter."""
        if self._tenant is not None:
            self._tenant.leave(self._count)
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
        """Reads the file, if there is one. Raises ConfigError naming file, tenant and field.

        `admin_keys`: digests, as in the file, of further operators' keys. `api_keys`: digests of
        the keys of the only tenant and of operators, instead of a file. `shared`: memory through
        which all processes of this router share the limits.
        """
        if path and api_keys:
            raise ConfigError("--api-key and --tenants do not go together: add the key to the file")
        self._clock, self._shared = clock, shared
        self._fair_queues: dict[str, FairQueue] = {}  # by model: each has its own workers
        self._file = TenantsFile(path) if path else None
        self._extra_admins = key_digests(admin_keys, "--admin-key")
        self._unlimited = Tenant(TenantConfig(""), self.fair_queue, clock, LimitUsage())
        self._known: dict[str, Tenant] = {}  # by name; also removed ones with running requests
        self._names: Sequence[str] = ()
        digests = key_digests(api_keys, "--api-key")
        self.is_open = not (path or digests)  # keys are ignored then
        only = TenantConfig(DEFAULT_TENANT, keyless=not digests, key_digests=digests)
        self._configure(self._file.read() if self._file else TenantsContent([only], digests))

    async def follow(self) -> None:
        """Applies changes of the files until cancelled; a mistake in them changes nothing."""
        while self._file:
            await asyncio.sleep(_RELOAD_S)
            try:
                if changed := await asyncio.to_thread(self._file.read_changed):
                    before, admins, limits = set(self._by_digest), self._admins, self._limits
                    self._configure(changed)
                    now = self._limits
                    log.info("%s: tenants are %s", self._file.path, ", ".join(self._names))
                    audit(
                        "tenants changed",
                        file=str(self._file.path),
                        tenants=",".join(self._names),
                        keys_added=len(set(self._by_digest) - before),
                        keys_removed=len(before - set(self._by_digest)),
                        limits_changed=",".join(
                            name for name in now if now[name] != limits.get(name, now[name])
                        ),
                        operators_keys_changed=self._admins != admins,
                    )
            except ConfigError as error:
                log.error("tenants stay as they were: %s", error)

    @property
    def _limits(self) -> dict[str, TenantConfig]:
        """What the file says of each tenant, without its keys."""
        return {
            name: replace(self._known[name].config, key_digests=(), keyless=False)
            for name in self._names
        }

    def _configure(self, content: TenantsContent) -> None:
        """Applies the file's content.

        A tenant of the same name keeps its running requests, charges and pending prompts. A removed
        tenant accepts no requests; its running ones end as usual.
        """
        names = [config.name for config in content.tenants]
        self._forget_all_but({*self._names, *names})
        for config in content.tenants:  # before any change: there may be no room for one more
            if config.name not in self._known:
                self._known[config.name] = self._new_tenant(config)
        self._keyless: Tenant | None = None
        self._by_digest: dict[bytes, Tenant] = {}
        self._file_has_admins = bool(content.admin_digests)
        self._admins = {*content.admin_digests, *self._extra_admins}
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
        """Drops other tenants without running requests here; the rest go at a later change."""
        for name in self._known.keys() - names:
            if self._known[name].is_idle:
                del self._known[name]
                for queue in self._fair_queues.values():
                    queue.forget(name)
                if self._shared is not None:
                    self._shared.release(name)

    def _new_tenant(self, config: TenantConfig) -> Tenant:
        usage = LimitUsage()
        if self._shared is not None and not self.is_open:
            usage = self._shared.usage(config.name)
        return Tenant(config, self.fair_queue, self._clock, usage, salted=not self.is_open)

    def fair_queue(self, model: str) -> FairQueue:
        """The fair queue of the workers of a model."""
        return self._fair_queues.setdefault(model, FairQueue(self._clock))

    def tenant_for(self, metadata: Metadata | None) -> Tenant:
        """The tenant whose key the call carries. Raises Unauthenticated."""
        key = None if self.is_open else _key(metadata or ())
        if key is None:
            if self._keyless is None:
                raise Unauthenticated("this router needs an API key: authorization: Bearer KEY")
            return self._keyless
        # The look-up's time may depend on the digest. That reveals nothing: without knowing a key
        # no caller can choose the bits of its digest.
        if (tenant := self._by_digest.get(digest := hashlib.sha256(key).digest())) is None:
            if digest in self._admins:
                raise Unauthenticated("the API key is an operator's: requests need a tenant's")
            raise Unauthenticated("the API key is unknown")
        return tenant

    @property
    def are_several(self) -> bool:
        return len(self._names) > 1

    def tenant_named(self, name: str) -> Tenant:
        """The tenant of that name. Raises Unauthenticated if the file no longer has it."""
        if name not in self._names:
            raise Unauthenticated(f"there is no tenant {name!r}")
        return self._known[name]

    def tenant_for_operator(self, metadata: Metadata | None) -> Tenant:
        """The key's tenant, else the keyless one, else one without limits."""
        try:
            return self.tenant_for(metadata)
        except Unauthenticated:
            return self._keyless or self._unlimited

    def is_admin(self, metadata: Metadata | None) -> bool:
        """Whether the call carries an operator's key. Raises Unauthenticated if malformed."""
        key = _key(metadata or ()) if self._admins else None  # else keys are ignored
        return key is not None and hashlib.sha256(key).digest() in self._admins

    def is_operator(self, metadata: Metadata | None) -> bool:
        """Whether the call may see the cluster's internals; without a file every call may."""
        return self.is_open or self.is_admin(metadata)

    def check_admin(self, metadata: Metadata | None) -> None:
        """Raises Unauthenticated for a call without an operator's key, where keys are needed."""
        if self.is_operator(metadata):
            return
        missing = "" if self._file_has_admins else ", which has none yet"
        what = "this is for operators: send the API key"
        if self._file:
            what = f"this is for operators: send a key of [admin] in the tenants file{missing}"
        raise Unauthenticated(
            f"{what} (BATON_API_KEY or --api-key-file; authorization: Bearer KEY)"
        )


def _key(metadata: Metadata) -> bytes | None:
    """The key in `authorization: Bearer KEY`; None without such an entry."""
    for name, value in metadata:
        if name.lower() != "authorization":
            continue
        text = value.encode() if isinstance(value, str) else value
        scheme, _, key = text.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthenticated("authorization must be: Bearer KEY")
        return key.strip()
    return None
