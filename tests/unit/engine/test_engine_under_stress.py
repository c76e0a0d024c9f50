"""The engine's thread when hundreds leave at once, when steps fail or hang, and when it is full."""

import threading
import time

import pytest
import torch

from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import SEQUENCES_PER_PLACE, Engine
from baton.engine.loop import MAX_FAILED_STEPS
from baton.engine.runner import SampledTokens, StepRunner
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.errors import InternalError, Overloaded, Unavailable
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import WAIT_S, Bench

STORM = 300
MAX_BATCH = 4


class GatedRunner(StepRunner):
    """Samples 7 for every sequence, one step for each `allow.release()`, or freely once opened."""

    def __init__(self):
        super().__init__(torch.zeros(64), None)
        self.allow, self.begun = threading.Semaphore(0), threading.Event()
        self.opened = self.failing = False
        self.poison = ""  # the beginning of ids of sequences that fail their steps
        self.plans = []

    def run(self, plan):
        self.plans.append([work.sequence.seq_id for work in plan.sequences])
        self.begun.set()
        assert self.opened or self.allow.acquire(timeout=WAIT_S)
        poisoned = self.poison and any(one.startswith(self.poison) for one in self.plans[-1])
        if self.failing or poisoned:
            raise RuntimeError("out of memory")
        return {
            work.sequence.seq_id: SampledTokens((7,)) for work in plan.sequences if work.samples
        }

    def open(self):
        self.opened = True
        self.allow.release()


class GatedBench(Bench):
    def __init__(self, num_blocks=64):
        self.runner = GatedRunner()
        scheduler = Scheduler(BlockManager(num_blocks, 4), ChunkBudget(16), MAX_BATCH)
        super().__init__(lambda publish: Engine(self.runner, scheduler, frozenset(), 1000, publish))

    def __exit__(self, kind, error, traceback):
        self.runner.open()
        self.engine.stop()

    def until_token_or_end(self, seq_id):
        return self.until(seq_id, "token_ids", "abort_reason")


@pytest.fixture
def bench():
    with GatedBench() as bench:
        yield bench


def sequence(name, length=40, max_tokens=8, **fields):
    first = 1 + 50 * sum(name.encode())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, list(range(first, first + length)), length, params, **fields)


def test_hundreds_leave_at_once_and_the_next_one_is_served_at_once(bench):
    engine, names = bench.engine, [f"s{i}" for i in range(STORM)]
    for name in names:
        engine.add(sequence(name, pause_after=1))
    assert bench.runner.begun.wait(WAIT_S)
    for name in names[::2]:
        engine.pause(name)
    gone = [engine.release(name) for name in names]
    engine.add(sequence("next", 3, 1))
    bench.runner.open()
    assert bench.until_token_or_end("next").finish_reason == "length"
    assert all(future.result(0) == [] for future in gone)
    # No sequence that left got a step after the one that ran.
    assert bench.runner.plans[1:] == [["next"]]
    engine.submit(engine._blocks.check).result(WAIT_S)
    load = engine.load().result(WAIT_S)
    assert (load.blocks_held, load.queue_tokens, load.waiting, load.running) == (0, 0, 0, 0)


def test_a_paused_sequence_does_not_run_and_keeps_its_blocks(bench):
    bench.engine.add(sequence("a"))
    assert bench.runner.begun.wait(WAIT_S)
    paused = bench.engine.pause("a")
    bench.engine.pause("unknown")
    bench.runner.open()
    paused.result(WAIT_S)
    load = bench.engine.load().result(WAIT_S)
    assert (load.blocks_held, load.running, load.waiting, load.steps) == (10, 0, 0, 1)
    bench.engine.release("a").result(WAIT_S)
    assert bench.engine.load().result(WAIT_S).blocks_held == 0


def test_the_age_of_a_step_is_known_while_it_hangs(bench):
    assert bench.engine.step_age_s == 0.0
    bench.engine.add(sequence("a", 3, 1))
    assert bench.runner.begun.wait(WAIT_S)
    first = bench.engine.step_age_s
    time.sleep(0.02)
    assert bench.engine.step_age_s >= first + 0.02
    bench.runner.open()
    bench.until_token_or_end("a")
    assert bench.engine.load().result(WAIT_S).steps == 1
    assert bench.engine.step_age_s == 0.0


