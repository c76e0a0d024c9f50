"""On the CPU a token's result is the same to the bit, whatever shares its step.

By torch in float32, by native code in every precision, with and without 8-bit weights and KV. That
makes greedy and seeded output independent of batching, chunking, workers and failover.
"""

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from baton.engine.kernels.delta_rule import DeltaRuleShape
from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.torch.activation import act_mul
from baton.engine.kernels.torch.linear import product
from baton.engine.models.model_config import DeltaRuleConfig, ExpertsConfig, LatentConfig
from baton.engine.models.rope import rope_table
from baton.engine.models.rope_config import Rope
from tests.unit.engine.small_models import Kind, feed, require, run_of, tokens
from tests.waiting import WAIT_S

# (in, out) of products in real and in odd shapes.
PRODUCTS = ((64, 1), (32, 64), (64, 160), (33, 65), (96, 100), (576, 960), (1536, 576), (896, 1152))
# bfloat16 by torch is left out: there attention itself trades the promise for speed.
PLACES = (("torch", torch.float32), ("native", torch.float32), ("native", torch.bfloat16))
PLAIN = [Kind(*place) for place in PLACES]
HELD = ((True, False), (False, True), (True, True))
INT8 = [Kind(*place, *held) for place in PLACES for held in HELD]
DELTA_RULE = DeltaRuleConfig((True, False), DeltaRuleShape(2, 6, 16, 32, 4))


@pytest.fixture(autouse=True)
def _threads_are_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


@pytest.mark.parametrize("shape", PRODUCTS)
def test_rows_of_a_product_do_not_depend_on_their_neighbours(shape, threads):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, shape[0], generator=generator)
    weight = torch.randn(shape[1], shape[0], generator=generator)
    bias = torch.randn(shape[1], generator=generator)
    whole = product(x, weight, bias)
    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127):
        assert torch.equal(product(x[11 : 11 + rows], weight, bias), whole[11 : 11 + rows])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("size", [100, 1000, 1536, 4864])
