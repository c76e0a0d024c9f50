"""Experts of a layer in one tensor, as gpt-oss's checkpoints have them, plain or in MXFP4.

Plain, `gate_up_proj` is `[experts, in, out]`. In MXFP4 (OCP Microscaling Formats 1.0)
`gate_up_proj_blocks` is uint8 `[experts, out, in / 32, 16]`, two numbers of 4 bits a byte, and
`gate_up_proj_scales` uint8 `[experts, out, in / 32]`. Of its outputs even ones are the gate's and
odd ones up's. `down_proj` is held alike, and biases are `[experts, out]`. Torch-free;
`weights/quantized_checkpoint.py` reads them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from baton.engine.models.quantization import Stored
from baton.errors import CheckpointError

BLOCK = 32  # inputs that share a scale in MXFP4
_PART = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class StackedPart(NamedTuple):
    """Where an expert's matrix or bias lies: in `tensor`, which outputs of which expert."""

    tensor: str
    expert: int
    outputs: slice
    is_bias: bool

    @classmethod
    def of(cls, name: str) -> StackedPart | None:
        """Of `….experts.3.up_proj.weight`, say; None for what is no expert's."""
        if not (found := _PART.fullmatch(name)):
            return None
        module, expert, which, kind = found.groups()
        outputs = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[which]
        tensor = f"{module}.{'down' if which == 'down' else 'gate_up'}_proj"
        return cls(tensor, int(expert), outputs, kind == "bias")

    def stored(self, shape: tuple[int, ...], experts: int, mxfp4: bool) -> dict[str, Stored]:
        """The tensors that hold a part of this shape with those of all experts."""
        outputs = shape[0] * (self.outputs.step or 1)
        if self.is_bias:
            return {f"{self.tensor}_bias": Stored((experts, outputs))}
        inputs = shape[1]
        if not mxfp4:
            return {self.tensor: Stored((experts, inputs, outputs))}
        if inputs % BLOCK:
            raise CheckpointError(
                f"{self.tensor} has {inputs} inputs: in MXFP4 they have to be a multiple of {BLOCK}"
            )
        blocks, kinds = (experts, outputs, inputs // BLOCK), ("U8",)
        return {
            f"{self.tensor}_blocks": Stored((*blocks, BLOCK // 2), kinds),
            f"{self.tensor}_scales": Stored(blocks, kinds),
        }
