"""The weight of a linear layer: one interface for all formats, with its reference in plain torch.

Native code and GPUs have subclasses (`kernels/native/packing.py`, `backends/gpu/linear.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.engine.kernels.activation import Activation
from baton.engine.kernels.torch.linear import product
from baton.engine.kernels.torch.rms_norm import Norm
from baton.engine.kernels.torch.row_ops import RowOps

ROWS_AT_ONCE = 4096
"""Outputs quantised or dequantised at a time, so that no second copy of a large matrix exists."""


Get = Callable[[str], Tensor | None]
"""Reads a checkpoint's tensor by its name; None where it has none of that name."""


class ResidualStream:
    """The residual stream of a step's rows, `[rows, hidden_size]`.

    pending: a layer's output that is added when the stream is next read, or None. Adding it late
    lets one kernel do the addition and the norm that follows · lora_slots: as `StepBatch`'s.
    """

    def __init__(
        self, rows: Tensor, pending: Tensor | None = None, lora_slots: Tensor | None = None
    ) -> None:
        self.rows, self.pending, self.lora_slots = rows, pending, lora_slots

    def add(self, output: Tensor) -> None:
        """Adds a layer's output at the next read."""
        assert self.pending is None, "the stream is read between two additions"
        self.pending = output

    def read(self) -> Tensor:
        """The stream with the pending output added."""
        if self.pending is not None:
            self.rows, self.pending = self.rows + self.pending, None
        return self.rows

    def read_in_place(self) -> Tensor:
        """The stream, with the pending output added to the tensor itself."""
        if self.pending is not None:
            self.rows.add_(self.pending)
            self.pending = None
        return self.rows

    def select(self, rows: Tensor) -> ResidualStream:
        """The stream of some rows, int64 `[n]`."""
        pending = None if self.pending is None else self.pending.index_select(0, rows)
        return ResidualStream(self.rows.index_select(0, rows), pending)

    def normed(self, norm: Norm, ops: RowOps) -> Tensor:
        """The norm of the stream, after the pending output has been added."""
        first, residual = (self.rows, None) if self.pending is None else (self.pending, self.rows)
        normed, self.rows = ops.add_rms_norm(first, residual, norm)
        self.pending = None
        return normed


class LinearWeight(ABC):
    """A matrix `[out, in]`."""

    ops: ClassVar[RowOps] = RowOps()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""

    @property
    def num_bytes(self) -> int:
        """Size of all its tensors."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    def take_outputs(self, rows: Tensor) -> LinearWeight:
        """The weight of some of the outputs, int64 `[n]`."""
        raise TypeError(f"{type(self).__name__} is not cut by outputs")

    def take_inputs(self, columns: range) -> LinearWeight:
        """The weight of some adjacent inputs; the products of all such parts add up to the whole.

        Raises CheckpointError where the format cannot be cut.
        """
        raise TypeError(f"{type(self).__name__} is not cut by inputs")

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: x `[rows, in]`, bias `[out]` → `[rows, out]` of x's type."""

    def product(
        self, x: Any, bias: Tensor | None = None, *, norm: Norm | None = None,
        act: Activation | None = None, residual: ResidualStream | None = None,
    ) -> Any:  # fmt: skip
        """`apply` with the layer's operations before and after it, which subclasses may fuse.

        x: `[rows, in]`, or the result of another weight's `product` with `act`; with a norm, a
        `ResidualStream` · norm: applied to x first · act: the product is `[rows, 2 * size]`, gate
        first; returns its gated half, to be passed to another weight's `product` · residual: the
        stream that the product is added to.
        """
        y = self.apply(x if norm is None else x.normed(norm, self.ops), bias)
        if act is not None:
            y = self.ops.act_mul(y, act)
        if residual is not None:
            residual.add(y)
        return y


@dataclass(frozen=True)
class DenseWeight(LinearWeight):
    """An unquantised matrix, float32, bfloat16 or float16."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs

    def take_outputs(self, rows: Tensor) -> DenseWeight:
        return DenseWeight(self.tensor[rows.to(self.tensor.device)])

    def take_inputs(self, columns: range) -> DenseWeight:
        return DenseWeight(self.tensor[:, columns.start : columns.stop].contiguous())

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, self.tensor, bias)


@dataclass(frozen=True)
class JoinedWeight(LinearWeight):
    """Weights of several formats with the same inputs, joined along the outputs."""

    parts: tuple[LinearWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def take_outputs(self, rows: Tensor) -> LinearWeight:
        """The weight of some of the outputs, those of one part after those of another."""
        taken, first = list[LinearWeight](), 0
        for part in self.parts:
            is_here = (rows >= first) & (rows < first + part.shape[0])
            taken.append(part.take_outputs(rows[is_here] - first))
            first += part.shape[0]
        return JoinedWeight(tuple(taken))

    def take_inputs(self, columns: range) -> LinearWeight:
        return JoinedWeight(tuple(part.take_inputs(columns) for part in self.parts))

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes = [part.shape[0] for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        applied = zip(self.parts, biases, strict=True)
        return torch.cat([part.apply(x, bias) for part, bias in applied], dim=1)


def require(get: Get, name: str) -> Tensor:
    """A tensor that the checkpoint has."""
    tensor = get(name)
    assert tensor is not None, "the checkpoint's tensors were checked"
    return tensor


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors joined along the first axis."""
    return torch.cat([part.contiguous() for part in parts])
