"""A cluster streams what one process would, token for token, whatever moved between workers."""

from __future__ import annotations

import asyncio

import pytest

from baton.client import AsyncClient
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import LENGTHS, SAMPLING, Case, Oracle, all_blocks_free, check

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
    """Mixed lengths and sampling in one batch change nobody's tokens."""
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
