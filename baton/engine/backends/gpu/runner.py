"""Runs scheduled steps on a GPU: by CUDA graphs if one fits, with sampling on the device.

A captured step is a copy of its inputs, a graph, and a copy of the tokens back. Rows whose sampling
depends on their previous tokens (penalties, grammars), or that want log-probabilities, are
deferred: they are sampled after the graph, once the previous step has landed, while the forward
pass runs.

Inputs are at fixed addresses, so a graph reads what was copied there last. The host writes them
into one of two pinned buffers, which alternate: one is read while the other is written. Steps that
no graph fits (log-probabilities of prompts, embeddings, proposed tokens, more chunks or rows than
captured) are launched kernel by kernel, and waited for. Used by the engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.adapters import LoraAdapter
from baton.engine.backends.gpu.cuda_graphs import StepInputs, StepShape, num_elements, split_inputs
from baton.engine.backends.gpu.device import Stream, new_stream
from baton.engine.backends.gpu.device_sampling import (
    DeviceSampler,
    SamplingGraphs,
    Scores,
    pinned_copy,
)
from baton.engine.backends.gpu.input_batch import InputBatch
from baton.engine.rank_executor import CaptureGraphs
from baton.engine.runner import BROKEN, Launch, Runner, SampledTokens, StepOutput, sample_rows
from baton.engine.sampling.logprobs import TokenLogprobs
from baton.engine.sampling.sampler import NO_TOKEN, Sampled, Sampler, SampleRow
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import ConfigError

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

Array = npt.NDArray[Any]


class _PinnedBuffers:
    """Pinned memory of one launch; event: after it the memory may be written again."""

    def __init__(self, stream: Stream, sampler: Sampler, largest: StepShape) -> None:
        self._inputs = stream.pinned(num_elements(largest), torch.int32)
        self._sections: dict[StepShape, tuple[Tensor, StepInputs[Array]]] = {}
        self.tokens = stream.pinned(largest.logits, torch.int64)
        self.sampler = DeviceSampler(stream, sampler, largest.logits)
        self.scores = Scores(stream, sampler.vocab_size)
        self.event = stream.record_event()

    def inputs(self, shape: StepShape) -> tuple[Tensor, StepInputs[Array]]:
        """The buffer of a launch's inputs, and its sections as arrays."""
        if shape not in self._sections:
            parts = split_inputs(self._inputs, shape)
            self._sections[shape] = parts.all, StepInputs(*(part.numpy() for part in parts))
        return self._sections[shape]


class _CapturedLaunch(Launch):
    """A launched CUDA graph: its sequences, and their blocks at the launch.

    sampling: scheduled sequences that sample · logit_rows: their rows of logits · sampled: the
    sequence of each row of logits · deferred: indexes into `sampling` of rows to finish after the
    graph · resampled, scored: deferred rows that are sampled again, and those that only want
    log-probabilities.
    """

    logits: Tensor  # set when it runs

    def __init__(self, plan: ScheduledStep, shape: StepShape, buffers: _PinnedBuffers) -> None:
        super().__init__(plan)
        self.shape, self.buffers = shape, buffers
        self.sequences = [item.sequence for item in plan.sequences]
        self.blocks = [one.block_ids for one in self.sequences]
        self.deferred: list[int] = []
        self.resampled, self.scored = list[int](), list[int]()
        self.sampling: list[ScheduledSequence] = plan.sequences
        self.logit_rows: Rows[int] = range(len(plan.sequences))
        self.sampled: Rows[Sequence | None] = self.sequences
        self.decodes = len(plan.sequences)
        if shape.chunk_rows:
            self.decodes = sum(item.count == 1 for item in plan.sequences) if shape.decodes else 0
            places = [*range(self.decodes), *range(shape.decodes, shape.logits)]
            sampling = [
                pair for pair in zip(plan.sequences, places, strict=False) if pair[0].samples
            ]
            self.sampling, self.logit_rows = (
                [item for item, _ in sampling],
                [at for _, at in sampling],
            )
            by_place = {at: item.sequence for item, at in sampling}
            self.sampled = [by_place.get(at) for at in range(shape.logits)]


class _EagerLaunch(Launch):
    """A step launched kernel by kernel, which is waited for; logits: as `StepModel.step`."""

    def __init__(self, plan: ScheduledStep, logits: Tensor) -> None:
        super().__init__(plan)
        self.logits = logits


