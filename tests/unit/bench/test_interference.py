"""What streams notice of long prompts: windows, gaps, and the load itself."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import pytest

from baton.bench.interference import Interference, interference, stream_stats
from baton.bench.request import INTERRUPTED, Demand, IdRange, Outcome
from tests.unit.bench.outcomes import outcome

LOAD = Interference(
    streams=2, stream_prompt=8, stream_output=20, prompt=64, prompt_output=2,
    every_s=0.3, periods=2, ramp_s=0.1,
)  # fmt: skip


class TestWindow:
    def test_only_what_is_inside_counts(self) -> None:
        """Messages at 0.5, 0.9, 1.4 and 2.2 of a request sent at 0.2, window from 1 to 2 s."""
        one = outcome(0.3, 0.7, 1.2, 2.0, sent_s=0.2)
        stats = stream_stats([one], (1.0, 2.0))
        assert stats["tokens_per_s"] == 1
        assert stats["itl_s"] and stats["itl_s"]["max"] == pytest.approx(0.5)
        assert stats["long_gap_share"] == pytest.approx(1.0)
        assert stats["ttft_s"] is None  # it was sent before

    def test_the_share_of_long_gaps(self) -> None:
        """Gaps of 100 and 300 ms: three quarters of the time were spent in the longer."""
        stats = stream_stats([outcome(0.1, 0.2, 0.5)], (0.0, 1.0))
        assert stats["long_gap_share"] == pytest.approx(0.75)

    def test_messages_of_several_tokens_and_requests_that_were_given_up(self) -> None:
        ended = outcome(0.1, 0.2, output_tokens=6)
        given_up = outcome(0.3, 0.4, status=INTERRUPTED, output_tokens=0)
        stats = stream_stats([ended, given_up], (0.0, 1.0))
        assert stats["tokens_per_s"] == pytest.approx(4 * 3)
        assert stats["failed"] == 0
        assert stream_stats([outcome(0.1, status="BROKEN")], (0.0, 1.0))["failed"] == 1


class Paced:
    """A server whose streams bring a token each step, and stall while a prompt runs."""

    url, protocol = "paced", "none"

    def __init__(self, step_s: float = 0.005, prompt_s: float = 0.0) -> None:
        self._step_s, self._prompt_s = step_s, prompt_s
        self._free = asyncio.Event()
        self._free.set()
        self.prompts: list[int] = []

    async def connect(self) -> str:
        return "paced"

    def body(self, demand: Demand) -> bytes:
        prompt = demand.prompt(IdRange())
        return json.dumps([hash(tuple(prompt)), len(prompt), demand.new_tokens]).encode()

    async def send(self, body: bytes, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        what, length, tokens = json.loads(body)
        self.prompts.append(what)
        if length >= LOAD.prompt and self._prompt_s:
            self._free.clear()
            await asyncio.sleep(self._prompt_s)
            self._free.set()
        for _ in range(tokens):
            await asyncio.sleep(self._step_s)
            await self._free.wait()
            outcome.add_tokens(1, loop.time() - began)
        outcome.output_tokens, outcome.ended_s = tokens, loop.time() - began

    async def close(self) -> None:
        pass


class TestLoad:
    def test_streams_start_apart_and_then_have_one_length(self) -> None:
        lengths = [demand.new_tokens for demand in islice(LOAD.stream_demands(0), 5)]
        assert lengths == [10, 20, 20, 20, 20]

    def test_a_prompt_at_the_beginning_of_each_period(self) -> None:
        demands = list(LOAD.prompt_demands(0))
        assert [demand.at_s for demand in demands] == [0.1, pytest.approx(0.4)]
        assert [demand.prompt_tokens for demand in demands] == [64, 64]
        assert LOAD.window_s == (0.1, pytest.approx(0.7))

    @pytest.mark.parametrize("alone_first", [True, False])
    async def test_stalls_are_seen_beside_prompts_and_not_alone(self, alone_first: bool) -> None:
        found, runs = await interference(Paced(prompt_s=0.25), LOAD, 1, alone_first)
        assert found["beside"]["long_gap_share"] > 0.3
        assert found["beside"]["itl_s"] is not None and found["beside"]["itl_s"]["max"] >= 0.2
        assert found["prompts"]["sent"] == 2 and found["prompts"]["failed"] == 0
        assert found["kept"] == pytest.approx(
            found["beside"]["tokens_per_s"] / found["alone"]["tokens_per_s"]
        )
        assert found["beside"]["failed"] == found["alone"]["failed"] == 0
        assert len(runs) == 3 and all(run.outcomes for run in runs)

    async def test_no_prompt_is_sent_twice(self) -> None:
        server = Paced()
        for round_ in range(2):
            await interference(server, LOAD, round_, True)
        assert len(set(server.prompts)) == len(server.prompts) > 8

    async def test_it_ends_early(self) -> None:
        stop = asyncio.Event()
        stop.set()
        found, _ = await interference(Paced(), Interference(), 0, True, stop)
        assert found["prompts"]["sent"] == 0 and found["kept"] == 0.0
