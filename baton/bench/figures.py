"""The figures of one stage of a run, out of what became of its requests.

The definitions are those of vLLM's `bench serve`; docs/benchmarking.md has the formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from baton.bench.outcome import INTERRUPTED, Outcome
from baton.bench.slo import Goodput, Slo
from baton.bench.spread import Spread, quantiles, spread_of

LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
_ERRORS_TOLD = 10


class Requests(TypedDict):
    """How many there were; `sent` leaves out the interrupted ones."""

    sent: int
    ok: int
    failed: int
    interrupted: int


class ErrorTold(TypedDict):
    """Requests that ended with one status, and what the first of them was told."""

    status: str
    count: int
    message: str


class PhaseFigures(TypedDict):
    """Where the time went according to a Baton server; what it does not see is `outside_s`."""

    queue_s: Spread | None
    first_token_after_queue_s: Spread | None  # prefill, placement, and the way to it
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


class Figures(TypedDict):
    """What one server did in one stage. Latencies and tokens are of requests that ended OK."""

    seconds: float
    requests: Requests
    statuses: dict[str, int]
    errors: list[ErrorTold]
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
    phases: PhaseFigures | None
    prefix_cache: PrefixCache | None
    short_outputs: int  # fewer tokens than asked for
    miscounted: int  # the stream brought other than the usage says, where messages tell
    opened_connections: int
    quantiles: dict[str, list[float]]  # 101 each, for distributions


def figures_of(outcomes: Iterable[Outcome], seconds: float, slo: Slo | None) -> Figures:
    """All of them; `seconds` is the time over which rates are taken."""
    every = list(outcomes)
    sent = [outcome for outcome in every if outcome.status != INTERRUPTED]
    ok = [outcome for outcome in sent if outcome.ok]
    inputs, outputs = sum(o.prompt_tokens for o in ok), sum(o.output_tokens for o in ok)
    latencies = _latencies(ok)
    over = 1 / seconds if seconds else 0.0
    return Figures(
        seconds=seconds,
        requests=Requests(
            sent=len(sent),
            ok=len(ok),
            failed=len(sent) - len(ok),
            interrupted=len(every) - len(sent),
        ),
        statuses=dict(Counter(outcome.status for outcome in every)),
        errors=_errors(sent),
        requests_per_s=len(ok) * over,
        input_tokens=inputs,
        output_tokens=outputs,
        input_tokens_per_s=inputs * over,
        output_tokens_per_s=outputs * over,
        ttft_s=spread_of(latencies["ttft_s"]),
        itl_s=spread_of(latencies["itl_s"]),
        tpot_s=spread_of(latencies["tpot_s"]),
        e2e_s=spread_of(latencies["e2e_s"]),
        goodput=slo.goodput(sent, seconds) if slo else None,
        phases=_phases(ok),
        prefix_cache=_prefix_cache(ok),
        short_outputs=sum(o.output_tokens < o.planned_output for o in ok),
        miscounted=sum(o.phases is not None and o.received_tokens != o.output_tokens for o in ok),
        opened_connections=sum(o.opened_connection for o in every),
        quantiles={name: quantiles(values) for name, values in latencies.items()},
    )


def latency(figures: Figures, name: str) -> Spread | None:
    """One of LATENCIES."""
    spread: Spread | None = figures[name]  # type: ignore[literal-required]
    return spread


def p95_s(figures: Figures, name: str) -> float | None:
    """Its 95th percentile, if it has values."""
    spread = latency(figures, name)
    return spread["p95"] if spread else None


def _latencies(ok: Sequence[Outcome]) -> dict[str, list[float | None]]:
    return {
        "ttft_s": [o.ttft_s for o in ok],
        "itl_s": [gap for o in ok for gap in o.gaps_s],
        "tpot_s": [o.tpot_s for o in ok],
        "e2e_s": [o.e2e_s for o in ok],
    }


def _errors(sent: Sequence[Outcome]) -> list[ErrorTold]:
    first: dict[str, str] = {}
    for outcome in sent:
        if not outcome.ok:
            first.setdefault(outcome.status, outcome.message)
    counts = Counter(outcome.status for outcome in sent)
    told = [ErrorTold(status=s, count=counts[s], message=text) for s, text in first.items()]
    return sorted(told, key=lambda error: -error["count"])[:_ERRORS_TOLD]


def _prefix_cache(ok: Sequence[Outcome]) -> PrefixCache | None:
    told = [outcome for outcome in ok if outcome.cached_tokens is not None]
    if not told:
        return None
    cached = sum(outcome.cached_tokens or 0 for outcome in told)
    return PrefixCache(
        cached_tokens=cached, share=cached / max(1, sum(o.prompt_tokens for o in told))
    )


def _phases(ok: Sequence[Outcome]) -> PhaseFigures | None:
    told = [(outcome, outcome.phases) for outcome in ok if outcome.phases]
    if not told:
        return None
    return PhaseFigures(
        queue_s=spread_of(p.queue_s for _, p in told),
        first_token_after_queue_s=spread_of(max(0.0, p.ttft_s - p.queue_s) for _, p in told),
        transfer_s=spread_of(p.transfer_s for _, p in told if p.transfer_bytes),
        decode_s=spread_of(p.e2e_s - p.ttft_s for _, p in told),
        outside_s=spread_of(o.ttft_s - p.ttft_s for o, p in told if o.ttft_s is not None),
        server_ttft_s=spread_of(p.ttft_s for _, p in told),
        server_e2e_s=spread_of(p.e2e_s for _, p in told),
        transfer_bytes=sum(p.transfer_bytes for _, p in told),
        transferred=sum(bool(p.transfer_bytes) for _, p in told),
        prefilled_by_decode=sum(o.prefilled_by_decode for o, _ in told),
        failovers=sum(o.attempts > 1 for o, _ in told),
    )
