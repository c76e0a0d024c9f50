"""Small models by torch and by native code, plain and with 8-bit weights and pools."""

from dataclasses import dataclass, is_dataclass, replace

import pytest
import torch

from baton.engine.backends.backend import unsupported
from baton.engine.backends.cpu.native_model import NativeModel, lacking
from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.kernels.native import library
from baton.engine.kernels.native.packing import PackedWeight
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.rope_config import Rope
from baton.engine.models.weight_loader import load_weights, random_weights
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.methods import quantize_weight
from tests.unit.engine.paged import PagedRun

CPU = torch.device("cpu")
KERNELS = ("torch", "native")
_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=100,
    rms_eps=1e-6,
    ropes=(Rope(10000.0),) * 2,
    windows=(None, None),
    tie_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    max_context=2048,
    eos_token_ids=(),
    dtype="float32",
    score_scale=32**-0.5,
)


def small_config(window=None, **changes):
    """A model of two layers, the second with a window if one is given."""
    return replace(_LLAMA, windows=(None, window), **changes)


def require(kernels):
    """Skips the test if it is to run native code and there is none."""
    if kernels == "native" and library.load() is None:
        pytest.skip("no native library can be built here")


def make(kernels, config, weights, dtype=torch.float32):
    """The model; skips the test where there is no native code."""
    require(kernels)
    if kernels == "torch":
        return DecoderModel(config, weights, dtype, CPU)
    weights = packed(weights)
    if unsupported(config, 16, "native"):
        return NativeOps(config, weights, dtype, attends=False)
    if lacking(config):
        return NativeOps(config, weights, dtype)
    return NativeModel(config, weights, dtype)


def load(directory, kernels, dtype=torch.float32):
    """A checkpoint's model."""
    config = ModelConfig.load(directory)
    return make(kernels, config, load_weights(directory, config, dtype, CPU), dtype)


def relative_error(got, expected):
    return float((got - expected).norm() / expected.norm())


def packed(part):
    """Weights with every matrix packed but those of routers, which models pack themselves."""
    if isinstance(part, LinearWeight):
        return PackedWeight.from_weight(part)
    if isinstance(part, tuple):
        return tuple(map(packed, part))
    if is_dataclass(part):
        kept = ("router", "shared_gate")
        fields = {name: value for name, value in vars(part).items() if name not in kept}
        return replace(part, **{name: packed(value) for name, value in fields.items()})
    return part


@dataclass(frozen=True)
class Kind:
    """How a model is computed, and what of it is held in 8 bits."""

    kernels: str
    dtype: torch.dtype = torch.float32
    weights: bool = False
    kv: bool = False

    def __str__(self):
        held = "+".join(name for name in ("weights", "kv") if getattr(self, name))
        return f"{self.kernels}-{str(self.dtype).removeprefix('torch.')}-{held or 'plain'}"


def qwen_config(window=None, **changes):
    return small_config(window, **{"architecture": "Qwen2ForCausalLM", "qkv_bias": True, **changes})


def changed(part, of_weight, of_tensor=lambda name, tensor: tensor):
    """A layer, its experts or one of them, with each weight and each tensor changed."""

    def change(name, value):
        if isinstance(value, LinearWeight):
            return of_weight(value)
        if isinstance(value, torch.Tensor):
            return of_tensor(name, value)
        if isinstance(value, tuple):
            return tuple(change(name, one) for one in value)
        return value if value is None else changed(value, of_weight, of_tensor)

    return replace(part, **{name: change(name, value) for name, value in vars(part).items()})


def run_of(kind, window=None, block_size=16, **sizes):
    """A pool and a model with weights wide enough for sharp attention."""
    config = qwen_config(window, **sizes)
    weights = random_weights(config, kind.dtype, CPU, seed=3)

    def held(weight):
        wide = DenseWeight(weight.tensor * 8)
        return quantize_weight(wide, "int8" if kind.weights else "none")

    layers = tuple(changed(layer, held) for layer in weights.layers)
    weights = replace(weights, layers=layers, lm_head=held(weights.lm_head))
    model = make(kind.kernels, config, weights, kind.dtype)
    return PagedRun(model, block_size, kv_dtype=torch.int8 if kind.kv else None)


def tokens(length, seed):
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(run, sequence, chunk):
    """Logits of all tokens, computed `chunk` at a time."""
    parts = []
    while left := len(sequence.tokens) - sequence.computed:
        parts += run.step((sequence, min(chunk, left)))
    return torch.cat(parts)