def test_a_gate_does_not_depend_on_threads_or_rows(size, activation, threads):
    gate_up = torch.randn(300, 2 * size, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([act_mul(row[None], activation) for row in gate_up])
    for many in (threads, 2 * threads + 1):
        torch.set_num_threads(many)
        for rows in (1, 2, 16, 23, 101, 300):
            assert torch.equal(act_mul(gate_up[:rows], activation), alone[:rows])


CHANGES: list[dict[str, Any]] = [
    {
        "architecture": "Gemma2ForCausalLM",
        "activation": "gelu_tanh",
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
    },
    {"architecture": "Olmo2ForCausalLM", "ropes": (Rope(1e4, size=16), None)},
    {"architecture": "GraniteForCausalLM", "residual_scale": 0.3, "logit_scale": 0.1},
    {
        "architecture": "Qwen2MoeForCausalLM",
        "experts": ExpertsConfig(6, 48, Routing(3, normed=True), (True, False), shared_size=32),
    },
    {
        "architecture": "GptOssForCausalLM",
        "activation": "swigluoai",
        "experts": ExpertsConfig(6, 48, Routing(3, normed=True), (True, True)),
    },
    {
        "architecture": "DeepseekV3ForCausalLM",
        "num_kv_heads": 1,
        "head_size": 80,
        "latent": LatentConfig(24, 64, nope_size=32, rope_size=16, value_size=32),
        "score_scale": 48**-0.5,
        "experts": ExpertsConfig(
            6, 48, Routing(3, True, True, 3, 2, 2, 1.5), (False, True), shared_size=32
        ),
    },
    {"architecture": "Qwen3NextForCausalLM", "delta_rule": DELTA_RULE},
    {"architecture": "Qwen3_5ForCausalLM", "delta_rule": DELTA_RULE},
]
HEADS = [(4, 2, 96, None), (9, 3, 100, 50), (3, 3, 128, None)]
CASES = [
    *((kind, sizes, {}) for kind in PLAIN for sizes in HEADS),
    *((kind, (4, 2, 100, 50), {}) for kind in INT8),
    *((kind, (4, 2, 100, 50), changes) for kind in PLAIN for changes in CHANGES),
]


def name_of(part):
    return part.get("architecture", "plain") if isinstance(part, dict) else str(part)


@pytest.mark.parametrize(("kind", "sizes", "changes"), CASES, ids=name_of)
def test_tokens_do_not_depend_on_their_batch(kind, sizes, changes):
    """Nor on the number of threads: all equal what one computes for the whole text."""
    heads, kv_heads, inner, window = sizes
    config = {"num_heads": heads, "num_kv_heads": kv_heads, "intermediate_size": inner}
    run = run_of(kind, window, **{**config, "qkv_bias": not changes, **changes})
    mine = tokens(150, seed=1)
    torch.set_num_threads(1)
    whole = feed(run, run.add(mine), 150)
    assert whole.isfinite().all()
    others = [run.add(tokens(length, seed=length), room=32) for length in (5, 140, 300)]
    for other in others:
        feed(run, other, 128)
        other.tokens += tokens(32, seed=9)
    for threads, chunks in ((1, (1, 2, 64)), (2, (7, 33))):
        torch.set_num_threads(threads)
        for chunk in chunks:
            assert torch.equal(feed(run, run.add(mine), chunk), whole), f"chunks of {chunk}"
        sequence = run.add(mine)
        run.step((sequence, 120))
        # A decode row among others, short and long; then a chunk beside decode rows and a chunk.
        got = run.step((others[0], 1), (others[2], 1), (sequence, 1))[2]
        assert torch.equal(got[0], whole[120])
        got = run.step((others[0], 1), (others[2], 1), (sequence, 20), (others[1], 16))[2]
        assert torch.equal(got, whole[121:141])


BY_THREE_THREADS = """
import torch
from tests.unit.engine.test_model_invariance import digest
torch.set_num_threads(3)
print(digest())
"""


def digest():
    """Of the bits of all logits of a prompt in chunks."""
    run = run_of(Kind("native"), 40)
    return hashlib.sha256(feed(run, run.add(tokens(90, 1)), 37).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("limit", ["1", "2"])
def test_fewer_threads_than_asked_for_compute_the_same(limit):
    require("native")
    ran = subprocess.run(
        [sys.executable, "-c", BY_THREE_THREADS],
        env={**os.environ, "OMP_THREAD_LIMIT": limit},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [digest()]


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_neighbours_far_longer_and_long_contexts_in_chunks_change_nothing(kind, threads):
    run = run_of(kind, block_size=32)
    mine = tokens(40, seed=1)
    whole = feed(run, run.add(mine), 40)
    long = run.add(tokens(1200, seed=2))
    all_of_long = feed(run, run.add(long.tokens), 1200)
    assert torch.equal(run.step((long, 1090))[0], all_of_long[:1090])
    sequence = run.add(mine)
    run.step((sequence, 30))
    for at in range(30, 40):
        got = run.step((long, 1), (sequence, 1))
        assert torch.equal(got[0][0], all_of_long[1060 + at])
        assert torch.equal(got[1][0], whole[at])


def test_a_positions_angles_are_the_same_whatever_the_longest_context():
    """Workers with other limits take over each other's KV."""
    long = rope_table(Rope(theta=10_000.0), 96, 4096)
    for size in (1, 2, 63, 64, 100, 1023, 4000):
        short = rope_table(Rope(theta=10_000.0), 96, size)
        assert all(torch.equal(s, table[:size]) for s, table in zip(short, long, strict=True))


@pytest.mark.parametrize("kind", INT8, ids=str)
def test_probabilities_in_8_bits_stay_close_to_those_in_full_precision(kind):
    run, full = run_of(kind), run_of(Kind("torch"))
    mine = tokens(150, seed=1)
    found, wanted = (feed(one, one.add(mine), 64).log_softmax(-1) for one in (run, full))
    assert not torch.equal(found, wanted)
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    assert divergence.mean() < 5e-3
    assert divergence.max() < 5e-2
