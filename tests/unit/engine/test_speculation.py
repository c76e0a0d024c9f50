"""Speculation changes when tokens come, and nothing else: real models, and scripted ones."""

from __future__ import annotations

import dataclasses
import inspect
import queue
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.blocks import BlockPool
from baton.engine.loop import Engine, Progress, StepReport
from baton.engine.ops.native import library
from baton.engine.planner import Plan, Planner
from baton.engine.runner import SampledTokens, tokens_by_sequence
from baton.engine.sampling.sampler import Sampled, TokenLogprobs
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import RowCost, SpeculativeConfig
from baton.prefix import hash_chain
from baton.sampling import SamplingParams
from baton.text import load_tokenizer

WAIT_S = 60.0
TINY = Path(__file__).parents[3] / "benchmarks" / "scenarios" / "tiny.json"

GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=60, temperature=0.4, top_p=0.9, seed=11, ignore_eos=True)
PENALTIES = dataclasses.replace(
    SEEDED, frequency_penalty=0.02, repetition_penalty=1.01, presence_penalty=0.02, logprobs=2
)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalties": PENALTIES}


class Bench:
    """An engine and what it publishes."""

    def __init__(self, engine_of: Callable[[Callable[[StepReport], None]], Engine]) -> None:
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.engine = engine_of(self.reports.put)
        self.num_proposed = self.num_accepted = self.num_kept = 0
        self.preemptions = 0
        self.engine.start()

    def finish(self, *sequences: Sequence) -> dict[str, list[Progress]]:
        """Runs sequences to their ends: what each got, step by step."""
        for sequence in sequences:
            self.engine.add(sequence).result(WAIT_S)
        got: dict[str, list[Progress]] = {sequence.seq_id: [] for sequence in sequences}
        running = set(got)
        while running:
            report = self.reports.get(timeout=WAIT_S)
            self.num_proposed += report.num_proposed
            self.num_accepted += report.num_accepted
            self.num_kept += report.num_kept
            self.preemptions = report.load.preemptions
            for progress in report.progress:
                assert progress.abort_reason is None
                got[progress.seq_id].append(progress)
                if progress.finish_reason:
                    running.remove(progress.seq_id)
        return got

    def close(self) -> None:
        self.engine.check().result(WAIT_S)
        assert self.engine.load().result(WAIT_S).blocks_held == 0
        self.engine.stop()


def tokens_of(got: list[Progress]) -> list[int]:
    return [token for progress in got for token in progress.token_ids]


def logprobs_of(got: list[Progress]) -> list[TokenLogprobs]:
    return [one for progress in got for one in progress.logprobs]


@pytest.fixture(scope="module", params=["torch", "native"])
def demo(request: pytest.FixtureRequest) -> build.Loaded:
    if request.param == "native" and library.load() is None:
        pytest.skip("no native library can be built here")
    settings = EngineConfig(
        dtype="float32", threads=1, kv_blocks=200, kernels=request.param, prefix_cache=False
    )
    return build.load(settings)


