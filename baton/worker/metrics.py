"""Measures a worker: its load, as routers see it, and its metrics (`baton.telemetry.metrics`).

Everything here runs on the event loop, nothing on the engine's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from opentelemetry.context import Context
from torch import Tensor

from baton.config import WorkerConfig
from baton.engine.block_manager import CacheChanges
from baton.engine.busy_share import BusyShare
from baton.engine.draft_model import DraftModel
from baton.engine.runner import StepRunner
from baton.engine.step_report import StepReport
from baton.errors import BatonError
from baton.kv_groups import KvGroups
from baton.telemetry.metrics.prometheus import Attributes, Recorder
from baton.v1 import worker_pb2
from baton.worker.adapters import FAILED, LOADED
from kvtransfer.pairing import transport_name
from kvtransfer.sender import TransferStats

_RESERVATIONS = ("held", "started", "refused", "failed")
_SMOOTHING = 0.2  # weight of the newest step in the running means
_EXPERTS_S = 10.0  # over which experts' tokens are compared at least


class LoadTracker:
    """A worker's load: the engine's plus measured times. Event-loop thread only."""

    def __init__(self) -> None:
        self.load = worker_pb2.Load()
        self.mean_step_s = 0.0  # over steps of every kind; 0 before the first
        self._prompts = BusyShare()
        self.cached: set[int] = set()  # every prefix hash that can be hit
        self.watchers: set[CacheWatcher] = set()

    def update(self, report: StepReport) -> None:
        load = worker_pb2.Load(**vars(report.load))
        load.step_ms = self.load.step_ms
        load.tokens_computed = self.load.tokens_computed + report.num_kept
        load.tokens_generated = self.load.tokens_generated + report.num_sampled
        step_s = (report.ended_ns - report.started_ns) / 1e9
        if report.num_tokens:
            self.mean_step_s = _smooth(self.mean_step_s, step_s)
        if report.num_tokens and kind_of(report) == "decode":
            load.step_ms = _smooth(load.step_ms, step_s * 1e3)
        elif report.num_tokens:
            streams_s = load.step_ms / 1e3 if kind_of(report) == "mixed" else 0.0
            self._prompts.add(report.ended_ns / 1e9, max(0.0, step_s - streams_s))
        self.load = load
        self.cached.difference_update(report.cache.evicted)
        self.cached.update(report.cache.stored)
        for watcher in self.watchers:
            watcher.add(report.cache)
        self.wake()

    def prefill_share(self, now: float) -> float:
        """The share of the last seconds that prompts took, which falls without further steps.

        now: of `time.time()`
        """
        return self._prompts.share(now)

    def wake(self) -> None:
        """Tells routers of load and state as they are now."""
        for watcher in self.watchers:
            watcher.on_change()


class CacheWatcher:
    """Changes not yet sent to one router: the net effect, however far it is behind."""

    def __init__(self, tracker: LoadTracker, on_change: Callable[[], None]) -> None:
        """`on_change` is called, until `close`, where load, state or cache may have changed."""
        self.on_change = on_change
        self._watchers = tracker.watchers
        self._stored, self._evicted, self._cleared = set(tracker.cached), set[int](), True
        self._watchers.add(self)

    def close(self) -> None:
        self._watchers.discard(self)

    def add(self, changes: CacheChanges) -> None:
        """Adds one step's changes."""
        evicted, stored = changes.evicted, changes.stored
        self._evicted |= evicted - self._stored
        self._stored -= evicted
        self._stored |= stored - self._evicted
        self._evicted -= stored

    def event(self) -> worker_pb2.CacheEvent | None:
        """What has changed since the last event, if anything; the first has all that is cached."""
        if not (self._stored or self._evicted or self._cleared):
            return None
        event = worker_pb2.CacheEvent(
            stored=self._stored, evicted=self._evicted, cleared=self._cleared
        )
        self._stored, self._evicted, self._cleared = set(), set(), False
        return event


def _smooth(mean: float, value: float) -> float:
    return value if mean == 0 else mean + _SMOOTHING * (value - mean)


