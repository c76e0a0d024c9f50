"""Computes plans on a GPU: decode steps by graphs, draws on the device, the next step ahead.

A plan of single tokens is one launch: a copy of its numbers, a graph, a draw, a copy of the tokens
back. Its only wait is the one for the tokens. What else a plan may hold (chunks, drafts, rows whose
logits the host changes) is computed as on a CPU, tensor by tensor. When `run` returns, all that the
plan computed is in the pool for every stream and thread to see. The step behind it may be on its
way: `ahead` says why nobody is harmed. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from baton.engine.backends.gpu.async_scheduling import Launch, Pace, Writes
from baton.engine.backends.gpu.device import Lane, lane_of
from baton.engine.backends.gpu.device_sampling import is_plain
from baton.engine.backends.gpu.graphs import DecodeModel, GraphFigures
from baton.engine.backends.gpu.launches import Counts, GpuSettings, Launcher, Next
from baton.engine.backends.gpu.warmup import rehearse
from baton.engine.batching import Batches
from baton.engine.planner import Plan, Work
from baton.engine.runner import Drawn, drawn_by, sample_rows
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
        lane: Lane | None = None,
    ) -> None:
        """The lane is a new one of the pool's device, if none is given."""
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.settings = settings
        self._lane = lane or lane_of(pool.device)
        self._batches = Batches(settings.block_size, pool.device)
        self._pace = Pace()
        self._writes = Writes()
        self._ahead: Launch | None = None
        with torch.inference_mode():
            self._launcher = Launcher(model, pool, self._lane, settings, sampler.vocab_size)

    @property
    def counts(self) -> Counts:
        """What ran so far."""
        return self._launcher.counts

    @property
    def decode_rows(self) -> dict[str, int]:
        """Rows of decode steps so far, by what became of them; may be asked by any thread."""
        counts = self.counts
        return {
            "wanted": counts.rows - counts.wasted_rows,
            "padding": counts.padding_rows,
            "wasted": counts.wasted_rows,
        }

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> GraphFigures | None:
        """Captures graphs before requests are served; None where they are off.

        progress: called with (captured, of how many). Kernels that were not compiled yet are, which
        takes most of the time; they write into the pool's first block. Raises ConfigError where it
        cannot be done.
        """
        if self.settings.chunk_tokens:
            rehearse(self.model, self.pool, self._lane, self.settings)
        if not self.settings.graphs:
            return None
        try:
            return self._launcher.graphs.capture(progress)
        except RuntimeError as error:
            raise ConfigError(
                f"decode steps cannot be captured as CUDA graphs ({error}): add --no-graphs"
            ) from error

    @torch.inference_mode()
    def run(self, plan: Plan) -> dict[str, Drawn]:
        """Runs every row of the plan; tokens for each sequence that has caught up, by its id."""
        ahead, self._ahead = self._ahead, None
        try:
            return self._run(plan, ahead)
        except BaseException:
            self._ahead = None
            self.settle()
            raise

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into.

        Attention multiplies what it must not see by zero, which undoes any number but not a NaN.
        """
        if blocks:
            # As bytes: not every operation knows every type of element.
            content, which = self.pool.view(torch.uint8), torch.tensor(blocks)
            self._lane.put(lambda: content.index_fill_(0, self._lane.upload(which), 0))
            self._writes.add(self._lane.mark(), blocks)
            self._forget(blocks)

    def settle(self, blocks: list[int] | None = None) -> None:
        """Waits until nothing on the lane writes into these blocks; None is all of the pool.

        To be called before others write there, or the pool is freed.
        """
        if blocks is None:
            with suppress(Exception):  # of a run that is over
                self._lane.mark().wait()
            self._writes.ended()
        else:
            self._writes.settle(set(blocks))
            self._forget(blocks)

    def _forget(self, blocks: list[int]) -> None:
        if self._ahead is not None:
            self._ahead.forget(set(blocks), self.settings.block_size)

    def _run(self, plan: Plan, ahead: Launch | None) -> dict[str, Drawn]:
        self._pace.observe(plan)
        taken = ahead.taken_by(plan.work) if ahead is not None else {}
        if ahead is not None:
            self.counts.wasted_rows += len(ahead.sources) - len(taken)
        if len(taken) < len(plan.work) or not self._goes_ahead(plan):
            plan.join()
        rest = [item for item in plan.work if item.sequence not in taken]
        if rest and (taken or not self._are_plain(rest)):
            return self._run_in_parts(ahead, taken, rest)
        launch = self._launcher.launch(_planned(rest)) if rest else ahead
        assert launch is not None, "with none ahead, everybody is left"
        if rest:
            launch.end = self._writes.end
        self._ahead = self._launch_ahead(plan, launch)
        tokens = self._launcher.tokens(launch)
        self._writes.ended(launch.end)
        if self._ahead is not None:
            self._ahead.feed(tokens)
        places = taken or {sequence: row.at for sequence, row in launch.rows.items()}
        return self._drawn(tokens, places)

    def _run_in_parts(
        self, ahead: Launch | None, taken: dict[Sequence, int], rest: list[Work]
    ) -> dict[str, Drawn]:
        """Some of a plan is on the lane, maybe; the others go behind it."""
        if self._are_plain(rest):
            launch = self._launcher.launch(_planned(rest))
            places = {sequence: row.at for sequence, row in launch.rows.items()}
            drawn = self._drawn(self._launcher.tokens(launch), places)
        else:
            drawn = self._lane.call(lambda: self._step(rest))
            self._lane.mark().wait()
        if ahead is not None and taken:
            self.counts.split += 1
            drawn |= self._drawn(self._launcher.tokens(ahead), taken)
        self._writes.ended()
        return drawn

    def _step(self, work: list[Work]) -> dict[str, Drawn]:
        """Computes anything, and samples as the host does: on the lane."""
        if self._are_decoding(work):
            logits = self._launcher.logits(_planned(work))
        else:
            logits = self.model.step(self._batches.build(Plan(work)), self.pool)
        sampling = [item for item in work if item.samples]
        rows = [row for item in sampling for row in sample_rows(item)]
        return drawn_by(sampling, self.sampler.sample(logits, rows))

    def _are_decoding(self, work: list[Work]) -> bool:
        """Whether these are single tokens, behind each of which one is drawn, in a batch's size."""
        return len(work) <= self.settings.max_batch and all(
            item.count == 1 and item.samples and item.start < self.settings.max_context
            for item in work
        )

    def _are_plain(self, work: list[Work]) -> bool:
        """Whether one launch computes these and draws their tokens."""
        return self._are_decoding(work) and all(
            is_plain(
                SampleRow(item.sequence.params, item.sequence.tokens, item.sequence.prompt_tokens)
            )
            for item in work
        )

    def _goes_ahead(self, plan: Plan) -> bool:
        """Whether the step behind this plan is launched with it, newcomers included."""
        fit = len(plan.work) + len(plan.joining) <= self.settings.max_batch
        steady = self.settings.overlap and self._pace.steady
        return steady and fit and self._are_plain(plan.joining)

    def _launch_ahead(self, plan: Plan, launch: Launch) -> Launch | None:
        """Launches the step behind `launch`, which computes this plan, if it is likely to come."""
        rows = self._behind(plan.work, launch) if self._goes_ahead(plan) else []
        if not rows:
            return None
        rows += _planned(plan.joining)
        size = self.settings.block_size
        try:
            ahead = self._launcher.launch(rows, launch)
        except Exception:
            log.warning(
                "a step could not be launched ahead: it waits until it is planned", exc_info=True
            )
            return None
        finally:  # a part of it may be on its way
            written = [row.sequence.block_ids[row.start // size] for row in rows]
            self._writes.add(self._lane.mark(), written)
        ahead.end = self._writes.end
        self.counts.ahead += 1
        self.counts.ahead_rows += len(rows)
        return ahead

    def _behind(self, work: list[Work], launch: Launch) -> list[Next]:
        """The rows of the next plan, if all that will be in it for sure can be launched."""
        rows = []
        for item in work:
            sequence = item.sequence
            if sequence.tokens_left(self.settings.max_context) < 2:
                continue  # it ends with the token that is being drawn
            if len(sequence.block_ids) * self.settings.block_size <= sequence.num_tokens:
                return []  # a launch without it would be one too many
            at = launch.rows[sequence].at
            rows.append(Next(sequence, sequence.num_tokens, 0, at))
        return rows

    def _drawn(self, tokens: list[int], places: dict[Sequence, int]) -> dict[str, Drawn]:
        """What sequences drew, each at its place among the tokens."""
        if any(tokens[at] >= self.sampler.vocab_size for at in places.values()):
            raise InternalError("logits are not finite numbers: the model's output is broken")
        return {sequence.seq_id: Drawn((tokens[at],)) for sequence, at in places.items()}


def _planned(work: list[Work]) -> list[Next]:
    return [Next(item.sequence, item.start, item.sequence.tokens[item.start]) for item in work]
