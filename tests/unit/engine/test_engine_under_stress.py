"""The engine's thread when hundreds leave at once, when steps fail or hang, and when it is full."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from baton.engine.blocks import BlockPool
from baton.engine.loop import MAX_FAILED_STEPS, Engine, Progress, StepReport
from baton.engine.planner import Plan, Planner
from baton.engine.runner import SampledTokens
from baton.engine.sequence import Sequence
from baton.engine.sequence_table import SEQUENCES_PER_PLACE
from baton.errors import InternalError, Overloaded, Unavailable
from baton.sampling import SamplingParams

WAIT_S = 60.0
STORM = 300
MAX_BATCH = 4


class GatedRunner:
    """Draws a 7 for everybody, one step for each `allow.release()`, or for none once opened."""

    def __init__(self) -> None:
        self.pool = torch.zeros(1)
        self.allow, self.begun = threading.Semaphore(0), threading.Event()
        self.opened = False
        self.failing = False
        self.plans: list[list[str]] = []

    def run(self, plan: Plan) -> dict[str, SampledTokens]:
        self.plans.append([work.sequence.seq_id for work in plan.work])
        self.begun.set()
        assert self.opened or self.allow.acquire(timeout=WAIT_S)
        if self.failing:
            raise RuntimeError("out of memory")
        return {work.sequence.seq_id: SampledTokens((7,)) for work in plan.work if work.samples}

    def scrub(self, blocks: list[int]) -> None:
        pass

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        pass

    def open(self) -> None:
        self.opened = True
        self.allow.release()


class Bench:
    def __init__(self, num_blocks: int = 64) -> None:
        self.runner = GatedRunner()
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        planner = Planner(BlockPool(num_blocks, 4), 16, MAX_BATCH)
        self.engine = Engine(self.runner, planner, frozenset(), 1000, self.reports.put)
        self.engine.start()

    def until(self, seq_id: str) -> Progress:
        """A sequence's first token, or its end."""
        while True:
            for progress in self.reports.get(timeout=WAIT_S).progress:
                if progress.seq_id == seq_id and (progress.token_ids or progress.abort_reason):
                    return progress

    def close(self) -> None:
        self.runner.open()
        self.engine.stop()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def sequence(name: str, length: int = 40, max_tokens: int = 8, **fields: object) -> Sequence:
    first = 1 + 50 * sum(name.encode())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens = list(range(first, first + length))
    return Sequence(name, tokens, length, params, **fields)  # type: ignore[arg-type]


def test_hundreds_leave_at_once_and_the_next_one_is_served_at_once(bench: Bench) -> None:
    engine, names = bench.engine, [f"s{i}" for i in range(STORM)]
    for name in names:
        engine.add(sequence(name, park_after=1))
    assert bench.runner.begun.wait(WAIT_S)
    for name in names[::2]:
        engine.halt(name)
    gone = [engine.release(name) for name in names]
    engine.add(sequence("next", 3, 1))
    bench.runner.open()
    assert bench.until("next").finish_reason == "length"
    assert all(future.result(0) == [] for future in gone)
    # Nobody who left got a step after the one that ran.
    assert bench.runner.plans[1:] == [["next"]]
    engine.check().result(WAIT_S)
    load = engine.load().result(WAIT_S)
    assert (load.blocks_held, load.queue_tokens, load.waiting, load.running) == (0, 0, 0, 0)


def test_one_that_is_halted_runs_no_more_and_keeps_its_blocks(bench: Bench) -> None:
    bench.engine.add(sequence("a"))
    assert bench.runner.begun.wait(WAIT_S)
    halted = bench.engine.halt("a")
    bench.engine.halt("nobody")
    bench.runner.open()
    halted.result(WAIT_S)
    load = bench.engine.load().result(WAIT_S)
    assert (load.blocks_held, load.running, load.waiting, load.steps) == (10, 0, 0, 1)
    bench.engine.release("a").result(WAIT_S)
    assert bench.engine.load().result(WAIT_S).blocks_held == 0


def test_the_age_of_a_step_is_known_while_it_hangs(bench: Bench) -> None:
    assert bench.engine.step_age_s == 0.0
    bench.engine.add(sequence("a", 3, 1))
    assert bench.runner.begun.wait(WAIT_S)
    first = bench.engine.step_age_s
    time.sleep(0.02)
    assert bench.engine.step_age_s >= first + 0.02
    bench.runner.open()
    bench.until("a")
    assert bench.engine.load().result(WAIT_S).steps == 1
    assert bench.engine.step_age_s == 0.0


def test_steps_that_keep_failing_end_the_engine_and_every_future(bench: Bench) -> None:
    bench.runner.failing = True
    bench.runner.open()
    for i in range(MAX_FAILED_STEPS):
        bench.engine.add(sequence(f"s{i}", 3))
        assert "out of memory" in str(bench.until(f"s{i}").abort_reason)
    with pytest.raises(InternalError, match=f"{MAX_FAILED_STEPS} steps in a row"):
        bench.engine.ended.result(WAIT_S)
    with pytest.raises(Unavailable, match="out of memory"):
        bench.engine.add(sequence("late")).result(WAIT_S)


def test_a_step_that_works_forgives_those_that_failed(bench: Bench) -> None:
    bench.runner.open()
    for i in range(MAX_FAILED_STEPS * 2):
        bench.runner.failing = i % MAX_FAILED_STEPS != 0
        bench.engine.add(sequence(f"s{i}", 3, 1))
        bench.until(f"s{i}")
    assert bench.engine.load().result(WAIT_S).blocks_held == 0


def test_more_sequences_than_the_batch_can_soon_take_are_refused(bench: Bench) -> None:
    most = SEQUENCES_PER_PLACE * MAX_BATCH
    for i in range(most):
        bench.engine.reserve(sequence(f"s{i}", 3)).result(WAIT_S)
    with pytest.raises(Overloaded, match="places") as refused:
        bench.engine.reserve(sequence("late", 3)).result(WAIT_S)
    assert 0 < refused.value.retry_after_s <= 1
    bench.engine.release("s0").result(WAIT_S)
    bench.engine.reserve(sequence("late", 3)).result(WAIT_S)


def test_newcomers_do_not_take_the_blocks_that_preempted_ones_wait_for() -> None:
    with contextlib.closing(Bench(num_blocks=8)) as bench:
        for name in ("a", "b"):  # room for 11 tokens each, and not for the 23 that they become
            bench.engine.reserve(sequence(name, 11, max_tokens=12)).result(WAIT_S)
        for name in ("a", "b"):
            bench.engine.start_reserved(name)
        bench.runner.allow.release()
        while bench.reports.get(timeout=WAIT_S).load.preemptions == 0:
            bench.runner.allow.release()
        late = bench.engine.reserve(sequence("late", 3))  # while one waits for the other's end
        bench.runner.open()
        with pytest.raises(Overloaded, match="wait for KV blocks"):
            late.result(WAIT_S)
        bench.until("b")
