"""A simulated worker does what the engine's scheduler does, step for step."""

import asyncio
import random

import pytest

from baton.bench.request import Demand
from baton.config import SimulatedSpeed
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from baton.simulator import virtual_loop
from baton.simulator.prompt import Prompt
from baton.simulator.worker import SimulatedSequence, SimulatedWorker, WorkerSpec

SPEED = SimulatedSpeed.parse("4000,10,0.5,1,8000,1.1")
SPEC = WorkerSpec(SPEED, num_blocks=4096, max_batch=8, chunk_tokens=256)


def load(seed, count=30, gap_s=0.15):
    """(arrival, prompt tokens, output tokens)."""
    dice, at = random.Random(seed), 0.0
    for _ in range(count):
        at += dice.expovariate(1 / gap_s)
        yield at, dice.choice([20, 100, 700]), dice.randint(1, 60)


def by_the_engine(requests, spec):
    """(first token, last token) of each request on an engine with the real scheduler."""
    blocks = BlockManager(spec.num_blocks, spec.block_size)
    scheduler = Scheduler(blocks, ChunkBudget(spec.chunk_tokens, spec.chunk_s), spec.max_batch)
    now, rest, first, last = 0.0, list(requests), {}, {}
    sequences = {}
    while rest or scheduler.running or scheduler.num_waiting:
        if not (scheduler.running or scheduler.num_waiting):
            now = max(now, rest[0][0])
        while rest and rest[0][0] <= now + 1e-9:
            at, prompt, new = rest.pop(0)
            params = SamplingParams(max_tokens=new, ignore_eos=True)
            # Tokens of its own, so that nothing is cached.
            tokens = [(len(sequences) * 7919 + i) % 30000 for i in range(prompt)]
            one = Sequence(str(len(sequences)), tokens, prompt, params, priority=at)
            one.limit = prompt + new
            sequences[one.seq_id] = one
            scheduler.add(one)
        step = scheduler.schedule()
        chunks = [item for item in step.sequences if item.sequence.new_tokens == 0]
        decoding = [item for item in step.sequences if item.sequence.new_tokens]
        again = [item for item in decoding if item.count > 1]  # preempted ones
        plain = [item for item in decoding if item.count == 1]
        chunks += again
        step_s = SPEED.step_s(
            sum(item.count for item in chunks),
            len(plain),
            sum(item.start + 1 for item in plain),
            sum(item.count * (item.start + item.count / 2) for item in chunks),
        )
        now += step_s
        scheduler.update_after_launch(step)
        scheduler.record_step(step, step_s)
        for item in step.sequences:
            scheduler.update_after_landing(item)
            one = item.sequence
            if item.samples:
                one.tokens[-1], one.awaits_token = 7, False
                first.setdefault(one.seq_id, now)
                if len(one.tokens) >= one.limit:
                    last[one.seq_id] = now
                    scheduler.free(one)
                    one.dropped = True
        blocks.check()
    return [(first[name], last[name]) for name in sequences], scheduler.preemptions


def by_the_simulator(requests, spec, gaps=None):
    async def run():
        loop = asyncio.get_running_loop()
        worker = SimulatedWorker(
            "w", spec, lambda: None, lambda s, n: gaps.append((s, n)) if gaps is not None else None
        )
        first, last, done = {}, {}, asyncio.Event()
        requests_ = list(requests)
        for number, (at, prompt, new) in enumerate(requests_):
            await asyncio.sleep(at - loop.time())

            def end(number=number):
                last[number] = loop.time()
                if len(last) == len(requests_):
                    done.set()

            worker.add(
                SimulatedSequence(
                    Prompt(Demand(at, ((number, prompt),), new), spec.block_size),
                    at,
                    0.0,
                    new,
                    lambda number=number: first.setdefault(number, loop.time()),
                    end,
                )
            )
        await done.wait()
        worker.blocks.check()
        assert worker.blocks.num_held == 0
        assert worker.load().queue_tokens == 0
        return [(first[n], last[n]) for n in range(len(requests_))], worker.totals

    return virtual_loop.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_tokens_come_when_the_engine_would_have_them(seed):
    requests = list(load(seed))
    expected, _ = by_the_engine(requests, SPEC)
    found, totals = by_the_simulator(requests, SPEC)
    assert totals.generated == sum(new for _, _, new in requests)
    assert totals.prompt_tokens == sum(prompt for _, prompt, _ in requests)
    differences = [
        abs(a - b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert max(differences) < 0.01  # of answers that take seconds


def test_a_pool_that_becomes_full_preempts_as_often():
    requests = [(0.0, 100, 200)] * 6
    spec = WorkerSpec(SPEED, num_blocks=80, max_batch=8, chunk_tokens=256)
    expected, preemptions = by_the_engine(requests, spec)
    found, totals = by_the_simulator(requests, spec)
    assert preemptions > 0
    assert totals.preemptions == pytest.approx(preemptions, abs=2)
    assert found[-1][1] == pytest.approx(expected[-1][1], rel=0.15)


def test_every_token_but_the_first_has_one_gap():
    requests, gaps = list(load(5)), []
    found, _ = by_the_simulator(requests, SPEC, gaps)
    assert sum(count for _, count in gaps) == sum(new - 1 for _, _, new in requests)
    whole = sum(seconds * count for seconds, count in gaps)
    assert whole == pytest.approx(sum(last - first for first, last in found), rel=0.02)