class WorkerMetrics:
    """One worker's metrics. Event-loop thread only."""

    def __init__(self, config: WorkerConfig) -> None:
        self._recorder = Recorder(config.role, {"service.instance.id": config.incarnation})
        self.render = self._recorder.render
        cost_per_s, started = config.price_per_hour / 3600.0, time.monotonic()
        self._recorder.observe(
            "baton.worker.cost", lambda: (time.monotonic() - started) * cost_per_s
        )
        for outcome in _RESERVATIONS:
            self._recorder.count("baton.reservations", 0, {"outcome": outcome})
        for result in (LOADED, FAILED):
            self._recorder.count("baton.adapter.loads", 0, {"result": result})
        self._drafted(0, 0)

    def stepped(self, report: StepReport) -> None:
        """The engine has run a step; one without progress is not counted."""
        if not report.num_sequences:
            return
        self._recorder.record("baton.engine.batch.size", report.num_sequences)
        self._recorder.record(
            "baton.engine.step.duration",
            (report.ended_ns - report.started_ns) / 1e9,
            {"kind": kind_of(report)},
        )
        if report.num_proposed:
            self._drafted(report.num_proposed, report.num_accepted)

    def adapter_load(self, result: str) -> None:
        self._recorder.count("baton.adapter.loads", 1, {"result": result})

    def prompt_started(self, waited_s: float, trace: Context) -> None:
        self._recorder.record("baton.prefill.queue_time", waited_s, context=trace)

    def transferred(self, transfer: TransferStats, trace: Context) -> None:
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

    def observe_engine(
        self,
        load: Callable[[], worker_pb2.Load],
        runner: StepRunner,
        draft: DraftModel | None = None,
        groups: KvGroups | None = None,
    ) -> None:
        """Reads the engine's load, and its rows on a GPU, at every scrape from now on."""

        def states(prefix: str, *names: str) -> list[tuple[float, Attributes]]:
            now = load()
            return [(getattr(now, prefix + name), {"state": name}) for name in names]

        def by_window() -> list[tuple[float, Attributes]]:
            held, count = Counter[str](), load().blocks_held_by_group
            for window, blocks in zip(groups.kinds if groups else (), count, strict=False):
                held[window] += blocks
            return [(blocks, {"window": window}) for window, blocks in held.items()]

        blocks = ("free", "cached", "held", "quarantined")
        observe = self._recorder.observe
        observe("baton.engine.step.age", lambda: load().step_age_ms / 1e3)
        observe("baton.engine.queue", lambda: load().queue_tokens)
        observe("baton.engine.sequences", lambda: states("", "running", "waiting"))
        observe("baton.engine.tokens.computed", lambda: load().tokens_computed)
        observe("baton.engine.tokens.generated", lambda: load().tokens_generated)
        observe("baton.engine.preemptions", lambda: load().preemptions)
        observe("baton.kv.blocks", lambda: states("blocks_", *blocks))
        observe("baton.kv.group.blocks", by_window)
        if runner.decode_rows:
            observe(
                "baton.engine.gpu.rows",
                lambda: [(rows, {"kind": kind}) for kind, rows in runner.decode_rows.items()],
            )
        if runner.waited_s is not None:
            observe("baton.engine.gpu.wait_time", lambda: runner.waited_s or 0.0)
        if (tokens := runner.expert_tokens) is not None:
            observe("baton.engine.expert.imbalance", ExpertImbalance(tokens).read)
        if draft is not None:
            observe("baton.engine.draft_time", lambda: draft.seconds)
        if (ranks := runner.ranks) is not None:
            observe("baton.engine.collective.time", lambda: ranks.collective_s)

    def observe_links(self, pairs: Callable[[], Iterable[worker_pb2.PairStatus]]) -> None:
        """Reads how fast each open link has been at every scrape from now on."""

        def speeds() -> Iterator[tuple[float, Attributes]]:
            for pair in pairs():
                if pair.state == "OPEN":
                    yield (
                        pair.sent_bytes / pair.sent_ms * 1e3 if pair.sent_ms else 0.0,
                        {
                            "peer": pair.decode,
                            "transport": transport_name(pair.transport),
                            "fallback": "yes" if pair.fallback else "no",
                        },
                    )

        self._recorder.observe("baton.kv.link.throughput", speeds)

    def _drafted(self, drafts: int, right: int) -> None:
        self._recorder.count("baton.engine.draft_tokens", right, {"accepted": "yes"})
        self._recorder.count("baton.engine.draft_tokens", drafts - right, {"accepted": "no"})


class ExpertImbalance:
    """The busiest expert's tokens over the mean, of the layer where that is most.

    Over the tokens since the last reading, or the one before if that is less than 10 s ago.
    """

    def __init__(self, tokens: Tensor, clock: Callable[[], float] = time.monotonic) -> None:
        """tokens: int64 `[layers, experts]`, which grow."""
        self._tokens, self._clock = tokens, clock
        self._before, self._since = tokens.cpu().clone(), clock()
        self._value = 1.0

    def read(self) -> float:
        """1 is even, and what is said before any token."""
        if self._clock() >= self._since + _EXPERTS_S:
            now = self._tokens.cpu().clone()
            tokens = (now - self._before).float()
            self._value = float(
                (tokens.amax(1) / tokens.mean(1).clamp_min(1e-9)).max().clamp_min(1)
            )
            self._before, self._since = now, self._clock()
        return self._value


def kind_of(report: StepReport) -> str:
    """What a step computed: "prefill", "decode" or "mixed"."""
    if not report.num_chunks:
        return "decode"
    return "mixed" if report.num_sequences > report.num_chunks else "prefill"
