"""Norm and gate in native code (`src/rows.cpp`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.engine.kernels.activation import ACTIVATIONS, Activation
from baton.engine.kernels.native import interface, library
from baton.engine.kernels.torch.rows import Norm, RowOps


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


NATIVE_ROW_OPS = NativeRowOps()


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    native = library.load(dtype)
    assert native is not None, "there is no native model without its library"
    return native


def c_norm(weight: Tensor | None, dtype: torch.dtype) -> interface.Norm:
    """A norm of rows of dtype for native code; null without a weight."""
    if weight is None:
        return interface.Norm()
    return interface.Norm(weight.data_ptr(), weight.dtype != dtype)
