"""The forward pass on a CPU, as one native call a step.

Computes what `baton.engine.models.decoder.Model` computes, which is its reference. In every
precision a row's result is the same to the bit whatever shares its batch or chunk: the kernels add
each row up in an order of its own.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int32, c_size_t, c_void_p

import torch
from torch import Tensor

from baton.engine.batch import StepBatch
from baton.engine.models.config import ModelConfig
from baton.engine.models.rope import rope_tables
from baton.engine.ops.native import library
from baton.engine.ops.native.packing import Linear, PackedWeight, fields
from baton.engine.runner import RunnerFailed
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.weight import Weight
from baton.engine.weights.weights import LayerWeights, Weights

_NORMS = "input_norm mlp_norm attention_norm output_norm q_norm k_norm"
_MATRICES = "qkv o gate_up down"
_OF_EXPERTS = "router shared_gate"
_HUGE_PAGE = 2 << 20  # where a workspace begins; elsewhere prompts take up to a tenth longer


# These structures mirror `src/kernels.h` and `src/forward.cpp`, field for field.


class Norm(Structure):
    """A norm's weight, or null; a wide one is float32 whatever the activations are."""

    _fields_ = fields(("weight", c_void_p), ("wide", c_int32))


class Pool(Structure):
    """The KV pool."""

    _fields_ = fields(
        ("data", c_void_p),
        ("layers all_heads first_head kv_heads block_size head_size int8", c_int32),
    )


class CExpert(Structure):
    """One of a mixture."""

    _fields_ = fields(("gate_up down", Linear))


class Layer(Structure):
    """One decoder layer's weights."""

    _fields_ = fields(
        (_NORMS, Norm),
        (f"{_MATRICES} {_OF_EXPERTS}", Linear),
        ("experts", POINTER(CExpert)),
        ("window table", c_int32),
    )


class Embedding(Structure):
    """Of the tokens from `first` on."""

    _fields_ = fields(("table", c_void_p), ("first count", c_int32))


class Ranks(Structure):
    """One rank of several; `exchange` is null where there is one only."""

    _fields_ = fields(("exchange", c_void_p), ("rank count", c_int32))


class ModelWeights(Structure):
    """A whole model, or one rank's part of it."""

    _fields_ = fields(
        ("embedding", Embedding),
        ("tables", c_void_p),
        ("final_norm", Norm),
        ("layers", POINTER(Layer)),
        ("lm_head", Linear),
        ("ranks", Ranks),
        ("vocab_size num_layers hidden heads kv_heads head_size max_context", c_int32),
        ("num_experts per_token normed gelu row_norms", c_int32),
        ("eps attention_scale attention_cap logit_scale logit_cap", c_float),
        ("embedding_scale residual_scale", c_float),
    )


class Step(Structure):
    """What one step computes and where it writes."""

    _fields_ = fields(
        ("token_ids context_lens query_lens block_tables logit_rows", c_void_p),
        ("logits own_logits workspace", c_void_p),
        ("pool", Pool),
        ("rows sequences width num_logits", c_int32),
    )


class NativeModel:
    """Packed weights, and scratch memory that one thread at a time may use."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        exchange: int | None = None,
    ) -> None:
        """Weights may be packed already; `config` is of the whole model, they are the shard's.

        exchange: address of the memory that several ranks share. Raises ConfigError where there is
        no library.
        """
        self.config = shard.config(config)
        self._kv_heads, self._tokens = shard.kv_heads(config), shard.tokens(config)
        self._ranks = Ranks(exchange, shard.rank, shard.count)
        self.dtype = dtype
        native = library.require(dtype)
        self._run, self._workspace_size = native.baton_step, native.baton_workspace
        self._run.restype, self._workspace_size.restype = c_bool, c_size_t
        self._kept: list[object] = []  # what the structures point at
        self._model = self._whole(weights)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._rows = 0  # that the workspace is for
        self._logits = torch.empty(0, config.vocab_size)
        self._own_logits = torch.empty(0, len(self._tokens))

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Runs a step's rows through the model and writes their K and V to the pool.

        The next-token scores of its `logit_rows`, float32 `[n, vocab]`, on the first rank; valid
        until the next step. Raises RunnerFailed when another rank does not answer.
        """
        rows, wanted = len(batch.token_ids), len(batch.logit_rows)
        if rows > self._rows:
            size = self._workspace_size(byref(self._model), rows)
            room = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
            self._workspace, self._rows = room[-room.data_ptr() % _HUGE_PAGE :], rows
        if wanted > len(self._logits):
            self._logits = torch.empty(wanted, self.config.vocab_size)
            self._own_logits = torch.empty(wanted, len(self._tokens))
        inputs = (
            batch.token_ids, batch.context_lens, batch.query_lens, batch.block_tables,
            batch.logit_rows, self._logits, self._own_logits, self._workspace,
        )  # fmt: skip
        _, layers, _, heads, block_size, _ = pool.shape
        mine = self._kv_heads
        int8, head_size = pool.dtype == torch.int8, self.config.head_size
        kv = Pool(
            pool.data_ptr(), layers, heads, mine.start, len(mine), block_size, head_size, int8
        )
        sizes = (rows, len(batch.query_lens), batch.block_tables.shape[1], wanted)
        pointers = (tensor.data_ptr() for tensor in inputs)
        step = Step(*pointers, kv, *sizes)
        if not self._run(torch.get_num_threads(), byref(self._model), byref(step)):
            raise RunnerFailed("a rank of this worker has ended or hangs: the step is lost")
        return self._logits[:wanted]

    def close(self) -> None:
        """Nothing runs elsewhere."""

    def _whole(self, weights: Weights) -> ModelWeights:
        config, experts = self.config, self.config.experts
        tables, table_of = rope_tables(config)
        layers = map(self._layer, weights.layers, config.windows, table_of)
        return ModelWeights(
            Embedding(self._keep(weights.embedding), self._tokens.start, len(self._tokens)),
            self._keep(tables),
            self._norm(weights.final_norm),
            (Layer * config.num_layers)(*layers),
            self._linear(weights.lm_head),
            self._ranks,
            *(
                config.vocab_size,
                config.num_layers,
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
            ),
            *(config.head_size, config.max_context),
            *((experts.count, experts.per_token, experts.normed) if experts else (0, 0, 0)),
            *(config.activation == "gelu_tanh", config.differs.qk_norm == "row"),
            *(config.rms_eps, config.score_scale, config.attention_softcap),
            *(config.logit_scale, config.logit_softcap),
            torch.tensor(config.embedding_scale, dtype=self.dtype).item(),
            config.residual_scale,
        )

    def _layer(self, layer: LayerWeights, window: int | None, table: int) -> Layer:
        norms = (self._norm(getattr(layer, name)) for name in _NORMS.split())
        products = [
            self._linear(getattr(layer, name), getattr(layer, f"{name}_bias"))
            for name in _MATRICES.split()
        ]
        if layer.experts is None:
            return Layer(*norms, *products, Linear(), Linear(), None, window or 0, table)
        products += [self._linear(getattr(layer.experts, name)) for name in _OF_EXPERTS.split()]
        experts = [
            CExpert(self._linear(one.gate_up), self._linear(one.down))
            for one in layer.experts.experts
        ]
        kept = (CExpert * len(experts))(*experts)
        return Layer(*norms, *products, kept, window or 0, table)

    def _norm(self, weight: Tensor | None) -> Norm:
        return Norm(self._keep(weight), weight is not None and weight.dtype != self.dtype)

    def _linear(self, weight: Weight | None, bias: Tensor | None = None) -> Linear:
        if weight is None:
            return Linear()
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
