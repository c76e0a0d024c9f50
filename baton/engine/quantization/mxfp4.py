"""MXFP4 (OCP Microscaling Formats 1.0): W4A16 with a power of two for each 32 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.quantization.config import MXFP4_GROUP
from baton.engine.quantization.group_scaled import FourBitWeight
from baton.engine.quantization.linear_weight import joined


class Mxfp4Weight(FourBitWeight):
    """An MXFP4 matrix.

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
        exponents = joined(scales)
        ones = torch.ones(exponents.shape, device=exponents.device)
        return cls(joined(blocks).flatten(1), torch.ldexp(ones, exponents.int() - 128))

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        table = torch.tensor((*self.NUMBERS, *(-x for x in self.NUMBERS)), dtype=torch.float32)
        return table.to(self.values.device)[self.nibbles(rows).int()]
