"""The part of a call that both clients share: addresses, attempts, deadline, trace, result.

It does no I/O: the clients send, receive and sleep as it decides.
"""

from __future__ import annotations

import math
import os
import random
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from baton import config
from baton.client.request import Options, Prompt, generate_request, timeout_of
from baton.client.results import (
    Completion,
    Delta,
    LabelScore,
    Route,
    Timing,
    Usage,
    delta_of,
    from_message,
    prompt_logprobs_of,
    tool_calls_of,
    transport_name,
)
from baton.client.retry import RetryPolicy
from baton.errors import BatonError, Cancelled, ConfigError, DeadlineExceeded, Unavailable, quoted
from baton.generation.enum_names import FINISH_REASONS
from baton.net import rpc, tls
from baton.telemetry import propagation, tracing
from baton.v1 import (
    common_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    route_pb2_grpc,
)

_INFERENCE = inference_pb2_grpc.InferenceServiceStub
# Of methods for operators; the others are of generation.
_STUBS: dict[str, Any] = {
    **dict.fromkeys(
        ("GetStatus", "Explain", "LoadFleetAdapter", "UnloadFleetAdapter"),
        fleet_pb2_grpc.FleetServiceStub,
    ),
    **dict.fromkeys(("ListRoutes", "SetRoute", "DeleteRoute"), route_pb2_grpc.RouteServiceStub),
}


def _addresses(target: str | Sequence[str]) -> tuple[str, ...]:
    """Parses "host:port", several separated by commas, or a sequence. Raises ConfigError."""
    parts = target.split(",") if isinstance(target, str) else target
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"target must be HOST:PORT or several of them, not {quoted(target)}")
    addresses = tuple(part.strip() for part in parts)
    if not addresses:
        raise ConfigError("target names no router: give HOST:PORT")
    for address in addresses:
        scheme, found, rest = address.partition("://")
        if found and scheme.lower() in ("http", "https", "grpc", "grpcs"):
            host = rest.partition(":")[0].partition("/")[0]
            raise ConfigError(
                f"target is a router's gRPC address, HOST:PORT without {scheme}://, not "
                f"{quoted(address)}: give its --port (7700 by default) instead of its --http-port "
                f"(7780), as {quoted(host + ':7700')}; ca_file turns TLS on"
            )
        config.split_address(address, "target")
    return addresses


class BaseStream:
    """The base of both clients' streams; `send` starts an attempt of `call`."""

    def __init__(self, call: GenerateCall, send: Callable[[GenerateCall], Any]) -> None:
        self._call = call
        self._send = send
        self._responses: Any = None

    @property
    def completion(self) -> Completion:
        """The completion. Raises Cancelled if the stream was not read to its end."""
        return self._call.completion

    def _cancel(self) -> None:
        self._call.close()
        if self._responses is not None:
            self._responses.cancel()


class BaseClient:
    """The base of `Client` and `AsyncClient`: addresses, channels and credentials."""

    _grpc: ClassVar[Any]  # grpc or grpc.aio

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:7700",
        *,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._addresses = _addresses(target)
        # Index of the address to try first; random, to spread clients over the routers.
        self._preferred = random.randrange(len(self._addresses))  # noqa: S311 - guards nothing
        self._failed_at = [-math.inf] * len(self._addresses)  # time.monotonic(), by index
        self._retry = retry or RetryPolicy()
        self._closed = False
        self._home: Any = None  # where it was first used; see `_here`
        self._metadata = rpc.bearer(api_key)
        self._tls = tls.of_caller(cert_file, key_file, ca_file, "") or tls.current()
        self._tls.of_client()  # raises ConfigError for unusable files
        # By address and credentials. Calls on a channel with older credentials end there, and gRPC
        # closes the connection of a channel that is idle for long.
        self._channels: dict[tuple[str, Any], Any] = {}
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()  # for `close` to cancel

    def _here(self) -> Any:
        """The process, and with asyncio the event loop, in which alone gRPC's channels work."""
        return os.getpid()

    @property
    def _is_away(self) -> bool:
        if self._home is None:
            self._home = self._here()
        return bool(self._home != self._here())

    def _channel(self, address: str) -> Any:
        """A channel, created at its first use because asyncio's belong to the running loop."""
        key = address, (credentials := self._tls.of_client())
        if key not in self._channels:
            channel = rpc.channel(address, credentials, self._grpc)
            self._channels.setdefault(key, channel)  # another thread may have added one
        return self._channels[key]

    def _send(self, call: GenerateCall) -> Any:
        responses = _INFERENCE(self._channel(call.address)).Generate(
            call.request, timeout=call.attempts.time_left_s, metadata=call.metadata
        )
        self._calls.add(responses)
        return responses

    def _send_unary(self, attempts: Attempts, method: str, request: Any) -> Any:
        """Starts an attempt; returns the response, or an awaitable of it with asyncio."""
        stub = _STUBS.get(method, _INFERENCE)
        send = getattr(stub(self._channel(attempts.address)), method)
        metadata = (*self._metadata, *propagation.inject())
        return send(request, timeout=attempts.time_left_s, metadata=metadata)

    def _generate_call(self, prompt: Prompt, options: Options) -> GenerateCall:
        return GenerateCall(self, generate_request(prompt, options), options.get("timeout"))


