"""The load generator's process: reads a `Load` from stdin, writes a `Run` to stdout.

    python scripts/load/generator.py < load.json > run.json

It is a process of its own so that nothing else delays it, and measures how late it was anyway.
Requests are made before the clock starts; each runs once, without retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from baton import rpc
from baton.errors import RetryableError
from baton.v1 import inference_pb2, inference_pb2_grpc
from load.arrivals import Arrival, Load
from load.outcomes import Outcome, Run

_LOOP_CHECK_S = 0.01
_SETTLE_S = 0.2


class Generator:
    """Sends requests to one router and times what comes back."""

    def __init__(self, load: Load, channel: grpc.aio.Channel) -> None:
        self._load = load
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (
            (("authorization", f"Bearer {load.api_key}"),) if load.api_key else ()
        )  # fmt: skip
        self._begin = 0.0
        self._loop_late_s: list[float] = []

    async def run(self) -> Run:
        """All of the load; returns when every request has ended."""
        requests = [(a, self._request(a)) for a in self._load.arrivals]
        gc.freeze()
        await asyncio.sleep(_SETTLE_S)
        self._begin = time.monotonic()
        watch = asyncio.create_task(self._watch_loop())
        in_order = iter(requests)
        if self._load.concurrency:
            takers = (self._take(in_order) for _ in range(self._load.concurrency))
            outcomes = [o for found in await asyncio.gather(*takers) for o in found]
        else:
            outcomes = await self._on_time(in_order)
        watch.cancel()
        return Run(outcomes, time.monotonic() - self._begin, self._loop_late_s)

    async def _on_time(
        self, requests: Iterator[tuple[Arrival, inference_pb2.GenerateRequest]]
    ) -> list[Outcome]:
        tasks = []
        for arrival, request in requests:
            await asyncio.sleep(max(0.0, self._begin + arrival.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._send(request, arrival.at_s)))
        return list(await asyncio.gather(*tasks))

    async def _take(
        self, requests: Iterator[tuple[Arrival, inference_pb2.GenerateRequest]]
    ) -> list[Outcome]:
        outcomes = []
        for _, request in requests:
            at_s = time.monotonic() - self._begin
            if at_s >= self._load.seconds:
                break
            outcomes.append(await self._send(request, at_s))
        return outcomes

    async def _send(self, request: inference_pb2.GenerateRequest, at_s: float) -> Outcome:
        sent = time.monotonic()
        outcome = Outcome(at_s, late_s=sent - self._begin - at_s)
        try:
            call = self._stub.Generate(
                request, timeout=self._load.timeout_s, metadata=self._metadata
            )
            async for response in call:
                _note(outcome, response, sent)
        except grpc.RpcError as rpc_error:
            error = rpc.error_of(rpc_error)
            outcome.status, outcome.message = rpc_error.code().name, str(error)
            if isinstance(error, RetryableError):
                outcome.retry_after_s = error.retry_after_s
        outcome.ended_s = time.monotonic() - sent
        return outcome

    def _request(self, arrival: Arrival) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(ttft_target_ms=self._load.ttft_target_ms)
        request.token_ids.ids.extend(arrival.prompt())
        request.sampling.max_tokens = arrival.new_tokens
        request.sampling.ignore_eos = True
        return request

    async def _watch_loop(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                due = time.monotonic() + _LOOP_CHECK_S
                await asyncio.sleep(_LOOP_CHECK_S)
                self._loop_late_s.append(time.monotonic() - due)


def _note(outcome: Outcome, response: inference_pb2.GenerateResponse, sent: float) -> None:
    if response.HasField("delta"):
        outcome.ttft_s = outcome.ttft_s or time.monotonic() - sent
        outcome.new_tokens += len(response.delta.token_ids)
    elif response.HasField("finish"):
        usage, route = response.finish.usage, response.finish.route
        outcome.prompt_tokens, outcome.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        outcome.prefill, outcome.decode = route.prefill, route.decode
        outcome.attempts = route.attempts


async def main() -> None:
    """Runs the load that stdin tells of."""
    load = Load.from_json(json.load(sys.stdin))
    async with rpc.channel(load.target) as channel:
        run = await Generator(load, channel).run()
    json.dump(run.to_json(), sys.stdout)


if __name__ == "__main__":
    uvloop.run(main())
