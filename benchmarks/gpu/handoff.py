"""What a handoff costs beyond computing and copying, from the spans of a cluster's traces.

    last chunk ends ── notice ── last put ── Commit, verify ── the sequence can be decoded

Bookkeeping is that time, less the time in which the device would copy what was put after the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.local.span_store import Span


def bookkeeping_ms(spans: Sequence[Span], copy_bytes_per_s: float) -> float | None:
    """Of one trace; None where nothing was handed over. copy_bytes_per_s: read and written."""
    named: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.end_ns):
        named.setdefault(span.name, []).append(span)
    if any(name not in named for name in ("prefill.chunk", "kv.transfer", "decode.admit")):
        return None
    transfer, admit = named["kv.transfer"][-1], named["decode.admit"][-1]
    until_ms = (admit.start_ns - named["prefill.chunk"][-1].end_ns) / 1e6
    wire, hidden, moved = (
        float(transfer.attributes[name]) for name in ("wire_ms", "hidden_ms", "bytes")
    )
    late = moved * (1 - hidden / wire) if wire else 0.0
    return until_ms - 2 * late / copy_bytes_per_s * 1e3
