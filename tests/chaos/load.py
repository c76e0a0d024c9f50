"""Callers: each asks for one wish after the other, sometimes for many, and times the answers.

Uses the SDK as a program would, and HTTP as programs in other languages do. Judges nothing: endings
go to whoever wants them.
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
from tests.chaos.wishes import CUT, REFUSED, TOLD, UNREACHED, Ending, Run, Wish, wish

SLACK_S = 10.0  # after its deadline, until a request counts as one that never ends
BURST = 12
BURST_SHARE = 0.03  # of a caller's turns
PAUSE_S = 0.3  # at most, between two turns
PAUSE_AFTER_FAILURE_S = 1.5

_STATUSES = {429: Overloaded, 503: Unavailable, 504: DeadlineExceeded}
_TYPES = {"service_unavailable_error": Unavailable, "timeout_error": DeadlineExceeded}

OnEnd = Callable[[Wish, Ending], None]


class Load:
    """`callers` of them; `running` and `ended` count requests.

    `gateways` are addresses by router's name, asked in turn.
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
        """Asks until the loop's clock says `until_s`; returns when the last request has ended."""
        callers = (self._caller(number, until_s) for number in range(self._callers))
        await asyncio.gather(*callers)

    async def _caller(self, number: int, until_s: float) -> None:
        dice = random.Random(self._seed * 1000 + number)
        clock = asyncio.get_running_loop().time
        while clock() < until_s:
            count = BURST if dice.random() < BURST_SHARE else 1
            asked = (self._ask(wish(dice, self._runs)) for _ in range(count))
            endings = await asyncio.gather(*asked)
            failed = any(isinstance(one.error, RetryableError) for one in endings)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S if failed else dice.random() * PAUSE_S)

    async def _ask(self, wish: Wish) -> Ending:
        self.running += 1
        try:
            if wish.http:
                ending = await ask_over_http(*next(self._gateways), wish)
            else:
                ending = await ask(self._client, wish)
        finally:
            self.running -= 1
        self.ended += 1
        self._on_end(wish, ending)
        return ending


async def ask(client: AsyncClient, wish: Wish) -> Ending:
    """Runs one request to whatever end it has."""
    clock = asyncio.get_running_loop().time
    seen = _Seen(clock())
    stream = client.stream(wish.run.prompt, **wish.options)
    try:
        async with asyncio.timeout(wish.timeout_s + SLACK_S):
            cancelled = await _read(stream, wish, seen)
    except BatonError as error:
        return seen.ending(clock(), error=error)
    except TimeoutError:
        return seen.ending(clock(), over=False)
    if cancelled:
        return seen.ending(clock(), cancelled=True)
    return seen.ending(clock(), completion=stream.completion)


async def _read(stream: AsyncStream, wish: Wish, seen: _Seen) -> bool:
    """Reads until the end or until the caller has enough; whether it had."""
    clock = asyncio.get_running_loop().time
    async with stream:
        async for delta in stream:
            seen.times.append(clock())
            seen.token_ids += delta.token_ids
            if wish.cancel_after is not None and len(seen.token_ids) > wish.cancel_after:
                return True
    return False


@dataclass
class _Seen:
    """What has come of one answer, and when."""

    began_s: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def ending(self, ended_s: float, **how: Any) -> Ending:
        """All of it, at the end."""
        gaps = (after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return Ending(
            tuple(self.token_ids),
            self.began_s,
            ended_s,
            ttft_s=self.times[0] - self.began_s if self.times else 0.0,
            largest_gap_s=max(gaps, default=0.0),
            **how,
        )


@dataclass
class _HttpSeen(_Seen):
    """The same of a stream over HTTP, put together from its events."""

    opened: bool = False  # its first bytes are there
    trace_id: str = ""
    text: str = ""
    reason: Any = None
    usage: Usage = field(default_factory=Usage)
    error: BatonError | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """One event's data."""
        if told := event.get("error"):
            self.error = _TYPES.get(told["type"], InternalError)(f"{TOLD}: {told}")
        for choice in event.get("choices", ()):
            self.times.append(asyncio.get_running_loop().time())
            self.token_ids += choice["token_ids"]
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
        if usage := event.get("usage"):
            self.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])

    def how(self, wish: Wish) -> dict[str, Any]:
        """How a stream ended that came to its [DONE]."""
        if self.error is not None:
            return {"broke": TOLD, "error": self.error}
        done = Completion(
            self.text,
            tuple(self.token_ids),
            self.reason,
            stop=wish.stop if self.reason == "stop" else "",  # HTTP does not tell
            usage=self.usage,
            trace_id=self.trace_id,
        )
        return {"completion": done}


async def ask_over_http(router: str, address: str, wish: Wish) -> Ending:
    """The same as a stream of one router's gateway, on a connection of its own."""
    clock = asyncio.get_running_loop().time
    seen = _HttpSeen(clock())
    how: dict[str, Any] = {}
    headers = {"x-request-timeout": str(wish.timeout_s)}
    try:
        async with (
            asyncio.timeout(wish.timeout_s + SLACK_S),
            httpx.AsyncClient(
                base_url=f"http://{address}", timeout=None, headers=headers
            ) as client,
            client.stream("POST", "/v1/completions", json=wish.body) as response,
        ):
            seen.trace_id = response.headers.get("x-trace-id", "")
            if response.status_code != 200:
                await response.aread()
                how = {"broke": REFUSED, "error": _refusal(response)}
            else:
                seen.opened = True
                how = await _read_events(response, wish, seen)
    except TimeoutError:
        how = {"over": False}
    except httpx.TransportError as error:
        broke = CUT if seen.opened else UNREACHED
        how = {"broke": broke, "error": Unavailable(f"{broke}: {error or type(error).__name__}")}
    return seen.ending(clock(), router=router, **how)


async def _read_events(response: httpx.Response, wish: Wish, seen: _HttpSeen) -> dict[str, Any]:
    """Reads until the end or until the caller has enough; how it ended."""
    events = EventReader()
    async with contextlib.aclosing(response.aiter_bytes()) as chunks:
        async for chunk in chunks:
            for data in events.feed(chunk):
                if data == b"[DONE]":
                    return seen.how(wish)
                seen.take(json.loads(data))
            if wish.cancel_after is not None and len(seen.token_ids) > wish.cancel_after:
                return {"cancelled": True}
    return {"broke": CUT, "error": Unavailable(f"{CUT}: the stream ended without [DONE]")}


def _refusal(response: httpx.Response) -> BatonError:
    kind = _STATUSES.get(response.status_code, InternalError)
    error = kind(f"{REFUSED} with {response.status_code}: {response.text[:300]}")
    if isinstance(error, RetryableError):
        error.retry_after_s = float(response.headers.get("retry-after", 0))
    return error