class TestRealModels:
    """The demo model's tokens are the same with drafts, right ones and wrong ones."""

    def sequences(self, loaded: build.Loaded, params: SamplingParams) -> list[Sequence]:
        source = load_tokenizer(loaded.path).encode(inspect.getsource(dataclasses))
        prompts = [source[at : at + length] for at, length in ((0, 40), (700, 90), (1500, 200))]
        return [Sequence(f"s{i}", list(p), len(p), params) for i, p in enumerate(prompts)]

    def run(
        self, loaded: build.Loaded, params: SamplingParams, **settings: object
    ) -> tuple[dict[str, list[Progress]], Bench]:
        changed = dataclasses.replace(loaded.settings, **settings)  # type: ignore[arg-type]
        bench = Bench(dataclasses.replace(loaded, settings=changed).engine)
        got = bench.finish(*self.sequences(loaded, params))
        bench.close()
        return got, bench

    @pytest.mark.parametrize("kind", KINDS)
    def test_tokens_are_the_same(self, demo: build.Loaded, kind: str) -> None:
        plain, bench = self.run(demo, KINDS[kind])
        assert bench.num_proposed == 0
        drafted, bench = self.run(demo, KINDS[kind], speculate=4)
        assert 0 < bench.num_accepted < bench.num_proposed
        for name, got in plain.items():
            assert tokens_of(drafted[name]) == tokens_of(got)
            assert len(drafted[name]) <= len(got)
            found, expected = logprobs_of(drafted[name]), logprobs_of(got)
            if demo.settings.kernels == "native":  # whatever shares its step, a row has its bits
                assert found == expected
            for one, other in zip(found, expected, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(logprobs_of(drafted["s0"])) == (60 if kind == "penalties" else 0)

    def test_continued_from_any_of_its_tokens_it_is_the_same(self, demo: build.Loaded) -> None:
        """What a failover does: the text found again is read anew from the tokens."""
        plain, _ = self.run(demo, SEEDED)
        whole = tokens_of(plain["s1"])
        first = self.sequences(demo, SEEDED)[1]
        for delivered in (1, 17, 40):
            bench = Bench(self._speculating(demo).engine)
            tokens = [*first.tokens, *whole[:delivered]]
            rest = Sequence("rest", tokens, first.prompt_tokens, SEEDED)
            assert tokens_of(bench.finish(rest)["rest"]) == whole[delivered:]
            bench.close()

    def _speculating(self, loaded: build.Loaded) -> build.Loaded:
        settings = dataclasses.replace(loaded.settings, speculate=4)
        return dataclasses.replace(loaded, settings=settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_too_small_for_all_changes_no_token(kind: str) -> None:
    """Simulated, so that each slot that is read is also checked."""
    settings = EngineConfig(
        str(TINY), random_weights=True, kv_blocks=64, chunk_tokens=32, simulate="1e9,0"
    )

    def run(**changes: object) -> tuple[dict[str, list[int]], Bench]:
        loaded = build.load(dataclasses.replace(settings, **changes))  # type: ignore[arg-type]
        bench = Bench(loaded.engine)
        loop = [5, 6, 7, 8, 9] * 6
        # What is drawn is hardly ever what was drafted, unless the same few are likely anyway.
        params = dataclasses.replace(KINDS[kind], logit_bias={5: 13.0, 6: 12.8}, max_tokens=40)
        got = bench.finish(*(Sequence(f"s{i}", loop[i:], 30 - i, params) for i in range(4)))
        bench.close()
        return {name: tokens_of(one) for name, one in got.items()}, bench

    plain, _ = run()
    drafted, bench = run(speculate=4, kv_blocks=26, block_size=4)
    assert bench.preemptions > 0
    assert 0 < bench.num_accepted < bench.num_proposed
    assert drafted == plain


class ScriptedRunner:
    """Draws for every position what a text says there, whatever was drafted."""

    def __init__(self, text: list[int]) -> None:
        self.pool = torch.zeros(1)
        self.text = text

    def run(self, plan: Plan) -> dict[str, SampledTokens]:
        sampling = [work for work in plan.work if work.samples]
        drawn = [
            self.text[work.sequence.num_tokens + i]
            for work in sampling
            for i in range(len(work.proposed) + 1)
        ]
        logprobs = [TokenLogprobs(token, -1.0, ()) for token in drawn]
        return tokens_by_sequence(sampling, Sampled(drawn, list(logprobs)))

    def scrub(self, blocks: list[int]) -> None:
        pass

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        pass


class UsualCost(RowCost):
    """What is drafted does not depend on how fast this machine is."""

    def took(self, rows: int, proposed: int, seconds: float) -> None:
        pass


LOOP = [1, 2, 3, 4, 5, 6, 7, 8]
EOS = 90


class TestEnds:
    """Where a sequence ends among right drafts, it ends there."""

    def bench(self, text: list[int], max_context: int = 1000) -> Bench:
        speculation = SpeculativeConfig(4, max_context, UsualCost())
        planner = Planner(BlockPool(64, 4), 64, 4, speculation)
        runner, eos = ScriptedRunner(text), frozenset({EOS})
        return Bench(lambda publish: Engine(runner, planner, eos, max_context, publish))

    def run(
        self, text: list[int], params: SamplingParams, max_context: int = 1000
    ) -> list[Progress]:
        bench = self.bench(text, max_context)
        got = bench.finish(Sequence("a", text[:16], 16, params))["a"]
        bench.close()
        assert bench.num_proposed >= bench.num_accepted
        return got

    def test_at_a_stop_token(self) -> None:
        """Every loop has the token that stops; it counts from min_tokens on."""
        text = LOOP * 20
        params = SamplingParams(max_tokens=99, stop_token_ids=frozenset({3}), min_tokens=30)
        got = self.run(text, params)
        assert tokens_of(got) == text[16:51]
        assert (got[-1].finish_reason, got[-1].token_ids[-1]) == ("stop", 3)
        assert max(len(progress.token_ids) for progress in got) > 1
        assert [one.token_id for one in logprobs_of(got)] == tokens_of(got)

    def test_at_an_end_of_sequence_that_was_drafted(self) -> None:
        text = [*LOOP[:5], EOS, 7, 8] * 20
        assert tokens_of(self.run(text, SamplingParams(max_tokens=99))) == text[16:22]
        ignored = self.run(text, SamplingParams(max_tokens=33, ignore_eos=True))
        assert tokens_of(ignored) == text[16:49]
        assert ignored[-1].finish_reason == "length"

    @pytest.mark.parametrize("most", range(1, 30))
    def test_at_max_tokens(self, most: int) -> None:
        text = LOOP * 20
        bench = self.bench(text)
        got = bench.finish(Sequence("a", text[:16], 16, SamplingParams(max_tokens=most)))["a"]
        bench.close()
        assert tokens_of(got) == text[16 : 16 + most]
        assert got[-1].finish_reason == "length"
        assert bench.num_proposed == bench.num_accepted  # none is computed behind the end

    def test_at_the_contexts_end(self) -> None:
        text = LOOP * 20
        got = self.run(text, SamplingParams(max_tokens=999), max_context=47)
        assert tokens_of(got) == text[16:47]
        assert got[-1].finish_reason == "length"

    def test_drafts_that_were_wrong_leave_nothing_behind(self) -> None:
        """Neither tokens nor computed ones nor anything in the prefix cache."""
        wrong = 0
        for end in range(41, 49):
            text = [*(LOOP * 6)[:end], *range(50, 62), *LOOP * 6]
            bench = self.bench(text)
            first = Sequence("first", text[:16], 16, SamplingParams(max_tokens=50))
            assert tokens_of(bench.finish(first)["first"]) == text[16:66]
            assert bench.num_kept == 65
            cached = bench.engine.cached_hashes().result(WAIT_S)
            assert set(cached) == set(hash_chain(text[:65], 4))
            bench.close()
            wrong += bench.num_proposed - bench.num_accepted
        assert wrong > 8
