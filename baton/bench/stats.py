"""Computes the statistics of a stage from the outcomes of its requests.

The definitions are those of vLLM's `bench serve`; docs/benchmarking.md has the formulas and all
fields of these dictionaries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from baton.bench.request import INTERRUPTED, Outcome
from baton.config.slo import Slo

Spread = dict[str, float]  # count, mean, p50, p90, p95, p99, min, max
Stats = dict[str, Any]

LONG_GAP_S = 0.2  # what a reader of a stream notices
_MOST_ERRORS = 10


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Mean and percentiles of the known values; None without any."""
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    p50, p90, p95, p99 = map(float, np.percentile(known, (50, 90, 95, 99)))
    return {
        "count": known.size, "mean": float(known.mean()), "p50": p50, "p90": p90, "p95": p95,
        "p99": p99, "min": float(known.min()), "max": float(known.max()),
    }  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float:
    """Percentile with linear interpolation (numpy's default); NaN without values."""
    known = list(values)
    return float(np.percentile(known, percent)) if known else math.nan


class Figure(NamedTuple):
    """One number of the statistics: its path, and its form in tables."""

    title: str
    path: str  # as "ttft_s.p50"
    factor: float = 1
    form: str = ".1f"

    def value_in(self, stats: Any) -> float | None:
        """Reads the number from statistics, counts as int; None if missing."""
        for key in self.path.split("."):
            stats = stats and stats[key]
        found: float | None = stats
        return found

    def show(self, value: float | None) -> str:
        return "-" if value is None else f"{value * self.factor:{self.form}}"


FIGURES = (
    *(
        Figure(f"{name.upper()} {rank}, ms", f"{name}_s.{rank}", 1e3, ".2f")
        for name in ("ttft", "itl", "tpot", "e2e")
        for rank in ("p50", "p95", "p99", "max")
    ),
    Figure("time in gaps over 200 ms, %", "long_gap_share", 100, ".2f"),
    Figure("requests sent", "requests.sent", 1, ".0f"),
    Figure("requests failed", "requests.failed", 1, ".0f"),
    Figure("requests interrupted", "requests.interrupted", 1, ".0f"),
    Figure("requests/s", "requests_per_s", 1, ".3f"),
    Figure("good requests, %", "goodput.share", 100, ".1f"),
    Figure("input tokens/s", "input_tokens_per_s", 1, ",.0f"),
    Figure("of them cached, %", "prefix_cache.share", 100),
    Figure("output tokens/s", "output_tokens_per_s", 1, ",.0f"),
    Figure("answers shorter than asked for", "short_outputs", 1, ".0f"),
    Figure("answers of other than their usage's tokens", "miscounted", 1, ".0f"),
    Figure("queue p50, ms", "phases.queue_s.p50", 1e3),
    Figure("first token after it p50, ms", "phases.first_token_after_queue_s.p50", 1e3),
    Figure("KV transfer p50, ms", "phases.transfer_s.p50", 1e3),
    Figure("rest of the answer p50, ms", "phases.decode_s.p50", 1e3),
    Figure("outside the server p50, ms", "phases.outside_s.p50", 1e3),
    Figure("handoffs", "phases.transferred", 1, ".0f"),
    Figure("KV bytes of handoffs", "phases.transfer_bytes", 1, ",.0f"),
    Figure("prefilled by decode", "phases.prefilled_by_decode", 1, ".0f"),
    Figure("failovers", "phases.failovers", 1, ".0f"),
)
INTERFERENCE_FIGURES = (
    Figure("share of tokens/s kept, %", "kept", 100),
    *(
        Figure(f"streams {phase}: {title}", f"{phase}.{path}", factor, form)
        for title, path, factor, form in (
            ("tokens/s", "tokens_per_s", 1, ".0f"),
            *((f"ITL {rank}, ms", f"itl_s.{rank}", 1e3, ".1f") for rank in ("p50", "p99", "max")),
            ("time in gaps over 200 ms, %", "long_gap_share", 100, ".2f"),
            ("TTFT p50, ms", "ttft_s.p50", 1e3, ".0f"),
        )
        for phase in ("alone", "beside")
    ),
    Figure("long prompts: TTFT p50, ms", "prompts.ttft_s.p50", 1e3, ".0f"),
    Figure("long prompts: TTFT p95, ms", "prompts.ttft_s.p95", 1e3, ".0f"),
    Figure("long prompts not answered", "prompts.failed", 1, ".0f"),
)


