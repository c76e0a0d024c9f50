"""What a worker's metrics say of steps, transfers and reservations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import pytest
from opentelemetry.context import Context

from baton.config import WorkerConfig
from baton.engine.loop import Progress, StepReport
from baton.engine.runner import Runner
from baton.engine.sequence_table import Load
from baton.errors import BatonError, Stale
from baton.v1 import worker_pb2
from baton.worker.metrics import WorkerFigures, kind_of

LOAD = Load(0, 0, 0, 8, 8, 0, 0, 0, 1, 0)


def step(num_tokens: int, *drawn: bool, ended_ns: int = 5_000_000) -> StepReport:
    """A step whose sequences have drawn a token or not."""
    progress = [Progress(str(n), 1, (7,) if one else ()) for n, one in enumerate(drawn)]
    return StepReport(0, ended_ns, num_tokens, progress, LOAD)


def text(figures: WorkerFigures) -> list[str]:
    return figures.render("")[1].decode().splitlines()


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (step(3, True, True, True), "decode"),
        (step(512, False), "prefill"),
        (step(100, True), "prefill"),  # the last chunk draws the first token
        (step(102, True, True, False), "mixed"),
        (step(150, False, False), "prefill"),
    ],
)
def test_what_a_step_computed(report: StepReport, kind: str) -> None:
    assert kind_of(report) == kind


def test_drafts_are_counted_and_make_no_step_one_of_prompts() -> None:
    progress = [Progress("a", 9, (7, 8, 9)), Progress("b", 1, (7,))]
    report = StepReport(0, 5_000_000, 6, progress, LOAD, num_proposed=4, num_accepted=2)
    assert kind_of(report) == "decode"
    assert kind_of(dataclasses.replace(report, num_tokens=66)) == "mixed"
    figures = WorkerFigures(WorkerConfig("decode"))
    assert 'baton_engine_drafts_total{right="yes"} 0' in text(figures)
    figures.stepped(report)
    figures.stepped(report)
    page = text(figures)
    assert 'baton_engine_drafts_total{right="yes"} 4' in page
    assert 'baton_engine_drafts_total{right="no"} 4' in page


def test_steps_are_measured_and_empty_ones_are_not() -> None:
    figures = WorkerFigures(WorkerConfig("decode"))
    figures.stepped(step(2, True, True))
    figures.stepped(step(0))
    page = text(figures)
    assert 'baton_engine_step_duration_seconds_count{kind="decode"} 1' in page
    assert 'baton_engine_step_duration_seconds_bucket{kind="decode",le="0.004"} 0' in page
    assert 'baton_engine_step_duration_seconds_bucket{kind="decode",le="0.006"} 1' in page
    assert "baton_engine_batch_size_sum 2" in page
    assert "baton_engine_batch_size_count 1" in page


def test_transfers() -> None:
    figures = WorkerFigures(WorkerConfig("prefill"))
    stats = SimpleNamespace(
        num_bytes=3_000_000, transfer_s=0.02, wire_s=0.001, transport="shm", resends=1
    )
    figures.transferred(stats, Context())
    with pytest.raises(Stale), figures.transferring():
        raise Stale("gone")
    with pytest.raises(RuntimeError), figures.transferring():
        raise RuntimeError("not a transfer's")
    page = text(figures)
    assert 'baton_kv_transfer_io_bytes_total{transport="shm"} 3000000' in page
    assert 'baton_kv_transfer_resends_total{transport="shm"} 1' in page
    assert 'baton_kv_transfer_duration_seconds_sum{transport="shm"} 0.02' in page
    name = "baton_kv_transfer_throughput_bytes_per_second"
    assert f'{name}_bucket{{transport="shm",le="2000000000.0"}} 0' in page
    assert f'{name}_bucket{{transport="shm",le="4000000000.0"}} 1' in page
    failures = [line for line in page if line.startswith("baton_kv_transfer_failures_total")]
    assert failures == ['baton_kv_transfer_failures_total{reason="Stale"} 1']
    assert issubclass(Stale, BatonError)


def test_reservations_by_outcome() -> None:
    figures = WorkerFigures(WorkerConfig("decode"))
    figures.reserved("held")
    figures.reserved("refused")
    page = text(figures)
    for outcome, number in (("held", 1), ("started", 0), ("refused", 1), ("failed", 0)):
        assert f'baton_reservations_total{{outcome="{outcome}"}} {number}' in page
    with pytest.raises(AssertionError):
        figures.reserved("lost")


@pytest.mark.parametrize(("price", "at_least"), [(0.0, 0.0), (3_600_000.0, 1e-9)])
def test_cost_grows_with_time(price: float, at_least: float) -> None:
    figures = WorkerFigures(WorkerConfig("decode", price_per_hour=price))
    (line,) = (one for one in text(figures) if one.startswith("baton_worker_cost_total"))
    assert (float(line.split()[1]) > 0) == (at_least > 0)


class _OnGpu(Runner):
    """A runner that has computed some decode steps."""

    decode_rows: ClassVar = {"wanted": 10, "padding": 6, "wasted": 1}


def test_rows_that_nobody_wanted_are_counted_where_there_are_any() -> None:
    for kind, shown in ((Runner, False), (_OnGpu, True)):
        figures = WorkerFigures(WorkerConfig("decode"))
        figures.look_at(worker_pb2.Load, kind.__new__(kind))
        assert ('baton_engine_gpu_rows_total{kind="padding"} 6' in text(figures)) is shown
        figures.close()
