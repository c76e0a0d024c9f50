"""Propagation of trace context from process to process, as the W3C's `traceparent`."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def inject(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries the current (or given) span to another process."""
    if context is not None and not context:
        return ()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return tuple(carrier.items())


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The context in a caller's metadata; an empty one if it is invalid.

    By the W3C's Trace Context, a repeated `traceparent` is invalid, too.
    """
    carrier: dict[str, list[str]] = {}
    for key, value in metadata or ():
        if key in _PROPAGATOR.fields and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    return _PROPAGATOR.extract(carrier) if len(carrier.get("traceparent", ())) == 1 else Context()
