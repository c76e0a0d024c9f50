"""The GPU's model gives what the torch model gives: logits, KV and tokens, batched any way."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from baton.engine.backends.gpu import linear
from baton.engine.backends.gpu.backend import refused
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.batch import StepBatch
from baton.engine.kernels.torch.row_quantization import FP8, unpack_rows
from baton.engine.kernels.triton.fused_moe import MoeWeight
from baton.engine.models.architectures import ARCHITECTURES
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.weight_loader import load_weights, random_weights
from baton.engine.quantization import int8
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.linear_weight import DenseWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from baton.errors import ConfigError
from tests.unit.engine.checkpoints import SIZES, make_checkpoint
from tests.unit.engine.gpu.models import CONFIGS, EXPERTS, FEW_STATES, TINY, both, tokens
from tests.unit.engine.paged import PagedRun, ints
from tests.unit.engine.quantized_checkpoints import make_mxfp4
from tests.unit.engine.small_models import CPU

ROWS = 18 + 4 + 1 + 4 + 3 + 3  # of mixed_steps


def mixed_steps(run):
    """Chunks; then a decode row among chunks, one behind a cached prefix; then decode rows."""
    first, second = run.add(tokens(20, 1)), run.add(tokens(9, 2))
    logits = run.step((first, 18), (second, 4))
    third = run.add(first.tokens[:16] + tokens(4, 3))
    groups = run.num_groups  # of layers, each with a block
    third.block_ids[:groups], third.computed = first.block_ids[:groups], 16
    logits += run.step((first, 1), (second, 4), (third, 3))
    logits += run.step((first, 1), (second, 1), (third, 1))
    return logits


def assert_near(one, other, atol=2e-5):
    """Equal steps give equal logits, and leave equal pools."""
    got, expected = mixed_steps(one), mixed_steps(other)
    for row, wanted in zip(got, expected, strict=True):
        assert row.dtype == torch.float32
        torch.testing.assert_close(row, wanted, rtol=0, atol=atol)
    assert wanted.std() > 0.3, "a model that says nothing proves nothing"


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_torch_model(name):
    model, gpu = both(CONFIGS[name])
    runs = PagedRun(gpu), PagedRun(model)
    assert_near(*runs)
    torch.testing.assert_close(runs[0].pool, runs[1].pool, rtol=0, atol=1e-5)
    if model.expert_tokens is not None:
        assert torch.equal(gpu.expert_tokens, model.expert_tokens)
        layers, per_token = sum(model.config.experts.layers), model.config.experts.routing.per_token
        assert model.expert_tokens.sum(1).tolist() == [ROWS * per_token] * layers


def assert_is(reference, folder, config):
    """The checkpoint on the GPU's path gives the logits of transformers' model."""
    prepare = partial(linear.prepare, quantization="none")
    weights = load_weights(folder, config, torch.float32, CPU, prepare)
    run = PagedRun(GpuModel(config, weights, torch.float32, CPU))
    prompt = tokens(20, 1)
    got = run.logits(prompt, 19, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which is infinite on a GPU
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_transformers(architecture, tmp_path):
    few = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    small = {} if architecture in SIZES else {**few, **sizes}
    if ARCHITECTURES[architecture].delta_rule:
        small |= FEW_STATES
    if ARCHITECTURES[architecture].chunked:
        small |= {"attention_chunk_size": 8}
    reference = make_checkpoint(tmp_path, architecture, sliding_window=12, **small)
    config = ModelConfig.load(tmp_path)
    if reason := refused(config, 16, (9, 0)):
        pytest.skip(reason)
    assert_is(reference, tmp_path, config)


@pytest.mark.parametrize(("kv_dtype", "quantization"), [(torch.int8, "fp8"), (FP8, "int8")])
@pytest.mark.parametrize("name", ["llama", "qwen2 moe"])
def test_int8_and_fp8(name, kv_dtype, quantization):
    # An output layer over an odd vocabulary stays whole.
    config = replace(CONFIGS[name], qkv_bias=True, vocab_size=97)
    model, gpu = both(config, quantization=quantization)
    runs = tuple(PagedRun(one, kv_dtype=kv_dtype) for one in (gpu, model))
    # Where two sums differ in their last bit, a value may come out as its neighbour.
    assert_near(*runs, atol=0.05)
    got, expected = (unpack_rows(run.pool[1:], torch.float32) for run in runs)
    apart = (got - expected).abs()
    assert (apart > 1e-4).float().mean() < 2e-3
    assert (apart <= expected.abs().amax(-1, keepdim=True) / 14 + 1e-6).all()


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize(("rows", "apart"), [(5, 2), (70, 1)])
def test_norms_and_gates_give_the_eight_bits_that_products_take(
    rows, apart, quantization, monkeypatch
):
    """Of a layer's four products only that of attention's output quantises by itself; and that
    behind a gate that few rows went through in a product."""
    config = replace(TINY, vocab_size=97)  # whose output layer stays whole
    models, steps = both(config, quantization=quantization), []
    for module in (int8, linear):

        def counted(x, dtype, quantize=module.quantize_rows):
            steps[-1] += 1
            return quantize(x, dtype)

        monkeypatch.setattr(module, "quantize_rows", counted)
    for model in models:
        steps.append(0)
        run = PagedRun(model)
        run.step((run.add(tokens(rows, 1, 97)), rows))
    assert steps == [4 * config.num_layers, apart * config.num_layers]


@pytest.mark.parametrize("name", ["llama", "llama biases, odd heads", "gemma3", "qwen2 tied"])
def test_few_rows_of_bfloat16_are_four_products_a_layer(name, monkeypatch):
    """Their norms, gates and sums are done on the way, unless a branch is normed by itself."""
    config = CONFIGS[name]
    model, gpu = both(config, torch.bfloat16)
    launched, launch = Counter[str](), GridExecutor.__call__

    def counted(self, *args, **kwargs):
        launched[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    logits = []
    for one in (model, gpu):
        run = PagedRun(one)
        sequences = [run.add(tokens(length, length)) for length in (9, 4, 6)]
        run.step(*((sequence, len(sequence.tokens) - 1) for sequence in sequences))
        launched.clear()
        logits.append(torch.cat(run.step(*((sequence, 1) for sequence in sequences))))
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.04
    layers, branches = config.num_layers, 2 * config.num_layers * (name == "gemma3")
    assert launched["_skinny_matmul"] == 4 * layers + 1
    assert launched["_add_rms_norm_kernel"] == branches and not launched["_act_mul_kernel"]


def test_int4_experts():
    experts = replace(EXPERTS, size=64)
    config = replace(CONFIGS["gpt-oss"], hidden_size=64, experts=experts)
    model, gpu = both(config, quantization="int4")
    assert isinstance(linear.unwrapped(gpu._weights.layers[0].experts.experts[0].down), Int4Weight)
    assert_near(PagedRun(gpu), PagedRun(model), atol=1e-4)


def test_mxfp4_experts(tmp_path):
    reference = make_mxfp4(tmp_path, num_local_experts=4)
    config = ModelConfig.load(tmp_path)
    prepare = partial(linear.prepare, quantization="int8")  # which leaves these as they are
    held = load_weights(tmp_path, config, torch.float32, CPU, prepare).layers[0].experts
    assert isinstance(linear.unwrapped(held.experts[3].down), Mxfp4Weight)
    assert_is(reference, tmp_path, config)


@pytest.mark.parametrize("kind", [DecoderModel, GpuModel])
def test_ranks_with_whole_experts_add_up_to_all(kind, monkeypatch):
    config = replace(CONFIGS["gpt-oss"], experts=replace(EXPERTS, count=5))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, config.hidden_size, generator=generator)
    router = DenseWeight(torch.randn(5, config.hidden_size, generator=generator))
    placed = SimpleNamespace(lengths=torch.ones(7, dtype=torch.int32))

    def mixed(shard):
        prepare = partial(linear.prepare, quantization="none")
        weights = random_weights(config, torch.float32, CPU, 3, prepare, shard)
        model = kind(config, weights, torch.float32, CPU, shard=shard)
        tokens = torch.zeros(5, dtype=torch.int64)
        experts = replace(model._weights.layers[0].experts, router=router, router_bias=None)
        found = model._mix(x, experts, placed, tokens)
        assert tokens.sum() == 7 * 3, "each rank counts all"
        return found

    whole = mixed(WHOLE)
    # New memory holds NaN then: what no rank computes must not be read.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        parts = [mixed(Shard(rank, 2, expert_parallel=True)) for rank in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(part.abs().max() > 0 for part in parts)
    torch.testing.assert_close(sum(parts), whole)


def test_experts_that_are_not_multiplied_together_are_refused():
    dense = DenseWeight(torch.zeros(64, 64))
    int4 = Int4Weight.from_dense(dense.tensor + 1)
    for weights, reason in (
        ((dense, int4), "some experts .* --device cpu"),
        ((int4, replace(int4, order=torch.arange(64))), "act-order .* --device cpu"),
    ):
        with pytest.raises(ConfigError, match=reason):
            MoeWeight.from_weights(weights, (None, None), torch.bfloat16)


def test_bfloat16_is_as_near_to_float32_as_torch_is():
    exact, _ = both(TINY)
    expected = torch.cat(mixed_steps(PagedRun(exact)))
    errors = []
    for model in both(TINY, torch.bfloat16):
        run = PagedRun(model)
        errors.append((torch.cat(mixed_steps(run)) - expected).abs().mean())
        assert run.pool.dtype == torch.bfloat16
    # The interpreter cuts what bfloat16 cannot hold, which is twice the error of rounding.
    assert errors[1] < 3 * errors[0]


class NoWaiting(TorchDispatchMode):
    """Refuses operations that would make the host wait for a GPU, and those that kernels spare."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "item")
    SPARED = ("cat", "sort", "searchsorted")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in func.name() for name in self.WAITING), f"{func.name()} waits"
        assert func.overloadpacket.__name__ not in self.SPARED, f"{func.name()} is launched"
        return func(*args, **(kwargs or {}))


