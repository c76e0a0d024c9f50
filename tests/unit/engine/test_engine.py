"""The engine end to end: batch, chunks, cache and preemptions never change a token."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from torch import Tensor

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.loop import Engine, Progress, StepReport
from baton.engine.models import decoder
from baton.engine.models.config import Rope
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.native import library
from baton.engine.ops.native import model as native_model
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, Overloaded, Stale
from baton.sampling import SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint

PROMPTS = [[(7 * i + 3 * j) % 250 + 3 for j in range(n)] for i, n in enumerate((1, 15, 16, 17, 90))]


class Bench:
    """An engine with everything it publishes."""

    def __init__(self, loaded: build.Loaded) -> None:
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.engine: Engine = loaded.engine(self.reports.put)

    def __enter__(self) -> Bench:
        self.engine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.check().result(10)
        self.engine.stop()

    def finish(self, names: set[str]) -> dict[str, list[int]]:
        """Tokens of the named sequences, when all have ended."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        left = set(names)
        while left:
            for progress in self.reports.get(timeout=60).progress:
                if progress.seq_id in tokens:
                    tokens[progress.seq_id] += progress.token_ids
                if progress.finish_reason or progress.abort_reason:
                    left.discard(progress.seq_id)
        return tokens

    def until(self, name: str, condition: str) -> Progress:
        """The first progress of a sequence that has `condition` set."""
        while True:
            for progress in self.reports.get(timeout=60).progress:
                if progress.seq_id == name and getattr(progress, condition):
                    return progress


