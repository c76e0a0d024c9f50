"""Load: callers that send one request after the other, sometimes a burst, and keep what comes back.

A few long runs of the oracle are enough: each request wants the first tokens of one of them, up to
a number or a stop string. Requests go through the SDK, and over HTTP as from other languages.
Outcomes are judged in `tests.chaos.judge`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import httpx

from baton.client import AsyncClient, Completion, Usage
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    Overloaded,
    RetryableError,
    Unavailable,
)
from tests.cluster.oracle import ENGINE, Oracle
from tests.cluster.oracle import SAMPLING as OF_ORACLE
from tests.waiting import WAIT_S

LENGTHS = (1, 15, 17, 40, 90, 200, 450, 1500)
SAMPLING: tuple[Mapping[str, Any], ...] = (
    OF_ORACLE["greedy"],
    OF_ORACLE["seeded"],
    {"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
)
NEVER = 1 << 30
LONG_TIMEOUT_S = WAIT_S  # no request may need this long
HTTP_SHARE = 0.4  # of requests that ask for no log-probabilities
SLACK_S = 60.0  # after its deadline, until a request counts as one that never ends
BURST = 12
BURST_SHARE = 0.03  # of a caller's turns
PAUSE_S = 0.3  # at most, between two turns
PAUSE_AFTER_FAILURE_S = 1.5
# How a request ends. A stream over HTTP fails with a status that is an error; without any answer;
# after the first byte but before its last event; or with an event that is the error.
COMPLETE, CANCELLED, NO_END, FAILED = "complete", "cancelled by us", "NO END", "failed"
REFUSED, UNREACHED, CUT, ERROR_EVENT = "refused", "not reached", "cut", "ended by an error event"

_HTTP_ERRORS: Mapping[Any, type[BatonError]] = {  # by a response's status, or an event's type
    404: ModelNotFound, 429: Overloaded, 503: Unavailable, 504: DeadlineExceeded,
    "service_unavailable_error": Unavailable, "timeout_error": DeadlineExceeded,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of the oracle: what every request for its first tokens must get.

    `decode` gives the text of token ids. `model` is what requests name; `others` are what a request
    may get as well, as a whole, where several versions share the name.
    """

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    whole: Completion
    decode: Callable[[tuple[int, ...]], str]
    model: str = ""
    others: tuple[Completion, ...] = ()

    def answer(self, tokens: tuple[int, ...]) -> Completion | None:
        """The completion that begins with these tokens; None: they are wrong."""
        wholes = (self.whole, *self.others)
        return next((one for one in wholes if one.token_ids[: len(tokens)] == tokens), None)


def oracle_runs(new_tokens: int, lengths: Sequence[int] = LENGTHS) -> list[Run]:
    """Runs the oracle once for each length, each second one after the same beginning."""
    runs, asked = [], {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1}
    with Oracle(ENGINE) as oracle:
        for i, length in enumerate(lengths):
            prompt = oracle.prompt(length, 0 if i % 2 else 7 * length)
            sampling = SAMPLING[i % len(SAMPLING)]
            whole = oracle.generate(prompt, **sampling, **asked)
            runs.append(Run(prompt, sampling, whole, oracle.text))
    return runs


@dataclass(frozen=True)
class ChaosRequest:
    """One request: the first `max_tokens` of a run, or less if `stop` is met.

    Cancelled after `cancel_after` tokens. With a `timeout_s` under LONG_TIMEOUT_S it may
    end with DEADLINE_EXCEEDED. With `http` it is a stream of one router's gateway, not resumed.
    """

    run: Run
    max_tokens: int
    salt: str = ""
    stop: str = ""
    logprobs: bool = False
    cancel_after: int = NEVER
    timeout_s: float = LONG_TIMEOUT_S
    http: bool = False
    interval: int = 1  # tokens that come together; over the SDK alone

    def __str__(self) -> str:
        asked = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "run"}
        model, sampling = self.run.model or "the model", dict(self.run.sampling)
        return f"{len(self.run.prompt)} tokens to {model} with {sampling}, {asked}"

    def tokens_of(self, whole: Completion) -> int:
        """How many tokens of a run it gets: up to the one that completes its stop string."""
        ids = whole.token_ids
        counts = range(1, len(ids)) if self.stop else ()
        met = (n for n in counts if self.stop in self.run.decode(ids[:n]))
        return next(met, self.max_tokens)

    @property
    def options(self) -> dict[str, Any]:
        """For the SDK, and for HTTP's body."""
        return {
            **self.run.sampling,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "cache_salt": self.salt,
            **({"model": self.run.model} if self.run.model else {}),
            **({"stop": self.stop} if self.stop else {}),
            **({"logprobs": 1} if self.logprobs else {}),
        }


