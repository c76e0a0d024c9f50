"""A histogram for what is measured at every token: an OpenTelemetry one takes ten times as long.

It is handed to the exposition as the SDK's own kind of data point, as an OpenTelemetry
MetricProducer would.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence

from opentelemetry.sdk.metrics.export import HistogramDataPoint


class Gaps:
    """Counts by bucket; `le` bounds as everywhere. One thread's own; no attributes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._start_ns = time.time_ns()

    def record(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def point(self) -> HistogramDataPoint:
        """All values so far."""
        return HistogramDataPoint(
            attributes={},
            start_time_unix_nano=self._start_ns,
            time_unix_nano=time.time_ns(),
            count=sum(self._counts),
            sum=self._sum,
            bucket_counts=tuple(self._counts),
            explicit_bounds=self._bounds,
            min=math.nan,  # Prometheus has no use for the extremes
            max=math.nan,
        )
