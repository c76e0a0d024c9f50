"""On the CPU a token's result is the same to the bit, whoever shares its step.

By torch in float32, by native code in every precision.
That is what makes greedy and seeded output independent of batching, chunking, workers and failover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import Rope
from baton.engine.models.decoder import Model, rope_tables
from baton.engine.ops.native.model import NativeModel
from baton.engine.ops.torch.linear import linear, silu_gate
from baton.engine.weights.weights import random_weights
from tests.unit.engine import either
from tests.unit.engine.paged import PagedRun, PagedSequence
from tests.unit.engine.small_config import small_config

CPU = torch.device("cpu")
MakeModel = Callable[..., Model | NativeModel]
# (in, out) of products in real and in odd shapes.
PRODUCTS = ((32, 64), (64, 160), (33, 65), (96, 100), (576, 960), (1536, 576), (896, 1152))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["torch float32", "native float32", "native bfloat16"])
def small_model(request: pytest.FixtureRequest) -> MakeModel:
    kernels, _, dtype = request.param.partition(" ")

    def small_model(
        heads: int, kv_heads: int, inner: int, window: int | None = None
    ) -> Model | NativeModel:
        return a_small_model(kernels, getattr(torch, dtype), heads, kv_heads, inner, window)

    return small_model


def a_small_model(
    kernels: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    inner: int,
    window: int | None = None,
) -> Model | NativeModel:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "intermediate_size": inner}
    config = small_config(window, **sizes)
    weights = random_weights(config, dtype, CPU, seed=3)
    for layer in weights.layers:
        # Wide enough for sharp attention and large activations.
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            matrix.mul_(8)
    return either.make(kernels, config, weights, dtype)


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(run: PagedRun, sequence: PagedSequence, chunk: int) -> Tensor:
    parts = []
    while left := len(sequence.tokens) - sequence.computed:
        parts += run.step((sequence, min(chunk, left)))
    return torch.cat(parts)


@pytest.mark.parametrize("shape", PRODUCTS)
def test_rows_of_a_product_do_not_know_their_neighbours(
    shape: tuple[int, int], threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, shape[0], generator=generator)
    weight = torch.randn(shape[1], shape[0], generator=generator)
    bias = torch.randn(shape[1], generator=generator)
    whole = linear(x, weight, bias)
    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127):
        assert torch.equal(linear(x[11 : 11 + rows], weight, bias), whole[11 : 11 + rows])


@pytest.mark.parametrize("size", [100, 1000, 1536, 4864])
@pytest.mark.parametrize("many_threads", [1, 2, 3, 5])
def test_silu_does_not_depend_on_threads_or_rows(size: int, many_threads: int) -> None:
    gate_up = torch.randn(300, 2 * size, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    alone = torch.cat([silu_gate(row[None]) for row in gate_up])
    try:
        torch.set_num_threads(many_threads)
        for rows in (1, 2, 16, 23, 101, 300):
            assert torch.equal(silu_gate(gate_up[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "window"), [(4, 2, 96, None), (9, 3, 100, 50), (3, 3, 128, None)]
)
def test_tokens_do_not_know_their_batch(
    small_model: MakeModel,
    heads: int,
    kv_heads: int,
    inner: int,
    window: int | None,
    threads: int,
) -> None:
    run = PagedRun(small_model(heads, kv_heads, inner, window))
    mine = tokens(150, seed=1)
    whole = feed(run, run.add(mine), 150)
    for chunk in (1, 2, 7, 33, 64):
        assert torch.equal(feed(run, run.add(mine), chunk), whole), f"chunks of {chunk}"
    others = [run.add(tokens(length, seed=length), room=32) for length in (5, 140, 300)]
    for other in others:
        feed(run, other, 128)
        other.tokens += tokens(32, seed=9)
    sequence = run.add(mine)
    run.step((sequence, 120))
    # A decode row among others, short and long; then a chunk beside decode rows and a chunk.
    got = run.step((others[0], 1), (others[2], 1), (sequence, 1))[2]
    assert torch.equal(got[0], whole[120])
    got = run.step((others[0], 1), (others[2], 1), (sequence, 20), (others[1], 17))[2]
    assert torch.equal(got, whole[121:141])


def test_keys_of_neighbours_far_longer_change_nothing(small_model: MakeModel, threads: int) -> None:
    run = PagedRun(small_model(4, 2, 96), block_size=32)
    mine = tokens(40, seed=1)
    whole = feed(run, run.add(mine), 40)
    long = run.add(tokens(1100, seed=2))
    run.step((long, 1090))
    sequence = run.add(mine)
    run.step((sequence, 30))
    for at in range(30, 40):
        got = run.step((long, 1), (sequence, 1))[1]
        assert torch.equal(got[0], whole[at])


def test_a_long_context_is_the_same_whole_and_in_chunks(
    small_model: MakeModel, threads: int
) -> None:
    run = PagedRun(small_model(4, 2, 96), block_size=32)
    mine = tokens(1200, seed=5)
    whole = feed(run, run.add(mine), 1200)
    assert torch.equal(feed(run, run.add(mine), 500), whole)
    again = run.add(mine)
    run.step((again, 1199))
    assert torch.equal(run.step((again, 1))[0][0], whole[1199])


def test_thread_counts_agree(small_model: MakeModel) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            run = PagedRun(small_model(9, 3, 100))
            results.append(feed(run, run.add(tokens(150, seed=1)), 64))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_a_positions_angles_are_the_same_whatever_the_longest_context() -> None:
    """Workers with other limits take over each other's KV."""
    long = rope_tables(Rope(theta=10_000.0), 96, 4096)
    for size in (1, 2, 63, 64, 100, 1023, 4000):
        short = rope_tables(Rope(theta=10_000.0), 96, size)
        assert all(torch.equal(s, table[:size]) for s, table in zip(short, long, strict=True))
