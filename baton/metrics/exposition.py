"""Metrics as text: OpenMetrics 1.0, which has room for examples, or Prometheus' older format.

OpenTelemetry's own exporter for Prometheus leaves exemplars out; they are what leads from a slow
bucket to a trace. Pure: data points in, bytes out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

from baton.metrics import table
from baton.metrics.table import Instrument

OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"

Metric = tuple[Instrument, Sequence[NumberDataPoint | HistogramDataPoint]]
Labels = Mapping[str, object]


def render(
    metrics: Iterable[Metric], resource: Mapping[str, str], accept: str = ""
) -> tuple[str, bytes]:
    """(content type, body). A metric without points is announced nevertheless."""
    is_open = "application/openmetrics-text" in accept
    lines = [*_target(resource, is_open)]
    for instrument, points in metrics:
        lines += _head(instrument, is_open)
        for point in points:
            if isinstance(point, HistogramDataPoint):
                lines += _histogram(instrument.series, point, is_open)
            else:
                name = instrument.samples[0]
                lines.append(f"{name}{_labels(point.attributes or {})} {_number(point.value)}")
    if is_open:
        lines.append("# EOF")
    return OPEN_METRICS if is_open else PLAIN, ("\n".join(lines) + "\n").encode()


def _target(resource: Mapping[str, str], is_open: bool) -> Iterator[str]:
    """What the process is, as OpenTelemetry's mapping to Prometheus has it."""
    name = "target" if is_open else "target_info"
    yield f"# HELP {name} Which process this is."
    yield f"# TYPE {name} {'info' if is_open else 'gauge'}"
    yield f"target_info{_labels(resource)} 1"


def _head(instrument: Instrument, is_open: bool) -> Iterator[str]:
    # The older format calls a counter what its sample is called.
    is_counter = instrument.kind == table.COUNTER
    name = instrument.samples[0] if is_counter and not is_open else instrument.series
    yield f"# HELP {name} {_escaped(instrument.text)}"
    yield f"# TYPE {name} {instrument.kind}"


def _histogram(series: str, point: HistogramDataPoint, is_open: bool) -> Iterator[str]:
    examples = _examples(point) if is_open else {}
    attributes, total = point.attributes or {}, 0
    bounds = [*map(_number, point.explicit_bounds), "+Inf"]
    for index, (bound, count) in enumerate(zip(bounds, point.bucket_counts, strict=True)):
        total += count
        labels = _labels({**attributes, "le": bound})
        yield f"{series}_bucket{labels} {total}{examples.get(index, '')}"
    yield f"{series}_sum{_labels(attributes)} {_number(point.sum)}"
    yield f"{series}_count{_labels(attributes)} {total}"


def _examples(point: HistogramDataPoint) -> dict[int, str]:
    """The trace behind the last sampled value of each bucket, by the bucket's index."""
    examples = {}
    for example in point.exemplars:
        if not example.trace_id or not example.span_id:
            continue
        labels = _labels(
            {"trace_id": f"{example.trace_id:032x}", "span_id": f"{example.span_id:016x}"}
        )
        seconds = example.time_unix_nano / 1e9
        value = f" # {labels} {_number(example.value)} {seconds:.3f}"
        examples[bisect_left(point.explicit_bounds, example.value)] = value
    return examples


def _labels(attributes: Labels) -> str:
    if not attributes:
        return ""
    pairs = (f'{key.replace(".", "_")}="{_escaped(str(v))}"' for key, v in attributes.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
