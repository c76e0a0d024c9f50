"""Speculation changes when tokens come, and nothing else: real models, and scripted ones."""

import dataclasses
import gc
import inspect
from pathlib import Path

import pytest
import torch

from baton.block_hash import hash_chain
from baton.config import EngineConfig
from baton.engine import build
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import Engine
from baton.engine.runner import StepRunner, tokens_by_sequence
from baton.engine.sampling.logprobs import TokenLogprobs
from baton.engine.sampling.sampler import Sampled
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.generation.sampling_params import SamplingParams
from baton.text import load_tokenizer
from tests.unit.engine.bench import WAIT_S, Bench, load, tokens_of

TINY = Path(__file__).parents[3] / "benchmarks" / "scenarios" / "tiny.json"
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.4, top_p=0.9, seed=11)
PENALTIES = dataclasses.replace(
    SEEDED, frequency_penalty=0.02, repetition_penalty=1.01, presence_penalty=0.02, logprobs=2
)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalties": PENALTIES}


def run(make_engine, *sequences):
    """(what each sequence got, tokens proposed, accepted and kept, preemptions, cached hashes)."""
    with Bench(make_engine) as bench:
        got = bench.finish(*sequences)
        cached = bench.engine._blocks._by_hash[0]
        assert bench.engine.load().result(WAIT_S).blocks_held == 0
    counts = map(bench.total, ("num_proposed", "num_accepted", "num_kept"))
    return got, *counts, bench.reports[-1].load.preemptions, cached


def logprobs_of(got):
    return [one for progress in got for one in progress.logprobs]


@pytest.fixture(scope="module")
def demo(request):
    return load(kv_blocks=200, kernels=request.param, prefix_cache=False)


def speculating(loaded, speculate=4):
    settings = dataclasses.replace(loaded.settings, speculate=speculate)
    return dataclasses.replace(loaded, settings=settings).engine


def demo_sequences(loaded, params):
    source = load_tokenizer(loaded.path).encode(inspect.getsource(dataclasses))
    prompts = [source[at : at + length] for at, length in ((0, 40), (700, 90), (1500, 200))]
    return [Sequence(f"s{i}", list(p), len(p), params) for i, p in enumerate(prompts)]