def test_steps_that_keep_failing_end_the_engine_and_every_future(bench):
    bench.runner.open()
    for i in range(MAX_FAILED_STEPS * 2):  # a step that works forgives those that failed
        bench.runner.failing = i % MAX_FAILED_STEPS != 0
        bench.engine.add(sequence(f"s{i}", 3, 1))
        progress = bench.until_token_or_end(f"s{i}")
        assert ("out of memory" in str(progress.abort_reason)) == bench.runner.failing
    assert bench.engine.load().result(WAIT_S).blocks_held == 0
    bench.runner.failing = True
    bench.engine.add(sequence("last", 3))
    with pytest.raises(InternalError, match=f"{MAX_FAILED_STEPS} steps in a row"):
        bench.engine.ended.result(WAIT_S)
    with pytest.raises(Unavailable, match="out of memory"):
        bench.engine.add(sequence("late")).result(WAIT_S)


@pytest.mark.parametrize("unverified", [False, True], ids=["one prompt", "KV is not verified"])
def test_some_steps_that_fail_do_not_end_the_engine(bench, unverified):
    """Of one prompt, as routers send it again, and its callers; and on KV that may be wrong."""
    bench.runner.open()
    bench.runner.poison = "poison"
    for at in range(3 * MAX_FAILED_STEPS):
        tokens = sequence("poison", 3 + at * unverified).tokens
        params = SamplingParams(max_tokens=8)
        one = Sequence(f"poison-{at}", tokens, len(tokens), params, unverified=unverified)
        bench.engine.add(one)
        assert "out of memory" in bench.until_token_or_end(one.seq_id).abort_reason
    bench.engine.add(sequence("other", 3, 1))
    assert bench.until_token_or_end("other").token_ids


def test_a_sequence_that_is_to_run_alone_shares_no_step_and_delays_the_others_by_every_other_one(
    bench,
):
    engine, runner = bench.engine, bench.runner
    engine.add(sequence("a", 3, max_tokens=40))
    engine.add(sequence("b", 3, max_tokens=40))
    for name in ("s1", "s2"):  # prompts of two chunks
        engine.add(sequence(name, 20, max_tokens=30, exclusive_tokens=4))
    runner.poison = "s2"
    runner.open()
    ended = {}
    while len(ended) < 4:
        for one in bench.next_report().progress:
            if end := one.finish_reason or one.abort_reason:
                ended[one.seq_id] = end
    assert "out of memory" in ended.pop("s2")
    assert ended == dict.fromkeys(("a", "b", "s1"), "length")
    engine.submit(engine._blocks.check).result(WAIT_S)
    alone = [plan for plan in runner.plans if plan in (["s1"], ["s2"])][:6]
    assert alone == [["s1"]] * 5 + [["s2"]], "until it has four tokens; then the next one"
    first = runner.plans.index(["s1"])
    turns = [plan == ["s1"] for plan in runner.plans[first : first + 9]]
    assert turns == [True, False] * 4 + [True]
    assert any(set(plan) == {"a", "b", "s1"} for plan in runner.plans), "from then on it shares"


def test_more_sequences_than_the_batch_can_soon_take_are_refused(bench):
    most = SEQUENCES_PER_PLACE * MAX_BATCH
    for i in range(most):
        bench.engine.reserve(sequence(f"s{i}", 3)).result(WAIT_S)
    with pytest.raises(Overloaded, match="places") as refused:
        bench.engine.reserve(sequence("late", 3)).result(WAIT_S)
    assert 0 < refused.value.retry_after_s <= 1
    bench.engine.release("s0").result(WAIT_S)
    bench.engine.reserve(sequence("late", 3)).result(WAIT_S)


def test_a_reserved_sequence_with_little_to_compute_is_in_the_next_step():
    with GatedBench() as bench:
        bench.engine.add(sequence("runs", 3, max_tokens=9)).result(WAIT_S)
        assert bench.runner.begun.wait(WAIT_S)
        little = bench.engine.reserve(sequence("little", 4), 4)
        much = bench.engine.reserve(sequence("much", 5), 4)
        bench.runner.open()
        assert (little.result(WAIT_S).started, much.result(WAIT_S).started) == (True, False)
        steps = [{one.seq_id for one in bench.next_report().progress} for _ in range(3)]
        assert steps[1] == {"runs", "little"} and "much" not in steps[2]


def test_newcomers_do_not_take_the_blocks_that_preempted_ones_wait_for():
    with GatedBench(num_blocks=8) as bench:
        for name in ("a", "b"):  # room for 11 tokens each, and not for the 23 that they become
            bench.engine.reserve(sequence(name, 11, max_tokens=12), 11)
        bench.runner.allow.release()
        while bench.next_report().load.preemptions == 0:
            bench.runner.allow.release()
        late = bench.engine.reserve(sequence("late", 3))  # while one waits for the other's end
        bench.runner.open()
        with pytest.raises(Overloaded, match="wait for KV blocks"):
            late.result(WAIT_S)
        bench.until_token_or_end("b")
