"""Computes plans on a GPU: decode steps by graphs, sampled on the device; all else as on a CPU.

A decode step that needs nothing of the host is one launch: a copy of its inputs, a graph, sampling,
a copy of the tokens back. Kernels find inputs at fixed places, so that a graph reads whatever was
copied there last. The host writes them into pinned memory, of which there are two buffers, used in
turn: while one is being read, the next launch's inputs are written into the other. What else a plan
may hold (chunks, proposed tokens, rows whose logits the host changes) is computed tensor by tensor.
Engine thread only.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.device import CudaStream, Stream
from baton.engine.backends.gpu.device_sampling import DeviceSampler
from baton.engine.backends.gpu.graphs import (
    PADDING,
    DecodeGraphs,
    num_elements,
    sections,
)
from baton.engine.planner import Plan, Work
from baton.engine.runner import Runner, SampledTokens
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, InternalError

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.model import GpuModel

KNOWN = -1  # the source of a row whose token the host knows


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

    def __init__(self, stream: Stream, max_batch: int, table_width: int) -> None:
        self.inputs = stream.pinned(num_elements(max_batch, table_width), torch.int32)
        self.sampler = DeviceSampler(stream, max_batch)
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
        self._block_size = pool.shape[4]
        if stream is None:
            stream = CudaStream(pool.device) if pool.device.type == "cuda" else Stream()
        self._stream = stream
        self._last: Launch | None = None  # until it is waited for
        width = -(-max_context // self._block_size)
        with torch.inference_mode():
            self._graphs = DecodeGraphs(model, pool, stream, self._max_batch, width)
            self._tables = BlockTables(self._max_batch, width)
            self._slots = [_Slot(stream, self._max_batch, width) for _ in range(2)]

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures decode steps before requests are served.

        Raises ConfigError where it cannot be done.
        """
        try:
            self._graphs.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"decode steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
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
        """Whether one launch computes a plan and samples its tokens."""
        return self._are_decoding(plan.work) and all(
            SampleRow(one.params, one.tokens, one.prompt_tokens).plain
            for one in (item.sequence for item in plan.work)
        )

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launch:
        """Starts a decode step; tokens that the launch before samples are taken from there."""
        began_ns, sequences = time.monotonic_ns(), [item.sequence for item in plan.work]
        before, sampled = {}, None
        if self._last is not None:
            before, sampled = self._last.rows, self._last.slot.sampler.tokens
        slot, shape = self._write_inputs(plan.work, [before.get(one, KNOWN) for one in sequences])
        settings = slot.sampler.prepare(
            [one.params for one in sequences],
            [item.start + 1 for item in plan.work],
            self.sampler.vocab_size,
        )

        def work() -> None:
            slot.sampler.sample(settings, self._decode(shape, slot, sampled)[: len(sequences)])

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
        tokens = launch.slot.sampler.host_tokens[: len(launch.rows)].tolist()
        self.decode_rows["wanted"] += len(wanted)
        self.decode_rows["wasted"] += len(tokens) - len(wanted)
        found = {one.seq_id: SampledTokens((tokens[launch.rows[one]],)) for one in wanted}
        if any(one.token_ids[0] >= self.sampler.vocab_size for one in found.values()):
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return found

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

    def _compute(self, work: list[Work]) -> dict[str, SampledTokens]:
        """Computes any work, and samples as the host does: on the stream."""
        if self._are_decoding(work):
            slot, shape = self._write_inputs(work, [KNOWN] * len(work))
            logits = self._decode(shape, slot, None)[: len(work)]
            self.decode_rows["wanted"] += len(work)
        else:
            logits = self.model.step(self._batches.build(Plan(work)), self.pool)
        return self._sample(work, logits)

    def _are_decoding(self, work: list[Work]) -> bool:
        """Whether these are single tokens, all of which sample, no more than a batch holds."""
        return len(work) <= self._max_batch and all(
            item.count == 1
            and item.samples
            and item.start < self._max_context
            and not item.sequence.params.embedding
            for item in work
        )

    def _write_inputs(self, work: list[Work], sources: list[int]) -> tuple[_Slot, tuple[int, int]]:
        """Writes rows into the slot used less recently: (slot, padded shape).

        sources: which row of the launch before samples a row's token, or KNOWN.
        """
        slot = self._slots.pop(0)
        self._slots.append(slot)
        with suppress(Exception):  # its own step reports it
            slot.event.synchronize()
        count, sequences = len(work), [item.sequence for item in work]
        blocks = max(item.start for item in work) // self._block_size + 1
        size, width = self._graphs.shape(count, blocks)
        into = sections(slot.inputs, size, width)
        for part, values, padding in (
            (into.token_ids, [item.sequence.tokens[item.start] for item in work], 0),
            (into.context_lens, [item.start for item in work], PADDING),
            (into.sources, sources, KNOWN),
        ):
            numbers = part.numpy()
            numbers[:count] = values
            numbers[count:] = padding
        self._tables.gather(sequences, into.block_tables[:count])
        into.block_tables[count:] = 0
        self.decode_rows["padding"] += size - count
        return slot, (size, width)

    def _decode(self, shape: tuple[int, int], slot: _Slot, sampled: Tensor | None) -> Tensor:
        """Logits `[size, vocab_size]` of what is in the slot; on the stream.

        sampled: tokens of the launch before.
        """
        here, there = self._graphs.inputs(*shape), sections(slot.inputs, *shape)
        here.all.copy_(there.all, non_blocking=True)
        if sampled is not None:
            # One beyond the vocabulary is an error, raised when it is used, but must be no index.
            tokens = sampled.index_select(0, here.sources.clamp(min=0))
            tokens.clamp_(max=self.sampler.vocab_size - 1)
            here.token_ids.copy_(torch.where(here.sources == KNOWN, here.token_ids, tokens))
        return self._graphs.decode(*shape)
