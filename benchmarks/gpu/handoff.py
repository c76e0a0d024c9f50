"""A cluster of one prefill and one decode worker: its tokens, and what its handoffs cost."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from contextlib import suppress

from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig
from baton.errors import DeadlineExceeded
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.single import SingleProcess
from baton.local.span_store import Span, SpanStore
from baton.sampling import SamplingParams
from benchmarks.gpu.part import Cells, Part

_LENGTHS, _NEW_TOKENS = (64, 300, 700, 1500), 24
_VOCAB = 4000  # of the demo model's 4096: none of its special tokens
_FLUSHED_S = 3.0  # by then all exporters have sent what they had


def handoff(part: Part, transport: str) -> Cells:
    """A cluster's tokens beside one process's. Raises AssertionError for others."""
    dice = random.Random(0)
    lengths = part.sized(_LENGTHS * 8, _LENGTHS[:2])
    prompts = [[dice.randrange(10, _VOCAB) for _ in range(length)] for length in lengths]
    # The demo model in float32, in which tokens are equal wherever they are computed.
    kernels = "auto" if part.cuda else "torch"
    engine = EngineConfig(dtype="float32", device=part.device_name, kv_blocks=512, kernels=kernels)
    params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
    with SingleProcess(engine) as single:
        wanted = [single.generate(prompt, params).token_ids for prompt in prompts]
    store, taken = SpanStore(10_000, 500_000), set()
    rate = part.copy_bytes_per_s or float("inf")

    def has_cost(spans: Sequence[Span]) -> bool:
        return bookkeeping_ms(spans, rate) is not None

    async def compare() -> None:
        async with OtlpReceiver(store) as receiver:
            config = ClusterConfig(
                engine=engine, port=0, transport=transport, otlp=receiver.address
            )
            async with LocalCluster(config) as cluster, AsyncClient(cluster.address) as client:
                for prompt, tokens in zip(prompts, wanted, strict=True):
                    done = await client.generate(
                        prompt, max_tokens=_NEW_TOKENS, ignore_eos=True, timeout=60
                    )
                    assert done.token_ids == tokens, f"other tokens for a prompt of {len(prompt)}"
                    taken.add(done.route.transport)
                with suppress(DeadlineExceeded):
                    await store.wait_for(done.trace_id, has_cost, _FLUSHED_S)

    asyncio.run(compare())
    assert taken == {transport}, f"handoffs went by {taken}"
    costs = [cost for spans in store.traces() if (cost := bookkeeping_ms(spans, rate)) is not None]
    bookkeeping = statistics.median(costs[1:])  # the first opens the link
    return {"requests": len(prompts), "other tokens": 0, "bookkeeping p50 ms": bookkeeping}


def bookkeeping_ms(spans: Sequence[Span], copy_bytes_per_s: float) -> float | None:
    """What the handoff of one trace costs beyond computing and copying; None without a handoff.

        last chunk ends ── notice ── last put ── Commit, verify ── the sequence can be decoded

    That time, less the time in which the device copies what was put after the chunk.
    """
    named = {span.name: span for span in sorted(spans, key=lambda span: span.end_ns)}
    if any(name not in named for name in ("prefill.chunk", "kv.transfer", "decode.admit")):
        return None
    until_ms = (named["decode.admit"].start_ns - named["prefill.chunk"].end_ns) / 1e6
    attributes = named["kv.transfer"].attributes
    wire, hidden, moved = (float(attributes[name]) for name in ("wire_ms", "hidden_ms", "bytes"))
    late = moved * (1 - hidden / wire) if wire else 0.0
    return until_ms - 2 * late / copy_bytes_per_s * 1e3
