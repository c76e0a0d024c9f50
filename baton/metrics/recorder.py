"""Counts and measures for one process, kept and written out by prometheus_client.

What is measured at each token or read only when scraped goes around its locks: `gaps` for the one,
callbacks for the other. A name that is not in the table, or not this process's, is a KeyError.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from prometheus_client import Counter, Histogram, Info, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.metrics import table
from baton.metrics.table import Instrument

Attributes = Mapping[str, str]
Reading = Callable[[], Iterable[tuple[float, Attributes]]]
_NOTHING: Attributes = {}
_OPEN_METRICS = "application/openmetrics-text"  # has room for exemplars; the plain format has not
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Gaps:
    """A histogram without labels or locks, a seventh of the library's cost; for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, instrument: Instrument) -> Metric:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        return HistogramMetricFamily(instrument.series, instrument.text, buckets, self._sum)


class Recorder(Collector):
    """One process's metrics. Event-loop thread only."""

    def __init__(self, process: str, resource: Mapping[str, str]) -> None:
        self._instruments = table.of(process)
        self._target = Info("target", "Which process this is.", registry=None)
        resource = {"service.name": f"baton-{process}", **resource}
        self._target.info({name.replace(".", "_"): value for name, value in resource.items()})
        self._counters: dict[str, Counter] = {}
        self._gaps: dict[str, Gaps] = {}
        self._readings: dict[str, Reading] = {}
        self._histograms = {
            one.name: Histogram(
                one.series, one.text, one.labels, registry=None, buckets=one.buckets
            )
            for one in self._instruments.values()
            if one.kind == table.HISTOGRAM
        }
        self.observe("process.cpu.time", _cpu_s)
        if _STATM.exists():
            self.observe("process.memory.usage", _memory_bytes)

    def count(self, name: str, number: float = 1, attributes: Attributes = _NOTHING) -> None:
        """Adds to a counter; 0 makes it appear before anything happened."""
        one = self._of_kind(name, table.COUNTER)
        if name not in self._counters:
            self._counters[name] = Counter(one.series, one.text, one.labels, registry=None)
        counter = self._counters[name]
        (counter.labels(*one.values(attributes)) if one.labels else counter).inc(number)

    def record(
        self,
        name: str,
        value: float,
        attributes: Attributes = _NOTHING,
        context: Context | None = None,
    ) -> None:
        """Puts a value into a histogram; the sampled span of `context` becomes its exemplar."""
        one, histogram = self._instruments[name], self._histograms[name]
        span = trace.get_current_span(context).get_span_context() if context else None
        exemplar = None
        if span is not None and span.is_valid and span.trace_flags.sampled:
            exemplar = {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
        child = histogram.labels(*one.values(attributes)) if one.labels else histogram
        child.observe(value, exemplar)

    def gaps(self, name: str) -> Gaps:
        """A histogram for values that come at every token."""
        instrument = self._of_kind(name, table.HISTOGRAM)
        return self._gaps.setdefault(name, Gaps(instrument.buckets))

    def observe(self, name: str, read: Reading) -> None:
        """Has `read` called at every scrape: (value, attributes) of a gauge or a total."""
        assert self._instruments[name].kind != table.HISTOGRAM, f"{name} is a histogram"
        self._readings[name] = read

    def collect(self) -> Iterator[Metric]:
        """Every metric now, as prometheus_client's; one without values is announced nevertheless.

        Without the `_created` samples, for which Prometheus has no use.
        """
        yield from self._target.collect()
        for one in self._instruments.values():
            if one.name in self._gaps:
                yield self._gaps[one.name].family(one)
            elif metric := self._counters.get(one.name) or self._histograms.get(one.name):
                for family in metric.collect():
                    samples = family.samples
                    family.samples = [s for s in samples if not s.name.endswith("_created")]
                    yield family
            else:
                kind = CounterMetricFamily if one.kind == table.COUNTER else GaugeMetricFamily
                read = kind(one.series, one.text, labels=one.labels)
                for value, attributes in self._readings.get(one.name, tuple)():
                    read.add_metric(one.values(attributes), value)
                yield read

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, text) of everything now, in the format that an Accept header asks for."""
        encode, kind = choose_encoder(_OPEN_METRICS if _OPEN_METRICS in accept else "")
        return kind, encode(self)

    def close(self) -> None:
        self._readings.clear()

    def _of_kind(self, name: str, kind: str) -> Instrument:
        instrument = self._instruments[name]
        assert instrument.kind == kind, f"{name} is a {instrument.kind}"
        return instrument


def _cpu_s() -> Iterator[tuple[float, Attributes]]:
    times = os.times()
    yield times.user, {"cpu.mode": "user"}
    yield times.system, {"cpu.mode": "system"}


def _memory_bytes() -> Iterator[tuple[float, Attributes]]:
    yield int(_STATM.read_text().split()[1]) * _PAGE_BYTES, {}
