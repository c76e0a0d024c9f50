"""Computes plans on a GPU: by graphs where a captured step holds them, and sampled on the device.

A captured step is one launch: a copy of its inputs, a graph, sampling, a copy of the tokens back.
Kernels find inputs at fixed places, so that a graph reads whatever was copied there last. The host
writes them into pinned memory, of which there are two buffers, used in turn: while one is being
read, the next launch's inputs are written into the other. What no captured step holds (log-
probabilities of prompts, embeddings, proposed tokens, chunks larger than are captured) is launched
kernel by kernel. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import Stream, new_stream
from baton.engine.backends.gpu.device_sampling import KNOWN, DeviceSampler
from baton.engine.backends.gpu.graphs import (
    PADDING,
    Shape,
    StepGraphs,
    inputs_in,
    num_elements,
)
from baton.engine.planner import Plan, Work
from baton.engine.runner import Runner, SampledTokens, sample_rows
from baton.engine.sampling.sampler import Sampled, Sampler, SampleRow
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, InternalError

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel


@dataclass
class _TableRow:
    row: int
    blocks: list[int] = field(default_factory=list)


class BlockTables:
    """Block tables of decoding sequences, on the host, kept from launch to launch.

    A sequence keeps its row while it decodes: turning a list of blocks into numbers takes far
    longer than copying them.
    """

    def __init__(self, max_batch: int, width: int) -> None:
        # Twice as many as can decode at once, so that rows need not be given up one by one.
        self._rows = np.zeros((2 * max_batch, width), np.int32)
        self._free = list(range(2 * max_batch))
        self._entries: dict[Sequence, _TableRow] = {}

    def gather(self, sequences: list[Sequence], into: Tensor) -> None:
        """Writes each sequence's first blocks into `[sequences, width]`; behind them lies 0."""
        rows = [self._row(sequence, sequences) for sequence in sequences]
        into.numpy()[:] = self._rows[rows, : into.shape[1]]

    def _row(self, sequence: Sequence, staying: list[Sequence]) -> int:
        entry = self._entries.get(sequence)
        if entry is None:
            if not self._free:
                kept = set(staying)
                for other in [one for one in self._entries if one not in kept]:
                    self._free.append(self._entries.pop(other).row)
            entry = self._entries[sequence] = _TableRow(self._free.pop())
        # It costs nanoseconds a block to compare them, as long as they are the same objects.
        if entry.blocks != sequence.block_ids:
            self._write(entry, list(sequence.block_ids))
        return entry.row

    def _write(self, entry: _TableRow, blocks: list[int]) -> None:
        row = self._rows[entry.row]
        used = min(len(blocks), len(row))
        row[:used] = blocks[:used]
        row[used:] = 0
        entry.blocks = blocks


class _Slot:
    """The pinned memory of one launch, and when it may be written again."""

    def __init__(self, stream: Stream, sampler: Sampler, max_batch: int, largest: Shape) -> None:
        self.inputs = stream.pinned(num_elements(largest), torch.int32)
        self.sampler = DeviceSampler(stream, sampler, max_batch)
        self.event = stream.record_event()


@dataclass
class Launch:
    """A decode step on the stream: the row of each sequence, and its blocks at the launch.

    began_ns: by `time.monotonic_ns`, when nothing before it was left to be waited for.
    """

    plan: Plan
    began_ns: int
    rows: dict[Sequence, int]
    blocks: list[list[int]]
    slot: _Slot


