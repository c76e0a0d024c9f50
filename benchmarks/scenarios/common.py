"""Servers as scenarios send to them, and bits of reports."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from baton.bench import servers
from baton.bench.generator import Run
from baton.bench.request import RequestOptions
from baton.bench.servers import Server
from baton.bench.stats import percentile


def connected(url: str, **options: Any) -> AbstractAsyncContextManager[Server]:
    """A server as the generator sends to it."""
    return servers.connected(url, RequestOptions(**options))


def spread(values_s: Iterable[float | None]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    known = [value for value in values_s if value is not None]
    p50, p99, most = (percentile(known, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def lag_of(run: Run) -> str:
    """How late requests were sent and how late the generator's own loop ran."""
    late, loop = spread(o.sent_s - o.at_s for o in run.outcomes), spread(run.loop_late_s)
    return f"generator: requests sent late by {late}, its event loop late by {loop}"
