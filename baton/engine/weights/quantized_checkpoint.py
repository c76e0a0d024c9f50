"""Matrices that a checkpoint holds quantised, read into the formats of `weight.py`.

What stands in files is packed as `models/quantization.py` tells, and read without loss: scales
become float32, and values and zero points of 4 bits stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from baton.engine.models.quantization import BLOCK, QuantizationConfig, Shapes
from baton.engine.models.stacked_experts import StackedPart
from baton.engine.weights.weight import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    Weight,
)
from baton.errors import CheckpointError

# A word's eight values, the lowest bits first, are those of outputs 0 2 4 6 1 3 5 7. The way back:
_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)

Get = Callable[[str], Tensor | None]
"""A tensor of the checkpoint by its name, or None where it has none of that name."""


def read_quantized(config: QuantizationConfig, parts: Shapes, get: Get) -> Weight:
    """A matrix `[out, in]`, of parts joined along the outputs.

    Raises CheckpointError naming a part whose inputs are in another order than the first's.
    """
    modules = {name.removesuffix(".weight"): shape for name, shape in parts.items()}
    if config.weights == "fp8_block":
        return Fp8BlockWeight(
            _joined(_found(get, f"{module}.weight") for module in modules),
            _joined(
                _of_groups(_found(get, f"{module}.weight_scale_inv").float(), *shape)
                for module, shape in modules.items()
            ),
        )
    if config.weights != "int4":
        kind = Int8Weight if config.weights == "int8" else Fp8Weight
        return kind(
            _joined(_found(get, f"{module}.weight") for module in modules),
            _joined(
                _found(get, f"{module}.weight_scale").float().flatten().expand(shape[0])
                for module, shape in modules.items()
            ),
        )
    read = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}[config.method]
    found = [read(config, module, get) for module in modules]
    orders = [_order(config, module, shape[1], get) for module, shape in modules.items()]
    for module, order in zip(modules, orders, strict=True):
        if not torch.equal(order, orders[0]):
            raise CheckpointError(
                f"{module} has its inputs in other groups (g_idx) than {next(iter(modules))}, with "
                "which it is multiplied: quantise the model without act-order"
            )
    values, scales, zeros = (_joined(part[at] for part in found) for at in range(3))
    order, inputs = orders[0], values.shape[1]
    in_order = torch.equal(order.cpu(), torch.arange(inputs))
    return Int4Weight.packed(
        values if in_order else values[:, order],
        scales,
        None if (zeros == Int4Weight.MIDDLE).all() else zeros,
        None if in_order else order,
    )


def read_stacked(part: StackedPart, get: Callable[[str], Tensor]) -> Tensor:
    """An expert's matrix `[out, in]` or bias `[out]`, out of what the checkpoint has of all."""
    if part.is_bias:
        return get(f"{part.tensor}_bias")[part.expert, part.outputs]
    return get(part.tensor)[part.expert, :, part.outputs].T


def read_mxfp4(
    parts: Iterable[StackedPart], get: Callable[[str], Tensor], device: torch.device
) -> Mxfp4Weight:
    """Matrices of an expert, their outputs one behind the other."""

    def joined(kind: str) -> Tensor:
        return _joined(
            get(f"{part.tensor}_{kind}")[part.expert, part.outputs].to(device) for part in parts
        )

    scales = joined("scales")
    ones = torch.ones(scales.shape, device=device)
    # Half of it: `Mxfp4Weight` has numbers twice as large.
    return Mxfp4Weight(joined("blocks").flatten(1), torch.ldexp(ones, scales.int() - 128))


def _of_groups(blocks: Tensor, outputs: int, inputs: int) -> Tensor:
    """Scales of blocks as those of each output's groups, which are equal: `[out, groups]`.

    A last block of fewer inputs makes groups smaller.
    """
    group = math.gcd(BLOCK, inputs)
    wide = blocks.repeat_interleave(BLOCK // group, dim=1)[:, : inputs // group]
    return wide.repeat_interleave(BLOCK, dim=0)[:outputs]


Int4 = tuple[Tensor, Tensor, Tensor]
"""Values uint8 `[out, in]` of 0 to 15, scales float32 and zero points uint8 `[out, groups]`."""


def _awq(config: QuantizationConfig, module: str, get: Get) -> Int4:
    values, zeros = (
        _nibbles(_found(get, f"{module}.{name}")).unflatten(-1, (-1, 8))[..., _OF_AWQ].flatten(-2).T
        for name in ("qweight", "qzeros")
    )
    return values, _found(get, f"{module}.scales").T.float(), zeros


def _gptq(config: QuantizationConfig, module: str, get: Get) -> Int4:
    values = _nibbles(_found(get, f"{module}.qweight").T)
    zeros = _nibbles(_found(get, f"{module}.qzeros")).T + config.zero_offset
    return values, _found(get, f"{module}.scales").T.float(), zeros


def _compressed_tensors(config: QuantizationConfig, module: str, get: Get) -> Int4:
    # Signed numbers there, values and zero points are stored with 8 added to both.
    values = _nibbles(_found(get, f"{module}.weight_packed"))
    scales = _found(get, f"{module}.weight_scale").float()
    if config.zero_points:
        return values, scales, _nibbles(_found(get, f"{module}.weight_zero_point").T).T
    return values, scales, torch.full_like(scales, Int4Weight.MIDDLE, dtype=torch.uint8)


def _order(config: QuantizationConfig, module: str, inputs: int, get: Get) -> Tensor:
    """Inputs in the order of their groups, int64 `[in]`. Raises CheckpointError for odd groups."""
    name = f"{module}.{'g_idx' if config.method == 'gptq' else 'weight_g_idx'}"
    groups = get(name)
    if groups is None:
        return torch.arange(inputs)
    order = groups.argsort(stable=True)
    places = torch.arange(len(order), device=order.device) // config.group_size
    if not torch.equal(groups[order].long(), places):
        raise CheckpointError(f"{name} has groups of other sizes than {config.group_size}")
    return order


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[..., n]` → uint8 `[..., 8 * n]`, each word's lowest bits first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.contiguous() for part in parts])


def _found(get: Get, name: str) -> Tensor:
    tensor = get(name)
    assert tensor is not None, "the checkpoint's tensors were checked"
    return tensor
