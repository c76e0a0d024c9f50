"""An engine on the GPU's runner, or on a CPU's, driven step by step over a tiny model."""

from dataclasses import replace

import numpy as np
import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.batch import StepBatch
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import Engine
from baton.engine.kv_cache import KvLayout
from baton.engine.models.decoder import DecoderModel
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import Scheduler
from baton.engine.speculative.ngram import NgramProposer
from baton.engine.state_cache import StateBlockManager
from baton.engine.step_report import SequenceProgress
from baton.errors import Overloaded
from tests.unit.engine.gpu.models import TINY, reference_weights, weights_of

SIZE = 4
MAX_CONTEXT = 64
CONFIG = replace(TINY, num_layers=1, windows=(None,), ropes=TINY.ropes[:1], max_context=MAX_CONTEXT)
EOS = frozenset({1})


class PaddedModel(DecoderModel):
    """The reference for padded steps, too; the logits of padding are no numbers."""

    def step(self, batch, pool):
        if (batch.context_lens >= 0).all():
            return super().step(batch, pool)
        real = ((batch.context_lens >= 0) & (batch.query_lens > 0)).nonzero()[:, 0]
        owners = torch.arange(len(batch.query_lens)).repeat_interleave(batch.query_lens)
        assert len(owners) == len(batch.token_ids), "padding takes all other rows"
        rows = torch.isin(owners, real).nonzero()[:, 0]
        if not len(real):
            return torch.full((len(batch.logit_rows), self.config.vocab_size), torch.nan)
        whole = StepBatch(
            batch.token_ids[rows],
            batch.context_lens[real],
            batch.query_lens[real],
            batch.block_tables[real],
            torch.arange(len(rows), dtype=torch.int32),
            int((real < batch.num_decodes).sum()),
            lora_slots=None if batch.lora_slots is None else batch.lora_slots[rows],
            state_tables=None if batch.state_tables is None else batch.state_tables[real],
        )
        logits = torch.full((len(owners), self.config.vocab_size), torch.nan)
        logits[rows] = super().step(whole, pool)
        return logits[batch.logit_rows]

    def decode(
        self, token_ids, context_lens, block_tables, pool, lora_slots=None, state_tables=None
    ):
        assert token_ids.dtype == context_lens.dtype == block_tables.dtype == torch.int32
        real = context_lens >= 0
        assert real[: int(real.sum())].all(), "padding is behind all rows"
        rows, ones = torch.arange(len(token_ids)).int(), torch.ones_like(token_ids)
        inputs = token_ids, context_lens, ones, block_tables, rows, len(token_ids)
        batch = StepBatch(*inputs, lora_slots=lora_slots, state_tables=state_tables)
        return PaddedModel.step(self, batch, pool)


def model_of(config):
    """Its products are torch's: the runner is tested here, and kernels elsewhere."""
    weights = reference_weights(weights_of(config))
    return PaddedModel(config, weights, torch.float32, torch.device("cpu"))


MODEL = model_of(CONFIG)


def new_pool(num_blocks):
    layers, heads, head_size = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_size
    return torch.zeros(KvLayout(num_blocks, layers, heads, SIZE, head_size, torch.float32).shape)


class Driven:
    """An engine whose thread is the test's."""

    def __init__(
        self, runner, num_blocks, *, max_batch=6, speculate=0, overlap=False, block_size=SIZE,
        lora_slots=0,
    ):  # fmt: skip
        self.runner = runner
        self.blocks = BlockManager(num_blocks, block_size)
        if states := runner.model.state_blocks(runner.pool):
            memory_of = runner.zero_blocks, runner.copy_blocks
            self.blocks = StateBlockManager(num_blocks, block_size, True, states, *memory_of)
        proposer = NgramProposer(speculate, MAX_CONTEXT) if speculate else None
        self.scheduler = Scheduler(self.blocks, ChunkBudget(16), max_batch, proposer)
        overlap = overlap and not speculate
        about = EOS, MAX_CONTEXT, self._publish, overlap, lora_slots
        self.engine = Engine(runner, self.scheduler, *about)
        self.progress: list[SequenceProgress] = []  # of the last report
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[object]] = {}
        self.prompts: dict[
            str, list[float]
        ] = {}  # log-probabilities and likeliest, or sums of hidden states
        self.ends: dict[str, str] = {}

    @property
    def busy(self):
        return not self.engine._idle

    @property
    def in_flight(self):
        """Ids of the sequences with a row in a launch that was not waited for."""
        flight = self.engine._flight
        return [work.sequence.seq_id for work in flight.step.sequences] if flight else []

    def add(self, sequence):
        self.tokens[sequence.seq_id], self.logprobs[sequence.seq_id] = [], []
        self.do(self.engine.add(sequence))

    def reserve(self, sequence):
        """Starts a sequence with blocks of its own, if there are any for it now."""
        self.tokens[sequence.seq_id], self.logprobs[sequence.seq_id] = [], []
        try:
            self.do(self.engine.reserve(sequence, sequence.num_tokens))
        except Overloaded:
            self.do(self.engine.add(sequence))

    def cancel(self, seq_id):
        self.do(self.engine.release(seq_id))
        self.ends.setdefault(seq_id, "cancelled")

    def step(self, times=1):
        for _ in range(times):
            self.engine._step()
            self.blocks.check()

    def finish(self):
        for _ in range(2000):
            if not self.busy:
                return
            self.step()
        raise AssertionError("it never ends")

    def do(self, command):
        """What an engine's command gives."""
        self.engine._inbox.run_all()
        self.blocks.check()
        return command.result(0)

    def _publish(self, report):
        self.progress = report.progress
        for one in report.progress:
            self.tokens[one.seq_id] += one.token_ids
            self.logprobs[one.seq_id] += one.logprobs
            told = self.prompts.setdefault(one.seq_id, [])
            if one.prompt_logprobs is not None:
                found = one.prompt_logprobs
                told += np.column_stack([found.logprobs, found.top_ids]).ravel().tolist()
            if one.pooled is not None:
                told += one.pooled.tolist()
            if reason := one.finish_reason or one.abort_reason:
                self.ends[one.seq_id] = reason


def on_cpu(num_blocks, model=MODEL, **options):
    runner = Runner(model, new_pool(num_blocks), Sampler(EOS, CONFIG.vocab_size))
    return Driven(runner, num_blocks, **options)


def gpu_runner(stream, num_blocks, max_batch=6, model=MODEL):
    settings = EngineConfig(max_batch=max_batch, block_size=SIZE)
    sampler = Sampler(EOS, CONFIG.vocab_size)
    return GpuRunner(model, new_pool(num_blocks), sampler, settings, MAX_CONTEXT, stream)


def on_gpu(
    stream, num_blocks, *, overlap=True, graphs=False, max_batch=6, model=MODEL, **options
):  # fmt: skip
    """On the GPU's runner, over a stream of the CPU."""
    runner = gpu_runner(stream, num_blocks, max_batch, model)
    if graphs:
        runner.capture()
    return Driven(runner, num_blocks, max_batch=max_batch, overlap=overlap, **options)
