"""An engine on the GPU's runner, or on the plain one, driven step by step over a tiny model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.launches import GpuSettings
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.batch import StepBatch
from baton.engine.blocks import BlockPool
from baton.engine.kv_cache import KvLayout
from baton.engine.loop import Engine, Progress, StepReport
from baton.engine.models.decoder import Model
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
        chunk_tokens: int = 16,
        max_batch: int = 6,
        speculate: int = 0,
        lookahead: int = 0,
        block_size: int = SIZE,
    ) -> None:
        self.runner = runner
        self.blocks = BlockPool(num_blocks, block_size)
        speculation = SpeculativeConfig(speculate, MAX_CONTEXT) if speculate else None
        self.planner = Planner(self.blocks, chunk_tokens, max_batch, speculation, lookahead)
        self.engine = Engine(runner, self.planner, EOS, MAX_CONTEXT, self._publish)
        self.sequences = self.engine._sequences
        self.progress: list[Progress] = []  # of the last step
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[object]] = {}
        self.ends: dict[str, str] = {}

    @property
    def busy(self) -> bool:
        return bool(self.planner.running or self.planner.num_waiting)

    def add(self, sequence: Sequence) -> None:
        self.tokens[sequence.seq_id], self.logprobs[sequence.seq_id] = [], []
        self.sequences.add(sequence)
        self.blocks.check()

    def come(self, sequence: Sequence) -> None:
        """Adds a sequence with blocks of its own, if there are any for it now."""
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
        plan = self.planner.plan()
        self.blocks.check()
        drawn, failure = self.engine._compute(plan)
        self.engine._publish(plan, drawn, failure, (0, 0))
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


def plain(num_blocks: int, **options: int) -> Driven:
    """On the CPU's runner."""
    runner = Runner(MODEL, new_pool(num_blocks), Sampler(EOS, CONFIG.vocab_size))
    return Driven(runner, num_blocks, **options)


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
    settings = GpuSettings(max_batch, MAX_CONTEXT, SIZE, graphs, overlap)
    sampler = Sampler(EOS, CONFIG.vocab_size)
    runner = GpuRunner(MODEL, new_pool(num_blocks), sampler, settings, stream)
    runner.prepare(lambda done, total: None)
    return Driven(runner, num_blocks, max_batch=max_batch, lookahead=int(overlap), **options)
