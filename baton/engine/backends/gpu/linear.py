"""Weights on a GPU: the product of each format, and the operations of a layer fused into it.

Tensors on a CPU are multiplied by the reference, `baton.engine.quantization`. Products of few rows
use `kernels/triton/skinny_matmul.py`, with norm, gate or residual addition fused; products of more
rows use cuBLAS, with separate kernels around it.

Shapes and GPUs of 8-bit products are limited as torch's `_int_mm` and `_scaled_mm` check before
they call cuBLAS or CUTLASS (aten/src/ATen/native/cuda/Blas.cpp and ScaledBlas.cpp of torch 2.11).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.activation import Activation
from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.kernels.torch.row_ops import RowOps
from baton.engine.kernels.triton.activation import act_mul
from baton.engine.kernels.triton.group_scaled_linear import group_scaled_linear
from baton.engine.kernels.triton.group_scaled_packing import PackedWeight, pack
from baton.engine.kernels.triton.lora import add_lora
from baton.engine.kernels.triton.rms_norm import add_rms_norm
from baton.engine.kernels.triton.row_quantization import (
    LARGEST_WHOLE,
    QuantizedRows,
    Rows,
    quantize_rows,
    scale_sums,
)
from baton.engine.kernels.triton.skinny_matmul import (
    new_counters,
    skinny_matmul,
    uses_skinny_matmul,
)
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.gguf import GgufWeight, common_weight
from baton.engine.quantization.group_scaled import GroupScaledWeight
from baton.engine.quantization.int8 import Int8Weight, RowScaledWeight
from baton.engine.quantization.linear_weight import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    ResidualStream,
)
from baton.engine.quantization.methods import quantize_weight
from baton.errors import CheckpointError

MULTIPLE = {"int8": 8, "fp8": 16}  # of inputs and outputs


class Gate(NamedTuple):
    """Rows `[rows, 2 * size]` whose gate the weight that reads them computes.

    So that weight can get the gated rows in the type that its product takes.
    """

    gate_up: Tensor
    act: Activation


class TritonRowOps(RowOps):
    """Norm, MLP's gate and adapters by Triton kernels; the norm adds x to the residual in place."""

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, *norm)

    def act_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        gated: Tensor = act_mul(gate_up, act)
        return gated

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate)

    def add_lora(self, y: Tensor, x: Tensor, slots: Tensor, lora: LoraMatrices) -> None:
        add_lora(y, x, slots, lora)


TRITON_ROW_OPS = TritonRowOps()


