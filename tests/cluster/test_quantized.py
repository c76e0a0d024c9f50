"""A cluster in 8 bits streams what one process in 8 bits would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.client import AsyncClient
from tests.cluster.conftest import ENGINE, ClusterFactory
from tests.cluster.oracle import SAMPLING, Case, Oracle, all_blocks_free, check


@pytest.mark.parametrize(("kernels", "transport"), [("auto", "shm"), ("torch", "gloo")])
async def test_weights_and_kv_in_8_bits(
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
    assert differs, "8 bits change a token somewhere, or these were not computed in 8 bits"
