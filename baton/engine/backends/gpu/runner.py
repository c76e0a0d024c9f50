"""Computes plans on a GPU: decode steps by graphs, sampling on the device, async scheduling.

A plan of single tokens is one launch: a copy of its inputs, a graph, sampling, a copy of the tokens
back. Its only wait is the one for the tokens. What else a plan may hold (chunks, proposed tokens,
rows whose logits the host changes) is computed as on a CPU, tensor by tensor. When `run` returns,
all that the plan computed is in the pool for every stream and thread to see. The step behind it may
be on its way: `async_scheduling` says why that is safe. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from baton.engine.backends.gpu.async_scheduling import BatchStability, Launch, Writes
from baton.engine.backends.gpu.device import Stream, stream_of
from baton.engine.backends.gpu.device_sampling import is_plain
from baton.engine.backends.gpu.graphs import DecodeModel, GraphStats
from baton.engine.backends.gpu.launches import GpuSettings, Launcher, Next, RunnerStats
from baton.engine.backends.gpu.warmup import warm_up
from baton.engine.batch import BatchBuilder
from baton.engine.planner import Plan, Work
from baton.engine.runner import SampledTokens, sample_rows, tokens_by_sequence
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, InternalError

log = logging.getLogger(__name__)


class GpuRunner:
    """Runs a model over a KV pool `[blocks, layers, 2, kv_heads, block_size, row_size]`."""

    def __init__(
        self,
        model: DecodeModel,
        pool: torch.Tensor,
        sampler: Sampler,
        settings: GpuSettings,
        stream: Stream | None = None,
    ) -> None:
        """The stream is a new one of the pool's device, if none is given."""
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.settings = settings
        self._stream = stream or stream_of(pool.device)
        self._batches = BatchBuilder(settings.block_size, pool.device)
        self._stability = BatchStability()
        self._writes = Writes()
        self._async_launch: Launch | None = None
        with torch.inference_mode():
            self._launcher = Launcher(model, pool, self._stream, settings, sampler.vocab_size)

    @property
    def stats(self) -> RunnerStats:
        """What ran so far."""
        return self._launcher.stats

    @property
    def decode_rows(self) -> dict[str, int]:
        """Rows of decode steps so far, by what became of them; may be read by any thread."""
        stats = self.stats
        return {
            "wanted": stats.rows - stats.wasted_rows,
            "padding": stats.padding_rows,
            "wasted": stats.wasted_rows,
        }

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> GraphStats | None:
        """Warms up and captures graphs before requests are served; None where graphs are off.

        progress: called with (captured, of how many). Kernels that were not compiled yet are, which
        takes most of the time; they write into the pool's first block. Raises ConfigError where it
        cannot be done.
        """
        if self.settings.chunk_tokens:
            warm_up(self.model, self.pool, self._stream, self.settings)
        if not self.settings.graphs:
            return None
        try:
            return self._launcher.graphs.capture(progress)
        except RuntimeError as error:
            raise ConfigError(
                f"decode steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    @torch.inference_mode()
    def run(self, plan: Plan) -> dict[str, SampledTokens]:
        """Runs every row of the plan; tokens for each sequence that has caught up, by its id."""
        async_launch, self._async_launch = self._async_launch, None
        try:
            return self._run(plan, async_launch)
        except BaseException:
            self._async_launch = None
            self.wait_for_writes()
            raise

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into; see `Runner.scrub`."""
        if blocks:
            # As bytes: not every operation knows every type of element.
            content, which = self.pool.view(torch.uint8), torch.tensor(blocks)
            self._stream.put(lambda: content.index_fill_(0, self._stream.upload(which), 0))
            self._writes.add(self._stream.record_event(), blocks)
            self._drop_writers_of(blocks)

    def wait_for_writes(self, blocks: list[int] | None = None) -> None:
        """Waits until nothing on the stream writes into these blocks; None is all of the pool."""
        if blocks is None:
            with suppress(Exception):  # of a run that is over
                self._stream.record_event().wait()
            self._writes.ended()
        else:
            self._writes.wait(set(blocks))
            self._drop_writers_of(blocks)

    def _drop_writers_of(self, blocks: list[int]) -> None:
        if self._async_launch is not None:
            self._async_launch.drop_writers_of(set(blocks), self.settings.block_size)

    def _run(self, plan: Plan, async_launch: Launch | None) -> dict[str, SampledTokens]:
        self._stability.observe(plan)
        done = async_launch.rows_for(plan.work) if async_launch is not None else {}
        if async_launch is not None:
            self.stats.wasted_rows += len(async_launch.sources) - len(done)
        if len(done) < len(plan.work) or not self._schedules_async(plan):
            plan.join()
        rest = [item for item in plan.work if item.sequence not in done]
        if rest and (done or not self._are_plain(rest)):
            return self._run_in_parts(async_launch, done, rest)
        launch = self._launcher.launch(_planned(rest)) if rest else async_launch
        assert launch is not None, "without an async launch all of the plan is left"
        if rest:
            launch.end = self._writes.end
        self._async_launch = self._launch_async(plan, launch)
        tokens = self._launcher.tokens(launch)
        self._writes.ended(launch.end)
        if self._async_launch is not None:
            self._async_launch.feed(tokens)
        rows = done or {sequence: row.at for sequence, row in launch.rows.items()}
        return self._sampled(tokens, rows)

    def _run_in_parts(
        self, async_launch: Launch | None, done: dict[Sequence, int], rest: list[Work]
    ) -> dict[str, SampledTokens]:
        """Part of a plan may be on the stream; the others follow."""
        if self._are_plain(rest):
            launch = self._launcher.launch(_planned(rest))
            rows = {sequence: row.at for sequence, row in launch.rows.items()}
            sampled = self._sampled(self._launcher.tokens(launch), rows)
        else:
            sampled = self._stream.call(lambda: self._step(rest))
            self._stream.record_event().wait()
        if async_launch is not None and done:
            self.stats.split += 1
            sampled |= self._sampled(self._launcher.tokens(async_launch), done)
        self._writes.ended()
        return sampled

    def _step(self, work: list[Work]) -> dict[str, SampledTokens]:
        """Computes any work, and samples as the host does: on the stream."""
        if self._are_decoding(work):
            logits = self._launcher.logits(_planned(work))
        else:
            logits = self.model.step(self._batches.build(Plan(work)), self.pool)
        sampling = [item for item in work if item.samples]
        rows = [row for item in sampling for row in sample_rows(item)]
        return tokens_by_sequence(sampling, self.sampler.sample(logits, rows))

    def _are_decoding(self, work: list[Work]) -> bool:
        """Whether these are single tokens, all of which sample, no more than a batch holds."""
        return len(work) <= self.settings.max_batch and all(
            item.count == 1 and item.samples and item.start < self.settings.max_context
            for item in work
        )

    def _are_plain(self, work: list[Work]) -> bool:
        """Whether one launch computes these and samples their tokens."""
        sequences = [item.sequence for item in work]
        return self._are_decoding(work) and all(
            is_plain(SampleRow(one.params, one.tokens, one.prompt_tokens)) for one in sequences
        )

    def _schedules_async(self, plan: Plan) -> bool:
        """Whether the step behind this plan is launched with it, newcomers included."""
        fit = len(plan.work) + len(plan.joining) <= self.settings.max_batch
        steady = self.settings.overlap and self._stability.steady
        return steady and fit and self._are_plain(plan.joining)

    def _launch_async(self, plan: Plan, launch: Launch) -> Launch | None:
        """Launches the step behind `launch`, which computes this plan, if it is likely to come."""
        rows = self._next_rows(plan.work, launch) if self._schedules_async(plan) else []
        if not rows:
            return None
        rows += _planned(plan.joining)
        size = self.settings.block_size
        try:
            async_launch = self._launcher.launch(rows, launch)
        except Exception:
            log.warning("an async launch failed: its step waits until it is planned", exc_info=True)
            return None
        finally:  # a part of it may be on its way
            written = [row.sequence.block_ids[row.start // size] for row in rows]
            self._writes.add(self._stream.record_event(), written)
        async_launch.end = self._writes.end
        self.stats.async_launches += 1
        self.stats.async_rows += len(rows)
        return async_launch

    def _next_rows(self, work: list[Work], launch: Launch) -> list[Next]:
        """The rows of the next plan, if all that will surely be in it can be launched."""
        rows = []
        for item in work:
            sequence = item.sequence
            if sequence.tokens_left(self.settings.max_context) < 2:
                continue  # it ends with the token that is being sampled
            if len(sequence.block_ids) * self.settings.block_size <= sequence.num_tokens:
                return []  # a launch without it would be one too many
            at = launch.rows[sequence].at
            rows.append(Next(sequence, sequence.num_tokens, 0, at))
        return rows

    def _sampled(self, tokens: list[int], rows: dict[Sequence, int]) -> dict[str, SampledTokens]:
        """What each sequence sampled, at its row among the tokens."""
        if any(tokens[at] >= self.sampler.vocab_size for at in rows.values()):
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return {sequence.seq_id: SampledTokens((tokens[at],)) for sequence, at in rows.items()}


def _planned(work: list[Work]) -> list[Next]:
    return [Next(item.sequence, item.start, item.sequence.tokens[item.start]) for item in work]
