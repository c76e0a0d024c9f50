"""An engine on the GPU's runner, or on a CPU's, driven step by step over a tiny model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.batch import StepBatch
from baton.engine.blocks import BlockPool
from baton.engine.kv_cache import KvLayout
from baton.engine.loop import Engine, Progress, StepReport
from baton.engine.models.decoder import Model
from baton.engine.overlap import OverlappedEngine
from baton.engine.planner import Planner
from baton.engine.runner import Runner, StepRunner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import SpeculativeConfig
from baton.errors import Overloaded
from tests.unit.engine.gpu.models import TINY, weights_of

SIZE = 4
MAX_CONTEXT = 64
CONFIG = replace(TINY, num_layers=1, windows=(None,), max_context=MAX_CONTEXT)
EOS = frozenset({1})


class DecodingModel(Model):
    """The reference with a step of its own for decoding; the logits of padding are no numbers."""

    def decode(
        self, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, pool: Tensor
    ) -> Tensor:
        assert token_ids.dtype == context_lens.dtype == block_tables.dtype == torch.int32
        logits = torch.full((len(token_ids), self.config.vocab_size), torch.nan)
        real = (context_lens >= 0).nonzero()[:, 0]
        assert torch.equal(real, torch.arange(len(real))), "padding is behind all rows"
        if len(real):
            ones = torch.ones(len(real), dtype=torch.int32)
            batch = StepBatch(
                token_ids[real], context_lens[real], ones, block_tables[real], real.int(), len(real)
            )
            logits[real] = self.step(batch, pool)
        return logits


MODEL = DecodingModel(CONFIG, weights_of(CONFIG), torch.float32, torch.device("cpu"))


def new_pool(num_blocks: int) -> Tensor:
    layers, heads, head_size = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_size
    return torch.zeros(KvLayout(num_blocks, layers, heads, SIZE, head_size, torch.float32).shape)


class Driven:
    """An engine whose thread is the test's."""

    def __init__(
        self,
        runner: StepRunner,
        num_blocks: int,
        *,
        max_batch: int = 6,
        speculate: int = 0,
        overlap: bool = False,
        block_size: int = SIZE,
    ) -> None:
        self.runner = runner
        self.blocks = BlockPool(num_blocks, block_size)
        speculation = SpeculativeConfig(speculate, MAX_CONTEXT) if speculate else None
        self.planner = Planner(self.blocks, 16, max_batch, speculation)
        kind = OverlappedEngine if overlap and not speculate else Engine
        self.engine = kind(runner, self.planner, EOS, MAX_CONTEXT, self._publish)  # type: ignore[arg-type]
        self.sequences = self.engine._sequences
        self.progress: list[Progress] = []  # of the last report
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[object]] = {}
        self.ends: dict[str, str] = {}

    @property
    def busy(self) -> bool:
        return not self.engine._idle

    @property
    def in_flight(self) -> list[str]:
        """Ids of the sequences with a row in a launch that was not waited for."""
        flight = getattr(self.engine, "_flight", None)
        return [work.sequence.seq_id for work in flight.plan.work] if flight else []

    def add(self, sequence: Sequence) -> None:
        self.tokens[sequence.seq_id], self.logprobs[sequence.seq_id] = [], []
        self.sequences.add(sequence)
        self.blocks.check()

    def reserve(self, sequence: Sequence) -> None:
        """Starts a sequence with blocks of its own, if there are any for it now."""
        self.tokens[sequence.seq_id], self.logprobs[sequence.seq_id] = [], []
        try:
            self.sequences.reserve(sequence)
        except Overloaded:
            self.sequences.add(sequence)
        else:
            self.sequences.start_reserved(sequence.seq_id)
        self.blocks.check()

    def cancel(self, seq_id: str) -> None:
        self.sequences.release(seq_id, None)
        self.ends.setdefault(seq_id, "cancelled")
        self.blocks.check()

    def step(self) -> None:
        self.engine._step()
        self.blocks.check()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.busy:
                return
            self.step()
        raise AssertionError("it never ends")

    def _publish(self, report: StepReport) -> None:
        self.progress = report.progress
        for one in report.progress:
            self.tokens[one.seq_id] += one.token_ids
            self.logprobs[one.seq_id] += one.logprobs
            if reason := one.finish_reason or one.abort_reason:
                self.ends[one.seq_id] = reason


def on_cpu(num_blocks: int, **options: int) -> Driven:
    runner = Runner(MODEL, new_pool(num_blocks), Sampler(EOS, CONFIG.vocab_size))
    return Driven(runner, num_blocks, **options)


def gpu_runner(stream: Stream, num_blocks: int, max_batch: int = 6) -> GpuRunner:
    settings = EngineConfig(max_batch=max_batch, block_size=SIZE)
    sampler = Sampler(EOS, CONFIG.vocab_size)
    return GpuRunner(MODEL, new_pool(num_blocks), sampler, settings, MAX_CONTEXT, stream)


def on_gpu(
    stream: Stream,
    num_blocks: int,
    *,
    overlap: bool = True,
    graphs: bool = False,
    max_batch: int = 6,
    **options: int,
) -> Driven:
    """On the GPU's runner, over a stream of the CPU."""
    runner = gpu_runner(stream, num_blocks, max_batch)
    if graphs:
        runner.capture(lambda done, total: None)
    return Driven(runner, num_blocks, max_batch=max_batch, overlap=overlap, **options)
