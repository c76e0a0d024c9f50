"""Warm-up and profile run: steps before requests are served, to compile kernels and measure memory.

A kernel is compiled on its first launch with new tile sizes, which takes seconds. Tile sizes follow
from powers of two of a step's sizes: the rows of its chunks, and its number of decode rows. Results
of these steps are meaningless: all blocks are the pool's first, which must be free.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.cuda_graphs import StepShape, shapes_of
from baton.engine.batch import BatchBuilder, StepModel
from baton.engine.runner import Runner
from baton.engine.scheduler import SCORED_ROWS, ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams

# The settings that use the most memory and kernels.
_RANKED = SamplingParams(
    temperature=1.0,
    top_k=64,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=20,
    prompt_logprobs=20,
)
_GREEDY = SamplingParams()


def largest_step(runner: Runner, settings: EngineConfig, max_context: int) -> None:
    """Runs a full batch with a step's whole token budget, at the end of full contexts."""
    of_blocks = runner.pool, runner.model
    rest = settings.chunk_tokens
    proposed = min(settings.speculate, rest // settings.max_batch, max_context - 2)
    rest -= proposed * settings.max_batch
    work = [
        _work(max_context, 1 + proposed, *of_blocks, proposed, _RANKED)
        for _ in range(settings.max_batch)
    ]
    if scored := min(rest, SCORED_ROWS, max_context - 1):
        work.append(_work(max_context, scored, *of_blocks, 0, _RANKED))
        work[-1].sequence.prompt_tokens, work[-1].sequence.num_scored = max_context, 0
        rest -= scored
    work += _chunks(rest, max_context, *of_blocks)
    work.sort(key=lambda item: item.count > 1)  # as schedulers order it
    runner.run(ScheduledStep(work))


def largest_captured(
    model: StepModel, pool: Tensor, settings: EngineConfig, max_context: int
) -> None:
    """Runs a step of the largest captured shape, with full contexts."""
    shapes = shapes_of(settings, max_context) or [StepShape(settings.max_batch, 0, 1)]
    work = [_work(max_context, 1, pool, model)] * shapes[0].decodes
    work += _chunks(shapes[0].chunk_rows, max_context, pool, model)
    work.sort(key=lambda item: item.count > 1)
    _step(model, pool, work)


def step_shapes(settings: EngineConfig, max_context: int) -> Iterator[tuple[int, int, int]]:
    """Steps that launch every kernel variant: (decode rows, rows of a chunk, table width)."""
    most = min(settings.chunk_tokens + settings.max_batch, max_context)
    # Beyond the reach of a measured configuration, another one may apply between powers of two.
    for rows in sorted({*_doublings(2, most), *_doublings(3, most)}):
        yield 0, rows, -(-rows // settings.block_size)
    for rows in _doublings(1, settings.max_batch):
        yield rows, 0, 1
    yield 1, min(2, most), 1


@torch.inference_mode()
def warm_up(model: StepModel, pool: Tensor, settings: EngineConfig, max_context: int) -> None:
    """Runs a step of each shape; the last row of each sequence is sampled."""
    for num_decodes, chunk, width in step_shapes(settings, max_context):
        end = min(width * settings.block_size, max_context)
        rows = [1] * num_decodes + [chunk] * bool(chunk)
        work = [_work(end, count, pool, model) for count in rows]
        _step(model, pool, work)
        if settings.lora_slots:
            for item in work:
                item.sequence.lora_slot = 0  # an adapter of zeros
            _step(model, pool, work)


def scored_decode(runner: Runner) -> None:
    """Runs a decode row with log-probabilities, whose logits have the model's type, not float32."""
    runner.run(
        ScheduledStep([_work(1, 1, runner.pool, runner.model, params=SamplingParams(logprobs=1))])
    )


def _work(
    end: int, count: int, pool: Tensor, model: StepModel, proposed: int = 0,
    params: SamplingParams = _GREEDY,
) -> ScheduledSequence:  # fmt: skip
    """Schedules the last `count` tokens of a context of `end`, some of them proposed."""
    blocks = [0] * (-(-end // pool.shape[4]) * model.num_groups)
    sequence = Sequence("", [0] * (end - proposed), 1, params, block_ids=blocks)
    sequence.state_blocks = [0] * model.state_blocks(pool)
    return ScheduledSequence(sequence, end - count, count, (0,) * proposed)


def _chunks(rows: int, max_context: int, pool: Tensor, model: StepModel) -> list[ScheduledSequence]:
    """Chunks of `rows` rows in total, of as few sequences as possible."""
    longest = max_context - 1
    counts = [min(longest, rows - done) for done in range(0, rows, longest)]
    return [_work(max_context, count, pool, model) for count in counts]


def _step(model: StepModel, pool: Tensor, work: list[ScheduledSequence]) -> None:
    model.step(BatchBuilder(pool.shape[4], pool.device, model.num_groups).new_batch(work), pool)


def _doublings(first: int, last: int) -> Iterator[int]:
    """first, doubled up to last, then last; empty if last is less than first."""
    while first < last:
        yield first
        first *= 2
    if first >= last >= 1:
        yield last
