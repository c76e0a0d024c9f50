"""Native steps, whole and by operations, against torch in precisions that transformers has not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from baton.engine.backends.cpu.native_model import NativeModel
from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.weight_loader import random_weights
from baton.engine.models.weights import ModelWeights
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.methods import quantize_weight
from tests.unit.engine.paged import PagedRun, PagedSequence
from tests.unit.engine.small_models import packed, relative_error, small_config

pytestmark = pytest.mark.usefixtures("every_cpu")
CPU = torch.device("cpu")
CONFIG = small_config(
    window=40,
    architecture="Qwen3ForCausalLM",
    vocab_size=301,
    hidden_size=96,
    num_heads=6,
    tie_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    max_context=512,
    dtype="bfloat16",
)
TOKENS = torch.randint(0, 301, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def weights_of(dtype: torch.dtype, int8: bool = False) -> ModelWeights:
    def prepare(weight: LinearWeight, is_output: bool) -> LinearWeight:
        assert isinstance(weight, DenseWeight)
        return quantize_weight(weight, "int8" if int8 else "none")

    return random_weights(CONFIG, dtype, CPU, seed=3, prepare=prepare)


def logits(model: DecoderModel, query_lens: tuple[int, ...], int8_kv: bool = False) -> Tensor:
    run = PagedRun(model, kv_dtype=torch.int8 if int8_kv else None)
    logits: Tensor = run.logits(TOKENS, *query_lens)
    return logits


@pytest.mark.parametrize("int8_kv", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_it_is_as_close_to_float32_as_torch_is(int8: bool, int8_kv: bool) -> None:
    def by_torch(dtype: torch.dtype) -> Tensor:
        return logits(DecoderModel(CONFIG, weights_of(dtype, int8), dtype, CPU), (90,), int8_kv)

    def by_native(kind: type[NativeOps], dtype: torch.dtype) -> Tensor:
        model = kind(CONFIG, packed(weights_of(dtype, int8)), dtype)
        return logits(model, (37, 1, 52), int8_kv)

    exact = by_torch(torch.float32)
    # A last bit may round an int8 to its neighbour, which is a hundredth of a row's largest.
    limit = 3e-3 if int8 or int8_kv else 2e-6
    of_torch = relative_error(by_torch(torch.bfloat16), exact)
    for kind in (NativeModel, NativeOps):
        assert relative_error(by_native(kind, torch.float32), exact) < limit
        assert relative_error(by_native(kind, torch.bfloat16), exact) < 1.2 * of_torch < 0.05


def test_gates_far_from_zero_do_not_overflow() -> None:
    def widened(weight: LinearWeight, is_output: bool) -> LinearWeight:
        assert isinstance(weight, DenseWeight)
        wide = weight.shape[0] == 2 * CONFIG.intermediate_size
        return DenseWeight(weight.tensor * 1000) if wide else weight

    f32 = torch.float32
    weights = random_weights(CONFIG, f32, CPU, seed=3, prepare=widened)
    expected = logits(DecoderModel(CONFIG, weights, f32, CPU), (90,))
    assert relative_error(logits(NativeModel(CONFIG, packed(weights), f32), (90,)), expected) < 1e-5


def scores_of(run: PagedRun, sequence: PagedSequence, count: int, rows: list[int]) -> Tensor:
    batch = run._batch(((sequence, count),))
    wanted = dataclasses.replace(batch, logit_rows=torch.tensor(rows, dtype=torch.int32))
    logits = run.model.step(wanted, run.pool).clone()
    sequence.computed += count
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_scores_change_nothing(dtype: torch.dtype) -> None:
    model = NativeModel(CONFIG, packed(weights_of(dtype)), dtype)
    whole = logits(model, (90,))
    run = PagedRun(model)
    sequence, other = run.add(TOKENS), run.add(TOKENS)
    assert scores_of(run, sequence, 50, []).shape == (0, CONFIG.vocab_size)
    assert torch.equal(scores_of(run, sequence, 40, [0, 17, 39]), whole[[50, 67, 89]])
    # The keys that the last layer left behind are those of the first chunk, too.
    assert torch.equal(scores_of(run, other, 90, [89]), whole[89:])
