"""Experts of a layer in one tensor, as gpt-oss's checkpoints have them, plain or in MXFP4.

Plain, `gate_up_proj` is `[experts, in, out]`. In MXFP4 `gate_up_proj_blocks` is uint8
`[experts, out, in / 32, 16]`, two numbers of 4 bits a byte, and `gate_up_proj_scales` uint8
`[experts, out, in / 32]`. Even outputs are the gate's and odd ones up's. `down_proj` is stored
alike, and biases are `[experts, out]`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from baton.engine.quantization.config import MXFP4_GROUP, TensorSpec
from baton.errors import CheckpointError

_PART = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class StackedPart(NamedTuple):
    """The place of an expert's matrix or bias: some outputs of an expert in `tensor`."""

    tensor: str
    expert: int
    outputs: slice
    is_bias: bool

    @classmethod
    def from_name(cls, name: str) -> StackedPart | None:
        """Parses a name such as `….experts.3.up_proj.weight`; None if it is not an expert's."""
        if not (found := _PART.fullmatch(name)):
            return None
        module, expert, which, kind = found.groups()
        outputs = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[which]
        tensor = f"{module}.{'down' if which == 'down' else 'gate_up'}_proj"
        return cls(tensor, int(expert), outputs, kind == "bias")

    def specs(self, shape: tuple[int, ...], experts: int, mxfp4: bool) -> dict[str, TensorSpec]:
        """The checkpoint's tensors, of all experts, that hold a part of this shape."""
        outputs = shape[0] * (self.outputs.step or 1)
        if self.is_bias:
            return {f"{self.tensor}_bias": TensorSpec((experts, outputs))}
        inputs = shape[1]
        if not mxfp4:
            return {self.tensor: TensorSpec((experts, inputs, outputs))}
        if inputs % MXFP4_GROUP:
            raise CheckpointError(
                f"{self.tensor} has {inputs} inputs: in MXFP4 they have to be a multiple of "
                f"{MXFP4_GROUP}"
            )
        blocks, kinds = (experts, outputs, inputs // MXFP4_GROUP), ("U8",)
        return {
            f"{self.tensor}_blocks": TensorSpec((*blocks, MXFP4_GROUP // 2), kinds),
            f"{self.tensor}_scales": TensorSpec(blocks, kinds),
        }
