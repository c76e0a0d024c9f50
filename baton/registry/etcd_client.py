"""A thin asyncio client of etcd: several endpoints, TLS, passwords, a deadline on every call.

It knows etcd's API and its ways of failing, and nothing of workers. A call that fails on one
endpoint is tried on the next. Every operation here may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from baton.config import RegistryConfig
from baton.config.watched_files import WatchedFiles
from baton.errors import (
    BatonError,
    ConfigError,
    InternalError,
    Overloaded,
    Stale,
    Unauthenticated,
    Unavailable,
)
from baton.net.backoff import Backoff
from baton.net.tls import Reloaded
from baton.v1 import etcd_pb2, etcd_pb2_grpc

log = logging.getLogger(__name__)

CALL_S = 2.0  # one attempt at one endpoint
START_S = 10.0  # until the first answer, at start
_LOOK_S = 0.1  # longest time between two tries of it
QUIET_S = 5.0  # after which a watch without events checks that its endpoint is alive

OPTIONS: list[tuple[str, Any]] = [
    # etcd cuts off clients that ping more often than every 5 s, or with no call under way.
    ("grpc.keepalive_time_ms", 10_000),
    # As a call: who is later answers none. A silent connection is left after 12 s, while a member
    # whose renewals wait on it is still missing (`GRACE_TTLS`). `grpc.keepalive_timeout_ms` does
    # not do that: gRPC waits 60 s for any ping.
    ("grpc.http2.ping_timeout_ms", int(CALL_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt to connect may take
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 16 << 20),
]
# A stream to a member that has lost its cluster fails instead of staying silent.
_STREAM_METADATA = (("hasleader", "true"),)

# What etcd's failures mean. Its status codes alone are not enough, so its texts are read as well.
# Unauthenticated leads to a new login, Unavailable to another attempt, ConfigError to the user.
_TEXTS: list[tuple[str, type[BatonError], str]] = [
    ("invalid auth token", Unauthenticated, "does not know our token"),
    ("revision of auth store is old", Unauthenticated, "requires a newer token"),
    ("user name is empty", Unauthenticated, "asks for a user: set --etcd-user"),
    ("authentication failed", ConfigError, "refuses user {user!r} or its password"),
    ("permission denied", ConfigError, "denies user {user!r} access to Baton's keys"),
    ("lease not found", Stale, "does not know our lease"),
    ("CERTIFICATE_VERIFY_FAILED", ConfigError, "has a certificate that --etcd-ca did not sign"),
    ("Hostname Verification", ConfigError, "has a certificate for another name"),
    ("ALERT_BAD_CERTIFICATE", ConfigError, "requires another client certificate: see --etcd-cert"),
    ("CERTIFICATE_REQUIRED", ConfigError, "requires a client certificate: set --etcd-cert"),
    ("SSL_ERROR_SSL", ConfigError, "and we find no common TLS"),
]
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


class _Endpoint:
    """One etcd member: its name for messages and the stubs of its channel."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.name = address
        if credentials:
            self.channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        else:
            self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.kv = etcd_pb2_grpc.KVStub(self.channel)
        self.lease = etcd_pb2_grpc.LeaseStub(self.channel)
        self.watch = etcd_pb2_grpc.WatchStub(self.channel)
        self.auth = etcd_pb2_grpc.AuthStub(self.channel)
        self._renewals: Any = None  # a stream of them: each new one costs several renewals
        self._renewing = asyncio.Lock()  # answers come in the order of the requests

    async def renew(
        self,
        request: etcd_pb2.LeaseKeepAliveRequest,
        *,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> int:
        """Seconds that a lease lives."""
        try:
            async with asyncio.timeout(timeout), self._renewing:
                if self._renewals is None or self._renewals.done():
                    self._renewals = self.lease.LeaseKeepAlive(metadata=metadata + _STREAM_METADATA)
                try:
                    await self._renewals.write(request)
                    answer = await self._renewals.read()
                except BaseException:  # also a time-out: the answer may yet come
                    self._renewals.cancel()
                    raise
        except (TimeoutError, asyncio.InvalidStateError) as error:
            raise Unavailable(f"etcd at {self.name} does not answer a lease renewal") from error
        if answer is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise Unavailable(f"etcd at {self.name} did not answer a lease renewal")
        return int(answer.TTL)


# (host:port, credentials) of each endpoint.
Addresses: TypeAlias = list[tuple[str, grpc.ChannelCredentials | None]]
# One of an endpoint's methods.
Pick = Callable[[_Endpoint], Callable[..., Awaitable[Any]]]


class EtcdClient:
    """Calls raise Unavailable while no endpoint answers and ConfigError when etcd refuses us."""

    def __init__(self, config: RegistryConfig) -> None:
        """Reads the files named in `config` (ConfigError); connects with the first call.

        Certificates are read again when they change, the password at every login: etcd asks for one
        after a restart, and where the user's password was changed.
        """
        self.names = config.etcd
        self._user = config.user
        self._password = _password(config)
        self._config = config
        kept = "calls to etcd go on with the old certificate"
        self._addresses = Reloaded(partial(_addresses, config), kept)
        self._endpoints: list[_Endpoint] = []  # made in the running loop, by the first call
        self._made_for: Addresses = []
        self._current = 0
        self._token: str | None = None  # "": etcd has authentication switched off

    async def close(self) -> None:
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.channel.close(None)

    async def connect(self, prefix: str, timeout_s: float | None = None) -> etcd_pb2.RangeResponse:
        """The first listing of `prefix`, tried for START_S; Unavailable names the fix."""
        timeout_s = START_S if timeout_s is None else timeout_s
        cause: BatonError | None = None
        backoff = Backoff(most_s=_LOOK_S)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self.range(prefix)
                    except Unavailable as error:
                        cause = error
                        await backoff.wait()
        except TimeoutError:
            raise Unavailable(
                f"etcd cannot be reached at {self.names} within {timeout_s:g} s: start it or "
                f"correct --etcd (https:// if it speaks TLS) ({cause or 'no answer'})"
            ) from cause

    async def range(self, prefix: str) -> etcd_pb2.RangeResponse:
        """All keys under `prefix`, and in the header the store's revision."""
        request = etcd_pb2.RangeRequest(key=prefix.encode(), range_end=_end_of(prefix))
        found: etcd_pb2.RangeResponse = await self._call(lambda at: at.kv.Range, request)
        return found

    async def get(self, key: str) -> tuple[etcd_pb2.KeyValue | None, int]:
        """What the member that is asked has, which costs no other one work, at its revision."""
        request = etcd_pb2.RangeRequest(key=key.encode(), serializable=True)
        found = await self._call(lambda at: at.kv.Range, request)
        return found.kvs[0] if found.kvs else None, found.header.revision

    async def put(self, key: str, value: bytes, lease: int) -> int:
        """Writes `key` under `lease`; the revision. Raises Stale when that lease is gone."""
        request = etcd_pb2.PutRequest(key=key.encode(), value=value, lease=lease)
        return int((await self._call(lambda at: at.kv.Put, request)).header.revision)

    async def put_if(self, key: str, value: bytes | None, revision: int, lease: int = 0) -> int:
        """Writes `key`, or deletes it with None, if its last change was at `revision` (0: it does
        not exist). Returns the new revision, 0 if it was changed.

        A call that etcd answers too late may have been done: read the key to know.
        """
        name = key.encode()
        done = etcd_pb2.RequestOp(
            request_put=etcd_pb2.PutRequest(key=name, value=value or b"", lease=lease)
        )
        if value is None:
            done = etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=name))
        unchanged = etcd_pb2.Compare(target=etcd_pb2.Compare.MOD, key=name, mod_revision=revision)
        request = etcd_pb2.TxnRequest(compare=[unchanged], success=[done])
        answer = await self._call(lambda at: at.kv.Txn, request)
        return int(answer.header.revision) if answer.succeeded else 0

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """(id, seconds to live) of a new lease; etcd may give more time than was asked for."""
        request = etcd_pb2.LeaseGrantRequest(TTL=ttl_s)
        granted = await self._call(lambda at: at.lease.LeaseGrant, request)
        return granted.ID, granted.TTL

    async def keep_alive(self, lease: int) -> int:
        """Renews a lease and returns its seconds to live, 0 if it is gone."""
        request = etcd_pb2.LeaseKeepAliveRequest(ID=lease)
        return int(await self._call(lambda at: at.renew, request))

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; Stale when it is gone already."""
        request = etcd_pb2.LeaseRevokeRequest(ID=lease)
        await self._call(lambda at: at.lease.LeaseRevoke, request)

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[etcd_pb2.WatchResponse]:
        """Yields what happens under `prefix` from `revision` on, first the answer `created`.

        Never ends by itself: a broken stream raises Unavailable, a watch that etcd cancels (other
        than for compaction, which is yielded) ConfigError.
        """
        at = self._endpoint()
        create = etcd_pb2.WatchCreateRequest(
            key=prefix.encode(),
            range_end=_end_of(prefix),
            start_revision=revision,
            progress_notify=True,
        )
        call = at.watch.Watch(metadata=self._metadata() + _STREAM_METADATA)
        try:
            async with asyncio.timeout(CALL_S):
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                response = await call.read()
            while response is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if response.canceled and not response.compact_revision:
                    self._token = None  # etcd may say "permission denied" to a token it forgot
                    raise ConfigError(
                        f"etcd at {at.name} ended the watch: {response.cancel_reason}"
                    )
                yield response
                response = await self._next(call, at, create.key)
            raise Unavailable(f"etcd at {at.name} ended the watch")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise _error_of(error, at.name, self._user) from error
        except TimeoutError as error:
            raise Unavailable(f"etcd at {at.name} does not answer") from error
        finally:
            call.cancel()

    async def _next(self, call: Any, at: _Endpoint, key: bytes) -> Any:
        """The stream's next message. While it is quiet its endpoint must answer reads of `key`.

        Pings alone do not do: under load gRPC was seen to sit beside a stopped etcd unaware.
        """
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait({reading}, timeout=QUIET_S))[0]:
                await self._check_alive(at, key)
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _check_alive(self, at: _Endpoint, key: bytes) -> None:
        request = etcd_pb2.RangeRequest(key=key)
        try:
            await at.kv.Range(request, timeout=CALL_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            meaning = _error_of(error, at.name, self._user)
            if isinstance(meaning, Unavailable):  # a refusal, of an old token say, is an answer
                raise meaning from error

    async def _call(self, pick: Pick, request: Any) -> Any:
        """Tries each endpoint once, and raises what the first one did."""
        errors: list[Unavailable] = []
        addresses = self._addresses.current
        for _ in addresses:
            tried = self._current
            try:
                return await self._attempt(pick, request)
            except Unavailable as error:
                errors.append(error)
                if self._current == tried:  # another call may have left this endpoint already
                    self._current = (tried + 1) % len(addresses)
        raise errors[0]

    async def _attempt(self, pick: Pick, request: Any, *, again: bool = True) -> Any:
        """Logs in where a user is configured, and `again` when etcd does not know the token."""
        at = self._endpoint()
        try:
            if self._user and self._token is None:
                self._token = await self._log_in(at)
            return await pick(at)(request, timeout=CALL_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as rpc_error:
            error = _error_of(rpc_error, at.name, self._user)
            if not isinstance(error, Unauthenticated) or not again:
                raise error from rpc_error
            if not self._user:
                raise ConfigError(str(error)) from rpc_error
        self._token = None
        return await self._attempt(pick, request, again=False)

    async def _log_in(self, at: _Endpoint) -> str:
        try:
            self._password = _password(self._config)
        except ConfigError as error:
            log.error("etcd gets the password read before: %s", error)
        request = etcd_pb2.AuthenticateRequest(name=self._user, password=self._password)
        try:
            return str((await at.auth.Authenticate(request, timeout=CALL_S)).token)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            raise

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    def _endpoint(self) -> _Endpoint:
        addresses = self._addresses.current
        if not self._endpoints or addresses is not self._made_for:
            # Calls that run on an earlier channel go on.
            self._made_for, self._endpoints = addresses, [_Endpoint(*one) for one in addresses]
        return self._endpoints[self._current]


def _end_of(prefix: str) -> bytes:
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _password(config: RegistryConfig) -> str:
    if config.user and config.password_file is None:
        raise ConfigError("--etcd-user needs --etcd-password-file")
    password = _read(config.password_file, "--etcd-password-file", WatchedFiles())
    try:
        return (password or b"").decode().rstrip("\r\n")
    except UnicodeDecodeError as error:  # perhaps it is being written
        raise ConfigError(f"--etcd-password-file {config.password_file} is no UTF-8") from error


def _addresses(config: RegistryConfig, files: WatchedFiles) -> Addresses:
    """Parses the endpoints; https://, a CA or a certificate selects TLS."""
    has_files = bool(config.ca_file or config.cert_file)
    found: Addresses = []
    for text in config.addresses:
        if has_files and text.startswith("http://"):
            raise ConfigError(f"--etcd {text} is not TLS: use https:// with --etcd-ca/--etcd-cert")
        credentials = None
        if has_files or text.startswith("https://"):
            credentials = grpc.ssl_channel_credentials(
                _read(config.ca_file, "--etcd-ca", files),
                _read(config.key_file, "--etcd-key", files),
                _read(config.cert_file, "--etcd-cert", files),
            )
        found.append((text.removeprefix("http://").removeprefix("https://"), credentials))
    return found


def _read(path: Path | None, option: str, files: WatchedFiles) -> bytes | None:
    if path is None:
        return None
    try:
        return files.read(path)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error


def _error_of(
    error: grpc.aio.AioRpcError | asyncio.InvalidStateError, endpoint: str, user: str
) -> BatonError:
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