def next_request(dice: random.Random, runs: Sequence[Run]) -> ChaosRequest:
    """The next request of a caller."""
    run = dice.choice(runs)
    most = len(run.whole.token_ids)
    made = ChaosRequest(run, dice.randint(1, most), f"{dice.randrange(4)}")
    kind = dice.random()
    if kind < 0.10:
        made = replace(made, timeout_s=dice.uniform(0.02, 1.5))
    elif kind < 0.25:
        made = replace(made, cancel_after=dice.randint(0, most // 2))
    elif run.others:  # of which the stop strings and log-probabilities are not equal
        pass
    elif kind < 0.40 and len(text := run.whole.text) >= 20 and "\ufffd" not in text:
        start = dice.randrange(4, len(text) - 6)  # a few characters out of the middle
        made = replace(made, max_tokens=most, stop=text[start : start + dice.randint(2, 6)])
    else:
        made = replace(made, logprobs=dice.random() < 0.3)
    made = replace(made, http=not made.logprobs and dice.random() < HTTP_SHARE)
    return made if made.http else replace(made, interval=dice.choice((1, 1, 8)))


@dataclass
class Outcome:
    """What has come of one request, and how it ended. Times are of the loop's clock.

    `token_ids` are those that were delivered, whatever came then. `lag_s`: the longest time that
    this process's loop stood still meanwhile, or may have as busy as the machine was.
    """

    began_s: float
    router: str = ""  # whose gateway it was sent to; empty for the SDK, which uses any
    ended_s: float = 0.0
    lag_s: float = 0.0
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: str = NO_END
    failure: str = FAILED  # the end, if it fails now
    error: BatonError | None = None
    completion: Completion | None = None


async def run_load(
    client: AsyncClient, gateways: Iterator[tuple[str, str]], runs: Sequence[Run],
    *, seed: int, callers: int, until_s: float,
) -> list[tuple[ChaosRequest, Outcome]]:  # fmt: skip
    """Sends until the loop's clock says `until_s`; returns when the last request has ended.

    `gateways` are routers and their HTTP addresses, in turn.
    """
    clock = asyncio.get_running_loop().time
    ended: list[tuple[ChaosRequest, Outcome]] = []

    async def call(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        while clock() < until_s:
            count = BURST if dice.random() < BURST_SHARE else 1
            requests = [next_request(dice, runs) for _ in range(count)]
            sent = [send(client, one, next(gateways) if one.http else ("", "")) for one in requests]
            outcomes = await asyncio.gather(*sent)
            ended.extend(zip(requests, outcomes, strict=True))
            failed = any(isinstance(one.error, RetryableError) for one in outcomes)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S if failed else dice.random() * PAUSE_S)

    await asyncio.gather(*map(call, range(callers)))
    return ended


async def send(
    client: AsyncClient, request: ChaosRequest, gateway: tuple[str, str] = ("", "")
) -> Outcome:
    """Runs one request to whatever end it has; over HTTP if a gateway is given."""
    clock, (router, address) = asyncio.get_running_loop().time, gateway
    outcome = Outcome(clock(), router)
    tokens = _over_http(address, request, outcome) if address else _sdk(client, request, outcome)
    try:
        async with asyncio.timeout(request.timeout_s + SLACK_S), contextlib.aclosing(tokens):
            async for token_ids in tokens:
                outcome.times.append(clock())
                outcome.token_ids += token_ids
                if len(outcome.token_ids) > request.cancel_after:
                    outcome.end = CANCELLED
                    break
            else:
                outcome.end = COMPLETE
    except BatonError as error:
        outcome.end, outcome.error = outcome.failure, error
    except httpx.TransportError as error:
        outcome.end, outcome.error = outcome.failure, Unavailable(f"{outcome.failure}: {error!r}")
    except TimeoutError:
        pass  # NO_END
    outcome.ended_s = clock()
    return outcome


async def _sdk(
    client: AsyncClient, request: ChaosRequest, outcome: Outcome
) -> AsyncGenerator[Sequence[int], None]:
    """The tokens of each message."""
    options = {
        **request.options, "timeout": request.timeout_s, "stream_interval": request.interval,
    }  # fmt: skip
    async with client.stream(request.run.prompt, **options) as stream:
        async for delta in stream:
            yield delta.token_ids
    outcome.completion = stream.completion


async def _over_http(
    address: str, request: ChaosRequest, outcome: Outcome
) -> AsyncGenerator[Sequence[int], None]:
    """The same as a stream of one router's gateway, on a connection of its own."""
    body = {
        **request.options,
        "prompt": list(request.run.prompt),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    headers = {"x-request-timeout": str(request.timeout_s)}
    text, reason, usage = "", "", Usage()
    outcome.failure = UNREACHED
    async with (
        httpx.AsyncClient(base_url=f"http://{address}", timeout=None, verify=False) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        if response.status_code != 200:
            outcome.failure = REFUSED
            await response.aread()
            kind = _HTTP_ERRORS.get(response.status_code, InternalError)
            error = kind(f"{REFUSED} with {response.status_code}: {response.text[:300]}")
            if isinstance(error, RetryableError):
                error.retry_after_s = float(response.headers.get("retry-after", 0))
            raise error
        outcome.failure, failed = CUT, None
        async with contextlib.aclosing(response.aiter_lines()) as lines:
            async for line in lines:
                if line == "data: [DONE]":
                    break
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                failed = failed or event.get("error")
                for choice in event.get("choices", ()):
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                    yield choice["token_ids"]
                if given := event.get("usage"):
                    usage = Usage(given["prompt_tokens"], given["completion_tokens"])
            else:
                raise Unavailable(f"{CUT}: the stream ended without [DONE]")
    if failed:
        outcome.failure = ERROR_EVENT
        raise _HTTP_ERRORS.get(failed["type"], InternalError)(f"{ERROR_EVENT}: {failed}")
    outcome.completion = Completion(
        text, tuple(outcome.token_ids), reason, usage=usage,
        stop=request.stop if reason == "stop" else "",  # HTTP does not say which
        trace_id=response.headers.get("x-trace-id", ""),
    )  # fmt: skip
