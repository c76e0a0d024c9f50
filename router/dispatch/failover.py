"""Failover: when an attempt fails, the request is placed again, on other workers if possible.

One rule makes this exact: prompt + delivered tokens is the new prompt, with the same seed, and
positions go on (`RequestState.spec`). The caller sees a pause, never a repeated, missing or
different token.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton.config import PROVING_TOKENS
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvMismatch,
    RetryableError,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.log_format import about
from baton.telemetry import tracing
from router.queueing.wait_queue import QueueFull
from router.request import RequestState
from router.telemetry.stats import RouterStats

log = logging.getLogger(__name__)

_BACKOFF_S = (0.02, 2.0)  # before the second attempt; at most
# Errors that a worker reports of itself or of its peer, never of the request.
_WORKER_ERRORS = (RetryableError, TransferFailed, Stale, Cancelled, KvMismatch, InternalError)


class RoleMissing(Unavailable):
    """No worker of a role that the request needs came within the recovery timeout."""


async def run_with_failover(
    state: RequestState,
    attempt: Callable[[], Awaitable[None]],
    max_attempts: int,
    stats: RouterStats,
    tracer: Tracer,
    parent: Context,
) -> None:
    """Runs `attempt` until it succeeds; raises the error of the last one.

    `max_attempts`: limit on failures, of which delivered tokens compensate some.
    """
    while True:
        state.attempts += 1
        delivered = len(state.delivered)
        try:
            await attempt()
            return
        except BatonError as error:
            is_cause = record_failure(state, error, len(state.delivered) - delivered)
            if is_cause or state.failures > max_attempts - 1 or not _is_retryable(error, state):
                raise
            trace_id, request_id = tracing.trace_id_in(parent), state.request.request_id
            log.warning(
                "request %s: attempt %d failed, placing it again%s: %s",
                request_id,
                state.attempts,
                ", alone in its steps" if state.runs_alone else "",
                error,
                extra=about(trace_id=trace_id, request_id=request_id),
            )
            stats.failed_over(state, trace_id, error)
        with tracing.span(tracer, "router.backoff", parent):
            await asyncio.sleep(_backoff_s(state.failures))


def record_failure(state: RequestState, error: BatonError, num_tokens: int) -> bool:
    """Counts a failed attempt that delivered `num_tokens`; returns whether the request caused it.

    A request whose steps fail repeatedly runs alone in its steps, and is the cause if one of those
    fails. PROVING_TOKENS prove that it is not: another sequence of the step was. Fewer prove
    nothing, as each attempt brings at least the token of prefill.
    """
    state.failures = max(0.0, state.failures - num_tokens / PROVING_TOKENS) + 1
    ran_alone, is_proven = state.runs_alone, num_tokens >= PROVING_TOKENS
    if is_proven:
        state.failed_steps = 0
    state.failed_steps += isinstance(error, InternalError)
    return ran_alone and not is_proven and isinstance(error, InternalError)


def _is_retryable(error: BatonError, state: RequestState) -> bool:
    """Whether another attempt may succeed; a call's or a worker's limit is not the deadline."""
    if isinstance(error, DeadlineExceeded):
        return state.request.time_left_s > 0
    return isinstance(error, _WORKER_ERRORS) and not isinstance(error, (RoleMissing, QueueFull))


def _backoff_s(failures: float) -> float:
    """Exponential, with jitter."""
    shortest_s, longest_s = _BACKOFF_S
    pause_s: float = min(longest_s, shortest_s * 4 ** min(4, failures - 1))
    return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
