"""The C interface of `src/`: its structures, field for field, and its functions.

Addresses are of contiguous tensors, which the structures do not keep alive.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_size_t, c_void_p
from typing import Any


def _fields(*kinds: tuple[str, Any]) -> list[tuple[str, Any]]:
    """A structure's fields, from pairs of names and their type."""
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Linear(Structure):
    """A packed weight and its bias."""

    _fields_ = _fields(
        ("packed scales offsets minimums units minimum_units order bias next", c_void_p),
        ("inputs outputs group format block offset", c_int32),
    )


class Norm(Structure):
    """A norm's weight, or null; a wide one is float32, whatever the type of activations."""

    _fields_ = _fields(("weight", c_void_p), ("wide", c_int32))


class Pool(Structure):
    """The KV pool."""

    _fields_ = _fields(
        ("data", c_void_p),
        ("layers all_heads first_head kv_heads block_size head_size int8 groups", c_int32),
        ("latent shared_by", c_int32),
    )


class Span(Structure):
    """The rows of a sequence, and its block table."""

    _fields_ = _fields(("first_row count context", c_int32), ("table", c_void_p), ("kept", c_int32))


class AttentionShape(Structure):
    """Attention and rotary embedding of a layer."""

    _fields_ = _fields(
        ("heads layer window", c_int32),
        ("scale cap eps", c_float),
        ("cos sin", c_void_p),
        ("q_norm k_norm", Norm),
        ("row_norms", c_int32),
        ("sinks", c_void_p),
        ("group norms_rotated chunked only_reads", c_int32),
    )


class DeltaRule(Structure):
    """The gated delta rule of a layer."""

    _fields_ = _fields(
        ("conv decay decay_bias scale pool", c_void_p),
        ("key_heads values_per_key key_size value_size kernel", c_int32),
        ("layer kv_heads chunk_rows block_chunks chunk_bytes", c_int32),
        ("eps", c_float),
    )


class Expert(Structure):
    """One expert of a mixture."""

    _fields_ = _fields(("gate_up down", Linear))


class Lora(Structure):
    """What adapters add to a product; `ends` is of `sections` elements."""

    _fields_ = (
        *_fields(("a b ranks", c_void_p), ("inputs outputs max_rank sections", c_int32)),
        ("ends", c_int32 * 3),
    )


class Layer(Structure):
    """One decoder layer."""

    _fields_ = _fields(
        ("input_norm mlp_norm attention_norm output_norm", Norm),
        ("qkv o gate_up down router shared_gate", Linear),
        ("correction expert_tokens", c_void_p),
        ("experts", POINTER(Expert)),
        ("attention", AttentionShape),
        ("qkv_lora o_lora gate_up_lora down_lora", Lora),
    )


class RoutingOptions(Structure):
    """See `baton.engine.kernels.moe_routing.Routing`."""

    _fields_ = _fields(
        ("per_token normed sigmoid groups taken_groups group_top", c_int32), ("scale", c_float)
    )


class Embedding(Structure):
    """The embeddings of `count` tokens from `first` on."""

    _fields_ = _fields(("table", c_void_p), ("first count", c_int32))


class Ranks(Structure):
    """This rank; `exchange` is null where there is one rank only."""

    _fields_ = _fields(("exchange", c_void_p), ("rank count", c_int32))


class Model(Structure):
    """All weights and settings of a model."""

    _fields_ = _fields(
        ("embedding", Embedding),
        ("final_norm", Norm),
        ("layers", POINTER(Layer)),
        ("lm_head", Linear),
        ("ranks", Ranks),
        ("vocab_size num_layers hidden heads kv_heads head_size", c_int32),
        ("num_experts first_expert own_experts", c_int32),
        ("routing", RoutingOptions),
        ("activation", c_int32),
        ("eps logit_scale logit_cap embedding_scale residual_scale", c_float),
    )


class Step(Structure):
    """Inputs and outputs of a step."""

    _fields_ = _fields(
        ("token_ids context_lens query_lens block_tables logit_rows lora_slots", c_void_p),
        ("logits own_logits hidden workspace", c_void_p),
        ("pool", Pool),
        ("rows sequences width num_logits", c_int32),
    )


_ROW_ARGUMENTS = (c_void_p, POINTER(Span), c_int32, POINTER(AttentionShape), POINTER(Pool))
# Arguments of each function after the number of threads.
_ON_THREADS: dict[str, tuple[Any, ...]] = {
    "linear": (c_void_p, c_int32, POINTER(Linear), c_void_p, c_bool, c_void_p),
    "add_rms_norm": (
        *(c_void_p, c_void_p, POINTER(Norm)),
        *(c_float, c_int32, c_int32, c_void_p),
    ),
    "act_mul": (c_void_p, c_int32, c_int32, c_int32, c_void_p),
    "add_lora": (c_void_p, c_int32, c_void_p, POINTER(Lora), c_void_p, c_void_p),
    "rotate": _ROW_ARGUMENTS,
    "attend": (*_ROW_ARGUMENTS, c_void_p),
    "delta_rule": (
        *(c_void_p, c_void_p, POINTER(Span), c_int32),
        *(POINTER(DeltaRule), c_void_p),
    ),
    "step": (POINTER(Model), POINTER(Step)),
}
_SIZES = {"linear_scratch": Linear, "lora_scratch": Lora, "workspace": Model}


def declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument types of a library's functions."""
    for name, arguments in _ON_THREADS.items():
        function = getattr(kernels, f"baton_{name}")
        function.argtypes, function.restype = (c_int32, *arguments), None
    kernels.baton_step.restype = c_bool
    for name, structure in _SIZES.items():
        function = getattr(kernels, f"baton_{name}")
        function.argtypes, function.restype = (POINTER(structure), c_int32), c_size_t
    return kernels
