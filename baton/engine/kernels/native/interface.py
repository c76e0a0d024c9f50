"""The C interface of `src/`: its structures, field for field, and its functions.

Addresses are of tensors that lie one row after the other; nothing keeps them in memory.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_float, c_int32, c_size_t, c_void_p
from typing import Any


def _fields(*kinds: tuple[str, Any]) -> list[tuple[str, Any]]:
    """A structure's fields, from names and their kind."""
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Linear(Structure):
    """A packed weight and its bias."""

    _fields_ = _fields(
        ("packed scales offsets zeros order bias", c_void_p),
        ("inputs outputs group numbers", c_int32),
    )


class Norm(Structure):
    """A norm's weight, or null; a wide one is float32 whatever the activations are."""

    _fields_ = _fields(("weight", c_void_p), ("wide", c_int32))


class Pool(Structure):
    """The KV pool."""

    _fields_ = _fields(
        ("data", c_void_p),
        ("layers all_heads first_head kv_heads block_size head_size int8", c_int32),
    )


class Span(Structure):
    """Rows of one sequence, and its blocks."""

    _fields_ = _fields(("first_row count context", c_int32), ("table", c_void_p))


class AttentionShape(Structure):
    """Attention and rotation in one layer."""

    _fields_ = _fields(
        ("heads layer window", c_int32),
        ("scale cap eps", c_float),
        ("cos sin", c_void_p),
        ("q_norm k_norm", Norm),
        ("row_norms", c_int32),
        ("sinks", c_void_p),
    )


class Expert(Structure):
    """One of a mixture."""

    _fields_ = _fields(("gate_up down", Linear))


class Layer(Structure):
    """One decoder layer."""

    _fields_ = _fields(
        ("input_norm mlp_norm attention_norm output_norm", Norm),
        ("qkv o gate_up down router shared_gate", Linear),
        ("expert_tokens", c_void_p),
        ("experts", POINTER(Expert)),
        ("attention", AttentionShape),
    )


class Embedding(Structure):
    """Of the tokens from `first` on."""

    _fields_ = _fields(("table", c_void_p), ("first count", c_int32))


class Ranks(Structure):
    """One rank of several; `exchange` is null where there is one only."""

    _fields_ = _fields(("exchange", c_void_p), ("rank count", c_int32))


class WholeModel(Structure):
    """All weights and settings of a model."""

    _fields_ = _fields(
        ("embedding", Embedding),
        ("final_norm", Norm),
        ("layers", POINTER(Layer)),
        ("lm_head", Linear),
        ("ranks", Ranks),
        ("vocab_size num_layers hidden heads kv_heads head_size", c_int32),
        ("num_experts first_expert own_experts per_token normed activation", c_int32),
        ("eps logit_scale logit_cap embedding_scale residual_scale", c_float),
    )


class Step(Structure):
    """What one step computes and where it writes."""

    _fields_ = _fields(
        ("token_ids context_lens query_lens block_tables logit_rows", c_void_p),
        ("logits own_logits hidden workspace", c_void_p),
        ("pool", Pool),
        ("rows sequences width num_logits", c_int32),
    )


_OF_ROWS = (c_void_p, POINTER(Span), c_int32, POINTER(AttentionShape), POINTER(Pool))
# Of each function: what it returns, and what it takes behind the number of threads.
_ON_THREADS: dict[str, tuple[Any, ...]] = {
    "linear": (c_void_p, c_int32, POINTER(Linear), c_void_p, c_bool, c_void_p),
    "add_rms_norm": (
        *(c_void_p, c_void_p, POINTER(Norm)),
        *(c_float, c_int32, c_int32, c_void_p),
    ),
    "act_mul": (c_void_p, c_int32, c_int32, c_int32, c_void_p),
    "rotate": _OF_ROWS,
    "attend": (*_OF_ROWS, c_void_p),
    "step": (POINTER(WholeModel), POINTER(Step)),
}
_SIZES = {"linear_scratch": Linear, "workspace": WholeModel}


def declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """A library whose functions know their arguments."""
    for name, arguments in _ON_THREADS.items():
        function = getattr(kernels, f"baton_{name}")
        function.argtypes, function.restype = (c_int32, *arguments), None
    kernels.baton_step.restype = c_bool
    for name, of in _SIZES.items():
        function = getattr(kernels, f"baton_{name}")
        function.argtypes, function.restype = (POINTER(of), c_int32), c_size_t
    return kernels
