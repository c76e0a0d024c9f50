"""Part "speed": what kernels move and compute each second, and what share of a ceiling that is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.device import device_of, free
from benchmarks.gpu.job import Event, Job, guarded
from benchmarks.gpu.targets import DECODE_ATTENTION, PREFILL_ATTENTION

# (table, module, function): what has targets goes first, and each may fail alone.
_ROOMS = (
    (PREFILL_ATTENTION, "attention_speed", "prefill_events"),
    (DECODE_ATTENTION, "attention_speed", "decode_events"),
    (DECODE_ATTENTION, "attention_speed", "fp8_events"),
    ("rows", "row_speed", "events"),
    ("blocks", "block_speed", "events"),
)


def run(job: Job) -> Iterator[Event]:
    """All rooms; memory is given back between them."""
    device_of(job)
    for table, module, function in _ROOMS:
        yield from guarded(table, function, partial(_events, job, module, function))
        free(job)


def _events(job: Job, module: str, function: str) -> Iterator[Event]:
    yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(job)
