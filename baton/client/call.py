"""What both clients share of a call: attempts, deadline, trace, outcome; and the unary calls.

The clients add only the waiting: they send, receive and sleep as this module says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from baton import config, telemetry
from baton.client.request import Options, Prompt, generate_request, timeout_of, tokenize_request
from baton.client.results import (
    Collector,
    Completion,
    Delta,
    Model,
    explanation_of,
    models_of,
    status_of,
)
from baton.client.retry import RetryPolicy
from baton.errors import BatonError, Cancelled, ConfigError, Unavailable, quoted
from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc

T = TypeVar("T")


@dataclass
class Target:
    """Which routers to call and how; `preferred` is the index of the one to try first."""

    addresses: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]
    retry: RetryPolicy
    preferred: int = 0
    closed: bool = False

    @classmethod
    def of(
        cls,
        target: str | Sequence[str],
        ca_file: str | Path | None,
        api_key: str | None,
        retry: RetryPolicy | None,
    ) -> Target:
        """From what callers give a client. Raises ConfigError for an address or a file."""
        parts = target.split(",") if isinstance(target, str) else target
        if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"target must be HOST:PORT or several of them, not {quoted(target)}")
        addresses = tuple(part.strip() for part in parts)
        if not addresses:
            raise ConfigError("target names no router: give HOST:PORT")
        for address in addresses:
            _check_address(address)
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        return cls(addresses, _credentials(ca_file), metadata, retry or RetryPolicy())


def _check_address(address: str) -> None:
    scheme, found, rest = address.partition("://")
    if found and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        raise ConfigError(
            f"target is a router's gRPC address, HOST:PORT without {scheme}://, not "
            f"{quoted(address)}: give its --port (7700 by default) instead of its --http-port "
            f"(7780), as {quoted(rest.partition(':')[0].partition('/')[0] + ':7700')}; ca_file "
            "turns TLS on"
        )
    config.split_address(address, "target")


def _credentials(ca_file: str | Path | None) -> grpc.ChannelCredentials | None:
    if ca_file is None:
        return None
    try:
        certificates = Path(ca_file).read_bytes()
    except OSError as error:
        raise ConfigError(f"ca_file {ca_file} cannot be read: {error.strerror}") from error
    return grpc.ssl_channel_credentials(certificates)


class Attempts:
    """Where a call is tried, how long it may still take, and whether it is tried again."""

    def __init__(self, target: Target, timeout_s: float | None) -> None:
        self._target = target
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._count = 1
        self._address = target.preferred
        self._begun = False
        self._broken_at: float | None = None  # time.monotonic()

    @property
    def address(self) -> str:
        """The router to call now; raises Cancelled when the client is closed."""
        if self._target.closed:
            raise Cancelled("the client is closed: make a new one")
        return self._target.addresses[self._address]

    @property
    def time_left_s(self) -> float | None:
        """What the next attempt may take, for gRPC; None is unlimited."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def received(self, output: bool) -> None:
        """A message came, with or without output: if the stream breaks, it is worth going on."""
        self._begun = True
        if output:
            self._count, self._broken_at = 1, None

    def failed(self, error: BatonError) -> float:
        """Moves on to the next attempt and says how many seconds to wait before it.

        Raises the error itself when it is final, and Cancelled when the client is closed.
        """
        if self._target.closed:
            raise Cancelled("the client was closed while the call ran") from error
        now = time.monotonic()
        if self._begun and self._broken_at is None:
            self._broken_at = now
        wait_s = self._target.retry.wait_s(
            error,
            attempts=self._count,
            addresses=len(self._target.addresses),
            time_left_s=self.time_left_s,
            jitter=random.random(),  # noqa: S311 - spreads load, guards nothing
            broken_s=None if self._broken_at is None else now - self._broken_at,
        )
        if wait_s is None:
            raise error
        self._count += 1
        # Later calls start there too, so that one dead router is paid for once.
        self._address = (self._address + 1) % len(self._target.addresses)
        self._target.preferred = self._address
        return wait_s


