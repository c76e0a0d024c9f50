"""Computes plans on a GPU: decode steps by graphs, and all tokens sampled on the device.

A decode step is one launch: a copy of its inputs, a graph, a copy of the tokens back. Rows whose
sampling must know their tokens (penalties, grammars), or that want log-probabilities, are sampled
behind the graph, once the step before has landed: while the forward pass runs.

Kernels find inputs at fixed places, so that a graph reads whatever was copied there last. The host
writes them into pinned memory, of which there are two buffers, used in turn: while one is being
read, the next launch's inputs are written into the other. What else a plan may hold (chunks,
proposed tokens) is computed tensor by tensor, and waited for. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream, new_stream
from baton.engine.backends.gpu.device_sampling import DeviceSampler, SamplingGraphs
from baton.engine.backends.gpu.graphs import Sections, num_elements, sections
from baton.engine.backends.gpu.input_batch import InputBatch
from baton.engine.planner import Plan, Work
from baton.engine.runner import Launch, Runner, SampledTokens, StepOutput, sample_rows
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow
from baton.errors import ConfigError, InternalError

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

Array = npt.NDArray[Any]


class _Slot:
    """The pinned memory of one launch, and when it may be written again."""

    def __init__(self, stream: Stream, sampler: Sampler, max_batch: int, table_width: int) -> None:
        self._inputs = stream.pinned(num_elements(max_batch, table_width), torch.int32)
        self._sections: dict[tuple[int, int], tuple[Tensor, Sections[Array]]] = {}
        self.tokens = stream.pinned(max_batch, torch.int64)
        self.sampler = DeviceSampler(stream, sampler, max_batch)
        self.event = stream.record_event()

    def inputs(self, shape: tuple[int, int]) -> tuple[Tensor, Sections[Array]]:
        """(all of a launch's inputs, their parts to write)."""
        if shape not in self._sections:
            parts = sections(self._inputs, *shape)
            self._sections[shape] = parts.all, Sections(*(part.numpy() for part in parts))
        return self._sections[shape]


class _DecodeLaunch(Launch):
    """A decode step on the stream: its sequences, and their blocks at the launch.

    apart: the rows that are sampled behind the step, with their tokens known.
    """

    logits: Tensor  # once it runs

    def __init__(self, plan: Plan, slot: _Slot) -> None:
        super().__init__(plan)
        self.slot = slot
        self.sequences = [item.sequence for item in plan.work]
        self.blocks = [one.block_ids for one in self.sequences]
        self.apart: list[int] = []


class _WaitingLaunch(Launch):
    """A step of any work, which is waited for; logits: as `StepModel.step`."""

    def __init__(self, plan: Plan, logits: Tensor) -> None:
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
        self._max_batch, self._max_context = settings.max_batch, max_context
        self._block_size = pool.shape[4]
        self._stream = stream = stream or new_stream(pool.device)
        self._last: _DecodeLaunch | None = None  # until it is waited for
        width = -(-max_context // self._block_size)
        with torch.inference_mode():
            graphs = (model, pool, stream, self._max_batch, width, sampler.vocab_size)
            self._graphs = SamplingGraphs(*graphs)
            self._inputs = InputBatch(self._max_batch, width)
            self._slots = [_Slot(stream, sampler, self._max_batch, width) for _ in range(2)]
            self._waiting_sampler = DeviceSampler(stream, sampler, self._max_batch)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures decode steps before requests are served.

        Raises ConfigError where it cannot be done.
        """
        try:
            with self.model.together("capture"):
                self._graphs.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"decode steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    def run(self, plan: Plan) -> dict[str, SampledTokens]:
        launch = self.launch(plan)
        self.sample(launch)
        return self.land(launch).by_id(plan)

    def launches_ahead(self, plan: Plan) -> bool:
        """Whether all its works are single tokens that sample, no more than a batch holds."""
        work = plan.work
        return (
            not plan.has_chunks and len(work) <= self._max_batch and all(map(self._decodes, work))
        )

    def _decodes(self, item: Work) -> bool:
        params = item.sequence.params
        return (
            item.samples
            and item.start < self._max_context
            and params.max_tokens > 0
            and not params.embedding
        )

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        """Begins a step; in a decode step, tokens that the launch before samples are taken from
        there."""
        if self.launches_ahead(plan):
            return self._launch_decode(plan)
        return _WaitingLaunch(plan, self._stream.call(lambda: self._forward(plan)))

    def _forward(self, plan: Plan) -> Tensor:
        """Logits as `StepModel.step`; on the stream, so that it follows its inputs there."""
        return self.model.step(self._batches.build(plan), self.pool)

    @torch.inference_mode()
    def sample(self, launch: Launch) -> None:
        if isinstance(launch, _DecodeLaunch):
            if launch.apart:
                self._sample_apart(launch)
            return
        assert isinstance(launch, _WaitingLaunch)
        work, logits = launch.plan.work, launch.logits
        found = self._stream.call(lambda: self._sample(work, logits))
        launch.output = StepOutput(found)

    def land(self, launch: Launch) -> StepOutput:
        """Raises what the step failed with, InternalError for logits that are no numbers."""
        if not isinstance(launch, _DecodeLaunch):
            self._wait(self._stream.record_event())
            return launch.output
        if launch is self._last:
            self._last = None
        count = len(launch.sequences)
        wasted = sum([one.dropped for one in launch.sequences])
        with nullcontext() if wasted < count else suppress(Exception):
            self._wait(launch.slot.event)
        self.decode_rows["wanted"] += count - wasted
        self.decode_rows["wasted"] += wasted
        tokens = launch.slot.tokens[:count].tolist()
        if max(tokens) >= self.sampler.vocab_size:
            for sequence, token_id in zip(launch.sequences, tokens, strict=True):
                if not sequence.dropped:
                    self._check(token_id)
        return StepOutput(self._found_apart(launch) if launch.apart else {}, tokens)

    def _check(self, token_id: int) -> None:
        if token_id >= self.sampler.vocab_size:
            raise InternalError("logits are not finite numbers: the model's output is broken")

    def _wait(self, event: Any) -> None:
        began = time.perf_counter()
        try:
            event.synchronize()
        finally:
            self.waited_s += time.perf_counter() - began

    def scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into; see `Runner.scrub`."""
        if blocks:
            self._stream.call(lambda: Runner.scrub(self, blocks))
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

    def _launch_decode(self, plan: Plan) -> _DecodeLaunch:
        slot = self._slots.pop(0)
        self._slots.append(slot)
        with suppress(Exception):  # its own step reports it
            slot.event.synchronize()
        work, count = plan.work, len(plan.work)
        launch = _DecodeLaunch(plan, slot)
        shape = self._graphs.shape(
            count, max([item.start for item in work]) // self._block_size + 1
        )
        before = self._last.sequences if self._last is not None else []
        sources = self._inputs.sources(launch.sequences, before)
        inputs, parts = slot.inputs(shape)
        launch.apart = self._inputs.write(work, sources, parts).tolist()
        self.decode_rows["padding"] += shape[0] - count

        def run() -> None:
            self._graphs.inputs(*shape).all.copy_(inputs, non_blocking=True)
            launch.logits = self._graphs.decode(*shape)
            if not launch.apart:
                self._copy_tokens(launch)

        try:
            self._stream.put(run)
        finally:  # a part of it may be there, and read what is in the slot
            slot.event = self._stream.record_event()
        self._last = launch
        return launch

    def _copy_tokens(self, launch: _DecodeLaunch) -> None:
        count = len(launch.sequences)
        launch.slot.tokens[:count].copy_(self._graphs.tokens[:count], non_blocking=True)

    def _sample_apart(self, launch: _DecodeLaunch) -> None:
        """Samples rows once more whose logits their tokens change, or of which more is wanted."""
        slot, apart = launch.slot, launch.apart
        slot.sampler.prepare([row for at in apart for row in sample_rows(launch.plan.work[at])])
        places = self._stream.pinned(len(apart), torch.int64).copy_(torch.tensor(apart))

        def run() -> None:
            at = places.to(self._stream.device, non_blocking=True)
            sampled = slot.sampler.sample(launch.logits.index_select(0, at).float())
            self._graphs.tokens.index_copy_(0, at, sampled)
            self._copy_tokens(launch)

        try:
            self._stream.put(run)
        finally:
            slot.event = self._stream.record_event()

    def _found_apart(self, launch: _DecodeLaunch) -> dict[str, SampledTokens]:
        sampled, found = launch.slot.sampler.sampled(), dict[str, SampledTokens]()
        of_rows = zip(launch.apart, sampled.token_ids, sampled.logprobs, strict=True)
        for at, token_id, logprobs in of_rows:
            found[launch.sequences[at].seq_id] = SampledTokens(
                (token_id,), (logprobs,) if logprobs else ()
            )
        return found
