"""Counts and measures for one process, kept and written out by prometheus_client.

What is measured at each token or read only when scraped goes around its locks: `gaps` for the one,
callbacks for the other. A name that is not in the table, or not this process's, is a KeyError.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from prometheus_client import (
    Counter,
    Histogram,
    Info,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.telemetry.metrics import instruments
from baton.telemetry.metrics.instruments import Instrument

Attributes = Mapping[str, str]
Reading = Callable[[], float | Iterable[tuple[float, Attributes]]]  # a number has no attributes
_NOTHING: Attributes = {}
_OPEN_METRICS = "application/openmetrics-text"  # has room for exemplars; the plain format has not

disable_created_metrics()  # type: ignore[no-untyped-call]  # samples for which Prometheus has no use


class Gaps(Collector):
    """A histogram without labels or locks, a seventh of the library's cost; for one thread."""

    def __init__(self, instrument: Instrument) -> None:
        self._instrument, self._bounds = instrument, instrument.buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        one = self._instrument
        yield HistogramMetricFamily(one.series, one.text, buckets, self._sum)


class _Observed(Collector):
    """A gauge or a total that is read when it is scraped."""

    def __init__(self, instrument: Instrument, read: Reading = tuple) -> None:
        self._instrument, self._read = instrument, read

    def collect(self) -> Iterator[Metric]:
        one = self._instrument
        kind = CounterMetricFamily if one.kind == instruments.COUNTER else GaugeMetricFamily
        family = kind(one.series, one.text, labels=one.labels)
        read = self._read()
        for value, attributes in [(read, _NOTHING)] if isinstance(read, int | float) else read:
            family.add_metric(one.values(attributes), value)
        yield family


def _made(one: Instrument) -> Collector:
    if one.kind == instruments.COUNTER:
        return Counter(one.series, one.text, one.labels, registry=None)
    if one.kind == instruments.HISTOGRAM:
        return Histogram(one.series, one.text, one.labels, registry=None, buckets=one.buckets)
    return _Observed(one)


class Recorder(Collector):
    """One process's metrics. Event-loop thread only."""

    def __init__(self, process: str, resource: Mapping[str, str]) -> None:
        self._instruments = instruments.for_process(process)
        self._target = Info("target", "Which process this is.", registry=None)
        resource = {"service.name": f"baton-{process}", **resource}
        self._target.info({name.replace(".", "_"): value for name, value in resource.items()})
        own = {
            name: one for name, one in self._instruments.items() if not name.startswith("process.")
        }
        self._metrics = {name: _made(one) for name, one in own.items()}
        self._metrics["process"] = ProcessCollector(registry=None)
        self._children: dict[tuple[object, ...], Any] = {}  # by name and attributes, once used

    def count(self, name: str, number: float = 1, attributes: Attributes = _NOTHING) -> None:
        """Adds to a counter; 0 makes its series appear before anything happened."""
        self._child(name, Counter, attributes).inc(number)

    def record(
        self,
        name: str,
        value: float,
        attributes: Attributes = _NOTHING,
        context: Context | None = None,
    ) -> None:
        """Puts a value into a histogram; the sampled span of `context` becomes its exemplar."""
        exemplar = None
        if context is not None:
            span = trace.get_current_span(context).get_span_context()
            if span.trace_flags.sampled:
                exemplar = {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
        self._child(name, Histogram, attributes).observe(value, exemplar)

    def gaps(self, name: str) -> Gaps:
        """A histogram for values that come at every token."""
        gaps = self._metrics[name] = Gaps(self._instruments[name])
        return gaps

    def observe(self, name: str, read: Reading) -> None:
        """Has `read` called at every scrape, for a gauge or a total."""
        instrument = self._instruments[name]
        assert instrument.kind != instruments.HISTOGRAM, f"{name} is a histogram"
        self._metrics[name] = _Observed(instrument, read)

    def collect(self) -> Iterator[Metric]:
        """Every metric now; one without values is announced nevertheless."""
        for metric in (self._target, *self._metrics.values()):
            yield from metric.collect()

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, text) of everything now, in the format that an Accept header asks for."""
        encode, kind = choose_encoder(_OPEN_METRICS if _OPEN_METRICS in accept else "")
        return kind, encode(self)

    def _child(self, name: str, kind: type[Any], attributes: Attributes) -> Any:
        key = (name, *attributes.items())
        if (child := self._children.get(key)) is None:
            one, metric = self._instruments[name], self._metrics[name]
            assert isinstance(metric, kind), f"{name} is a {one.kind}"
            child = metric.labels(*one.values(attributes)) if one.labels else metric
            self._children[key] = child
        return child
