"""What streams notice of long prompts: windows, gaps, and the load itself."""

import asyncio
from dataclasses import replace
from itertools import islice

import pytest

from baton.bench.interference import interference, stream_stats, streams
from baton.bench.report import failures_of
from baton.bench.request import INTERRUPTED
from baton.bench.workload import Interference, Lengths, Workload
from tests.unit.bench.outcomes import FakeServer, outcome

LOAD = Interference(prompt=64, output=2, every_s=0.3, periods=2, ramp_s=0.1)
STREAMS = Workload(concurrency=2, prompt_lengths=Lengths(8, 8), output_lengths=Lengths(20, 20))


@pytest.mark.parametrize(
    ("outcomes", "window_s", "expected"),
    [
        # Messages at 0.5, 0.9, 1.4 and 2.2 of a request sent before the window.
        ([outcome(0.3, 0.7, 1.2, 2.0, sent_s=0.2)], (1.0, 2.0),
         {"tokens_per_s": 1, "itl_s": 0.5, "long_gap_share": 1.0, "ttft_s": None}),
        # Gaps of 100 and 300 ms: three quarters of the time in the longer.
        ([outcome(0.1, 0.2, 0.5)], (0.0, 1.0),
         {"long_gap_share": 0.75, "ttft_s": 0.1, "itl_s": 0.3}),
        # Three tokens a message, also of a request that was given up.
        ([outcome(0.1, 0.2, output_tokens=6),
          outcome(0.3, 0.4, status=INTERRUPTED, output_tokens=0)], (0.0, 1.0),
         {"tokens_per_s": 4 * 3, "failed": 0}),
        ([outcome(0.1, status="BROKEN")], (0.0, 1.0), {"failed": 1}),
    ],
)  # fmt: skip
def test_only_what_is_inside_the_window_counts(outcomes, window_s, expected):
    stats = stream_stats(outcomes, window_s)
    found = {n: stats[n]["max"] if isinstance(stats[n], dict) else stats[n] for n in expected}
    assert found == pytest.approx(expected)


def test_streams_start_apart_and_each_period_begins_with_a_prompt():
    lengths = [demand.new_tokens for demand in islice(streams(STREAMS), 5)]
    assert lengths == [10, 20, 20, 20, 20]
    demands = list(LOAD.prompts(STREAMS))
    assert [demand.at_s for demand in demands] == [0.1, pytest.approx(0.4)]
    assert [demand.prompt_tokens for demand in demands] == [64, 64]
    assert LOAD.window_s == (0.1, pytest.approx(0.7))


class Paced(FakeServer):
    """A server whose streams bring a token each 5 ms, and stall while a long prompt runs."""

    def __init__(self, prompt_s=0.0):
        super().__init__()
        self._prompt_s = prompt_s
        self._free = asyncio.Event()
        self._free.set()

    async def answer(self, demand, outcome):
        loop = asyncio.get_running_loop()
        began = loop.time()
        if demand.prompt_tokens >= LOAD.prompt and self._prompt_s:
            self._free.clear()
            await asyncio.sleep(self._prompt_s)
            self._free.set()
        for _ in range(demand.new_tokens):
            await asyncio.sleep(0.005)
            await self._free.wait()
            outcome.add_tokens(1, loop.time() - began)
        outcome.output_tokens = demand.new_tokens


async def test_stalls_are_seen_beside_prompts_and_no_prompt_is_sent_twice():
    server = Paced(prompt_s=0.25)
    for alone_first in (True, False):
        found, runs = await interference(
            server, replace(STREAMS, salt=1 + alone_first), LOAD, alone_first
        )
        alone, beside = found["alone"], found["beside"]
        assert beside["long_gap_share"] > 0.3 and beside["itl_s"]["max"] >= 0.2
        assert (found["prompts"]["sent"], found["prompts"]["failed"]) == (2, 0)
        assert found["kept"] == pytest.approx(beside["tokens_per_s"] / alone["tokens_per_s"])
        assert beside["failed"] == alone["failed"] == 0
        assert runs.keys() == {"alone", "beside", "prompts"}
        assert all(run.outcomes for run in runs.values())
    prompts = [demand.parts for demand in server.demands]
    assert len(set(prompts)) == len(prompts) > 8


async def test_it_ends_early():
    stop = asyncio.Event()
    stop.set()
    found, _ = await interference(Paced(), STREAMS, Interference(), True, stop)
    assert found["prompts"]["sent"] == 0 and found["kept"] is None


class Refusing(Paced):
    """It takes no long prompts, which disturb nobody then."""

    async def answer(self, demand, outcome):
        if demand.prompt_tokens < LOAD.prompt:
            await super().answer(demand, outcome)
        else:
            outcome.status, outcome.message = "HTTP_400", "the context holds 1024 tokens"


async def test_prompts_that_are_refused_leave_no_share_of_tokens_kept_but_their_reason():
    found, _ = await interference(Refusing(), replace(STREAMS, salt=1), LOAD, True)
    assert (found["prompts"]["sent"], found["prompts"]["failed"]) == (2, 2)
    assert found["kept"] is None
    report = {"stages": [], "interference": found}
    assert failures_of(report) == "2 requests failed: HTTP_400: the context holds 1024 tokens"
