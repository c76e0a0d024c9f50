"""Counts and measures for one process, through OpenTelemetry's metrics SDK.

What is measured at each token or asked for at each look goes around it: `gaps` for the one,
callbacks for the other. A name that is not in the table, or not this process's, is a KeyError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from opentelemetry.sdk.resources import Resource

from baton.metrics import exposition, table
from baton.metrics.gaps import Gaps
from baton.metrics.table import Instrument

Attributes = Mapping[str, str]
Reading = Callable[[], Iterable[tuple[float, Attributes]]]
Points = list[NumberDataPoint | HistogramDataPoint]
_NOTHING: Attributes = {}
_NOWHERE = Context()


class Recorder:
    """One process's metrics. Event-loop thread only."""

    def __init__(self, process: str, resource: Mapping[str, str]) -> None:
        self._instruments = table.of(process)
        self._resource = {"service.name": f"baton-{process}", **resource}
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(
            metric_readers=[self._reader],
            resource=Resource(self._resource),
            shutdown_on_exit=False,  # nothing is sent anywhere
        )
        self._meter = self._provider.get_meter("baton")
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gaps: dict[str, Gaps] = {}
        for instrument in self._instruments.values():
            if instrument.kind == table.HISTOGRAM:
                self._histograms[instrument.name] = self._histogram(instrument)

    def count(self, name: str, number: float = 1, attributes: Attributes = _NOTHING) -> None:
        """Adds to a counter; 0 makes it appear before anything happened."""
        counter = self._counters.get(name)
        if counter is None:
            instrument = self._of_kind(name, table.COUNTER)
            made = self._meter.create_counter(name, instrument.unit, instrument.text)
            assert isinstance(made, Counter)
            counter = self._counters[name] = made
        counter.add(number, attributes, _NOWHERE)

    def record(
        self,
        name: str,
        value: float,
        attributes: Attributes = _NOTHING,
        context: Context | None = None,
    ) -> None:
        """Puts a value into a histogram; the sampled span of `context` becomes its example."""
        self._histograms[name].record(value, attributes, context or _NOWHERE)

    def gaps(self, name: str) -> Gaps:
        """A histogram for values that come at every token."""
        instrument = self._of_kind(name, table.HISTOGRAM)
        return self._gaps.setdefault(name, Gaps(instrument.buckets))

    def observe(self, name: str, read: Reading) -> None:
        """Has `read` called at every look: (value, attributes) of a gauge, or of a counter whose
        total somebody else keeps."""
        instrument = self._instruments[name]

        def observations(options: CallbackOptions) -> Iterator[Observation]:
            return (Observation(value, attributes) for value, attributes in read())

        make = (
            self._meter.create_observable_counter
            if instrument.kind == table.COUNTER
            else self._meter.create_observable_gauge
        )
        make(name, [observations], instrument.unit, instrument.text)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, text) of everything now, in the format that an Accept header asks for."""
        points = self._points()
        metrics = [(one, points.get(one.name, [])) for one in self._instruments.values()]
        return exposition.render(metrics, self._resource, accept)

    def close(self) -> None:
        """Forgets what is observed."""
        self._provider.shutdown()

    def _points(self) -> dict[str, Points]:
        found: dict[str, Points] = {name: [gaps.point()] for name, gaps in self._gaps.items()}
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = found.setdefault(metric.name, [])
                    points += metric.data.data_points  # type: ignore[arg-type]
        return found

    def _histogram(self, instrument: Instrument) -> Histogram:
        made = self._meter.create_histogram(
            instrument.name,
            instrument.unit,
            instrument.text,
            explicit_bucket_boundaries_advisory=instrument.buckets,
        )
        assert isinstance(made, Histogram)
        return made

    def _of_kind(self, name: str, kind: str) -> Instrument:
        instrument = self._instruments[name]
        assert instrument.kind == kind, f"{name} is a {instrument.kind}"
        return instrument
