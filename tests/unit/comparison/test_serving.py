"""Served figures: gaps in a window, what streams keep, capacity, and servers that are not there."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.bench.demand import Demand, IdRange
from baton.bench.outcome import INTERRUPTED, OK, Outcome
from baton.config import EngineConfig
from benchmarks.engine.candidates import Rivals
from benchmarks.engine.conversation import Failed, Missing
from benchmarks.serving import gaps, servers, table
from benchmarks.serving.gaps import Window
from benchmarks.serving.interference import (
    Interference,
    interference,
    prompt_demands,
    stream_demands,
)
from benchmarks.serving.mixed import Mixed, capacity, mixed
from benchmarks.shapes import SHAPES

LOAD = Interference(
    streams=2, stream_prompt=8, stream_output=20, prompt=64, every_s=0.3, periods=2, ramp_s=0.1
)


def stream(sent_s: float, *times_s: float, status: str = OK, output: int | None = None) -> Outcome:
    """A request whose messages came so long after it was sent."""
    outcome = Outcome(sent_s, sent_s, status=status, token_times_s=array("d", times_s))
    outcome.token_counts = array("I", [1] * len(times_s))
    outcome.output_tokens = len(times_s) if output is None else output
    outcome.ended_s = times_s[-1] if times_s else 0.0
    return outcome


class TestGaps:
    def test_only_what_lies_in_the_window_counts(self) -> None:
        one = stream(1.0, 0.5, 1.0, 1.5, 2.0, 2.5)  # at 1.5, 2.0, 2.5, 3.0, 3.5
        figures = gaps.stream_figures([one], Window(1.9, 3.2))
        assert figures["tokens_per_s"] == pytest.approx(3 / 1.3)
        assert figures["itl_s"] is not None and figures["itl_s"]["count"] == 3
        assert figures["ttft_s"] is None  # it was sent before

    def test_a_gap_counts_with_its_part_in_the_window(self) -> None:
        """0.1 s gaps and one of 1 s, of which 0.6 s lie in the window."""
        one = stream(0.0, 0.1, 0.2, 0.3, 1.3, 1.4)
        figures = gaps.stream_figures([one], Window(0.0, 0.9))
        assert figures["long_gap_share"] == pytest.approx(0.6 / 0.8)

    def test_a_gap_of_exactly_the_limit_is_not_long(self) -> None:
        assert gaps.long_gap_share([stream(0.0, 0.0, 0.2)]) == 0
        assert gaps.long_gap_share([stream(0.0, 0.0, 0.1, 0.4)]) == pytest.approx(0.75)
        assert gaps.long_gap_share([]) == 0

    def test_waiting_between_requests_is_no_gap(self) -> None:
        two = [stream(0.0, 0.1, 0.2), stream(5.0, 0.1, 0.2)]
        figures = gaps.stream_figures(two, Window(0.0, 6.0))
        assert figures["long_gap_share"] == 0
        assert figures["ttft_s"] is not None and figures["ttft_s"]["count"] == 2

    def test_tokens_are_more_than_messages_where_a_message_brings_several(self) -> None:
        """Only ended requests say how many; the others are taken to be like them."""
        ended = stream(0.0, 0.1, 0.2, output=6)
        given_up = stream(0.0, 0.3, 0.4, status=INTERRUPTED, output=0)
        assert gaps.tokens_per_message([ended, given_up]) == 3
        figures = gaps.stream_figures([ended, given_up], Window(0.0, 1.0))
        assert figures["tokens_per_s"] == pytest.approx(4 * 3)
        assert figures["failed"] == 0

    def test_failures_are_counted_and_have_no_latency(self) -> None:
        outcomes = [stream(0.0, 0.5, 0.6), stream(0.0, 0.7, status="BROKEN")]
        assert gaps.stream_figures(outcomes, Window(0.0, 1.0))["failed"] == 1
        told = gaps.prompt_figures(outcomes)
        assert (told["sent"], told["failed"]) == (2, 1)
        assert told["ttft_s"] is not None and told["ttft_s"]["max"] == 0.5


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
            outcome.got(1, loop.time() - began)
        outcome.output_tokens, outcome.ended_s = tokens, loop.time() - began

    async def close(self) -> None:
        pass


class TestInterference:
    def test_streams_start_apart_and_then_have_one_length(self) -> None:
        lengths = [demand.new_tokens for demand in islice(stream_demands(LOAD, 0), 5)]
        assert lengths == [10, 20, 20, 20, 20]

    def test_a_prompt_at_the_beginning_of_each_period(self) -> None:
        demands = list(prompt_demands(LOAD, 0, True))
        assert [demand.at_s for demand in demands] == [0.1, pytest.approx(0.4)]
        assert [demand.prompt_tokens for demand in demands] == [64, 64]
        assert not list(prompt_demands(LOAD, 0, False))
        assert LOAD.window.seconds == pytest.approx(0.6)

    @pytest.mark.parametrize("alone_first", [True, False])
    async def test_stalls_are_seen_beside_prompts_and_not_alone(self, alone_first: bool) -> None:
        server = Paced(prompt_s=0.25)
        found = await interference(server, LOAD, 1, alone_first)
        assert found["beside"]["long_gap_share"] > 0.3
        assert found["beside"]["itl_s"] is not None and found["beside"]["itl_s"]["max"] >= 0.2
        assert found["prompts"]["sent"] == 2 and found["prompts"]["failed"] == 0
        assert found["kept"] == pytest.approx(
            found["beside"]["tokens_per_s"] / found["alone"]["tokens_per_s"]
        )
        assert found["beside"]["failed"] == found["alone"]["failed"] == 0

    async def test_no_prompt_is_sent_twice(self) -> None:
        server = Paced()
        for round_ in range(2):
            await interference(server, LOAD, round_, True)
        assert len(set(server.prompts)) == len(server.prompts) > 8


class TestMixed:
    async def test_it_is_sent_at_its_rate_and_counted_like_any_run(self) -> None:
        load = Mixed(prompts="20", outputs="4", duration_s=0.5)
        found = await mixed(Paced(step_s=0.001), load, 40.0, 3)
        assert found["figures"]["requests"]["ok"] == found["figures"]["requests"]["sent"] > 5
        assert found["figures"]["goodput"] is not None
        assert found["rate"] == 40.0

    async def test_capacity_counts_what_ends_after_the_ramp(self) -> None:
        """16 at a time, each at least 40 ms: at most 400 a second, and never none."""
        load = Mixed(prompts="8", outputs="8", capacity_s=0.8)
        found = await capacity(Paced(), load, 0)
        assert 0 < found <= 16 / 0.04 * 1.1


class TestTable:
    def test_medians_over_rounds_and_gaps_where_nothing_was_measured(self) -> None:
        stream = {"tokens_per_s": 100.0, "itl_s": None, "long_gap_share": 0.0, "ttft_s": None}
        prompts = {"sent": 1, "failed": 0, "ttft_s": {"p50": 0.5, "p95": 0.5}}
        rounds = [
            {"alone": stream, "beside": stream, "prompts": prompts, "kept": kept}
            for kept in (0.9, 0.5, 0.7)
        ]
        measured = table.Measured(interference=rounds, capacity=1.5)  # type: ignore[arg-type]
        lines = [" ".join(line.split()) for line in table.text_of({"one": measured})]
        assert "share of tokens/s kept, % 70.0 (50.0-90.0)" in lines
        assert "alone: ITL p99, ms -" in lines
        assert "long prompts' TTFT p50, ms 500 (500-500)" in lines
        assert lines[-1] == "capacity of one for the mixed load: 1.50 requests/s"
        assert not any(line.startswith("mixed") for line in lines)
        (told,) = table.json_of({"one": measured})
        assert told["medians"]["interference"]["share of tokens/s kept, %"]["rounds"] == 3


def place(tmp_path: Path, rivals: Rivals) -> servers.Place:
    log = tmp_path / "log"
    return servers.Place(SHAPES["tiny"], tmp_path, rivals, log, EngineConfig())


class TestServers:
    async def test_a_rival_that_is_not_installed_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(Missing, match="no llama-server"):
            async with servers.llama_server(place(tmp_path, Rivals(llama_cpp=tmp_path))):
                pass

    async def test_a_module_that_is_not_there_is_missing(self) -> None:
        with pytest.raises(Missing, match="surely_nobody"):
            servers._need(sys.executable, "surely_nobody_has_this_library")
        servers._need(sys.executable, "json")

    async def test_a_server_that_ends_is_a_failure_with_its_last_words(
        self, tmp_path: Path
    ) -> None:
        argv = [sys.executable, "-c", "print('no model'); raise SystemExit(4)"]
        with pytest.raises(Failed, match=r"status 4 \| no model"):
            async with servers._program(argv, {}, 1, tmp_path / "log"):
                pass

    def test_the_aggregated_cluster_computes_every_prompt_on_its_decode_worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = SimpleNamespace()
        monkeypatch.setattr(
            servers, "_cluster", lambda config, extra: seen.__dict__.update(c=config, e=extra)
        )
        servers.baton_aggregated(place(tmp_path, Rivals()))
        assert seen.c.limits.local_prefill_max_tokens > 1_000_000
        threads = seen.e["decode"].index("--threads")
        assert int(seen.e["decode"][threads + 1]) == len(servers.cores())
