"""The structures and functions of the C++ library, as ctypes sees them.

They mirror `src/linear.h`, `src/attention.h` and `src/forward.cpp`, field for field.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_size_t, c_void_p

PHASES = ("norms", "qkv", "rotation", "attention", "o", "gate_up", "silu", "down", "logits")
"""What a step's seconds are counted under, in the order of `Phase` in forward.cpp."""


class Linear(Structure):
    """Packed weights of one matrix product."""

    _fields_ = (
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
    )


class Pool(Structure):
    """The KV pool."""

    _fields_ = (
        ("data", c_void_p),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_size", c_int32),
        ("int8", c_int32),
    )


class Layer(Structure):
    """One decoder layer's weights."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", c_int32),
        ("unused", c_int32),
    )


class Model(Structure):
    """A whole model."""

    _fields_ = (
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layers", POINTER(Layer)),
        ("lm_head", Linear),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("inner", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
    )


class Step(Structure):
    """What one step computes and where it writes."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("contexts", c_void_p),
        ("counts", c_void_p),
        ("tables", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("workspace", c_void_p),
        ("seconds", POINTER(c_double)),
        ("pool", Pool),
        ("rows", c_int32),
        ("sequences", c_int32),
        ("width", c_int32),
        ("num_logits", c_int32),
    )


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the arguments of the functions that serving uses."""
    for suffix in ("f32", "bf16"):
        step = library[f"baton_step_{suffix}"]
        step.argtypes = (c_int32, POINTER(Model), POINTER(Step))
        step.restype = None
        workspace = library[f"baton_workspace_{suffix}"]
        workspace.argtypes = (POINTER(Model), c_int32)
        workspace.restype = c_size_t
