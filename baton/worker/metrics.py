"""What a worker measures of its engine and transfers: the names are `baton.metrics.table`'s.

Everything here runs on the event loop; the engine's thread knows nothing of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from opentelemetry.context import Context

from baton.config import WorkerConfig
from baton.engine.loop import StepReport
from baton.engine.runner import CountsRows, StepRunner
from baton.errors import BatonError
from baton.metrics import process
from baton.metrics.recorder import Attributes, Recorder
from baton.v1 import worker_pb2

_RESERVATIONS = ("held", "started", "refused", "failed")
_SECONDS_PER_HOUR = 3600.0


class Transfer(Protocol):
    """What is told of a handoff's KV; `kvtransfer` measures it."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def transfer_s(self) -> float: ...
    @property
    def wire_s(self) -> float: ...
    @property
    def transport(self) -> str: ...
    @property
    def resends(self) -> int: ...


class WorkerFigures:
    """One worker's metrics. Event-loop thread only."""

    def __init__(self, config: WorkerConfig) -> None:
        self._recorder = Recorder(config.role, {"service.instance.id": config.incarnation})
        self._price_per_s = config.price_per_hour / _SECONDS_PER_HOUR
        self._started = time.monotonic()
        self.render = self._recorder.render
        self.close = self._recorder.close
        process.observe(self._recorder)
        self._recorder.observe("baton.worker.cost", lambda: _one(self._cost))
        if config.role == "decode":
            for outcome in _RESERVATIONS:
                self._recorder.count("baton.reservations", 0, {"outcome": outcome})
            self._drafted(0, 0)

    def stepped(self, report: StepReport) -> None:
        """The engine has run a step; an empty one only tells of what was asked for."""
        if not report.progress:
            return
        self._recorder.record("baton.engine.batch.size", len(report.progress))
        self._recorder.record(
            "baton.engine.step.duration",
            (report.ended_ns - report.started_ns) / 1e9,
            {"kind": kind_of(report)},
        )
        if report.num_proposed:
            self._drafted(report.num_proposed, report.num_accepted)

    def prompt_started(self, waited_s: float, trace: Context) -> None:
        """The first chunk of a prompt was computed."""
        self._recorder.record("baton.prefill.queue_time", waited_s, context=trace)

    def transferred(self, transfer: Transfer, trace: Context) -> None:
        """A handoff's KV was committed."""
        by = {"transport": transfer.transport}
        record, count = self._recorder.record, self._recorder.count
        record("baton.kv.transfer.duration", transfer.transfer_s, by, trace)
        if transfer.wire_s > 0:
            per_s = transfer.num_bytes / transfer.wire_s
            record("baton.kv.transfer.throughput", per_s, by, trace)
        count("baton.kv.transfer.io", transfer.num_bytes, by)
        count("baton.kv.transfer.resends", transfer.resends, by)

    @contextlib.contextmanager
    def transferring(self) -> Iterator[None]:
        """Around what raises a BatonError when a handoff's KV does not arrive."""
        try:
            yield
        except BatonError as error:
            self._recorder.count("baton.kv.transfer.failures", 1, {"reason": type(error).__name__})
            raise

    def reserved(self, outcome: str) -> None:
        """Reserve was answered: "held", "started", "refused" or "failed"."""
        assert outcome in _RESERVATIONS
        self._recorder.count("baton.reservations", 1, {"outcome": outcome})

    def look_at(self, load: Callable[[], worker_pb2.Load], runner: StepRunner) -> None:
        """Has the engine's load, and its rows on a GPU, read at every look from now on."""
        observe = self._recorder.observe
        observe("baton.engine.step.age", lambda: _one(load().step_age_ms / 1e3))
        observe("baton.engine.queue", lambda: _one(load().queue_tokens))
        observe("baton.engine.sequences", lambda: _sequences(load()))
        observe("baton.engine.tokens.computed", lambda: _one(load().tokens_computed))
        observe("baton.engine.tokens.generated", lambda: _one(load().tokens_generated))
        observe("baton.engine.preemptions", lambda: _one(load().preemptions))
        observe("baton.kv.blocks", lambda: _blocks(load()))
        if isinstance(runner, CountsRows):
            observe("baton.engine.gpu.rows", lambda: _by_kind(runner.decode_rows))

    def _drafted(self, drafts: int, right: int) -> None:
        self._recorder.count("baton.engine.drafts", right, {"right": "yes"})
        self._recorder.count("baton.engine.drafts", drafts - right, {"right": "no"})

    @property
    def _cost(self) -> float:
        return (time.monotonic() - self._started) * self._price_per_s


def kind_of(report: StepReport) -> str:
    """What a step computed: prompts, next tokens of streams, or both.

    A stream's row is one token that gives one, drafts and what comes of them aside; whatever else
    there is belongs to prompts.
    """
    rows = len(report.progress)
    drawing = sum(bool(p.token_ids) for p in report.progress)
    if report.num_tokens - report.num_proposed == rows == drawing:
        return "decode"
    return "mixed" if drawing and rows > 1 else "prefill"


def _one(value: float) -> Iterator[tuple[float, Attributes]]:
    yield value, {}


def _by_kind(counts: Mapping[str, int]) -> Iterator[tuple[float, Attributes]]:
    for kind, count in counts.items():
        yield count, {"kind": kind}


def _sequences(load: worker_pb2.Load) -> Iterator[tuple[float, Attributes]]:
    yield load.running, {"state": "running"}
    yield load.waiting, {"state": "waiting"}


def _blocks(load: worker_pb2.Load) -> Iterator[tuple[float, Attributes]]:
    yield load.blocks_free, {"state": "free"}
    yield load.blocks_cached, {"state": "cached"}
    yield load.blocks_held, {"state": "held"}
    yield load.blocks_quarantined, {"state": "quarantined"}
