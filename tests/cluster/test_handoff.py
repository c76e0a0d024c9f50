"""What moves between the workers: exactly the bytes it must, early, and never twice."""

from __future__ import annotations

import json

import pytest

from baton.client import AsyncClient
from baton.config import DEMO_MODEL
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import is_complete
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Case, Oracle, all_blocks_free, check

CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
HEAD_SIZE = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
FLOAT32_BYTES = 4
BYTES_PER_TOKEN = (
    2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * HEAD_SIZE * FLOAT32_BYTES
)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_bytes_are_those_of_the_tokens_sent(
    cluster_factory: ClusterFactory, oracle: Oracle, transport: str
) -> None:
    cluster = await cluster_factory(prefill=1, decode=1, transport=transport)
    async with AsyncClient(cluster.address) as client:
        for length in (33, 160, 501):
            case = Case(oracle.prompt(length, start=1000 + length), "greedy")
            done = await check(client, oracle, case, cache_salt="bytes")
            assert done.timing.transfer_bytes == BYTES_PER_TOKEN * length
            assert done.route.transport == transport


async def test_a_second_turn_moves_only_its_new_blocks(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory(prefill=1, decode=1, transport="shm")
    async with AsyncClient(cluster.address) as client:
        case = Case(oracle.prompt(200, start=2000), "greedy")
        first = await check(client, oracle, case, cache_salt="turns")
        second_prompt = (*case.prompt, *first.token_ids, *oracle.prompt(100, start=2500))
        second = Case(second_prompt, "greedy")
        done = await check(client, oracle, second, cache_salt="turns")
        # Decode keeps whole blocks of the first turn; its last token was never computed there.
        kept = (len(case.prompt) + len(first.token_ids) - 1) // 16 * 16
        assert done.timing.transfer_bytes == BYTES_PER_TOKEN * (len(second_prompt) - kept)
        assert done.usage.cached_tokens >= len(case.prompt) // 16 * 16


async def test_a_short_or_cached_prompt_skips_the_prefill_worker(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory(prefill=1, decode=1, transport="shm")
    async with AsyncClient(cluster.address) as client:
        short = await check(client, oracle, Case(oracle.prompt(15, start=3000), "greedy"))
        assert short.route.prefill is None
        assert short.timing.transfer_bytes == 0
        long = Case(oracle.prompt(333, start=3100), "seeded")
        assert (await check(client, oracle, long)).route.prefill is not None
        again = await check(client, oracle, long)
        assert again.route.prefill is None
        assert again.usage.cached_tokens == 320


async def test_the_trace_of_a_long_prompt(
    cluster_factory: ClusterFactory, oracle: Oracle, traces: OtlpReceiver
) -> None:
    """The first token leaves before Commit, and blocks travel while later chunks compute."""
    services = {"baton-router", "baton-prefill", "baton-decode"}
    cluster = await cluster_factory(otlp=traces.address)
    async with AsyncClient(cluster.address) as client:
        await check(client, oracle, Case(oracle.prompt(64, start=100), "greedy"))  # pairs them
        done = await check(
            client, oracle, Case(oracle.prompt(1900), "greedy", 24), cache_salt="own"
        )
        await all_blocks_free(client)
    spans = await traces.store.wait_for(
        done.trace_id, lambda spans: is_complete(spans, services), 10.0
    )
    by_name = {span.name: span for span in spans}
    chunks = sorted((s for s in spans if s.name == "prefill.chunk"), key=lambda s: s.start_ns)
    assert len(chunks) == 4
    assert sum(int(s.attributes["baton.chunk_tokens"]) for s in chunks) == 1900
    transfer = by_name["kv.transfer"]
    assert transfer.attributes["bytes"] == 1900 * BYTES_PER_TOKEN
    assert int(transfer.attributes["chunks"]) == 4
    assert transfer.start_ns < chunks[-1].start_ns, "blocks left while later chunks computed"
    first_token = by_name["router.first_token"]
    assert first_token.end_ns < transfer.end_ns, "the first token did not wait for Commit"
    assert by_name["decode.first_step"].start_ns >= by_name["decode.admit"].start_ns
    assert by_name["router.generate"].end_ns >= by_name["decode.run"].end_ns
