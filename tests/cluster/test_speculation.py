"""Clusters that draft stream what one process without drafts would, in fewer steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from baton.client import AsyncClient
from tests.cluster.conftest import ENGINE, ClusterFactory
from tests.cluster.oracle import SAMPLING, Case, Oracle, all_blocks_free, check
from tests.cluster.streams import Streams, mixed_cases

DRAFTING = replace(ENGINE, speculate=4)


async def test_tokens_are_the_same_and_come_several_at_once(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster = await cluster_factory(engine=DRAFTING)
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


async def test_a_stop_string_ends_a_stream_where_it_ends_without_drafts(
    cluster_factory: ClusterFactory, oracle: Oracle
) -> None:
    cluster, plain = await cluster_factory(engine=DRAFTING), await cluster_factory()
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


async def test_a_killed_worker_costs_no_token(
    repaired_cluster: ClusterFactory, oracle: Oracle
) -> None:
    """The successor finds the text again in the tokens that it is given."""
    cluster = await repaired_cluster(decode=2, engine=DRAFTING)
    async with AsyncClient(cluster.address) as client:
        streams = Streams(client, oracle, mixed_cases(oracle, 12, new_tokens=250))
        running = asyncio.ensure_future(streams.run())
        await streams.midway.wait()
        cluster.kill("decode-0")
        done = await running
        assert any(one.route.attempts > 1 for one in done)
        await all_blocks_free(client)