@pytest.fixture(
    scope="module", params=["mistral window, no gqa", "gpt-oss", "deepseek v3", "llama4"]
)
def decoding(request):
    """A model, a run with two sequences of 18 and 5 tokens; their last tokens and block_tables."""
    _, gpu = both(CONFIGS[request.param])
    run = PagedRun(gpu)
    sequences = [run.add(tokens(18, 1), room=2), run.add(tokens(5, 2), room=27)]
    run.step((sequences[0], 18), (sequences[1], 5))
    return gpu, run, ints([7, 11]), ints([sequence.block_ids for sequence in sequences])


def test_decode_is_a_step_of_single_rows(decoding):
    gpu, run, last, block_tables = decoding
    stepped, decoded = run.pool.clone(), run.pool.clone()
    batch = StepBatch(last, ints([18, 5]), ints([1, 1]), block_tables, ints([0, 1]), 2)
    expected = gpu.step(batch, stepped)
    before = None if gpu.expert_tokens is None else gpu.expert_tokens.clone()
    # Two rows of padding among them, whose block_tables name blocks that are somebody's.
    padded = [torch.stack([rows[0], rows[1], rows[1], rows[0]]) for rows in (last, block_tables)]
    got = gpu.decode(padded[0], ints([18, -1, 5, -1]), padded[1], decoded)
    assert got.shape == (4, TINY.vocab_size)
    assert torch.isfinite(got).all()
    if gpu.expert_tokens is not None:
        taken = (gpu.expert_tokens - before).sum(1).tolist()
        assert taken == [2 * 3] * len(before), "padding takes none"
    torch.testing.assert_close(got[[0, 2]], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded, stepped, rtol=0, atol=1e-5)
    written = decoded != run.pool
    assert torch.equal(written, stepped != run.pool), "padding leaves the pool alone"
    groups = run.num_groups
    assert written[block_tables[0, groups : 2 * groups].long(), ..., 2, :].all()
    assert written[block_tables[1, :groups].long(), ..., 5, :].all()
    gpu.decode(last, ints([-1, -1]), block_tables, decoded)
    assert torch.equal(written, decoded != run.pool), "nor does a batch of padding touch it"
    assert written.sum() == 2 * groups * run.pool[0, :, :, :, 0].numel()