class GpuRunner(Runner):
    """Runs a model on a GPU's stream, or, for tests, on a CPU's."""

    launches_ahead = True
    model: GpuModel

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
        self._max_batch, self._max_context = settings.max_batch, max_context
        self._prefill_only = settings.prefill_only
        self._block_size = pool.shape[4]
        self._stream = stream = stream or new_stream(pool.device)
        self._last: Launch | None = None  # until it is waited for
        width = -(-max_context // self._block_size)
        with torch.inference_mode():
            self._graphs = StepGraphs(model, pool, stream, settings, max_context)
            self._tables = BlockTables(self._max_batch, width)
            largest = self._graphs.largest
            self._slots = [_Slot(stream, sampler, self._max_batch, largest) for _ in range(2)]
            self._waiting_sampler = DeviceSampler(stream, sampler, self._max_batch)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures steps before requests are served.

        Raises ConfigError where it cannot be done.
        """
        try:
            with self.model.together("capture"):
                self._graphs.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    def run(self, plan: Plan) -> dict[str, SampledTokens]:
        if self.launches(plan):
            launch = self.launch(plan)
            return self.tokens(launch, set(launch.rows))
        try:
            with torch.inference_mode():
                return self._stream.call(lambda: self._compute(plan.work))
        finally:
            self._stream.record_event().synchronize()

    def launches(self, plan: Plan) -> bool:
        """Whether one launch computes a plan and samples its tokens, the last ones unknown."""
        sequences = [item.sequence for item in plan.work]
        shape = self._shape(plan.work)
        return (shape is not None and not shape.chunk_rows) and all(
            one.grammar is None and one.params.max_tokens > 0 and not one.params.bad_words
            for one in sequences
        )

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        """Starts a decode step; tokens that the launch before samples are taken from there."""
        began_ns, sequences = time.monotonic_ns(), [item.sequence for item in plan.work]
        before, sampled = {}, None
        if self._last is not None:
            before, sampled = self._last.rows, self._last.slot.sampler.tokens
        sources = [before.get(one, KNOWN) for one in sequences]
        shape = self._graphs.decode_shape(len(sequences), self._blocks(plan.work))
        slot = self._write_inputs(plan.work, shape, sources)
        slot.sampler.prepare([row for item in plan.work for row in sample_rows(item)], sources)

        def work() -> None:
            slot.sampler.sample(self._replay(shape, slot, sampled)[: len(sequences)], sampled)

        try:
            self._stream.put(work)
        finally:  # a part of it may be there, and read what is in the slot
            slot.event = self._stream.record_event()
        rows = {sequence: row for row, sequence in enumerate(sequences)}
        self._last = Launch(plan, began_ns, rows, [one.block_ids for one in sequences], slot)
        return self._last

    def tokens(self, launch: Launch, wanted: set[Sequence]) -> dict[str, SampledTokens]:
        """Waits for a launch; what the wanted sequences sampled, by their ids.

        Raises what the launch failed with, InternalError for logits that are no numbers.
        """
        if launch is self._last:
            self._last = None
        with nullcontext() if wanted else suppress(Exception):
            launch.slot.event.synchronize()
        sampled = launch.slot.sampler.sampled()
        self.decode_rows["wanted"] += len(wanted)
        self.decode_rows["wasted"] += len(launch.rows) - len(wanted)
        found = {}
        for sequence in wanted:
            row = launch.rows[sequence]
            logprobs = sampled.logprobs[row]
            found[sequence.seq_id] = SampledTokens(
                (self._token(sampled.token_ids[row]),), (logprobs,) if logprobs else ()
            )
        return found

    def _token(self, token_id: int) -> int:
        if token_id >= self.sampler.vocab_size:
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return token_id

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
            held = zip(self._last.rows, self._last.blocks, strict=True)
            if any(sequence.block_ids is not before for sequence, before in held):
                with suppress(Exception):
                    self._last.slot.event.synchronize()

    def close(self) -> None:
        self._graphs.close()
        super().close()

    def _compute(self, work: list[Work]) -> dict[str, SampledTokens]:
        """Computes and samples any work: on the stream, and waited for."""
        shape = self._shape(work)
        if shape is None:
            logits = self.model.step(self._batches.build(Plan(work)), self.pool)
        else:
            slot = self._write_inputs(work, shape)
            count = sum(item.samples for item in work)
            logits = self._replay(shape, slot)[:count]
            self.decode_rows["wanted"] += 0 if shape.chunk_rows else count
        return self._sample(work, logits)

    def _choose(self, logits: Tensor, rows: Rows[SampleRow]) -> Sampled:
        if not rows:
            return Sampled([], [])
        sampler = self._waiting_sampler
        sampler.prepare(rows)
        sampler.sample(logits)
        self._stream.record_event().synchronize()
        sampled = sampler.sampled()
        for token_id in sampled.token_ids:
            self._token(token_id)
        return sampled

    def _are_decoding(self, work: list[Work]) -> bool:
        """Whether these are single tokens, all of which sample, no more than a batch holds."""
        return len(work) <= self._max_batch and all(
            item.count == 1
            and item.samples
            and item.start < self._max_context
            and not item.sequence.params.embedding
            for item in work
        )

    def _shape(self, work: list[Work]) -> Shape | None:
        """What the work is padded to; None where that does not hold what it asks for."""
        if any(
            item.proposed
            or item.scored
            or item.sequence.params.embedding
            or item.start + item.count > self._max_context
            for item in work
        ):
            return None
        blocks, counts = self._blocks(work), [item.count for item in work]
        decodes = self._are_decoding(work)
        if decodes and not self._prefill_only:
            return self._graphs.decode_shape(len(work), blocks)
        shape = self._graphs.chunk_shape(counts, blocks)
        return self._graphs.decode_shape(len(work), blocks) if decodes and not shape else shape

    def _blocks(self, work: list[Work]) -> int:
        """How many blocks the longest context of a step has, its own rows included."""
        return -(-max(item.start + item.count for item in work) // self._block_size)

    def _write_inputs(self, work: list[Work], shape: Shape, sources: Rows[int] = ()) -> _Slot:
        """Writes a step's inputs, padded, into the slot used less recently.

        sources: which row of the launch before samples a decode row's token, or KNOWN; none are all
        known.
        """
        slot = self._slots.pop(0)
        self._slots.append(slot)
        with suppress(Exception):  # its own step reports it
            slot.event.synchronize()
        into = inputs_in(slot.inputs, shape)
        singles = sum(item.count == 1 for item in work) if shape.decodes else 0
        decodes, chunks = work[:singles], work[singles:]
        tokens, contexts, lengths, logit_rows, fed, tables = (part.numpy() for part in into[:-1])
        tokens[:], contexts[:], fed[:], tables[:] = 0, PADDING, KNOWN, 0
        tokens[:singles] = [item.sequence.tokens[item.start] for item in decodes]
        contexts[:singles] = [item.start for item in decodes]
        fed[: len(sources)] = sources
        self._tables.gather([item.sequence for item in decodes], into.block_tables[:singles])
        if not shape.chunk_rows:
            self.decode_rows["padding"] += shape.decodes - singles
            return slot
        # Behind as many sequences with a row each come those of chunks.
        end, those = shape.decodes, slice(shape.decodes, shape.decodes + len(chunks))
        sampling = [row for row, item in enumerate(decodes) if item.samples]
        for item in chunks:
            begin, end, start = end, end + item.count, item.start
            tokens[begin:end] = item.sequence.tokens[start : start + item.count]
            sampling += [end - 1] * item.samples
        contexts[those] = [item.start for item in chunks]
        lengths[: shape.decodes], lengths[shape.decodes :] = 1, 0
        lengths[those] = [item.count for item in chunks]
        lengths[-1] = shape.rows - end
        logit_rows[:] = 0
        logit_rows[: len(sampling)] = sampling
        self._tables.gather([item.sequence for item in chunks], into.block_tables[those])
        return slot

    def _replay(self, shape: Shape, slot: _Slot, sampled: Tensor | None = None) -> Tensor:
        """Logits `[shape.logits, vocab_size]` of what is in the slot; on the stream.

        sampled: tokens of the launch before.
        """
        here, there = self._graphs.inputs(shape), inputs_in(slot.inputs, shape)
        here.all.copy_(there.all, non_blocking=True)
        if sampled is not None:
            # One beyond the vocabulary is an error, raised when it is used, but must be no index.
            tokens = sampled.index_select(0, here.sources.clamp(min=0))
            tokens.clamp_(max=self.sampler.vocab_size - 1)
            fed = here.token_ids[: shape.decodes]
            fed.copy_(torch.where(here.sources == KNOWN, fed, tokens))
        return self._graphs.run(shape)