class GpuRunner(Runner):
    """Runs a model on a GPU's stream; in tests, on a CPU's."""

    model: GpuModel
    waited_s: float

    def __init__(
        self, model: GpuModel, pool: Tensor, sampler: Sampler, settings: EngineConfig,
        max_context: int, stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """max_context: largest context of a sequence in tokens · stream: None makes one."""
        super().__init__(model, pool, sampler)
        self.decode_rows = {"wanted": 0, "padding": 0, "wasted": 0}
        self.waited_s = 0.0
        self._max_context = max_context
        self._block_size = pool.shape[4]
        self._stream = stream = stream or new_stream(pool.device)
        self._last: _CapturedLaunch | None = None  # until it is waited for
        self._copied = stream.record_event()  # after the last copy of blocks
        self._shaped: tuple[ScheduledStep | None, StepShape | None] = None, None  # the last plan's
        width = -(-max_context // self._block_size) * self.num_groups
        with torch.inference_mode():
            self._graphs = SamplingGraphs(
                model, pool, stream, settings, max_context, sampler.vocab_size
            )
            self._inputs = InputBatch(settings.max_batch, width, model.state_blocks(pool))
            self._buffers = [
                _PinnedBuffers(stream, sampler, self._graphs.largest) for _ in range(2)
            ]
            self._eager_sampler = DeviceSampler(stream, sampler, settings.max_batch)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures CUDA graphs, before requests are served. Raises ConfigError if that fails."""
        try:
            with self.model.on_all_ranks(CaptureGraphs()):
                self._graphs.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    def launches_ahead(self, plan: ScheduledStep) -> bool:
        """Whether a graph fits the step, and only decode rows await the previous step's tokens."""
        shape = self._shape(plan)
        if shape is None or not shape.chunk_rows:
            return shape is not None
        return not any(
            item.sequence.awaits_token and item.samples
            for item in plan.sequences
            if item.count > 1 or not shape.decodes
        )

    def _shape(self, plan: ScheduledStep) -> StepShape | None:
        """The shape of the graph that fits a step, or None."""
        if plan is not self._shaped[0]:
            self._shaped = plan, self._shape_of(plan)
        return self._shaped[1]

    def _shape_of(self, plan: ScheduledStep) -> StepShape | None:
        work = plan.sequences
        if not all(map(self._fits, work)):
            return None
        longest = max([item.start + item.count for item in work])
        blocks = -(-longest // self._block_size) * self.num_groups
        shape = None
        if not plan.has_chunks and all(item.samples for item in work):
            shape = self._graphs.decode_shape(len(work), blocks)
        shape = shape or self._graphs.chunk_shape([item.count for item in work], blocks)
        if shape and self._graphs.has_lora:
            return shape._replace(lora=any(item.sequence.lora_slot >= 0 for item in work))
        return shape

    def _fits(self, item: ScheduledSequence) -> bool:
        """Whether a graph supports what a sequence asks for in this step."""
        sequence = item.sequence
        params = sequence.params
        return (
            item.start + item.count <= self._max_context
            and not item.proposed
            and (sequence.num_scored is None or not item.scored)
            and not params.is_pooled
            and (params.max_tokens > 0 or not item.samples)
        )

    @torch.inference_mode()
    def launch(self, plan: ScheduledStep) -> Launch:
        """Launches a step; a graph loads the previous launch's tokens on the device."""
        if shape := self._shape(plan):
            return self._launch_captured(plan, shape)
        return _EagerLaunch(plan, self._stream.call(lambda: self._forward(plan)))

    def _forward(self, plan: ScheduledStep) -> Tensor:
        """Logits as `StepModel.step`. Called on the stream, so that inputs are copied before."""
        return self.model.step(self._batches.build(plan), self.pool)

    @torch.inference_mode()
    def sample(self, launch: Launch) -> None:
        if isinstance(launch, _CapturedLaunch):
            if launch.deferred:
                self._sample_deferred(launch)
            return
        assert isinstance(launch, _EagerLaunch)
        plan, logits = launch.step, launch.logits
        launch.output = self._stream.call(lambda: self._sample(plan, logits))

    def land(self, launch: Launch) -> StepOutput:
        """Waits for a step. Raises its error."""
        if not isinstance(launch, _CapturedLaunch):
            self._wait(self._stream.record_event())
            return launch.output
        if launch is self._last:
            self._last = None
        count, chunks = len(launch.sequences), launch.shape.chunk_rows > 0
        wasted = sum([one.dropped for one in launch.sequences])
        with nullcontext() if wasted < count else suppress(Exception):
            self._wait(launch.buffers.event)
        if not chunks:
            self.decode_rows["wanted"] += count - wasted
            self.decode_rows["wasted"] += wasted
        tokens = launch.buffers.tokens[: len(launch.sampled)].tolist()
        if chunks:
            tokens = [tokens[at] for at in launch.logit_rows]
        tokens = self.sampler.checked(tokens)
        deferred = self._deferred_tokens(launch, tokens) if launch.deferred else {}
        if not chunks and NO_TOKEN not in tokens:
            return StepOutput(deferred, tokens)
        sampling = {
            one.sequence.seq_id: token for one, token in zip(launch.sampling, tokens, strict=True)
        }
        found = (
            {name: SampledTokens((token,)) for name, token in sampling.items()} if chunks else {}
        )
        broken = {name: BROKEN for name, token in sampling.items() if token == NO_TOKEN}
        return StepOutput(found | deferred | broken, [] if chunks else tokens)

    def _wait(self, event: Any) -> None:
        began = time.perf_counter()
        try:
            event.synchronize()
        finally:
            self.waited_s += time.perf_counter() - began

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks that hold unverified bytes; see `Runner.zero_blocks`."""
        if blocks:
            self._stream.call(lambda: Runner.zero_blocks(self, blocks))
            self._stream.record_event().synchronize()

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """See `StepRunner`. Steps that are launched later see the copies."""
        if len(self.pools) > 1:  # other streams write to the others': wait for the step in flight
            with suppress(Exception):
                self._stream.record_event().synchronize()
        self._stream.call(lambda: Runner.copy_blocks(self, source, target))
        self._copied = self._stream.record_event()

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        self._stream.call(lambda: Runner.write_lora(self, slot, adapter))
        self._stream.record_event().synchronize()

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        """Waits for launches that may write blocks which their sequences have released, and for
        copies of blocks; None: for all.

        A sequence that releases blocks gets a new list of blocks, which shows it. Errors are not
        raised here but by the step's `land`.
        """
        if blocks is None:
            self._last = None
            with suppress(Exception):
                self._stream.record_event().synchronize()
            return
        with suppress(Exception):
            self._copied.synchronize()
        if self._last is not None:
            held = zip(self._last.sequences, self._last.blocks, strict=True)
            if any(sequence.block_ids is not before for sequence, before in held):
                with suppress(Exception):
                    self._last.buffers.event.synchronize()

    def close(self) -> None:
        self._graphs.close()
        super().close()

    def _choose(self, logits: Tensor, rows: Rows[SampleRow]) -> Sampled:
        if not rows:
            return Sampled([], [])
        sampler = self._eager_sampler
        sampler.prepare(rows)
        sampler.sample(logits)
        self._wait(self._stream.record_event())
        return sampler.sampled()

    def _launch_captured(self, plan: ScheduledStep, shape: StepShape) -> _CapturedLaunch:
        buffers = self._buffers.pop(0)
        self._buffers.append(buffers)
        with suppress(Exception):  # that step's `land` raises it
            buffers.event.synchronize()
        launch = _CapturedLaunch(plan, shape, buffers)
        before = self._last.sampled if self._last is not None else []
        sources = self._inputs.sources(launch.sequences[: launch.decodes], before)
        inputs, parts = buffers.inputs(shape)
        launch.deferred = self._inputs.write(plan.sequences, shape, sources, parts).tolist()
        if not shape.chunk_rows:
            self.decode_rows["padding"] += shape.decodes - launch.decodes

        def run() -> None:
            self._graphs.inputs(shape).all.copy_(inputs, non_blocking=True)
            launch.logits = self._graphs.run(shape)
            if not launch.deferred:
                self._copy_tokens(launch)

        try:
            self._stream.put(run)
        finally:  # a part may have been launched, and read the buffers
            buffers.event = self._stream.record_event()
        self._last = launch
        return launch

    def _copy_tokens(self, launch: _CapturedLaunch) -> None:
        count = len(launch.sampled)
        launch.buffers.tokens[:count].copy_(self._graphs.tokens[:count], non_blocking=True)

    def _sample_deferred(self, launch: _CapturedLaunch) -> None:
        """Samples rows again whose tokens change their logits; computes log-probabilities."""
        buffers, stream, sampling = launch.buffers, self._stream, launch.logit_rows
        rows = {at: next(sample_rows(launch.sampling[at])) for at in launch.deferred}
        for at, row in rows.items():
            (launch.resampled if row.adjusted or row.grammar else launch.scored).append(at)
        if launch.resampled:
            buffers.sampler.prepare([rows[at] for at in launch.resampled])
            places = pinned_copy(stream, np.array([sampling[at] for at in launch.resampled]))
        if scored := launch.scored:
            wanted = [rows[at].params.logprobs or 0 for at in scored]
            buffers.scores.prepare([sampling[at] for at in scored], wanted)

        def run() -> None:
            if launch.resampled:
                at = places.to(stream.device, non_blocking=True)
                sampled = buffers.sampler.sample(launch.logits.index_select(0, at).float())
                self._graphs.tokens.index_copy_(0, at, sampled)
            if scored:
                buffers.scores.compute(launch.logits, self._graphs.tokens)
            self._copy_tokens(launch)

        try:
            stream.put(run)
        finally:
            buffers.event = stream.record_event()

    def _deferred_tokens(
        self, launch: _CapturedLaunch, tokens: list[int]
    ) -> dict[str, SampledTokens]:
        logprobs = dict[int, TokenLogprobs | None]()
        if launch.resampled:
            of_rows = launch.buffers.sampler.sampled().logprobs
            logprobs |= zip(launch.resampled, of_rows, strict=True)
        if scored := launch.scored:
            found = launch.buffers.scores.found([tokens[at] for at in scored])
            logprobs |= zip(scored, found, strict=True)
        return {
            launch.sampling[at].sequence.seq_id: SampledTokens((tokens[at],), (one,) if one else ())
            for at, one in logprobs.items()
        }
