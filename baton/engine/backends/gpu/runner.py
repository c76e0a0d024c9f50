"""Computes plans on a GPU: by graphs where a captured step holds them, and sampled on the device.

A captured step is one launch: a copy of its inputs, a graph, a copy of the tokens back. Rows whose
sampling must know their tokens (penalties, grammars), or that want log-probabilities, are sampled
behind the graph, once the step before has landed: while the forward pass runs.

Kernels find inputs at fixed places, so that a graph reads whatever was copied there last. The host
writes them into pinned memory, of which there are two buffers, used in turn: while one is being
read, the next launch's inputs are written into the other. What no captured step holds (log-
probabilities of prompts, embeddings, proposed tokens, more chunks or rows than are captured) is
launched kernel by kernel, and waited for. Engine thread only.
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
from baton.engine.runner import Launch, Runner, SampledTokens, StepOutput, sample_rows
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow, TokenLogprobs
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, InternalError

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

Array = npt.NDArray[Any]


class _Slot:
    """The pinned memory of one launch, and when it may be written again."""

    def __init__(self, stream: Stream, sampler: Sampler, largest: StepShape) -> None:
        self._inputs = stream.pinned(num_elements(largest), torch.int32)
        self._sections: dict[StepShape, tuple[Tensor, StepInputs[Array]]] = {}
        self.tokens = stream.pinned(largest.logits, torch.int64)
        self.sampler = DeviceSampler(stream, sampler, largest.logits)
        self.scores = Scores(stream, sampler.vocab_size)
        self.event = stream.record_event()

    def inputs(self, shape: StepShape) -> tuple[Tensor, StepInputs[Array]]:
        """(all of a launch's inputs, their parts to write)."""
        if shape not in self._sections:
            parts = split_inputs(self._inputs, shape)
            self._sections[shape] = parts.all, StepInputs(*(part.numpy() for part in parts))
        return self._sections[shape]


class _CapturedLaunch(Launch):
    """A padded step on the stream: its sequences, and their blocks at the launch.

    sampling: the works that sample · places: their rows of logits · sampled: the sequence that each
    row of logits samples a token of · apart: of `sampling`, those of which more is to be done
    behind the step · resampled, scored: those of them that are sampled once more, with their tokens
    known, and those that only want log-probabilities.
    """

    logits: Tensor  # once it runs

    def __init__(self, plan: ScheduledStep, shape: StepShape, slot: _Slot) -> None:
        super().__init__(plan)
        self.shape, self.slot = shape, slot
        self.sequences = [item.sequence for item in plan.sequences]
        self.blocks = [one.block_ids for one in self.sequences]
        self.apart: list[int] = []
        self.resampled, self.scored = list[int](), list[int]()
        self.sampling: list[ScheduledSequence] = plan.sequences
        self.places: Rows[int] = range(len(plan.sequences))
        self.sampled: Rows[Sequence | None] = self.sequences
        self.decodes = len(plan.sequences)
        if shape.chunk_rows:
            self.decodes = sum(item.count == 1 for item in plan.sequences) if shape.decodes else 0
            places = [*range(self.decodes), *range(shape.decodes, shape.logits)]
            of_works = [
                pair for pair in zip(plan.sequences, places, strict=False) if pair[0].samples
            ]
            self.sampling, self.places = [item for item, _ in of_works], [at for _, at in of_works]
            by_place = {at: item.sequence for item, at in of_works}
            self.sampled = [by_place.get(at) for at in range(shape.logits)]


class _WaitingLaunch(Launch):
    """A step of any work, which is waited for; logits: as `StepModel.step`."""

    def __init__(self, plan: ScheduledStep, logits: Tensor) -> None:
        super().__init__(plan)
        self.logits = logits


class GpuRunner(Runner):
    """Runs a model on a GPU's stream, or, for tests, on a CPU's."""

    model: GpuModel
    waited_s: float

    def __init__(
        self,
        model: GpuModel,
        pool: Tensor,
        sampler: Sampler,
        settings: EngineConfig,
        max_context: int,
        stream: Stream | None = None,
    ) -> None:
        """max_context: of sequences, in tokens. The stream is one of the pool's device if None."""
        super().__init__(model, pool, sampler)
        self.decode_rows = {"wanted": 0, "padding": 0, "wasted": 0}
        self.waited_s = 0.0
        self._max_context = max_context
        self._block_size = pool.shape[4]
        self._stream = stream = stream or new_stream(pool.device)
        self._last: _CapturedLaunch | None = None  # until it is waited for
        self._shaped: tuple[ScheduledStep | None, StepShape | None] = None, None  # the last plan's
        width = -(-max_context // self._block_size)
        with torch.inference_mode():
            self._graphs = SamplingGraphs(
                model, pool, stream, settings, max_context, sampler.vocab_size
            )
            self._inputs = InputBatch(settings.max_batch, width)
            self._slots = [_Slot(stream, sampler, self._graphs.largest) for _ in range(2)]
            self._waiting_sampler = DeviceSampler(stream, sampler, settings.max_batch)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures steps before requests are served.

        Raises ConfigError where it cannot be done.
        """
        try:
            with self.model.on_all_ranks(CaptureGraphs()):
                self._graphs.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    def launches_ahead(self, plan: ScheduledStep) -> bool:
        """Whether a captured step holds it in which only decode rows await their tokens."""
        shape = self._shape(plan)
        if shape is None or not shape.chunk_rows:
            return shape is not None
        return not any(
            item.sequence.awaits_token and item.samples
            for item in plan.sequences
            if item.count > 1 or not shape.decodes
        )

    def _shape(self, plan: ScheduledStep) -> StepShape | None:
        """The shape of the captured step that holds a plan, if one does."""
        if plan is not self._shaped[0]:
            self._shaped = plan, self._shape_of(plan)
        return self._shaped[1]

    def _shape_of(self, plan: ScheduledStep) -> StepShape | None:
        work = plan.sequences
        if not all(map(self._fits, work)):
            return None
        blocks = -(-max([item.start + item.count for item in work]) // self._block_size)
        shape = None
        if not plan.has_chunks and all(item.samples for item in work):
            shape = self._graphs.decode_shape(len(work), blocks)
        return shape or self._graphs.chunk_shape([item.count for item in work], blocks)

    def _fits(self, item: ScheduledSequence) -> bool:
        """Whether a captured step gives a sequence all that it asks for."""
        sequence = item.sequence
        params = sequence.params
        return (
            item.start + item.count <= self._max_context
            and not item.proposed
            and (sequence.num_scored is None or not item.scored)
            and not params.embedding
            and (params.max_tokens > 0 or not item.samples)
        )

    @torch.inference_mode()
    def launch(self, plan: ScheduledStep) -> Launch:
        """Begins a step; in a captured one, tokens that the launch before samples are taken from
        there."""
        if shape := self._shape(plan):
            return self._launch_captured(plan, shape)
        return _WaitingLaunch(plan, self._stream.call(lambda: self._forward(plan)))

    def _forward(self, plan: ScheduledStep) -> Tensor:
        """Logits as `StepModel.step`; on the stream, so that it follows its inputs there."""
        return self.model.step(self._batches.build(plan), self.pool)

    @torch.inference_mode()
    def sample(self, launch: Launch) -> None:
        if isinstance(launch, _CapturedLaunch):
            if launch.apart:
                self._sample_apart(launch)
            return
        assert isinstance(launch, _WaitingLaunch)
        plan, logits = launch.step, launch.logits
        launch.output = self._stream.call(lambda: self._sample(plan, logits))

    def land(self, launch: Launch) -> StepOutput:
        """Raises what the step failed with, InternalError for logits that are no numbers."""
        if not isinstance(launch, _CapturedLaunch):
            self._wait(self._stream.record_event())
            return launch.output
        if launch is self._last:
            self._last = None
        count, chunks = len(launch.sequences), launch.shape.chunk_rows > 0
        wasted = sum([one.dropped for one in launch.sequences])
        with nullcontext() if wasted < count else suppress(Exception):
            self._wait(launch.slot.event)
        if not chunks:
            self.decode_rows["wanted"] += count - wasted
            self.decode_rows["wasted"] += wasted
        tokens = launch.slot.tokens[: len(launch.sampled)].tolist()
        if chunks:
            tokens = [tokens[at] for at in launch.places]
        if tokens and max(tokens) >= self.sampler.vocab_size:
            for item, token_id in zip(launch.sampling, tokens, strict=True):
                if not item.sequence.dropped:
                    self._check(token_id)
        apart = self._found_apart(launch, tokens) if launch.apart else {}
        if not chunks:
            return StepOutput(apart, tokens)
        of_works = zip(launch.sampling, tokens, strict=True)
        found = {item.sequence.seq_id: SampledTokens((token_id,)) for item, token_id in of_works}
        return StepOutput(found | apart)

    def _check(self, token_id: int) -> None:
        if token_id >= self.sampler.vocab_size:
            raise InternalError("logits are not finite numbers: the model's output is broken")

    def _wait(self, event: Any) -> None:
        began = time.perf_counter()
        try:
            event.synchronize()
        finally:
            self.waited_s += time.perf_counter() - began

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into; see `Runner.zero_blocks`."""
        if blocks:
            self._stream.call(lambda: Runner.zero_blocks(self, blocks))
            self._stream.record_event().synchronize()

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        """Waits for rows that may use blocks which their sequences gave up; None: for everything.

        A sequence that gives up blocks gets another list of them. Failures are not raised here:
        they belong to the step that is waited for.
        """
        if blocks is None:
            self._last = None
            with suppress(Exception):
                self._stream.record_event().synchronize()
        elif self._last is not None:
            held = zip(self._last.sequences, self._last.blocks, strict=True)
            if any(sequence.block_ids is not before for sequence, before in held):
                with suppress(Exception):
                    self._last.slot.event.synchronize()

    def close(self) -> None:
        self._graphs.close()
        super().close()

    def _choose(self, logits: Tensor, rows: Rows[SampleRow]) -> Sampled:
        if not rows:
            return Sampled([], [])
        sampler = self._waiting_sampler
        sampler.prepare(rows)
        sampler.sample(logits)
        self._wait(self._stream.record_event())
        sampled = sampler.sampled()
        for token_id in sampled.token_ids:
            self._check(token_id)
        return sampled

    def _launch_captured(self, plan: ScheduledStep, shape: StepShape) -> _CapturedLaunch:
        slot = self._slots.pop(0)
        self._slots.append(slot)
        with suppress(Exception):  # its own step reports it
            slot.event.synchronize()
        launch = _CapturedLaunch(plan, shape, slot)
        before = self._last.sampled if self._last is not None else []
        sources = self._inputs.sources(launch.sequences[: launch.decodes], before)
        inputs, parts = slot.inputs(shape)
        launch.apart = self._inputs.write(plan.sequences, shape, sources, parts).tolist()
        if not shape.chunk_rows:
            self.decode_rows["padding"] += shape.decodes - launch.decodes

        def run() -> None:
            self._graphs.inputs(shape).all.copy_(inputs, non_blocking=True)
            launch.logits = self._graphs.run(shape)
            if not launch.apart:
                self._copy_tokens(launch)

        try:
            self._stream.put(run)
        finally:  # a part of it may be there, and read what is in the slot
            slot.event = self._stream.record_event()
        self._last = launch
        return launch

    def _copy_tokens(self, launch: _CapturedLaunch) -> None:
        count = len(launch.sampled)
        launch.slot.tokens[:count].copy_(self._graphs.tokens[:count], non_blocking=True)

    def _sample_apart(self, launch: _CapturedLaunch) -> None:
        """Samples rows once more whose logits their tokens change, and scores those that ask."""
        slot, stream, of_works = launch.slot, self._stream, launch.places
        rows = {at: next(sample_rows(launch.sampling[at])) for at in launch.apart}
        for at, row in rows.items():
            (launch.resampled if row.adjusted or row.grammar else launch.scored).append(at)
        if launch.resampled:
            slot.sampler.prepare([rows[at] for at in launch.resampled])
            places = pinned_copy(stream, np.array([of_works[at] for at in launch.resampled]))
        if scored := launch.scored:
            wanted = [rows[at].params.logprobs or 0 for at in scored]
            slot.scores.prepare([of_works[at] for at in scored], wanted)

        def run() -> None:
            if launch.resampled:
                at = places.to(stream.device, non_blocking=True)
                sampled = slot.sampler.sample(launch.logits.index_select(0, at).float())
                self._graphs.tokens.index_copy_(0, at, sampled)
            if scored:
                slot.scores.compute(launch.logits, self._graphs.tokens)
            self._copy_tokens(launch)

        try:
            stream.put(run)
        finally:
            slot.event = stream.record_event()

    def _found_apart(self, launch: _CapturedLaunch, tokens: list[int]) -> dict[str, SampledTokens]:
        logprobs = dict[int, TokenLogprobs | None]()
        if launch.resampled:
            of_rows = launch.slot.sampler.sampled().logprobs
            logprobs |= zip(launch.resampled, of_rows, strict=True)
        if scored := launch.scored:
            found = launch.slot.scores.found([tokens[at] for at in scored])
            logprobs |= zip(scored, found, strict=True)
        return {
            launch.sampling[at].sequence.seq_id: SampledTokens((tokens[at],), (one,) if one else ())
            for at, one in logprobs.items()
        }
