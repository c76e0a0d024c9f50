"""Norm, gate and adapters in native code (`src/rows.cpp`, `src/lora.cpp`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.engine.kernels.activation import ACTIVATIONS, Activation
from baton.engine.kernels.native import interface, library
from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.kernels.torch.row_ops import RowOps


class NativeRowOps(RowOps):
    """Row operations of the library that belongs to the rows' type."""

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `RowOps`; x is added to the residual in place."""
        stream, added = (x, None) if residual is None else (residual, x.data_ptr())
        normed = torch.empty_like(stream)
        _library(x.dtype).baton_add_rms_norm(
            torch.get_num_threads(), stream.data_ptr(), added, c_norm(norm.weight, x.dtype),
            norm.eps, *stream.shape, normed.data_ptr(),
        )  # fmt: skip
        return normed, stream

    def act_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out, kind = gate_up.new_empty(rows, size), ACTIVATIONS.index(act)
        _library(gate_up.dtype).baton_act_mul(
            torch.get_num_threads(), gate_up.data_ptr(), rows, size, kind, out.data_ptr()
        )
        return out

    def add_lora(self, y: Tensor, x: Tensor, slots: Tensor, lora: LoraMatrices) -> None:
        native, rows, structure = _library(x.dtype), len(x), c_lora(lora)
        scratch = torch.empty(native.baton_lora_scratch(structure, rows), dtype=torch.uint8)
        native.baton_add_lora(
            torch.get_num_threads(), x.data_ptr(), rows, slots.data_ptr(), structure,
            y.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip


NATIVE_ROW_OPS = NativeRowOps()


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    native = library.load(dtype)
    assert native is not None, "there is no native model without its library"
    return native


def c_lora(lora: LoraMatrices | None) -> interface.Lora:
    """What adapters add to a product, for native code; null if they do not change it."""
    if lora is None:
        return interface.Lora()
    tensors = (lora.a, lora.b, lora.ranks)
    sizes = (lora.a.shape[2], lora.b.shape[2], lora.max_rank, len(lora.ends))
    return interface.Lora(*(one.data_ptr() for one in tensors), *sizes, lora.ends)


def c_norm(weight: Tensor | None, dtype: torch.dtype) -> interface.Norm:
    """A norm of rows of dtype for native code; null without a weight."""
    if weight is None:
        return interface.Norm()
    return interface.Norm(weight.data_ptr(), weight.dtype != dtype)
