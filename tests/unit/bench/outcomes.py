"""Outcomes with times that a test can compute with, and a server that a test writes."""

from __future__ import annotations

from array import array
from typing import Any

from baton.bench.request import Demand, Outcome


def outcome(*token_times_s: float, sent_s: float = 0.0, **fields: Any) -> Outcome:
    """One that ended OK with a token at each time."""
    defaults: dict[str, Any] = {
        "at_s": sent_s,
        "planned_output_tokens": len(token_times_s),
        "output_tokens": len(token_times_s),
        "prompt_tokens": 10,
        "ended_s": max(token_times_s, default=0.0) + 0.01,
        "token_times_s": array("d", token_times_s),
        "token_counts": array("I", [1] * len(token_times_s)),
    }
    return Outcome(**{**defaults, "sent_s": sent_s, **fields})


def failed(status: str, message: str = "no", **fields: Any) -> Outcome:
    """One that brought nothing."""
    defaults = {"status": status, "message": message, "ended_s": 0.1, "prompt_tokens": 0}
    return outcome(**{**defaults, **fields})


class FakeServer:
    """Hands each request to `answer`; `demands` are those that were sent, in order."""

    url, protocol, model = "fake://", "fake", "fake"

    def __init__(self) -> None:
        self._bodies: list[Demand] = []
        self.demands: list[Demand] = []

    async def connect(self) -> None: ...

    def body(self, demand: Demand) -> bytes:
        self._bodies.append(demand)
        return str(len(self._bodies) - 1).encode()

    async def send(self, body: bytes, outcome: Outcome) -> None:
        self.demands.append(self._bodies[int(body)])
        await self.answer(self.demands[-1], outcome)

    async def answer(self, demand: Demand, outcome: Outcome) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...
