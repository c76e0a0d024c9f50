"""The Llama family's forward pass on a CPU, as one native call a step.

Computes what `baton.engine.models.decoder.Model` computes, which is its reference. In every
precision a row's result is the same to the bit whatever shares its batch or chunk: the kernels add
each row up in an order of its own.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_size_t, c_void_p

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import rope_tables
from baton.engine.ops.native import library
from baton.engine.ops.native.packing import Linear, PackedWeight, fields
from baton.engine.weights.weight import Weight
from baton.engine.weights.weights import LayerWeights, Weights

_NORMS, _MATRICES = "input_norm post_norm q_norm k_norm", "qkv o gate_up down"


# These structures mirror `src/kernels.h` and `src/forward.cpp`, field for field.


class Pool(Structure):
    """The KV pool."""

    _fields_ = fields(("data", c_void_p), ("layers kv_heads block_size head_size int8", c_int32))


class Layer(Structure):
    """One decoder layer's weights."""

    _fields_ = fields((_NORMS, c_void_p), (_MATRICES, Linear), ("window", c_int32))


class ModelWeights(Structure):
    """A whole model."""

    _fields_ = fields(
        ("embedding final_norm cos sin", c_void_p),
        ("layers", POINTER(Layer)),
        ("lm_head", Linear),
        ("num_layers hidden heads kv_heads head_size inner", c_int32),
        ("eps attention_scale", c_float),
    )


class Step(Structure):
    """What one step computes and where it writes."""

    _fields_ = fields(
        ("token_ids context_lens query_lens block_tables logit_rows logits workspace", c_void_p),
        ("pool", Pool),
        ("rows sequences width num_logits", c_int32),
    )


class NativeModel:
    """Packed weights, and scratch memory that one thread at a time may use."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype) -> None:
        """Weights may be packed already. Raises ConfigError where there is no library."""
        self.config = config
        self.dtype = dtype
        native = library.require(dtype)
        self._run, self._workspace_size = native.baton_step, native.baton_workspace
        self._run.restype, self._workspace_size.restype = None, c_size_t
        self._kept: list[object] = []  # what the structures point at
        self._model = self._whole(weights)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._rows = 0  # that the workspace is for
        self._logits = torch.empty(0, config.vocab_size)

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a step's rows through the model and writes their K and V to the pool.

        The next-token scores of its `logit_rows`, float32 `[n, vocab]`; valid until the next step.
        """
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        if rows > self._rows:
            size = self._workspace_size(byref(self._model), rows)
            self._workspace, self._rows = torch.empty(size, dtype=torch.uint8), rows
        if wanted > len(self._logits):
            self._logits = torch.empty(wanted, self.config.vocab_size)
        inputs = (
            batch.token_ids, batch.context_lens, batch.query_lens, batch.block_tables,
            batch.logit_rows, self._logits, self._workspace,
        )  # fmt: skip
        _, layers, _, kv_heads, block_size, _ = pool.shape
        int8, head_size = pool.dtype == torch.int8, self.config.head_size
        kv = Pool(pool.data_ptr(), layers, kv_heads, block_size, head_size, int8)
        sizes = (rows, len(batch.query_lens), batch.block_tables.shape[1], wanted)
        pointers = (tensor.data_ptr() for tensor in inputs)
        step = Step(*pointers, kv, *sizes)
        self._run(torch.get_num_threads(), byref(self._model), byref(step))
        return self._logits[:wanted]

    def _whole(self, weights: Weights) -> ModelWeights:
        config = self.config
        layers = map(self._layer, weights.layers, config.windows)
        tables = rope_tables(config.rope, config.head_size, config.max_context)
        return ModelWeights(
            *map(self._keep, (weights.embedding, weights.final_norm, *tables)),
            (Layer * config.num_layers)(*layers),
            self._linear(weights.lm_head, None),
            *(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads),
            *(config.head_size, config.intermediate_size),
            *(config.rms_eps, config.head_size**-0.5),
        )

    def _layer(self, layer: LayerWeights, window: int | None) -> Layer:
        norms = (self._keep(getattr(layer, name)) for name in _NORMS.split())
        products = (
            self._linear(getattr(layer, name), getattr(layer, f"{name}_bias"))
            for name in _MATRICES.split()
        )
        return Layer(*norms, *products, window or 0)

    def _linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        packed = PackedWeight.of(weight)
        self._kept += [packed, bias]
        return packed.linear(bias)

    def _keep(self, tensor: Tensor | None) -> int | None:
        """A tensor's address; the tensor stays as long as the model does."""
        if tensor is None:
            return None
        assert tensor.is_contiguous(), "native code reads rows one after the other"
        self._kept.append(tensor)
        return tensor.data_ptr()
