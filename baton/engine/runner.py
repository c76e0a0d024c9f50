"""Computes a plan: tensors in, forward pass, tokens out. Chooses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.attention import AttentionBatch, PrefillSegment
from baton.engine.model import Model
from baton.engine.planner import Plan, Work
from baton.engine.sampler import Sampler, SampleRow, TokenLogprobs


@dataclass(frozen=True)
class Drawn:
    """The token that one sequence got in a step."""

    token_id: int
    logprobs: TokenLogprobs | None


class StepRunner(Protocol):
    """What an engine needs of whatever computes its steps."""

    pool: torch.Tensor

    def run(self, plan: Plan) -> dict[str, Drawn]:
        """A token for each sequence that has caught up, by its id."""

    def scrub(self, blocks: list[int]) -> None:
        """Makes blocks that unverified bytes came into harmless."""


class Runner:
    """Runs a model over a KV pool `[blocks, layers, 2, kv_heads, block_size, head_size]`."""

    def __init__(self, model: Model, pool: torch.Tensor, sampler: Sampler) -> None:
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self._block_size = pool.shape[4]

    @torch.inference_mode()
    def run(self, plan: Plan) -> dict[str, Drawn]:
        """Runs every row of the plan; a token for each sequence that has caught up, by its id."""
        batch = self._attention_batch(plan)
        token_ids, positions = self._rows(plan)
        hidden = self.model.forward(token_ids, positions, batch, self.pool)
        sampling, last_rows = self._sampling_rows(plan)
        if not sampling:
            return {}
        logits = self.model.logits(hidden[torch.tensor(last_rows, device=hidden.device)])
        rows = [
            SampleRow(work.sequence.params, work.sequence.tokens, work.sequence.prompt_tokens)
            for work in sampling
        ]
        sampled = self.sampler.sample(logits, rows)
        return {
            work.sequence.seq_id: Drawn(token, logprobs)
            for work, token, logprobs in zip(
                sampling, sampled.token_ids, sampled.logprobs, strict=True
            )
        }

    def scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks that unverified bytes came into.

        Attention multiplies what it must not see by zero, which undoes any number but not a NaN.
        """
        if blocks:
            self.pool[self._tensor(blocks)] = 0

    def _rows(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        tokens: list[int] = []
        positions: list[int] = []
        for work in plan.work:
            end = work.start + work.count
            tokens += work.sequence.tokens[work.start : end]
            positions += range(work.start, end)
        device = self.pool.device
        return torch.tensor(tokens, device=device), torch.tensor(positions, device=device)

    def _sampling_rows(self, plan: Plan) -> tuple[list[Work], list[int]]:
        """Work that has caught up, and the row of each one's last token."""
        sampling: list[Work] = []
        rows: list[int] = []
        end = 0
        for work in plan.work:
            end += work.count
            if work.samples:
                sampling.append(work)
                rows.append(end - 1)
        return sampling, rows

    def _attention_batch(self, plan: Plan) -> AttentionBatch:
        singles = [work for work in plan.work if work.count == 1]
        chunks = plan.work[len(singles) :]
        assert all(work.count > 1 for work in chunks), "single-token rows come first"
        return AttentionBatch(
            slots=self._slots(plan),
            num_decode=len(singles),
            decode_tables=self._tables(singles),
            decode_lengths=self._tensor([work.start + 1 for work in singles]),
            segments=self._segments(chunks, first_row=len(singles)),
        )

    def _segments(self, chunks: list[Work], first_row: int) -> tuple[PrefillSegment, ...]:
        segments = []
        for work in chunks:
            needed = -(-(work.start + work.count) // self._block_size)
            blocks = self._tensor(work.sequence.block_ids[:needed])
            segments.append(PrefillSegment(first_row, work.count, work.start, blocks))
            first_row += work.count
        return tuple(segments)

    def _tables(self, singles: list[Work]) -> torch.Tensor:
        size = self._block_size
        tables = [work.sequence.block_ids[: work.start // size + 1] for work in singles]
        width = max(map(len, tables), default=0)
        padded = [table + [0] * (width - len(table)) for table in tables]
        return self._tensor(padded).view(len(singles), width)

    def _slots(self, plan: Plan) -> torch.Tensor:
        size = self._block_size
        slots: list[int] = []
        for work in plan.work:
            blocks = work.sequence.block_ids
            slots += [
                blocks[at // size] * size + at % size
                for at in range(work.start, work.start + work.count)
            ]
        return self._tensor(slots)

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.device)
