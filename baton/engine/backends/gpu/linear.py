"""Weights on a GPU: how each format multiplies, and what of a layer it does on the way.

Where a tensor lies on a CPU, a weight computes as `baton.engine.weights.weight` does, which is the
reference. Products of few rows use `kernels/triton/skinny_matmul.py`, which can fuse a norm, a gate
or the residual addition; products of more rows use cuBLAS, with separate kernels for the rest.

What 8-bit products ask of shapes and GPUs is what torch's `_int_mm` and `_scaled_mm` check before
they call cuBLAS or CUTLASS (aten/src/ATen/native/cuda/Blas.cpp and ScaledBlas.cpp of torch 2.11).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.triton.activation import act_mul
from baton.engine.kernels.triton.group_scaled_linear import group_scaled_linear
from baton.engine.kernels.triton.group_scaled_packing import PackedWeight, pack
from baton.engine.kernels.triton.rms_norm import add_rms_norm
from baton.engine.kernels.triton.row_quantization import (
    LARGEST_WHOLE,
    QuantizedRows,
    Rows,
    quantize_rows,
    scale_sums,
)
from baton.engine.kernels.triton.skinny_matmul import is_ours, new_counters, skinny_matmul
from baton.engine.models.decoder import Hidden
from baton.engine.models.model_config import Activation
from baton.engine.weights.weight import (
    DenseWeight,
    Fp8Weight,
    GroupScaledWeight,
    Int8Weight,
    RowScaledWeight,
    Weight,
    quantized,
)
from baton.errors import CheckpointError

MULTIPLE = {"int8": 8, "fp8": 16}  # of inputs and outputs


class Gate(NamedTuple):
    """Rows `[rows, 2 * size]` that are still to be gated, by whoever takes them."""

    gate_up: Tensor
    activation: Activation


class GpuWeight(Weight):
    """A weight that takes a layer's other operations along, where its product can.

    What is written here does them one by one, for any format.
    """

    def takes(self, size: int) -> torch.dtype | None:
        """The type of rows of that size that products take as `QuantizedRows`, if they do."""
        return None

    def gated(self, x: Any) -> Rows:
        """Rows that this weight can be applied to, of a tensor or a `Gate`."""
        if not isinstance(x, Gate):
            return x
        return act_mul(x.gate_up, x.activation, to=self.takes(x.gate_up.shape[1] // 2))

    def normed_product(
        self, hidden: Hidden, norm: Tensor, eps: float, bias: Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[Any, Hidden]:  # fmt: skip
        """The product of the stream's norm, and the stream, all added.

        activation: the product is `[rows, 2 * size]`, gate first, and the gated half is wanted: for
        another weight's `added_product`, as a tensor or as a `Gate`.
        """
        stream, added = hidden
        first, residual = (stream, None) if added is None else (added, stream)
        normed, stream = add_rms_norm(first, residual, norm, eps, to=self.takes(stream.shape[1]))
        return self.gate_product(normed, bias, activation), Hidden(stream)

    def gate_product(self, x: Rows, bias: Tensor | None, activation: Activation | None) -> Any:
        """`apply`; with an activation as in `normed_product`."""
        product = self.apply(x, bias)
        return product if activation is None else Gate(product, activation)

    def added_product(self, hidden: Hidden, x: Any, bias: Tensor | None) -> Hidden:
        """The stream with the product added, or to be added. x: a tensor or a `Gate`."""
        return Hidden(hidden.stream, self.apply(self.gated(x), bias))

    @cached_property
    def _counters(self) -> Tensor:
        return new_counters(self.shape[0], self._device)

    @property
    def _device(self) -> torch.device:
        return next(part.device for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True)
class GpuDenseWeight(DenseWeight, GpuWeight):
    """A matrix as it is: by cuBLAS, or by our product where that measured faster."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._is_ours(x):
            return super().apply(x, bias)
        return skinny_matmul(x, self.tensor, self._counters, bias, dtype=x.dtype)

    def normed_product(
        self, hidden: Hidden, norm: Tensor, eps: float, bias: Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[Any, Hidden]:  # fmt: skip
        if not self._is_ours(hidden.stream, has_norm=True, has_gate=activation is not None):
            return super().normed_product(hidden, norm, eps, bias, activation)
        stream = hidden.stream if hidden.added is None else hidden.stream.add_(hidden.added)
        product = skinny_matmul(
            stream, self.tensor, self._counters, bias, dtype=stream.dtype, norm=self._wide(norm),
            eps=eps, activation=activation,
        )  # fmt: skip
        return product, Hidden(stream)

    def gate_product(self, x: Rows, bias: Tensor | None, activation: Activation | None) -> Any:
        if activation is None or not self._is_ours(x, has_gate=True):
            return super().gate_product(x, bias, activation)
        args = (x, self.tensor, self._counters, bias)
        return skinny_matmul(*args, dtype=x.dtype, activation=activation)

    def added_product(self, hidden: Hidden, x: Any, bias: Tensor | None) -> Hidden:
        x = self.gated(x)
        if hidden.added is not None or not self._is_ours(x):
            return Hidden(hidden.stream, self.apply(x, bias))
        args = (x, self.tensor, self._counters, bias)
        return Hidden(skinny_matmul(*args, dtype=x.dtype, residual=hidden.stream))

    def _is_ours(self, x: Tensor, has_norm: bool = False, has_gate: bool = False) -> bool:
        """Whether a product with these rows is ours; those of float32 have no tensor cores."""
        return x.dtype != torch.float32 and is_ours(x, self.tensor, has_norm, has_gate)

    def _wide(self, norm: Tensor) -> Tensor:
        """The norm in front in float32: a thread loads it ahead only by 32 bits at a time."""
        held = self._norms.get(id(norm))
        if held is None:
            held = self._norms[id(norm)] = norm, norm.float()
        return held[1]

    @cached_property
    def _norms(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


class _EightBitWeight(RowScaledWeight, GpuWeight):
    """W8A8: quantises rows, or takes them from a norm or a gate that has done so."""

    def takes(self, size: int) -> torch.dtype | None:
        return self.DTYPE if size <= LARGEST_WHOLE else None

    def apply(self, x: Rows, bias: Tensor | None = None) -> Tensor:
        """x may be quantised already. Never waits for the device."""
        x = self._rows(x)
        if self._is_ours(x):
            return self._ours(x, bias)
        by = self._by_library if x.values.is_cuda else self.scaled
        return by(x.values, x.scales, bias, x.dtype)

    def gate_product(self, x: Rows, bias: Tensor | None, activation: Activation | None) -> Any:
        x = self._rows(x)
        if activation is None or not self._is_ours(x, has_gate=True):
            return super().gate_product(x, bias, activation)
        return self._ours(x, bias, activation=activation)

    def added_product(self, hidden: Hidden, x: Any, bias: Tensor | None) -> Hidden:
        x = self._rows(self.gated(x))
        if hidden.added is not None or not self._is_ours(x):
            return Hidden(hidden.stream, self.apply(x, bias))
        return Hidden(self._ours(x, bias, residual=hidden.stream))

    def _rows(self, x: Rows) -> QuantizedRows:
        if isinstance(x, QuantizedRows):
            return x
        return QuantizedRows(*quantize_rows(x, self.DTYPE), x.dtype)

    def _is_ours(self, x: QuantizedRows, has_gate: bool = False) -> bool:
        """Whether a product with these rows is ours."""
        return is_ours(x.values, self.values, has_gate=has_gate)

    def _ours(
        self, x: QuantizedRows, bias: Tensor | None, activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return skinny_matmul(
            x.values, self.values, self._counters, bias, dtype=x.dtype,
            scales=(x.scales, self.scales), activation=activation, residual=residual,
        )  # fmt: skip

    @abstractmethod
    def _by_library(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """As `scaled`, faster."""


class GpuInt8Weight(_EightBitWeight, Int8Weight):
    """W8A8 in int8: the sums are whole numbers and exact, by either kernel."""

    def _by_library(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return scale_sums(torch._int_mm(x, self.values.T), scales, self.scales, bias, dtype)


class GpuFp8Weight(_EightBitWeight, Fp8Weight):
    """W8A8 in fp8: sums are taken in the tensor cores' own, faster precision."""

    def _by_library(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        fused = None if dtype == torch.float32 else bias  # float32 results take no bias there
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
    """A group-quantised weight; activations stay as they are."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Never waits for the device."""
        return group_scaled_linear(x if self.order is None else x[:, self.order], self, bias)


_ON_GPU: dict[type[Weight], type[Weight]] = {
    DenseWeight: GpuDenseWeight,
    Int8Weight: GpuInt8Weight,
    Fp8Weight: GpuFp8Weight,
}


def prepare(
    weight: Weight, is_output: bool, quantization: str, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    """A weight as the GPU's model is to apply it to activations of dtype; dense ones, which have
    theirs, are quantised.

    A matrix whose sizes 8-bit products refuse stays as it is (an output layer over an odd
    vocabulary, at most), and one whose inputs are no whole groups of int4. Group-quantised ones are
    packed, but for groups that kernels do not take.

    Raises CheckpointError for a matrix of an 8-bit checkpoint that --tp has cut to such sizes.
    """
    kind = "int8" if quantization == "int4" and is_output else quantization
    if isinstance(weight, DenseWeight):
        dtype = weight.tensor.dtype
        if not any(size % MULTIPLE.get(kind, 1) for size in weight.shape):
            weight = quantized(weight, kind)
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
        return weight if packed is None else GpuGroupScaledWeight(**vars(packed))
    return _ON_GPU.get(type(weight), type(weight))(**vars(weight))
