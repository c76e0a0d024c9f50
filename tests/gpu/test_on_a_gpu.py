"""On a real GPU: kernels, the engine's tokens, KV between processes, a cluster's tokens.

The parts of `make gpu` as processes of their own: in this one kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.part import Event, Job
from benchmarks.gpu.run import run_part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def run(part: str, tmp_path: Path, seconds: float = 300.0) -> list[Event]:
    """A part's events, none of which is a failure. What comes first is not bound by `seconds`."""
    job = Job(part, "cuda:0", seconds, ("1B",), quick=True)
    events = list(run_part(job, tmp_path / "log", 370.0 - seconds))
    assert not [event for event in events if event.kind == "failed"], events
    return events


def rows(events: list[Event], table: str) -> dict[str, Event]:
    """A table by its rows' names."""
    return {event.name: event for event in events if event.kind == "row" and event.table == table}


def test_every_kernel_is_as_its_reference(tmp_path: Path) -> None:
    events = run("kernels", tmp_path)
    assert len(rows(events, "kernels against their references")) >= 20
    assert not [event for event in events if event.kind == "note"], "some were left out"


def test_the_engine_gives_the_tokens_of_plain_torch(tmp_path: Path) -> None:
    (row,) = rows(run("engine", tmp_path, 1.0), "engine against its reference").values()
    assert row.cells["other tokens"] == 0


def test_bytes_arrive_over_cuda_ipc_and_a_cluster_has_the_tokens_of_one_process(
    tmp_path: Path,
) -> None:
    events = run("cluster", tmp_path)
    assert "cuda_ipc" in rows(events, "transfer")
    for event in events:
        if event.kind == "note" and event.table == "handoff":
            pytest.skip(event.text)
    assert rows(events, "handoff")["cuda_ipc"].cells["other tokens"] == 0