def stats_of(outcomes: Iterable[Outcome], seconds: float, slo: Slo | None = None) -> Stats:
    """Statistics of requests. Latencies and tokens are those of successful ones.

    `seconds`: the time for rates. Interrupted requests are only counted as such.
    """
    every = list(outcomes)
    sent = [outcome for outcome in every if outcome.status != INTERRUPTED]
    ok = [outcome for outcome in sent if outcome.ok]
    inputs, outputs = sum(o.prompt_tokens for o in ok), sum(o.output_tokens for o in ok)
    gaps_s = [gap_s for o in ok for gap_s in o.gaps_s]
    latencies: dict[str, Sequence[float | None]] = {
        "ttft_s": [o.ttft_s for o in ok],
        "itl_s": gaps_s,
        "tpot_s": [o.tpot_s for o in ok],
        "e2e_s": [o.e2e_s for o in ok],
    }
    per_s = 1 / seconds if seconds else 0.0
    return {
        "seconds": seconds,
        "requests": {
            "sent": len(sent),
            "ok": len(ok),
            "failed": len(sent) - len(ok),
            "interrupted": len(every) - len(sent),
        },
        "statuses": dict(Counter(outcome.status for outcome in every)),
        "errors": errors_of(sent),
        "requests_per_s": len(ok) * per_s,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "input_tokens_per_s": inputs * per_s,
        "output_tokens_per_s": outputs * per_s,
        **{name: spread_of(values) for name, values in latencies.items()},
        "long_gap_share": sum(g for g in gaps_s if g > LONG_GAP_S) / (sum(gaps_s) or 1.0),
        "goodput": goodput_of(sent, per_s, limits_of(slo)) if slo and sent else None,
        "phases": _phases(ok),
        "prefix_cache": _prefix_cache(ok),
        "short_outputs": sum(o.output_tokens < o.planned_output_tokens for o in ok),
        # Streams whose messages add up to another number of tokens than their usage.
        "miscounted": sum(bool(o.finish) and sum(o.token_counts) != o.output_tokens for o in ok),
        "opened_connections": sum(o.opened_connection for o in every),
    }


def limits_of(slo: Slo) -> dict[str, float]:
    """Finite limits of an SLO by name, in seconds."""
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return {name: limit_s for name, limit_s in limits.items() if math.isfinite(limit_s)}


def goodput_of(sent: Sequence[Outcome], per_s: float, limits: dict[str, float]) -> Stats:
    """Share and rate of requests that met every limit, and shares for each limit."""

    def meets(outcome: Outcome, name: str, limit_s: float) -> bool:
        value_s: float | None = getattr(outcome, f"{name}_s")
        if value_s is None:  # without tokens; one token has no time per output token
            return outcome.ok and name == "tpot" and bool(outcome.token_times_s)
        return outcome.ok and value_s <= limit_s

    count = len(sent)
    good = sum(all(meets(o, *limit) for limit in limits.items()) for o in sent)
    return {
        "slo": limits,
        "share": good / count,
        "requests_per_s": good * per_s,
        "met": {
            n: sum(meets(o, n, limit_s) for o in sent) / count for n, limit_s in limits.items()
        },
    }


def errors_of(sent: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Number of failed requests by status, with the first message of each."""
    failed = [outcome for outcome in sent if not outcome.ok]
    first = {outcome.status: outcome.message for outcome in reversed(failed)}
    counts = Counter(outcome.status for outcome in failed)
    return [
        {"status": status, "count": count, "message": first[status]}
        for status, count in counts.most_common(_MOST_ERRORS)
    ]


def _prefix_cache(ok: Sequence[Outcome]) -> Stats | None:
    reported = [outcome for outcome in ok if outcome.cached_tokens is not None]
    if not reported:
        return None
    cached = sum(outcome.cached_tokens or 0 for outcome in reported)
    inputs = max(1, sum(outcome.prompt_tokens for outcome in reported))
    return {"cached_tokens": cached, "share": cached / inputs}


def _phases(ok: Sequence[Outcome]) -> Stats | None:
    """Time in phases as reported by a Baton server, and outside the server."""
    pairs = [(outcome, outcome.finish) for outcome in ok if outcome.finish is not None]
    if not pairs:
        return None
    times, routes = [finish.timing for _, finish in pairs], [finish.route for _, finish in pairs]
    milliseconds = {
        "queue_s": (t.queue_ms for t in times),
        "first_token_after_queue_s": (max(0.0, t.ttft_ms - t.queue_ms) for t in times),
        "transfer_s": (t.transfer_ms for t in times if t.transfer_bytes),
        "decode_s": (t.e2e_ms - t.ttft_ms for t in times),
        "outside_s": (o.ttft_s * 1e3 - f.timing.ttft_ms for o, f in pairs if o.ttft_s is not None),
        "server_ttft_s": (t.ttft_ms for t in times),
        "server_e2e_s": (t.e2e_ms for t in times),
    }
    return {
        **{name: spread_of(ms / 1e3 for ms in values) for name, values in milliseconds.items()},
        "transfer_bytes": sum(t.transfer_bytes for t in times),
        "transferred": sum(bool(t.transfer_bytes) for t in times),
        "prefilled_by_decode": sum(not route.prefill for route in routes),
        "failovers": sum(route.attempts > 1 for route in routes),
    }
