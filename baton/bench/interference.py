"""Measures how much long prompts disturb running streams.

Two phases on the same server: the streams alone, and with a long prompt every few seconds. Only a
window of complete periods counts; the streams continue until prompts sent in it are answered, so
that slow answers count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from baton.bench.generator import Generator, Run
from baton.bench.request import INTERRUPTED, Demand, Outcome
from baton.bench.servers import Server
from baton.bench.stats import LONG_GAP_S, Stats, errors_of, spread_of
from baton.bench.workload import Interference, Workload

_LATEST_END_S = 40.0  # after the window; a later answer counts as failed


def streams(workload: Workload) -> Iterator[Demand]:
    """Endless requests; the first have different lengths, so that streams do not end together."""
    for number, demand in enumerate(replace(workload, count=0, duration_s=0.0).demands()):
        share = min(1.0, (number + 1) / workload.concurrency)
        yield replace(demand, new_tokens=max(1, round(demand.new_tokens * share)))


async def interference(
    server: Server,
    workload: Workload,
    load: Interference,
    alone_first: bool,
    stop: asyncio.Event | None = None,
) -> tuple[Stats, dict[str, Run]]:
    """Runs both phases with uncached prompts; returns the statistics, and the runs by part.

    The workload's `concurrency` is the number of streams. Setting `stop` ends it early. `kept` is
    the streams' tokens/s with prompts divided by those without, None unless every prompt was
    answered: a refused prompt does not interfere.
    """
    phases: dict[bool, tuple[Run, Run]] = {}
    for number, has_prompts in enumerate((not alone_first, alone_first)):
        salted = replace(workload, salt=workload.salt * 2 + number)
        prompts = load.prompts(salted) if has_prompts else iter(())
        phases[has_prompts] = await phase(server, salted, load, prompts, stop)
    (only_streams, _), (beside_prompts, sent) = phases[False], phases[True]
    alone, beside = (
        stream_stats(run.outcomes, load.window_s) for run in (only_streams, beside_prompts)
    )
    answered = bool(sent.outcomes) and all(outcome.ok for outcome in sent.outcomes)
    whole = answered and alone["tokens_per_s"] > 0
    stats = {
        "alone": alone,
        "beside": beside,
        "prompts": {
            "sent": len(sent.outcomes),
            "failed": sum(not outcome.ok for outcome in sent.outcomes),
            "ttft_s": spread_of(outcome.ttft_s for outcome in sent.outcomes if outcome.ok),
            "errors": errors_of(sent.outcomes),
        },
        "kept": beside["tokens_per_s"] / alone["tokens_per_s"] if whole else None,
    }
    return stats, {"alone": only_streams, "beside": beside_prompts, "prompts": sent}


async def phase(
    server: Server,
    workload: Workload,
    load: Interference,
    prompts: Iterator[Demand],
    stop: asyncio.Event | None = None,
) -> tuple[Run, Run]:
    """Runs of the streams, which ends with the window, and of the prompts."""
    ended = asyncio.Event()
    running, arriving = Generator(server, ended), Generator(server, ended)
    tasks = [
        asyncio.create_task(running.closed_loop(streams(workload), workload.concurrency)),
        asyncio.create_task(arriving.open_loop(prompts)),
    ]
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        for task, limit_s in zip(tasks, (load.window_s[1], _LATEST_END_S), strict=True):
            await asyncio.wait({stopped, task}, timeout=limit_s, return_when="FIRST_COMPLETED")
    finally:
        ended.set()
        stopped.cancel()
        await asyncio.gather(*tasks)
    return running.run, arriving.run


def stream_stats(outcomes: Sequence[Outcome], window_s: tuple[float, float]) -> Stats:
    """Statistics of these requests inside the window.

    Requests cancelled at the end of the run count with the tokens they had. A gap is the time
    between two messages of a request.
    """
    begin_s, end_s = window_s
    spans = [(o.sent_s + a, o.sent_s + b) for o in outcomes for a, b in pairwise(o.token_times_s)]
    inside = [(max(0.0, min(b, end_s) - max(a, begin_s)), b - a) for a, b in spans]
    streamed_s = sum(part_s for part_s, _ in inside)
    waited_s = sum(part_s for part_s, gap_s in inside if gap_s > LONG_GAP_S)
    messages = sum(begin_s <= o.sent_s + at < end_s for o in outcomes for at in o.token_times_s)
    # Over HTTP a message may have several tokens; only the end of a request gives their number.
    ended = [outcome for outcome in outcomes if outcome.ok]
    tokens_per_message = 1.0
    if ended_messages := sum(len(outcome.token_times_s) for outcome in ended):
        tokens_per_message = sum(outcome.output_tokens for outcome in ended) / ended_messages
    return {
        "tokens_per_s": messages * tokens_per_message / (end_s - begin_s),
        "itl_s": spread_of(b - a for a, b in spans if begin_s <= b < end_s),
        "long_gap_share": waited_s / streamed_s if streamed_s else 0.0,
        "ttft_s": spread_of(o.ttft_s for o in outcomes if begin_s <= o.sent_s < end_s),
        "failed": sum(not o.ok and o.status != INTERRUPTED for o in outcomes),
        "errors": errors_of(o for o in outcomes if o.status != INTERRUPTED),
    }
