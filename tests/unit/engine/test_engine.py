"""The engine end to end: batch, chunks, cache and preemptions never change a token."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from baton.engine import build
from baton.engine.models import decoder
from baton.engine.models.rope import rope_tables
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, Overloaded, Stale
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import WAIT_S, Bench, load, tokens_of

PROMPTS = [[(7 * i + 3 * j) % 250 + 3 for j in range(n)] for i, n in enumerate((1, 15, 16, 17, 90))]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
PENALTIES = dataclasses.replace(
    GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
)


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory, chunk_tokens=32)


def a_sequence(number, params=GREEDY, name=None, **fields):
    prompt = PROMPTS[number]
    return Sequence(name or f"s{number}", list(prompt), len(prompt), params, **fields)


def run_together(loaded, params):
    with Bench(loaded.engine) as bench:
        tokens = bench.tokens(*(a_sequence(number, params) for number in range(len(PROMPTS))))
        load = bench.engine.load().result(WAIT_S)
        if not load.preemptions:
            stored = {one for report in bench.reports for one in report.cache.stored}
            assert stored == set(bench.engine._blocks._by_hash[0])
    assert load.blocks_held == bench.reports[-1].load.blocks_held == 0
    return tokens, load.preemptions


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, PENALTIES], ids=["greedy", "seeded", "penalties"]
)
def test_tokens_do_not_depend_on_how_they_came_about(directory, loaded, params):
    alone = {}
    for number in range(len(PROMPTS)):
        with Bench(loaded.engine) as bench:
            alone |= bench.tokens(a_sequence(number, params))
    assert run_together(loaded, params)[0] == alone
    other_chunks_and_blocks = load(directory, chunk_tokens=3, block_size=4, kv_blocks=512)
    build.warm_up(other_chunks_and_blocks)
    assert run_together(other_chunks_and_blocks, params)[0] == alone
    tokens, preemptions = run_together(load(directory, chunk_tokens=32, kv_blocks=14), params)
    assert tokens == alone and preemptions > 0
    with Bench(loaded.engine) as bench:  # with a cold and a warm prefix cache
        for turn, cached in enumerate((0, 80)):
            again = a_sequence(4, params, f"t{turn}")
            assert bench.tokens(again)[again.seq_id] == alone["s4"]
            assert again.num_cached == cached
    with Bench(loaded.engine) as bench:  # failover: prompt + delivered tokens is the new prompt
        rest = a_sequence(3, params)
        rest.tokens += alone["s3"][:9]
        assert bench.tokens(rest)["s3"] == alone["s3"][9:]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_what_is_kept_for_each_position_ends_where_sequences_do(kernels, directory, monkeypatch):
    """Angles for all of a model's own context would take a gigabyte at a million tokens."""
    asked = []

    def watched(config):
        asked.append(config.max_context)
        return rope_tables(config)

    monkeypatch.setattr(decoder, "rope_tables", watched)
    load(directory, kernels=kernels, max_context=70)
    load(directory, kernels=kernels, kv_blocks=4)
    assert asked == [70, 64]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "asked", [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"embedding": True, "max_tokens": 0}]
)
def test_output_that_is_not_finite_ends_its_sequence_alone(directory, monkeypatch, asked, kernels):
    loaded = load(directory, kernels=kernels)
    model, broken = loaded.runner.model, a_sequence(4, dataclasses.replace(GREEDY, **asked), "nan")
    step, pool = model.step, loaded.runner.pool

    @torch.inference_mode()
    def with_nan(batch, pool):
        """Makes the model's output for the prompt of `broken` NaN, and one block of its KV."""
        logits = step(batch, pool)
        if broken.block_ids:
            pool[broken.block_ids[0]] = torch.nan
            first = list(batch.block_tables[:, 0]).index(broken.block_ids[0])
            owners = torch.arange(len(batch.query_lens)).repeat_interleave(batch.query_lens)
            rows = owners[batch.logit_rows] == first
            logits[rows] = torch.nan
            if model.hidden is not None:
                model.hidden[rows] = torch.nan
        return logits

    with Bench(loaded.engine) as bench:
        alone = bench.tokens(a_sequence(2))["s2"]
    monkeypatch.setattr(model, "step", with_nan)
    with Bench(loaded.engine) as bench:
        other = a_sequence(2)
        for one in [bench.engine.add(sequence) for sequence in (other, broken)]:
            one.result(WAIT_S)
        assert "not finite" in bench.until("nan", "abort_reason").abort_reason
        while not bench.next_report().progress or not other.dropped:
            pass
        assert other.tokens[other.prompt_tokens :] == alone
        assert not pool.isnan().any(), "a block's next owner would read them"
        again = bench.finish(a_sequence(4, GREEDY, "again"))
        assert len(tokens_of(again["again"])) == GREEDY.max_tokens
        assert bench.engine.load().result(WAIT_S).blocks_held == 0


@pytest.mark.parametrize("quarantine", [False, True])
def test_unverified_bytes_do_not_outlive_their_reservation(loaded, quarantine):
    """A NaN left in a block would spoil the block's next sequence, even where it is masked."""
    with Bench(loaded.engine) as bench:
        reserved = bench.engine.reserve(a_sequence(4, name="doomed")).result(WAIT_S)
        loaded.runner.pool[list(reserved.block_ids)] = float("nan")
        blocks = bench.engine.release("doomed", 0 if quarantine else None).result(WAIT_S)
        assert bool(blocks) == quarantine
        if quarantine:
            assert bench.engine.load().result(WAIT_S).blocks_quarantined == len(blocks)
            bench.engine.end_quarantine(blocks).result(WAIT_S)
        assert bench.engine.load().result(WAIT_S).blocks_free == 128
    assert not loaded.runner.pool.isnan().any()


def test_a_full_pool_refuses_at_once_and_keeps_nothing(directory):
    with Bench(load(directory, kv_blocks=4).engine) as bench:
        bench.engine.reserve(Sequence("a", [5] * 40, 40, GREEDY)).result(WAIT_S)
        with pytest.raises(Overloaded, match="1 of 4 KV blocks"):
            bench.engine.reserve(Sequence("b", [6] * 20, 20, GREEDY)).result(WAIT_S)
        with pytest.raises(Overloaded, match="needs 7 KV blocks"):
            bench.engine.add(Sequence("c", [7] * 100, 100, GREEDY)).result(WAIT_S)
        bench.engine.release("a").result(WAIT_S)
        with pytest.raises(Stale):
            bench.engine.resume("a", 40, 5).result(WAIT_S)
        assert bench.engine.load().result(WAIT_S).blocks_held == 0
    with pytest.raises(ConfigError, match="--kv-blocks"):
        load(directory, kv_blocks=1, block_size=1)


def test_the_kernel_has_a_name_for_the_engine_thread(loaded):
    with Bench(loaded.engine) as bench:
        read = Path("/proc/thread-self/comm").read_text
        assert bench.engine.submit(read).result(WAIT_S) == "engine\n"
