"""The statistics of one stage of a run, made from the outcomes of its requests.

The definitions are those of vLLM's `bench serve`; docs/benchmarking.md has the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from baton.bench.request import INTERRUPTED, Outcome
from baton.slo import Slo

_MOST_ERRORS = 10


class Spread(TypedDict):
    """Mean and percentiles of many values; seconds where the field's name ends in _s."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values there are, percentiles as `percentile`; None of none."""
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    p50, p90, p95, p99 = map(float, np.percentile(known, (50, 90, 95, 99)))
    return Spread(
        count=known.size, mean=float(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99,
        min=float(known.min()), max=float(known.max()),
    )  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two nearest ranks (numpy's default); NaN of none."""
    known = list(values)
    return float(np.percentile(known, percent)) if known else math.nan


def quantiles(values: Iterable[float | None], steps: int = 100) -> list[float]:
    """`steps` + 1 values from the smallest to the largest, evenly spaced in rank; none of none."""
    known = [value for value in values if value is not None]
    found: list[float] = (
        np.percentile(known, np.linspace(0, 100, steps + 1)).tolist() if known else []
    )
    return found


class Requests(TypedDict):
    """How many there were; `sent` leaves out the interrupted ones."""

    sent: int
    ok: int
    failed: int
    interrupted: int


class ErrorCount(TypedDict):
    """Requests that ended with one status, with the message of the first."""

    status: str
    count: int
    message: str


class Goodput(TypedDict):
    """How many requests met every service-level objective."""

    slo: dict[str, float]  # seconds
    share: float  # of all that were sent
    requests_per_s: float
    met: dict[str, float]  # share of all that were sent, for each objective alone


class PhaseStats(TypedDict):
    """Where the time went according to a Baton server; what it does not see is `outside_s`."""

    queue_s: Spread | None
    first_token_after_queue_s: Spread | None  # prefill, placement and handoff
    transfer_s: Spread | None  # of those whose KV was transferred
    decode_s: Spread | None  # from the first token to the end, at the server
    outside_s: Spread | None  # the caller's TTFT less the server's: network and client
    server_ttft_s: Spread | None
    server_e2e_s: Spread | None
    transfer_bytes: int
    transferred: int
    prefilled_by_decode: int
    failovers: int  # requests that took more than one attempt


class PrefixCache(TypedDict):
    """Prompt tokens that were not computed again."""

    cached_tokens: int
    share: float  # of input tokens


class Stats(TypedDict):
    """What one server did in one stage. Latencies and tokens are of requests that ended OK."""

    seconds: float
    requests: Requests
    statuses: dict[str, int]
    errors: list[ErrorCount]
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    goodput: Goodput | None
    phases: PhaseStats | None
    prefix_cache: PrefixCache | None
    short_outputs: int  # fewer tokens than asked for
    miscounted: int  # the stream's token count differs from its usage, where messages give counts
    opened_connections: int
    quantiles: dict[str, list[float]]  # 101 each, for distributions


def stats_of(outcomes: Iterable[Outcome], seconds: float, slo: Slo | None = None) -> Stats:
    """All of them; `seconds` is the time over which rates are taken."""
    every = list(outcomes)
    sent = [outcome for outcome in every if outcome.status != INTERRUPTED]
    ok = [outcome for outcome in sent if outcome.ok]
    inputs, outputs = sum(o.prompt_tokens for o in ok), sum(o.output_tokens for o in ok)
    latencies: dict[str, list[float | None]] = {
        "ttft_s": [o.ttft_s for o in ok],
        "itl_s": [gap for o in ok for gap in o.gaps_s],
        "tpot_s": [o.tpot_s for o in ok],
        "e2e_s": [o.e2e_s for o in ok],
    }
    per_s = 1 / seconds if seconds else 0.0
    return Stats(
        seconds=seconds,
        requests=Requests(
            sent=len(sent),
            ok=len(ok),
            failed=len(sent) - len(ok),
            interrupted=len(every) - len(sent),
        ),
        statuses=dict(Counter(outcome.status for outcome in every)),
        errors=_errors(sent),
        requests_per_s=len(ok) * per_s,
        input_tokens=inputs,
        output_tokens=outputs,
        input_tokens_per_s=inputs * per_s,
        output_tokens_per_s=outputs * per_s,
        ttft_s=spread_of(latencies["ttft_s"]),
        itl_s=spread_of(latencies["itl_s"]),
        tpot_s=spread_of(latencies["tpot_s"]),
        e2e_s=spread_of(latencies["e2e_s"]),
        goodput=goodput_of(sent, seconds, slo) if slo else None,
        phases=_phases(ok),
        prefix_cache=_prefix_cache(ok),
        short_outputs=sum(o.output_tokens < o.planned_output for o in ok),
        miscounted=sum(o.phases is not None and o.received_tokens != o.output_tokens for o in ok),
        opened_connections=sum(o.opened_connection for o in every),
        quantiles={name: quantiles(values) for name, values in latencies.items()},
    )


def limits_of(slo: Slo) -> dict[str, float]:
    """Its limits by name, seconds."""
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return {name: limit_s for name, limit_s in limits.items() if math.isfinite(limit_s)}


def goodput_of(sent: Sequence[Outcome], seconds: float, slo: Slo) -> Goodput:
    """Over all requests sent: one that failed has met nothing."""

    def meets(outcome: Outcome, name: str, limit_s: float) -> bool:
        # An answer of one token has no time per output token, and so meets any limit on it.
        value_s: float | None = getattr(outcome, f"{name}_s")
        return outcome.ok and (value_s is None or value_s <= limit_s)

    limits = limits_of(slo)
    count = max(1, len(sent))
    good = sum(all(meets(o, *limit) for limit in limits.items()) for o in sent)
    return Goodput(
        slo=limits,
        share=good / count,
        requests_per_s=good / seconds if seconds else 0.0,
        met={n: sum(meets(o, n, limit_s) for o in sent) / count for n, limit_s in limits.items()},
    )


def latency(stats: Stats, name: str) -> Spread | None:
    """The latency of that name, as "ttft_s"."""
    spread: Spread | None = stats[name]  # type: ignore[literal-required]
    return spread


def _errors(sent: Sequence[Outcome]) -> list[ErrorCount]:
    failed = [outcome for outcome in sent if not outcome.ok]
    first = {outcome.status: outcome.message for outcome in reversed(failed)}
    counts = Counter(outcome.status for outcome in failed)
    return [
        ErrorCount(status=status, count=count, message=first[status])
        for status, count in counts.most_common(_MOST_ERRORS)
    ]


def _prefix_cache(ok: Sequence[Outcome]) -> PrefixCache | None:
    reported = [outcome for outcome in ok if outcome.cached_tokens is not None]
    if not reported:
        return None
    cached = sum(outcome.cached_tokens or 0 for outcome in reported)
    inputs = max(1, sum(outcome.prompt_tokens for outcome in reported))
    return PrefixCache(cached_tokens=cached, share=cached / inputs)


def _phases(ok: Sequence[Outcome]) -> PhaseStats | None:
    pairs = [(outcome, outcome.phases) for outcome in ok if outcome.phases]
    if not pairs:
        return None
    return PhaseStats(
        queue_s=spread_of(p.queue_s for _, p in pairs),
        first_token_after_queue_s=spread_of(max(0.0, p.ttft_s - p.queue_s) for _, p in pairs),
        transfer_s=spread_of(p.transfer_s for _, p in pairs if p.transfer_bytes),
        decode_s=spread_of(p.e2e_s - p.ttft_s for _, p in pairs),
        outside_s=spread_of(o.ttft_s - p.ttft_s for o, p in pairs if o.ttft_s is not None),
        server_ttft_s=spread_of(p.ttft_s for _, p in pairs),
        server_e2e_s=spread_of(p.e2e_s for _, p in pairs),
        transfer_bytes=sum(p.transfer_bytes for _, p in pairs),
        transferred=sum(bool(p.transfer_bytes) for _, p in pairs),
        prefilled_by_decode=sum(o.prefilled_by_decode for o, _ in pairs),
        failovers=sum(o.attempts > 1 for o, _ in pairs),
    )