class GenerateCall:
    """One completion from its request to its last message, over as many attempts as it takes."""

    def __init__(
        self, target: Target, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self.request = request
        sampling = request.sampling
        if sampling.temperature > 0 and not sampling.HasField("seed"):
            # Chosen here, so that another router can go on with the same random numbers.
            sampling.seed = random.getrandbits(64)
        self.over = False
        self.attempts = Attempts(target, timeout_s)
        self._collector = Collector()
        # The global tracer: a no-op unless the program that uses the SDK has set one up.
        self._span = trace.get_tracer("baton.client").start_span(
            "baton.client.generate",
            kind=SpanKind.CLIENT,
            attributes={"gen_ai.request.model": request.model},
        )
        self.metadata = (*target.metadata, *telemetry.inject(telemetry.context_of(self._span)))

    @property
    def completion(self) -> Completion:
        """The whole completion; raises Cancelled if the stream was not read to its end."""
        if not self._collector.finished:
            raise Cancelled("the stream was not read to its end: it has no completion")
        return self._completion()

    def received(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes a message; the new output, if it carries some. Raises what makes it useless."""
        try:
            delta = self._collector.add(response)
        except BatonError as error:
            self._fail(error)
            raise
        self.attempts.received(output=delta is not None)
        return delta

    @property
    def address(self) -> str:
        """The router to call now; raises Cancelled when the client is closed."""
        try:
            return self.attempts.address
        except BatonError as error:
            self._fail(error)
            raise

    def failed(self, error: BatonError) -> float | None:
        """Seconds to wait before the next attempt; None when there is nothing more to do.

        The next attempt goes on behind what has come. Raises the error when it is final; its
        `partial` is what has come.
        """
        self._collector.broken()
        if self.over or self._collector.finished:
            self._end()
            return None
        try:
            wait_s = self.attempts.failed(error)
            self.request.resumed_token_ids[:] = self._collector.token_ids
            return wait_s
        except BatonError as final:
            self._fail(final)
            raise

    def ended(self) -> float | None:
        """The router closed the stream: as `failed`, unless the last message has come."""
        return self.failed(Unavailable("the stream ended without its last message"))

    def close(self) -> None:
        """Ends the call for its caller. Harmless after the end."""
        if not self.over:
            self.over = True
            self._span.end()

    def _completion(self) -> Completion:
        return self._collector.completion(telemetry.trace_id_of(self._span))

    def _end(self) -> None:
        if self._span.is_recording():
            usage = self._completion().usage
            self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self.close()

    def _fail(self, error: BatonError) -> None:
        error.partial = self._completion()  # type: ignore[attr-defined]
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self.close()


@dataclass(frozen=True)
class UnaryCall(Generic[T]):
    """A call with one answer: how a channel makes it, what is sent, what the answer means."""

    method: Callable[[Any], Any]
    request: Any
    timeout_s: float | None
    result: Callable[[Any], T]


class BaseClient:
    """What `Client` and `AsyncClient` have in common: where to call, and the calls they make."""

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:7700",
        *,
        ca_file: str | Path | None = None,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._target = Target.of(target, ca_file, api_key, retry)
        self._channels: dict[str, Any] = {}
        self._open()

    def _open(self) -> None:
        """Makes what a client has beside this."""

    def _generate_call(self, prompt: Prompt, options: Options) -> GenerateCall:
        return GenerateCall(self._target, generate_request(prompt, options), timeout_of(options))

    def _tokenize_call(
        self, prompt: Prompt, model: str | None, timeout_s: float | None
    ) -> UnaryCall[list[int]]:
        return UnaryCall(
            lambda channel: inference_pb2_grpc.InferenceServiceStub(channel).Tokenize,
            tokenize_request(prompt, model),
            timeout_s,
            lambda response: list(response.token_ids),
        )

    def _models_call(self, timeout_s: float | None) -> UnaryCall[list[Model]]:
        return UnaryCall(
            lambda channel: inference_pb2_grpc.InferenceServiceStub(channel).ListModels,
            inference_pb2.ListModelsRequest(),
            timeout_s,
            models_of,
        )

    def _status_call(self, timeout_s: float | None) -> UnaryCall[dict[str, Any]]:
        return UnaryCall(
            lambda channel: fleet_pb2_grpc.FleetServiceStub(channel).GetStatus,
            fleet_pb2.GetStatusRequest(),
            timeout_s,
            status_of,
        )

    def _explain_call(self, prompt: Prompt, options: Options) -> UnaryCall[dict[str, Any]]:
        return UnaryCall(
            lambda channel: fleet_pb2_grpc.FleetServiceStub(channel).Explain,
            fleet_pb2.ExplainRequest(request=generate_request(prompt, options)),
            timeout_of(options),
            explanation_of,
        )
