"""Numbers of 4 bits (E2M1), W4A16: MXFP4 (OCP Microscaling Formats 1.0) and NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.quantization.config import MXFP4_GROUP
from baton.engine.quantization.group_scaled import FourBitWeight
from baton.engine.quantization.linear_weight import joined


def powers_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2 ** (exponents - bias), float32, of uint8."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - bias)


class Mxfp4Weight(FourBitWeight):
    """An MXFP4 matrix, or an NVFP4 one: then scales of 16 inputs each are any numbers.

    A value is an E2M1 number with the sign in its highest bit. Its meaning is doubled, so that it
    is a whole number, and scales are half the powers of two that the checkpoint has.
    """

    NAME = "MXFP4"
    GROUP: ClassVar[int] = MXFP4_GROUP
    NUMBERS: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 6, 8, 12)

    @classmethod
    def from_blocks(cls, blocks: Sequence[Tensor], scales: Sequence[Tensor]) -> Self:
        """Parts of a checkpoint's matrix, joined along the outputs.

        blocks: uint8 `[out, in / 32, 16]` each · scales: uint8 `[out, in / 32]`, biased exponents.
        """
        return cls(joined(blocks).flatten(1), powers_of_two(joined(scales), 128))

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        table = torch.tensor((*self.NUMBERS, *(-x for x in self.NUMBERS)), dtype=torch.float32)
        return table.to(self.values.device)[self.nibbles(rows).int()]
