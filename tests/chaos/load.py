"""Load: callers that send one request after the other, sometimes a burst, and time the answers.

Requests go through the SDK, and over HTTP as from other languages. Outcomes are not judged here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.bench.servers import EventReader
from baton.client import AsyncClient, AsyncStream, Completion, Usage
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    RetryableError,
    Unavailable,
)
from tests.chaos.requests import (
    CUT,
    ERROR_EVENT,
    REFUSED,
    UNREACHED,
    ChaosRequest,
    Outcome,
    Run,
    next_request,
)

SLACK_S = 10.0  # after its deadline, until a request counts as one that never ends
BURST = 12
BURST_SHARE = 0.03  # of a caller's turns
PAUSE_S = 0.3  # at most, between two turns
PAUSE_AFTER_FAILURE_S = 1.5

_STATUSES = {429: Overloaded, 503: Unavailable, 504: DeadlineExceeded}
_TYPES = {"service_unavailable_error": Unavailable, "timeout_error": DeadlineExceeded}

OnEnd = Callable[[ChaosRequest, Outcome], None]


class Load:
    """`callers` clients; `running` and `ended` count requests.

    `gateways` are HTTP addresses by router's name, used in turn.
    """

    def __init__(
        self,
        client: AsyncClient,
        gateways: Mapping[str, str],
        runs: Sequence[Run],
        seed: int,
        callers: int,
        on_end: OnEnd,
    ) -> None:
        self._gateways = itertools.cycle(gateways.items())
        self.running = 0
        self.ended = 0
        self._client = client
        self._runs = runs
        self._seed = seed
        self._callers = callers
        self._on_end = on_end

    async def run(self, until_s: float) -> None:
        """Sends until the loop's clock says `until_s`; returns when the last request has ended."""
        callers = (self._caller(number, until_s) for number in range(self._callers))
        await asyncio.gather(*callers)

    async def _caller(self, number: int, until_s: float) -> None:
        dice = random.Random(self._seed * 1000 + number)
        clock = asyncio.get_running_loop().time
        while clock() < until_s:
            count = BURST if dice.random() < BURST_SHARE else 1
            asked = (self._send(next_request(dice, self._runs)) for _ in range(count))
            outcomes = await asyncio.gather(*asked)
            failed = any(isinstance(one.error, RetryableError) for one in outcomes)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S if failed else dice.random() * PAUSE_S)

    async def _send(self, request: ChaosRequest) -> Outcome:
        self.running += 1
        try:
            if request.http:
                outcome = await send_http(*next(self._gateways), request)
            else:
                outcome = await send(self._client, request)
        finally:
            self.running -= 1
        self.ended += 1
        self._on_end(request, outcome)
        return outcome


async def send(client: AsyncClient, request: ChaosRequest) -> Outcome:
    """Runs one request to whatever end it has."""
    clock = asyncio.get_running_loop().time
    received = _Received(clock())
    stream = client.stream(request.run.prompt, **request.options)
    try:
        async with asyncio.timeout(request.timeout_s + SLACK_S):
            cancelled = await _read(stream, request, received)
    except BatonError as error:
        return received.outcome(clock(), error=error)
    except TimeoutError:
        return received.outcome(clock(), over=False)
    if cancelled:
        return received.outcome(clock(), cancelled=True)
    return received.outcome(clock(), completion=stream.completion)


async def _read(stream: AsyncStream, request: ChaosRequest, received: _Received) -> bool:
    """Reads until the end or until the caller cancels; whether it did."""
    clock = asyncio.get_running_loop().time
    async with stream:
        async for delta in stream:
            received.times.append(clock())
            received.token_ids += delta.token_ids
            if request.cancel_after is not None and len(received.token_ids) > request.cancel_after:
                return True
    return False


@dataclass
class _Received:
    """What has arrived of one response, and when."""

    began_s: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def outcome(self, ended_s: float, **how: Any) -> Outcome:
        gaps = (after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return Outcome(
            tuple(self.token_ids),
            self.began_s,
            ended_s,
            ttft_s=self.times[0] - self.began_s if self.times else 0.0,
            largest_gap_s=max(gaps, default=0.0),
            **how,
        )


@dataclass
class _HttpReceived(_Received):
    """A stream over HTTP, put together from its events."""

    opened: bool = False  # its first bytes have arrived
    trace_id: str = ""
    text: str = ""
    reason: Any = None
    usage: Usage = field(default_factory=Usage)
    error: BatonError | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """One event's data."""
        if error := event.get("error"):
            self.error = _TYPES.get(error["type"], InternalError)(f"{ERROR_EVENT}: {error}")
        for choice in event.get("choices", ()):
            self.times.append(asyncio.get_running_loop().time())
            self.token_ids += choice["token_ids"]
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
        if usage := event.get("usage"):
            self.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])

    def how(self, request: ChaosRequest) -> dict[str, Any]:
        """How a stream ended that came to its [DONE]."""
        if self.error is not None:
            return {"failure": ERROR_EVENT, "error": self.error}
        done = Completion(
            self.text,
            tuple(self.token_ids),
            self.reason,
            stop=request.stop if self.reason == "stop" else "",  # HTTP does not say which
            usage=self.usage,
            trace_id=self.trace_id,
        )
        return {"completion": done}


async def send_http(router: str, address: str, request: ChaosRequest) -> Outcome:
    """Runs one request as a stream of one router's gateway, on its own connection."""
    clock = asyncio.get_running_loop().time
    received = _HttpReceived(clock())
    how: dict[str, Any] = {}
    headers = {"x-request-timeout": str(request.timeout_s)}
    try:
        async with (
            asyncio.timeout(request.timeout_s + SLACK_S),
            httpx.AsyncClient(
                base_url=f"http://{address}", timeout=None, headers=headers
            ) as client,
            client.stream("POST", "/v1/completions", json=request.body) as response,
        ):
            received.trace_id = response.headers.get("x-trace-id", "")
            if response.status_code != 200:
                await response.aread()
                how = {"failure": REFUSED, "error": _refusal(response)}
            else:
                received.opened = True
                how = await _read_events(response, request, received)
    except TimeoutError:
        how = {"over": False}
    except httpx.TransportError as error:
        failure = CUT if received.opened else UNREACHED
        how = {
            "failure": failure,
            "error": Unavailable(f"{failure}: {error or type(error).__name__}"),
        }
    return received.outcome(clock(), router=router, **how)


async def _read_events(
    response: httpx.Response, request: ChaosRequest, received: _HttpReceived
) -> dict[str, Any]:
    """Reads until the end or until the caller cancels; how it ended."""
    events = EventReader()
    async with contextlib.aclosing(response.aiter_bytes()) as chunks:
        async for chunk in chunks:
            for data in events.feed(chunk):
                if data == b"[DONE]":
                    return received.how(request)
                received.take(json.loads(data))
            if request.cancel_after is not None and len(received.token_ids) > request.cancel_after:
                return {"cancelled": True}
    return {"failure": CUT, "error": Unavailable(f"{CUT}: the stream ended without [DONE]")}


def _refusal(response: httpx.Response) -> BatonError:
    kind = _STATUSES.get(response.status_code, InternalError)
    error = kind(f"{REFUSED} with {response.status_code}: {response.text[:300]}")
    if isinstance(error, RetryableError):
        error.retry_after_s = float(response.headers.get("retry-after", 0))
    return error
