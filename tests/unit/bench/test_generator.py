"""When requests go out, how many at a time, and what an early end leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.bench.generator import Generator, Lag
from baton.bench.request import INTERRUPTED, Demand, Outcome

FOREVER = 1e9


class FakeServer:
    """Answers each request after so many seconds, or when the run is ended."""

    url, protocol = "fake://", "fake"

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.running = self.most = 0
        self.bodies: list[bytes] = []
        self.three_run = asyncio.Event()

    async def connect(self) -> str:
        return "fake"

    def body(self, demand: Demand) -> bytes:
        return str(demand.parts[0][0]).encode()

    async def send(self, body: bytes, outcome: Outcome) -> None:
        self.bodies.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 3:
            self.three_run.set()
        try:
            outcome.add_tokens(1, 0.0)
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
            outcome.ended_s = self.takes_s

    async def close(self) -> None: ...


def demands(number: int, every_s: float = 0.0) -> Iterator[Demand]:
    return (Demand(i * every_s, ((i, 4),), 2) for i in range(number))


async def test_an_open_loop_waits_for_nobody() -> None:
    """All are sent in order, none before its time, though the first has not ended."""
    server, stop = FakeServer(0.5), asyncio.Event()
    async with asyncio.timeout(60):
        run = await Generator(server, stop).open_loop(demands(20, 0.01))
    assert server.bodies == [str(i).encode() for i in range(20)]
    assert server.most > 1
    assert [o.at_s for o in run.outcomes] == [i * 0.01 for i in range(20)]
    assert all(o.ok and o.sent_s >= o.at_s - 1e-3 for o in run.outcomes)
    assert run.lag.late_s == [pytest.approx(o.sent_s - o.at_s) for o in run.outcomes]
    assert run.seconds >= 0.19 + 0.5 - 0.01
    assert (run.outcomes[0].planned_prompt, run.outcomes[0].planned_output) == (4, 2)


async def test_a_late_send_is_told() -> None:
    """The server's client keeps the event loop from its work: that is the generator's lag."""
    server, stop = FakeServer(0.0), asyncio.Event()
    quick = server.send

    async def slow(body: bytes, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.05
        while loop.time() < end:
            pass
        await quick(body, outcome)

    server.send = slow  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        run = await Generator(server, stop).open_loop(demands(10, 0.01))
    assert max(run.lag.late_s) > 0.2
    assert max(run.lag.loop_late_s) > 0.03
    told = "; ".join(run.lag.complaints())
    assert "sent late" in told and "event loop" in told


async def test_a_closed_loop_keeps_so_many_running() -> None:
    server, stop = FakeServer(0.01), asyncio.Event()
    async with asyncio.timeout(60):
        run = await Generator(server, stop).closed_loop(demands(30), 4, 0.0)
    assert (server.most, len(run.outcomes), run.ok) == (4, 30, 30)
    assert sorted(int(body) for body in server.bodies) == list(range(30))


async def test_a_closed_loop_begins_nothing_after_its_time() -> None:
    server, stop = FakeServer(0.05), asyncio.Event()
    async with asyncio.timeout(60):
        run = await Generator(server, stop).closed_loop(demands(10**6), 2, 0.3)
    assert run.outcomes and all(o.ok and o.at_s < 0.3 for o in run.outcomes)


@pytest.mark.parametrize("kind", ["open", "closed"])
async def test_ended_early(kind: str) -> None:
    """What runs is given up and told apart; what has not begun never does."""
    server, stop = FakeServer(FOREVER), asyncio.Event()
    generator = Generator(server, stop)
    if kind == "open":
        running = asyncio.create_task(
            generator.open_loop(iter([*demands(3), Demand(FOREVER, ((9, 1),), 1)]))
        )
    else:
        running = asyncio.create_task(generator.closed_loop(demands(100), 3, 0.0))
    async with asyncio.timeout(60):
        await server.three_run.wait()
        stop.set()
        run = await running
    assert [o.status for o in run.outcomes] == [INTERRUPTED] * 3
    assert server.running == 0
    assert run.seconds > 0


async def test_an_error_in_the_generator_is_no_outcome() -> None:
    """A bug must end the run: it is no answer of the server."""
    server, stop = FakeServer(0.0), asyncio.Event()

    async def broken(body: bytes, outcome: Outcome) -> None:
        raise ZeroDivisionError

    server.send = broken  # type: ignore[method-assign]
    with pytest.RaisesGroup(ZeroDivisionError):
        await Generator(server, stop).open_loop(demands(1))


def test_lag_that_is_none() -> None:
    assert Lag([0.001] * 99, [0.002] * 99, 1.0, 10.0).complaints() == []
    assert Lag([0.02] * 99, [0.02] * 99, 9.0, 10.0).complaints() == [
        "requests were sent late (p99 20.0 ms)",
        "its event loop was late (p99 20.0 ms)",
        "it kept a core busy (90%)",
    ]
    assert Lag().complaints() == []
