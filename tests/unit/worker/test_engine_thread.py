"""The engine thread and its inbox: every caller gets an answer, whatever happens to the thread."""

import itertools
import threading

import pytest

from baton import block_hash
from baton.engine import loop
from baton.engine.sequence import Sequence
from baton.errors import InternalError, Unavailable
from baton.generation.sampling_params import SamplingParams
from baton.v1 import common_pb2
from baton.worker.messages import ModelLimits, sequence_of
from tests.unit.engine.bench import WAIT_S, Bench, load


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory, kv_blocks=16)


@pytest.fixture
def bench(loaded):
    bench = Bench(loaded.engine)
    bench.engine.start()
    yield bench
    bench.engine.stop()


def endless(name):
    return Sequence(name, [3, 4, 5], 3, SamplingParams(max_tokens=200, ignore_eos=True))


def test_stop_drops_what_runs_and_answers_every_caller(bench):
    engine = bench.engine
    engine.add(endless("a"))
    bench.until("a", "token_ids")
    gate, held = threading.Event(), threading.Event()
    engine.submit(lambda: (held.set(), gate.wait(WAIT_S)))
    assert held.wait(WAIT_S)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    late = [engine.load() for _ in range(100)]
    gate.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive() and engine.ended.result(0) is None
    for future in late:
        assert future.exception(WAIT_S) is None or isinstance(future.exception(0), Unavailable)
    for asked in (engine.load(), engine.release("a"), engine.add(endless("a"))):
        with pytest.raises(Unavailable, match="stopped"):
            asked.result(0)


@pytest.mark.parametrize("fails", ["publish", "schedule"])
def test_a_thread_that_fails_is_logged_and_answers_every_caller(bench, caplog, fails):
    engine = bench.engine
    broken = (engine, "_publish_report") if fails == "publish" else (engine._scheduler, "schedule")
    engine.submit(lambda: setattr(*broken, None))
    engine.add(endless("a"))
    with pytest.raises(InternalError, match="not callable"):
        engine.ended.result(WAIT_S)
    with pytest.raises(Unavailable, match="not callable"):
        engine.load().result(0)
    assert "the engine thread failed" in caplog.text


def test_work_is_done_although_its_caller_hung_up_and_fails_its_caller_alone(bench):
    engine = bench.engine
    assert engine.reserve(endless("a")).result(WAIT_S).block_ids
    gate = threading.Event()
    engine.submit(lambda: gate.wait(WAIT_S))
    assert not engine.release("a").cancel()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        engine.submit(lambda: 1 // 0).result(WAIT_S)
    load = engine.load().result(WAIT_S)
    assert (load.blocks_held, load.blocks_total) == (0, 16)


def test_it_hashes_no_prompt(bench, loaded, monkeypatch):
    """A long one's blocks would hold up every stream, when it is reserved and at its Commit."""
    hashed, hash64 = [], block_hash._hash64

    def watched(data):
        if threading.current_thread().name == "engine":
            hashed.append(len(data))
        return hash64(data)

    monkeypatch.setattr(block_hash, "_hash64", watched)
    engine = bench.engine
    sampling = common_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
    asked = common_pb2.SequenceSpec(
        handoff_id="a", token_ids=[5] * 200, prompt_tokens=200, sampling=sampling
    )
    sequence = sequence_of(asked, ModelLimits.from_loaded(loaded))
    engine.reserve(sequence).result(WAIT_S)
    engine.resume("a", 200, 7).result(WAIT_S)
    assert len(engine._blocks._by_hash[0]) == 12
    assert sum(hashed) == 0


def test_setting_the_clock_does_not_change_how_long_steps_took(bench, monkeypatch):
    """Rates, and through them what routers promise, are made of how long steps took."""
    hours = itertools.count(0, -3600 * 10**9)
    monkeypatch.setattr(loop.time, "time_ns", lambda: 10**18 + next(hours))
    bench.engine.add(endless("a"))
    steps = [bench.next_report() for _ in range(5)]
    assert all(0 < step.ended_ns - step.started_ns < WAIT_S * 1e9 for step in steps)