# What is sampled does not depend on which kernels computed the scores.
@pytest.mark.parametrize(
    ("demo", "kind"),
    [("torch", "penalties"), *(("native", kind) for kind in KINDS)],
    indirect=["demo"],
)
def test_a_real_models_tokens_are_the_same(demo, kind):
    params = KINDS[kind]
    plain, proposed, *_ = run(demo.engine, *demo_sequences(demo, params))
    assert proposed == 0
    drafted, proposed, accepted, *_ = run(speculating(demo), *demo_sequences(demo, params))
    assert 0 < accepted < proposed
    for name, got in plain.items():
        assert tokens_of(drafted[name]) == tokens_of(got)
        assert len(drafted[name]) <= len(got)
        found, expected = logprobs_of(drafted[name]), logprobs_of(got)
        if demo.settings.kernels == "native":  # whatever shares its step, a row has its bits
            assert found == expected
        for one, other in zip(found, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len(logprobs_of(drafted["s0"])) == (60 if kind == "penalties" else 0)
    whole, first = tokens_of(plain["s1"]), demo_sequences(demo, params)[1]
    for delivered in (1, 40):  # after a failover the text is read anew from the tokens
        tokens = [*first.tokens, *whole[:delivered]]
        rest = Sequence("rest", tokens, first.prompt_tokens, params)
        assert tokens_of(run(speculating(demo), rest)[0]["rest"]) == whole[delivered:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_too_small_for_all_changes_no_token(kind):
    """Simulated, so that each slot that is read is also checked."""
    settings = EngineConfig(
        str(TINY), random_weights=True, kv_blocks=64, chunk_tokens=32, simulate="1e9,0"
    )
    loop = [5, 6, 7, 8, 9] * 6
    # What is sampled is hardly ever what was proposed, unless the same few are likely anyway.
    params = dataclasses.replace(KINDS[kind], logit_bias={5: 13.0, 6: 12.8}, max_tokens=40)
    results = []
    for changes in ({}, {"speculate": 4, "kv_blocks": 26, "block_size": 4}):
        loaded = build.load(dataclasses.replace(settings, **changes))
        sequences = [Sequence(f"s{i}", loop[i:], 30 - i, params) for i in range(4)]
        got, proposed, accepted, _, preemptions, _ = run(loaded.engine, *sequences)
        results.append({name: tokens_of(one) for name, one in got.items()})
    assert results[0] == results[1]
    assert preemptions > 0
    assert 0 < accepted < proposed


class ScriptedRunner(StepRunner):
    """Samples at every position what a text says there, whatever was proposed."""

    def __init__(self, text):
        super().__init__(torch.zeros(1), None)
        self.text = text

    def run(self, plan):
        sampling = [work for work in plan.sequences if work.samples]
        tokens = [
            self.text[work.sequence.num_tokens + i]
            for work in sampling
            for i in range(len(work.proposed) + 1)
        ]
        logprobs = [TokenLogprobs(token, -1.0, ()) for token in tokens]
        return tokens_by_sequence(sampling, Sampled(tokens, logprobs), {})


class UsualCost(NgramProposer):
    """What is proposed does not depend on how fast this machine is."""

    def learn(self, sequence, sampled):
        assert list(sampled) == sequence.tokens[len(sequence.tokens) - len(sampled) :]
        super().learn(sequence, sampled)

    def record_step(self, rows, proposed, seconds):
        pass


LOOP = [1, 2, 3, 4, 5, 6, 7, 8]
EOS = 90


def scripted(text, params, max_context=1000, proposer=None):
    """What a sequence got that begins with 16 tokens of a text, and the counts of `run`."""
    proposer = proposer or UsualCost(4, max_context)
    scheduler = Scheduler(BlockManager(64, 4), ChunkBudget(64), 4, proposer)
    runner, eos = ScriptedRunner(text), frozenset({EOS})
    got, *counts = run(
        lambda publish: Engine(runner, scheduler, eos, max_context, publish),
        Sequence("a", text[:16], 16, params),
    )
    return got["a"], *counts


@pytest.mark.parametrize(
    ("text", "params", "max_context", "end", "reason"),
    [
        # Every loop has the token that stops; it counts from min_tokens on.
        (LOOP * 20, {"stop_token_ids": frozenset({3}), "min_tokens": 30}, 1000, 51, "stop"),
        ([*LOOP[:5], EOS, 7, 8] * 20, {}, 1000, 22, "stop"),
        ([*LOOP[:5], EOS, 7, 8] * 20, {"max_tokens": 33, "ignore_eos": True}, 1000, 49, "length"),
        (LOOP * 20, {}, 47, 47, "length"),
        *((LOOP * 20, {"max_tokens": most}, 1000, 16 + most, "length") for most in range(1, 30)),
    ],
)
def test_a_sequence_ends_where_it_does_among_right_proposals(
    text, params, max_context, end, reason
):
    params = SamplingParams(**{"max_tokens": 99, **params})
    got, proposed, accepted, *_ = scripted(text, params, max_context)
    assert tokens_of(got) == text[16:end]
    assert got[-1].finish_reason == reason
    assert [one.token_id for one in logprobs_of(got)] == tokens_of(got)
    if end > 40:
        assert max(len(progress.token_ids) for progress in got) > 1
    if reason == "length" and EOS not in text:
        assert proposed == accepted  # none is computed behind the end


def test_wrong_proposals_leave_nothing_behind():
    """Neither tokens nor computed ones nor anything in the prefix cache."""
    wrong = 0
    for end in range(41, 49):
        text = [*(LOOP * 6)[:end], *range(50, 62), *LOOP * 6]
        got, proposed, accepted, kept, _, cached = scripted(text, SamplingParams(max_tokens=50))
        assert tokens_of(got) == text[16:66]
        assert kept == 65
        assert set(cached) == set(hash_chain(text[:65], 4))
        wrong += proposed - accepted
    assert wrong > 8


def test_nothing_is_kept_of_sequences_that_ended():
    proposer = UsualCost(4, 1000)
    scripted(LOOP * 20, SamplingParams(max_tokens=50), proposer=proposer)
    gc.collect()
    assert not proposer._indexes