def test_nothing_waits_for_the_device(decoding, monkeypatch):
    gpu, run, last, block_tables = decoding
    pool = run.pool.clone()
    mixed = StepBatch(
        token_ids=ints([7, 11, 12, 13]),
        context_lens=ints([18, 5]),
        query_lens=ints([1, 3]),
        block_tables=block_tables,
        logit_rows=ints([0, 3]),
        num_decodes=1,
    )
    with NoWaiting():
        gpu.step(mixed, pool)
        gpu.decode(last, ints([18, -1]), block_tables, pool)
        with pytest.raises(AssertionError, match="waits"):
            last[0].item()


def test_states_are_advanced_by_their_own_rows_without_waiting():
    _, gpu = both(CONFIGS["qwen3.5"])
    run = PagedRun(gpu)
    sequences = [run.add(tokens(9, 1), room=7), run.add(tokens(5, 2), room=11)]
    run.step((sequences[0], 9), (sequences[1], 2))
    chunk, decoded = ints([7, 11, 12, 13]), run.pool.clone()
    tables, states = (ints([getattr(one, name) for one in sequences]) for name in (
        "block_ids", "state_blocks"))  # fmt: skip
    lens, logit_rows = (ints([9, 2]), ints([1, 3])), ints([0, 3])
    mixed = StepBatch(chunk, *lens, tables, logit_rows, 1, state_tables=states)
    padded = ints([7, 11, 7]), ints([9, -1, -1]), tables[[0, 1, 0]]
    with NoWaiting():
        expected = gpu.step(mixed, run.pool)
        got = gpu.decode(*padded, decoded, state_tables=states[[0, 1, 0]])
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    of_first = [*sequences[0].state_blocks, *sequences[0].block_ids]
    torch.testing.assert_close(decoded[of_first], run.pool[of_first], rtol=0, atol=1e-5)
    changed = (decoded != run.pool).flatten(1).any(1).nonzero()[:, 0].tolist()
    of_second = {*sequences[1].state_blocks, *sequences[1].block_ids}
    assert changed and {*changed} - {*of_first} <= of_second, "padding leaves the pool alone"