class Attempts:
    """The attempts of a call: their addresses, the time left, and retries."""

    def __init__(self, client: BaseClient, timeout: float | None) -> None:
        """Raises InvalidRequest for an invalid `timeout`."""
        timeout_s = timeout_of(timeout)
        self._client = client
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._count = 1
        self._address = client._preferred
        self._tried: set[int] = set()  # indexes, since all were tried
        self._begun = False
        self._failing_since: float | None = None  # time.monotonic()
        self._failure: BatonError | None = None  # of the last attempt before this one

    @property
    def address(self) -> str:
        """The router to call now.

        Raises Cancelled when the client is closed, ConfigError where it cannot be used.
        """
        if self._client._closed:
            raise Cancelled("the client is closed: make a new one")
        if self._client._is_away:
            raise ConfigError(
                "the client was first used in another process or event loop: make one in each, "
                "after a fork"
            )
        return self._client._addresses[self._address]

    @property
    def time_left_s(self) -> float | None:
        """The next attempt's time-out for gRPC; None: unlimited."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def received(self, output: bool) -> None:
        """Notes that a message arrived, so that a broken stream is continued."""
        self._begun = True
        if output:
            self._count, self._failing_since, self._failure = 1, None, None

    def failed(self, error: BatonError) -> float:
        """Prepares the next attempt; returns the seconds to wait before it.

        Raises the error if it is final, and Cancelled if the client is closed. That of the attempt
        before is its cause, as a deadline alone tells nothing of it.
        """
        if self._client._closed:
            raise Cancelled("the client was closed while the call ran") from error
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        wait_s = self._client._retry.wait_s(
            error,
            attempts=self._count,
            addresses=len(self._client._addresses),
            time_left_s=self.time_left_s,
            jitter=random.random(),  # noqa: S311 - spreads load, guards nothing
            failing_s=now - self._failing_since,
            begun=self._begun,
        )
        # A router that said nothing until a deadline may hang.
        is_silent = isinstance(error, DeadlineExceeded) and not self._begun
        if wait_s is not None or is_silent:
            self._client._failed_at[self._address] = now
            # Later calls start there, so that a dead router delays one call only.
            self._client._preferred = self._address = self._next_address()
        if wait_s is None:
            if self._failure is not None:
                raise error from self._failure
            raise error
        self._failure = error
        self._count += 1
        return wait_s

    def _next_address(self) -> int:
        """Picks two untried addresses at random; returns the one whose failure is older.

        The clients of a failed or full router thus spread over several others, and few of them
        reach one that has just refused requests.
        """
        self._tried.add(self._address)
        everywhere = range(len(self._client._addresses))
        if not (left := [one for one in everywhere if one not in self._tried]):
            self._tried.clear()
            left = [one for one in everywhere if one != self._address] or [self._address]
        two = random.sample(left, min(2, len(left)))
        return min(two, key=self._client._failed_at.__getitem__)


class GenerateCall:
    """A completion from its request to its last message, over all of its attempts."""

    def __init__(
        self, client: BaseClient, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> None:
        self.request = request
        sampling = request.sampling
        is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
        if not (is_greedy or sampling.HasField("seed")):
            # Chosen here, so that another router can continue with the same random numbers.
            sampling.seed = random.getrandbits(64)
        self.over = False
        self.attempts = Attempts(client, timeout)
        self._started = inference_pb2.Started()
        self._prompt_logprobs = common_pb2.PromptLogprobs()
        self._deltas: list[Delta] = []
        self._token_ids: list[int] = []
        self._last_reason, self._stop = common_pb2.FINISH_REASON_UNSPECIFIED, ""
        self._finish: inference_pb2.Finish | None = None
        # The global tracer does nothing unless the program has set one up.
        self._span = trace.get_tracer("baton.client").start_span(
            "baton.client.generate",
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": tracing.operation_of(request),
                "gen_ai.provider.name": tracing.PROVIDER,
                "gen_ai.request.model": request.model,
            },
        )
        self.metadata = (*client._metadata, *propagation.inject(tracing.context_of(self._span)))

    @property
    def completion(self) -> Completion:
        """The completion. Raises Cancelled if the stream was not read to its end."""
        if self._finish is None:
            raise Cancelled("the stream was not read to its end: it has no completion")
        return self._completion()

    @property
    def address(self) -> str:
        """As `Attempts.address`."""
        try:
            return self.attempts.address
        except BatonError as error:
            self._fail(error)
            raise

    def received(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Processes a message; returns its output, if it has any.

        Raises Unavailable for a router that starts over instead of continuing.
        """
        delta = None
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
                if (resumed := self._started.resumed_tokens) != len(self._token_ids):
                    error = Unavailable(
                        f"the router continues after {resumed} tokens, but {len(self._token_ids)} "
                        "were received: it cannot continue another router's stream"
                    )
                    self._fail(error)
                    raise error
            case "prompt_logprobs":
                self._prompt_logprobs = response.prompt_logprobs
            case "delta":
                self._deltas.append(delta := delta_of(response.delta))
                self._token_ids.extend(delta.token_ids)
                self._last_reason = response.delta.finish_reason
                self._stop = response.delta.stop
            case "finish":
                self._finish = response.finish
        self.attempts.received(output=delta is not None)
        return delta

    def failed(self, error: BatonError) -> float | None:
        """Seconds to wait before the next attempt; None if the completion is complete.

        The next attempt continues behind the output so far. Raises the error if it is final, with
        that output as `partial`.
        """
        if self._last_reason and not self._finish:  # only the last message is missing
            self._finish = self._finish_so_far()
        if self.over or self._finish:
            if self._span.is_recording():
                usage = self._completion().usage
                self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
                self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            self.close()
            return None
        try:
            wait_s = self.attempts.failed(error)
        except BatonError as final:
            self._fail(final)
            raise
        self.request.resumed_token_ids[:] = self._token_ids
        self.request.resume_ticket = self._started.resume_ticket
        if self._started.model:  # no other version would go on as it began
            self.request.model = self._started.model
        return wait_s

    def ended(self) -> float | None:
        """Called when the router closed the stream; like `failed` before the last message."""
        return self.failed(Unavailable("the stream ended without its last message"))

    def close(self) -> None:
        """Ends the call; may be called again."""
        if not self.over:
            self.over = True
            self._span.end()

    def _completion(self) -> Completion:
        finish = self._finish or self._finish_so_far()
        route = finish.route
        return Completion(
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(self._token_ids),
            finish_reason=FINISH_REASONS.get(finish.reason),
            stop=finish.stop,
            logprobs=tuple(logprob for delta in self._deltas for logprob in delta.logprobs),
            prompt_logprobs=prompt_logprobs_of(self._prompt_logprobs),
            embedding=tuple(finish.embedding),
            labels=tuple(LabelScore(one.name, one.logit, one.score) for one in finish.labels),
            usage=from_message(Usage, finish.usage),
            timing=from_message(Timing, finish.timing),
            route=Route(
                prefill=route.prefill or None,
                decode=route.decode or None,
                transport=transport_name(route.transport),
                attempts=route.attempts,
            ),
            trace_id=self._started.trace_id or tracing.trace_id_of(self._span),
            request_id=self._started.request_id,
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=tool_calls_of(self._deltas),
        )

    def _finish_so_far(self) -> inference_pb2.Finish:
        """Reconstructs a last message that did not arrive."""
        usage = common_pb2.Usage(
            prompt_tokens=self._started.prompt_tokens, completion_tokens=len(self._token_ids)
        )
        return inference_pb2.Finish(reason=self._last_reason, stop=self._stop, usage=usage)

    def _fail(self, error: BatonError) -> None:
        error.partial = self._completion()  # type: ignore[attr-defined]
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self.close()