class GpuWeight(LinearWeight):
    """A weight whose product includes norm, gate or residual addition if a kernel fuses them.

    This class computes them one by one, for any format."""

    ops = TRITON_ROW_OPS

    def product(
        self, x: Any, bias: Tensor | None = None, *, norm: Norm | None = None,
        act: Activation | None = None, residual: ResidualStream | None = None,
    ) -> Any:  # fmt: skip
        x = self._read(x, norm)
        if residual is not None and residual.pending is None and self._is_skinny(x):
            residual.rows = self._skinny_product(x, bias, residual=residual.rows)
            return None
        if act is not None and self._is_skinny(x, has_gate=True):
            return self._skinny_product(x, bias, act=act)
        y = self.apply(x, bias)
        if residual is not None:
            residual.add(y)
        return y if act is None else Gate(y, act)

    def _read(self, x: Any, norm: Norm | None) -> Rows:
        """The normed or gated rows, in the type that this weight's product takes."""
        if norm is not None:
            return self._normed(x, norm)
        if isinstance(x, Gate):
            return act_mul(x.gate_up, x.act, to=self.rows_dtype(x.gate_up.shape[1] // 2))
        return x

    def _normed(self, stream: ResidualStream, norm: Norm) -> Rows:
        first, residual = stream.rows, None
        if stream.pending is not None:
            first, residual = stream.pending, stream.rows
        to = self.rows_dtype(stream.rows.shape[1])
        normed, stream.rows = add_rms_norm(first, residual, *norm, to=to)
        stream.pending = None
        return normed

    def rows_dtype(self, size: int) -> torch.dtype | None:
        """The type to quantise rows of that size to before a product; None: they stay."""
        return None

    def _is_skinny(self, x: Rows, has_norm: bool = False, has_gate: bool = False) -> bool:
        """Whether these rows are multiplied by `skinny_matmul`."""
        return False

    def _skinny_product(
        self, x: Rows, bias: Tensor | None, act: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`skinny_matmul`; with a residual, the sum."""
        raise NotImplementedError

    @cached_property
    def _counters(self) -> Tensor:
        return new_counters(self.shape[0], self._device)

    @property
    def _device(self) -> torch.device:
        return next(part.device for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True)
class GpuReferenceWeight(GpuWeight):
    """A weight of a format that no kernel supports, multiplied by torch."""

    weight: LinearWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.weight.apply(x, bias)


def unwrapped(weight: LinearWeight) -> LinearWeight:
    """The weight that a `GpuReferenceWeight` holds, which kernels for experts pack themselves."""
    return weight.weight if isinstance(weight, GpuReferenceWeight) else weight


@dataclass(frozen=True)
class GpuDenseWeight(DenseWeight, GpuWeight):
    """An unquantised matrix, multiplied by cuBLAS, or by `skinny_matmul` where that is faster."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._skinny_product(x, bias) if self._is_skinny(x) else super().apply(x, bias)

    def product(
        self, x: Any, bias: Tensor | None = None, *, norm: Norm | None = None,
        act: Activation | None = None, residual: ResidualStream | None = None,
    ) -> Any:  # fmt: skip
        has_gate = act is not None
        if norm is not None and self._is_skinny(x.rows, has_norm=True, has_gate=has_gate):
            stream = x.read_in_place()
            return self._skinny_product(stream, bias, act, norm=norm)
        return GpuWeight.product(self, x, bias, norm=norm, act=act, residual=residual)

    def _is_skinny(self, x: Tensor, has_norm: bool = False, has_gate: bool = False) -> bool:
        # float32 rows have no tensor cores.
        return x.dtype != torch.float32 and uses_skinny_matmul(x, self.tensor, has_norm, has_gate)

    def _skinny_product(
        self, x: Tensor, bias: Tensor | None, act: Activation | None = None,
        residual: Tensor | None = None, norm: Norm | None = None,
    ) -> Tensor:  # fmt: skip
        weight, eps = (None, 0.0) if norm is None else (self._wide(norm.weight), norm.eps)
        return skinny_matmul(
            x, self.tensor, self._counters, bias, dtype=x.dtype, norm=weight, eps=eps,
            activation=act, residual=residual,
        )  # fmt: skip

    def _wide(self, norm: Tensor) -> Tensor:
        """The norm's weight in float32: only loads of 32 bits are pipelined."""
        held = self._norms.get(id(norm))
        if held is None:
            held = self._norms[id(norm)] = norm, norm.float()
        return held[1]

    @cached_property
    def _norms(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


class _EightBitWeight(RowScaledWeight, GpuWeight):
    """W8A8: quantises rows, unless the norm or gate before it has done so."""

    product = GpuWeight.product

    def apply(self, x: Rows, bias: Tensor | None = None) -> Tensor:
        """x may be quantised already. Never waits for the device."""
        x = self._quantized(x)
        if self._is_skinny(x):
            return self._skinny_product(x, bias)
        by = self._library_product if x.values.is_cuda else self.apply_quantized
        return by(x.values, x.scales, bias, x.dtype)

    def _read(self, x: Any, norm: Norm | None) -> QuantizedRows:
        return self._quantized(super()._read(x, norm))

    def rows_dtype(self, size: int) -> torch.dtype | None:
        return self.DTYPE if size <= LARGEST_WHOLE else None

    def _quantized(self, x: Rows) -> QuantizedRows:
        if isinstance(x, QuantizedRows):
            return x
        return QuantizedRows(*quantize_rows(x, self.DTYPE), x.dtype)

    def _is_skinny(self, x: QuantizedRows, has_norm: bool = False, has_gate: bool = False) -> bool:
        return uses_skinny_matmul(x.values, self.values, has_gate=has_gate)

    def _skinny_product(
        self, x: QuantizedRows, bias: Tensor | None, act: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return skinny_matmul(
            x.values, self.values, self._counters, bias, dtype=x.dtype,
            scales=(x.scales, self.scales), activation=act, residual=residual,
        )  # fmt: skip

    @abstractmethod
    def _library_product(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`apply_quantized` by cuBLAS or CUTLASS."""


class GpuInt8Weight(_EightBitWeight, Int8Weight):
    """W8A8 in int8; sums are integers, and exact with either kernel."""

    def _library_product(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return scale_sums(torch._int_mm(x, self.values.T), scales, self.scales, bias, dtype)


class GpuFp8Weight(_EightBitWeight, Fp8Weight):
    """W8A8 in fp8, with the fast accumulation of tensor cores."""

    def _library_product(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        fused = (
            None if dtype == torch.float32 else bias
        )  # `_scaled_mm` adds no bias to float32 results
        out = torch._scaled_mm(
            x,
            self.values.T,
            scales[:, None],
            self.scales[None],
            bias=fused,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return out if bias is None or bias is fused else out.add_(bias)


class GpuGroupScaledWeight(PackedWeight, GpuWeight):
    """A group-quantised weight; activations are not quantised."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Never waits for the device."""
        return group_scaled_linear(x if self.order is None else x[:, self.order], self, bias)


_ON_GPU: dict[type[LinearWeight], type[LinearWeight]] = {
    DenseWeight: GpuDenseWeight,
    Int8Weight: GpuInt8Weight,
    Fp8Weight: GpuFp8Weight,
}


def prepare(
    weight: LinearWeight, is_output: bool, quantization: str, dtype: torch.dtype = torch.bfloat16
) -> LinearWeight:
    """Prepares a weight for the GPU's model: quantises dense weights, and packs group-quantised
    ones.

    dtype: of the activations; a dense weight has its own. A matrix is not quantised if 8-bit
    products do not support its sizes (an output layer with an odd vocabulary), or if its inputs are
    not a multiple of an int4 group. Groups that kernels do not support are not packed. GGUF's types
    but Q4_0 become dense.

    Raises CheckpointError for a matrix of an 8-bit checkpoint that --tp splits into unsupported
    sizes.
    """
    kind = "int8" if quantization == "int4" and is_output else quantization
    if isinstance(weight, GgufWeight | JoinedWeight):
        weight = common_weight(weight, dtype)
    if isinstance(weight, DenseWeight):
        dtype = weight.tensor.dtype
        if not any(size % MULTIPLE.get(kind, 1) for size in weight.shape):
            weight = quantize_weight(weight, kind)
    elif isinstance(weight, RowScaledWeight):
        multiple = MULTIPLE["int8" if isinstance(weight, Int8Weight) else "fp8"]
        if any(size % multiple for size in weight.shape):
            outputs, inputs = weight.shape
            raise CheckpointError(
                f"each rank has {outputs} x {inputs} of an 8-bit matrix, and GPUs multiply by "
                f"multiples of {multiple}: choose a smaller --tp"
            )
    if isinstance(weight, GroupScaledWeight):
        packed = pack(weight, dtype) if weight.values.is_cuda else None
        if packed is None:
            return GpuReferenceWeight(weight)
        return GpuGroupScaledWeight(**vars(packed))
    return _ON_GPU.get(type(weight), type(weight))(**vars(weight))