def load(directory: Path, **settings: object) -> build.Loaded:
    defaults = {"kv_blocks": 128, "chunk_tokens": 32, "threads": 1, "dtype": "float32"}
    return build.load(EngineConfig(model=str(directory), **{**defaults, **settings}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM")
    return path


@pytest.fixture(scope="module")
def loaded(directory: Path) -> build.Loaded:
    return load(directory)


def sequences(params: SamplingParams) -> list[Sequence]:
    return [Sequence(f"s{i}", list(p), len(p), params) for i, p in enumerate(PROMPTS)]


def run_alone(loaded: build.Loaded, params: SamplingParams) -> dict[str, list[int]]:
    tokens = {}
    for sequence in sequences(params):
        with Bench(loaded) as bench:
            bench.engine.add(sequence).result(10)
            tokens |= bench.finish({sequence.seq_id})
    return tokens


def run_together(loaded: build.Loaded, params: SamplingParams) -> tuple[dict[str, list[int]], int]:
    with Bench(loaded) as bench:
        for added in [bench.engine.add(sequence) for sequence in sequences(params)]:
            added.result(10)  # all are there before the first gets far
        tokens = bench.finish({f"s{i}" for i in range(len(PROMPTS))})
        load = bench.engine.load().result(10)
        assert load.blocks_held == 0
        return tokens, load.preemptions


GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


PENALISED = SamplingParams(
    max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2,
    ignore_eos=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"]
)
class TestEqualTokens:
    """One sequence's tokens do not depend on how they came about."""

    def test_alone_and_together(self, loaded: build.Loaded, params: SamplingParams) -> None:
        together, _ = run_together(loaded, params)
        assert together == run_alone(loaded, params)

    def test_with_other_chunks_and_blocks(
        self, directory: Path, loaded: build.Loaded, params: SamplingParams
    ) -> None:
        other = load(directory, chunk_tokens=3, block_size=4, kv_blocks=512)
        build.warm_up(other)
        assert run_together(other, params)[0] == run_alone(loaded, params)

    def test_with_preemption(
        self, directory: Path, loaded: build.Loaded, params: SamplingParams
    ) -> None:
        small = load(directory, kv_blocks=14)
        tokens, preemptions = run_together(small, params)
        assert preemptions > 0
        assert tokens == run_alone(loaded, params)

    def test_with_a_warm_prefix_cache(self, loaded: build.Loaded, params: SamplingParams) -> None:
        with Bench(loaded) as bench:
            results = []
            for turn in range(2):
                sequence = Sequence(f"t{turn}", list(PROMPTS[4]), len(PROMPTS[4]), params)
                bench.engine.add(sequence).result(10)
                results.append(bench.finish({sequence.seq_id})[sequence.seq_id])
                assert sequence.num_cached == (80 if turn else 0)
        assert results[0] == results[1]

    def test_continued_from_delivered_tokens(
        self, loaded: build.Loaded, params: SamplingParams
    ) -> None:
        """The failover rule: prompt + delivered tokens is the new prompt."""
        whole = run_alone(loaded, params)["s3"]
        prompt = PROMPTS[3]
        with Bench(loaded) as bench:
            rest = Sequence("rest", [*prompt, *whole[:9]], len(prompt), params)
            bench.engine.add(rest).result(10)
            assert bench.finish({"rest"})["rest"] == whole[9:]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_what_is_kept_for_each_position_ends_where_sequences_do(
    kernels: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Angles for all of a model's own context would take a gigabyte at a million tokens."""
    if kernels == "native" and library.load() is None:
        pytest.skip("no native library can be built here")
    asked = []

    def watched(rope: Rope, head_size: int, max_context: int) -> tuple[Tensor, Tensor]:
        asked.append(max_context)
        return rope_tables(rope, head_size, max_context)

    monkeypatch.setattr(decoder, "rope_tables", watched)
    monkeypatch.setattr(native_model, "rope_tables", watched)
    load(directory, kernels=kernels, max_context=70)
    load(directory, kernels=kernels, kv_blocks=4)
    assert asked == [70, 64]


def test_a_handoff_within_one_pool_continues_like_one_sequence(loaded: build.Loaded) -> None:
    """Prefill parks after one token; another engine's reservation resumes from copied blocks."""
    prompt = PROMPTS[4]
    expected = run_alone(loaded, GREEDY)["s4"]
    with Bench(loaded) as bench:
        first = Sequence("prefill", list(prompt), len(prompt), GREEDY, "a", park_after=1)
        bench.engine.add(first).result(10)
        (token,) = bench.until("prefill", "token_ids").token_ids
        second = Sequence("decode", list(prompt), len(prompt), GREEDY, "b")
        reserved = bench.engine.reserve(second).result(10)
        assert reserved.num_cached == 0
        pool = loaded.runner.pool
        for source, target in zip(first.block_ids, reserved.block_ids, strict=False):
            pool[target] = pool[source]
        bench.engine.resume("decode", len(prompt), token).result(10)
        tokens = bench.finish({"decode"})["decode"]
        bench.engine.release("prefill").result(10)
        assert [token, *tokens] == expected


def test_quarantined_blocks_come_back_only_when_told(loaded: build.Loaded) -> None:
    with Bench(loaded) as bench:
        sequence = Sequence("q", list(PROMPTS[4]), len(PROMPTS[4]), GREEDY)
        bench.engine.reserve(sequence).result(10)
        blocks = bench.engine.release("q", quarantine_from=0).result(10)
        assert bench.engine.load().result(10).blocks_quarantined == len(blocks) > 0
        bench.engine.readmit(blocks).result(10)
        assert bench.engine.load().result(10).blocks_free == 128


@pytest.mark.parametrize("quarantine", [False, True])
def test_unverified_bytes_do_not_outlive_their_reservation(
    loaded: build.Loaded, quarantine: bool
) -> None:
    """A NaN left in a block would spoil whoever gets the block next, even where it is masked."""
    with Bench(loaded) as bench:
        doomed = Sequence("doomed", list(PROMPTS[4]), len(PROMPTS[4]), GREEDY, "salt")
        reserved = bench.engine.reserve(doomed).result(10)
        loaded.runner.pool[list(reserved.block_ids)] = float("nan")
        blocks = bench.engine.release("doomed", 0 if quarantine else None).result(10)
        assert bool(blocks) == quarantine
        if quarantine:
            bench.engine.readmit(blocks).result(10)
        assert not loaded.runner.pool.isnan().any()


def test_a_full_pool_refuses_at_once_and_keeps_nothing(directory: Path) -> None:
    with Bench(load(directory, kv_blocks=4)) as bench:
        bench.engine.reserve(Sequence("a", [5] * 40, 40, GREEDY)).result(10)
        with pytest.raises(Overloaded, match="1 of 4 KV blocks"):
            bench.engine.reserve(Sequence("b", [6] * 20, 20, GREEDY)).result(10)
        with pytest.raises(Overloaded, match="needs 7 KV blocks"):
            bench.engine.add(Sequence("c", [7] * 100, 100, GREEDY)).result(10)
        bench.engine.release("a").result(10)
        assert bench.engine.load().result(10).blocks_held == 0


def test_releasing_stops_a_running_sequence(loaded: build.Loaded) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with Bench(loaded) as bench:
        bench.engine.add(Sequence("e", [5, 6, 7], 3, endless)).result(10)
        bench.until("e", "token_ids")
        bench.engine.release("e").result(10)
        load = bench.engine.load().result(10)
        assert (load.running, load.blocks_held) == (0, 0)
        with pytest.raises(Stale):
            bench.engine.start_reserved("e").result(10)


class FailingRunner:
    """A runner whose next steps raise."""

    def run(self, plan: object) -> dict[str, object]:
        raise RuntimeError("out of memory")


def test_a_failed_step_gives_its_sequences_up_and_the_engine_lives(loaded: build.Loaded) -> None:
    with Bench(loaded) as bench:
        runner, bench.engine._runner = bench.engine._runner, FailingRunner()  # type: ignore[assignment]
        bench.engine.add(Sequence("f", [5, 6], 2, GREEDY)).result(10)
        assert "out of memory" in str(bench.until("f", "abort_reason").abort_reason)
        bench.engine._runner = runner
        bench.engine.add(Sequence("g", [5, 6], 2, GREEDY)).result(10)
        assert len(bench.finish({"g"})["g"]) == GREEDY.max_tokens


def test_publishing_tells_of_load_and_cache(loaded: build.Loaded) -> None:
    with Bench(loaded) as bench:
        bench.engine.add(Sequence("p", list(PROMPTS[4]), len(PROMPTS[4]), GREEDY)).result(10)
        stored: set[int] = set()
        ended = False
        while not ended:
            report = bench.reports.get(timeout=60)
            stored.update(report.cache.stored)
            ended = any(progress.finish_reason for progress in report.progress)
        assert stored == set(bench.engine.cached_hashes().result(10))
        assert report.load.blocks_held == 0


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_a_pool_too_small_for_any_request_is_refused_at_load(directory: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-blocks"):
        load(directory, kv_blocks=1, block_size=1)
