"""A cluster streams what one process would, token for token: handoffs, int8, speculation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.config import DEMO_MODEL
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import is_complete
from tests.cluster.conftest import ENGINE, ClusterFactory
from tests.cluster.oracle import LENGTHS, SAMPLING, Case, Oracle, all_blocks_free, check
from tests.cluster.streams import mixed_cases

TOPOLOGIES = [(1, "shm"), (1, "gloo"), (2, "shm"), (2, "gloo")]


@pytest.mark.parametrize(("size", "transport"), TOPOLOGIES)
async def test_alone_cold_and_cached(
    cluster_factory: ClusterFactory, oracle: Oracle, size: int, transport: str
) -> None:
    """Every length, greedy and seeded, first without and then with prefix-cache hits."""
    cluster = await cluster_factory(prefill=size, decode=size, transport=transport)
    async with AsyncClient(cluster.address) as client:
        for sampling in SAMPLING:
            for length in LENGTHS:
                case = Case(oracle.prompt(length), sampling)
                salt = {"cache_salt": f"alone-{sampling}"}
                cold = await check(client, oracle, case, **salt)
                assert cold.usage.prompt_tokens == length
                warm = await check(client, oracle, case, **salt)
                if size == 1:
                    assert warm.usage.cached_tokens == (length - 1) // 16 * 16
        await all_blocks_free(client)


@pytest.mark.parametrize(("size", "transport"), TOPOLOGIES)
async def test_32_at_once(
    cluster_factory: ClusterFactory, oracle: Oracle, size: int, transport: str
) -> None:
    """Mixed lengths and sampling in one batch change no tokens."""
    cluster = await cluster_factory(prefill=size, decode=size, transport=transport)
    kinds = list(SAMPLING)
    lengths = [*LENGTHS, *LENGTHS[:5], *LENGTHS[:5]]
    cases = [Case(oracle.prompt(lengths[i // 2]), kinds[i % 2]) for i in range(32)]
    async with AsyncClient(cluster.address) as client:
        salts = [f"{transport}-{size}-{i % 4}" for i in range(32)]
        runs = [
            check(client, oracle, case, cache_salt=salt)
            for case, salt in zip(cases, salts, strict=True)
        ]
        done = await asyncio.gather(*runs)
        await all_blocks_free(client)
    by_handoff = [one for one in done if one.route.prefill]
    assert by_handoff
    assert {one.route.transport for one in by_handoff} == {transport}
    assert {one.route.attempts for one in done} == {1}
    if size == 2:
        assert len({one.route.decode for one in done}) == 2
        assert len({one.route.prefill for one in by_handoff}) == 2


async def test_text_chat_and_ids_run_the_same_tokens(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory()
    prompt = "def read(path):\n    with open(path) as file:\n"
    async with AsyncClient(cluster.address) as client:
        ids = await client.tokenize(prompt)
        by_text = await client.generate(prompt, max_tokens=16)
        by_ids = await client.generate(ids, max_tokens=16)
        assert by_text.token_ids == by_ids.token_ids
        assert by_text.text == by_ids.text == oracle.text(by_text.token_ids)
        chat = [{"role": "user", "content": "Write a stack."}]
        chat_ids = await client.tokenize(chat)
        by_chat = await client.generate(chat, max_tokens=16)
        assert by_chat.token_ids == (await client.generate(chat_ids, max_tokens=16)).token_ids


async def test_logprobs_and_stop_strings_survive_the_handoff(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory()
    case = Case(oracle.prompt(40), "greedy")
    async with AsyncClient(cluster.address) as client:
        whole = await check(client, oracle, case, logprobs=3, cache_salt="logprobs")
        assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
        assert all(len(one.top) == 3 and one.top[0][1] >= one.logprob for one in whole.logprobs)
        assert whole.route.prefill is not None
        stop = whole.text[10:14]
        stopped = await client.generate(case.prompt, **{**case.options, "stop": stop})
        assert stopped.finish_reason == "stop"
        assert stopped.stop == stop
        assert stopped.text == whole.text[: whole.text.index(stop)]
        await all_blocks_free(client)


async def test_one_token_needs_no_decode(cluster_factory: ClusterFactory, oracle: Oracle) -> None:
    cluster = await cluster_factory()
    case = Case(oracle.prompt(100, start=300), "greedy")
    async with AsyncClient(cluster.address) as client:
        done = await client.generate(case.prompt, max_tokens=1, ignore_eos=True)
        assert done.token_ids == oracle.tokens(case)[:1]
        assert done.finish_reason == "length"
        await all_blocks_free(client)


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
    """The first token leaves before Commit, and blocks are sent while later chunks compute."""
    services = {"baton-router", "baton-prefill", "baton-decode"}
    cluster = await cluster_factory(otlp=traces.address)
    async with AsyncClient(cluster.address) as client:
        await check(client, oracle, Case(oracle.prompt(64, start=100), "greedy"))  # makes the link
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
    assert transfer.start_ns < chunks[-1].start_ns, "no block was sent before the last chunk"
    first_token = by_name["router.first_token"]
    assert first_token.end_ns < transfer.end_ns, "the first token waited for Commit"
    assert by_name["decode.first_step"].start_ns >= by_name["decode.admit"].start_ns
    assert by_name["router.generate"].end_ns >= by_name["decode.run"].end_ns


@pytest.mark.parametrize(("kernels", "transport"), [("auto", "shm"), ("torch", "gloo")])
async def test_int8_weights_and_kv(
    cluster_factory: ClusterFactory, oracle: Oracle, kernels: str, transport: str
) -> None:
    """Cold and with prefix-cache hits, greedy and seeded, over a handoff of the int8 pool."""
    engine = replace(ENGINE, quantization="int8", kv_dtype="int8", kernels=kernels)
    cluster = await cluster_factory(engine=engine, transport=transport)
    differs = False
    with Oracle(engine) as int8_oracle:
        async with AsyncClient(cluster.address) as client:
            for sampling in SAMPLING:
                for length in (49, 500):
                    case = Case(int8_oracle.prompt(length), sampling)
                    cold = await check(client, int8_oracle, case, cache_salt=sampling)
                    assert cold.route.transport == transport
                    warm = await check(client, int8_oracle, case, cache_salt=sampling)
                    assert warm.usage.cached_tokens == (length - 1) // 16 * 16
                    differs |= int8_oracle.tokens(case) != oracle.tokens(case)
            await all_blocks_free(client)
    assert differs, "int8 changed no token: it was not used"


SPECULATING = replace(ENGINE, speculate=4)


async def test_speculation_changes_no_token_and_delivers_several_at_once(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory(engine=SPECULATING)
    async with AsyncClient(cluster.address) as client:
        for sampling in SAMPLING:
            case = Case(oracle.prompt(200, start=900), sampling, new_tokens=120)
            largest = 0
            asked = client.stream(case.prompt, **case.options, logprobs=1, cache_salt=sampling)
            async with asked as stream:
                async for delta in stream:
                    assert len(delta.logprobs) == len(delta.token_ids)
                    largest = max(largest, len(delta.token_ids))
            done = stream.completion
            assert done.token_ids == oracle.tokens(case)
            assert [one.token_id for one in done.logprobs] == list(done.token_ids)
            assert done.text == oracle.text(done.token_ids)
            assert largest > 1
        runs = [check(client, oracle, case) for case in mixed_cases(oracle, 16, new_tokens=60)]
        await asyncio.gather(*runs)
        await all_blocks_free(client)


async def test_a_stop_string_ends_a_stream_at_the_same_token_with_speculation(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster, plain = await cluster_factory(engine=SPECULATING), await cluster_factory()
    prompt = oracle.prompt(200, start=900)
    async with AsyncClient(cluster.address) as client, AsyncClient(plain.address) as other:
        whole = await other.generate(prompt, max_tokens=120, ignore_eos=True)
        for at in (60, 83, 101):
            stop = whole.text[at : at + 5]
            options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "stop": stop}
            one = await client.generate(prompt, **options)
            two = await other.generate(prompt, **options)
            assert (one.text, one.stop, one.finish_reason) == (two.text, stop, "stop")
            assert one.token_ids == two.token_ids
            assert one.usage.completion_tokens == two.usage.completion_tokens
        await all_blocks_free(client)
