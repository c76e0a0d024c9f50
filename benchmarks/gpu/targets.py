"""What the project wants of a GPU, held against what was measured. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.job import Event, Row

VERDICTS = ("met", "missed", "not measured")


@dataclass(frozen=True)
class Target:
    """A bound for one cell of a table: at least, or at most."""

    text: str
    table: str
    row: str
    cell: str
    bound: float
    at_most: bool = False

    def verdict(self, value: float | None) -> str:
        """Whether a value keeps it."""
        met, missed, unknown = VERDICTS
        if value is None:
            return unknown
        kept = value <= self.bound if self.at_most else value >= self.bound
        return met if kept else missed


DECODE_ATTENTION, PREFILL_ATTENTION = "decode attention", "prefill attention"
DECODE, PREFILL = "decode", "prefill"
TRANSFER, HANDOFF = "transfer", "handoff"

OF_COPY, OF_MATMUL, OF_SDPA = "of copy rate", "of matmul rate", "of SDPA"
OF_FLOOR, OF_RIVAL = "of floor", "x transformers"

TARGETS = (
    Target("decode attention: 80 % of the copy rate at batch 64, context 4096",
           DECODE_ATTENTION, "bf16, batch 64, context 4096", OF_COPY, 0.80),
    Target("prefill attention: 0.8 of SDPA's rate, 2048 tokens",
           PREFILL_ATTENTION, "2048 tokens", OF_SDPA, 0.8),
    Target("prefill attention: 0.8 of SDPA's rate, 8192 tokens",
           PREFILL_ATTENTION, "8192 tokens", OF_SDPA, 0.8),
    Target("decode step, 8B, batch 1: 80 % of its floor",
           DECODE, "8B bf16, batch 1", OF_FLOOR, 0.80),
    Target("decode step, 8B, batch 64: 65 % of its floor",
           DECODE, "8B bf16, batch 64", OF_FLOOR, 0.65),
    Target("decode, 8B, batch 64: 3 times transformers",
           DECODE, "8B bf16, batch 64", OF_RIVAL, 3.0),
    Target("prefill, 8B, 2048 tokens: 60 % of the matmul rate",
           PREFILL, "8B bf16, 2048 tokens", OF_MATMUL, 0.60),
    Target("cuda_ipc: 80 % of the copy rate for 512 MB of blocks",
           TRANSFER, "cuda_ipc", OF_COPY, 0.80),
    Target("handoff: bookkeeping p50 of 3 ms at most",
           HANDOFF, "cuda_ipc", "bookkeeping p50 ms", 3.0, at_most=True),
)  # fmt: skip


def verdicts(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Each target with its value and what became of it."""
    cells: dict[tuple[str, str], Mapping[str, Any]] = {
        (event.table, event.name): event.cells for event in events if isinstance(event, Row)
    }
    found = []
    for target in TARGETS:
        value = cells.get((target.table, target.row), {}).get(target.cell)
        found.append(
            {
                "target": target.text,
                "cell": target.cell,
                "value": value,
                "bound": target.bound,
                "at_most": target.at_most,
                "verdict": target.verdict(value),
            }
        )
    return found
