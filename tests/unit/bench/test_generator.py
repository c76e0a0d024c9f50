"""When requests go out, how many at a time, and what an early end leaves."""

import asyncio

import pytest

from baton.bench.generator import Generator
from baton.bench.request import INTERRUPTED, Demand
from tests.unit.bench.outcomes import FakeServer

FOREVER = 1e9


class Slow(FakeServer):
    """Answers each request after so many seconds, once `before` has run."""

    def __init__(self, takes_s=0.0, before=lambda: None):
        super().__init__()
        self.takes_s, self.before = takes_s, before
        self.running = self.most = 0
        self.three_run = asyncio.Event()

    async def answer(self, demand, outcome):
        self.before()
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 3:
            self.three_run.set()
        try:
            outcome.add_tokens(1, 0.0)
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1


def demands(number, every_s=0.0):
    return (Demand(i * every_s, ((i, 4),), 2) for i in range(number))


async def test_an_open_loop_sends_each_request_at_its_time():
    """All are sent in order, none before its time, though the first has not ended."""
    server = Slow(0.5)
    run = await Generator(server).open_loop(demands(20, 0.01))
    assert [d.parts[0][0] for d in server.demands] == list(range(20)) and server.most > 1
    assert [o.at_s for o in run.outcomes] == [i * 0.01 for i in range(20)]
    assert all(o.ok and o.sent_s >= o.at_s - 1e-3 for o in run.outcomes)
    assert all(o.ended_s >= 0.5 - 0.01 for o in run.outcomes)
    assert run.seconds >= 0.19 + 0.5 - 0.01
    first = run.outcomes[0]
    assert (first.planned_prompt_tokens, first.planned_output_tokens) == (4, 2)


async def test_a_closed_loop_keeps_its_concurrency_and_begins_nothing_after_its_time():
    server = Slow(0.01)
    run = await Generator(server).closed_loop(demands(30), 4)
    assert (server.most, len(run.outcomes), run.ok) == (4, 30, 30)
    assert sorted(d.parts[0][0] for d in server.demands) == list(range(30))
    assert run.outcomes[4].at_s >= 0.01  # due when the one before it had ended
    run = await Generator(Slow(0.05)).closed_loop(demands(10**6), 2, 0.3)
    assert run.outcomes and all(o.ok and o.at_s < 0.3 for o in run.outcomes)


@pytest.mark.parametrize("kind", ["open", "closed"])
async def test_a_stop_cancels_what_runs_and_begins_nothing_more(kind):
    server, stop = Slow(FOREVER), asyncio.Event()
    generator = Generator(server, stop)
    loops = {
        "open": lambda: generator.open_loop([*demands(3), Demand(FOREVER, ((9, 1),), 1)]),
        "closed": lambda: generator.closed_loop(demands(100), 3),
    }
    running = asyncio.create_task(loops[kind]())
    await server.three_run.wait()
    stop.set()
    await running
    assert [o.status for o in generator.run.outcomes] == [INTERRUPTED] * 3
    assert server.running == 0 and generator.run.seconds > 0


async def test_an_error_in_the_generator_ends_the_run():
    """It is no answer of the server."""
    server = Slow(before=lambda: 1 // 0)
    with pytest.RaisesGroup(ZeroDivisionError):
        await Generator(server).open_loop(demands(1))
