"""What a kernel's module declares in `SPECS`: how it is compiled, tuned, tested and measured.

Tensors for a launch are made in one place, `KernelSpec.trial`: on the meta device for compiling
without a GPU, on a GPU for tuning and measuring, on either for comparison with the reference.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from baton.engine.kernels import triton as kernels

Key: TypeAlias = Mapping[str, int | str]
"""Sizes and types by name: a shape, or what a configuration depends on, as `{"rows": 64}`."""

Config: TypeAlias = Mapping[str, int]
"""Keyword arguments of a launch: `num_warps`, `num_stages`, and the kernel's own sizes by name."""

Outputs: TypeAlias = tuple[Tensor, ...]

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8": torch.int8, "fp8": torch.float8_e4m3fn,
}  # fmt: skip

# Of the difference's norm to the reference's. Results are rounded to their type, by the reference
# too: half of float32's 2**-24 grows with the length of sums, the others' 2**-11 and 2**-8 do not.
_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
_INTERPRETED = 2  # Triton's interpreter cuts off what a GPU rounds to bfloat16
_ONE_ROW = 4.0  # times as far may a single row be, which few elements make up

# Sizes at which a case is quickly interpreted.
_SMALL = {
    "rows": 6, "columns": 300, "size": 300, "heads": 4, "kv_heads": 2,
    "batch": 3, "context": 40, "tokens": 18,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One launch on tensors made for it, beside its reference on the same values.

    key: what the kernel gives to `tuning.choose` for these tensors · run: launches it, with the
    configuration in effect for None · moved_bytes: read and written at least · flops: of products;
    both 0 where they say nothing · tolerance: relative error allowed; None is by type, 0 is equal
    to the bit.
    """

    key: Key
    run: Callable[[Config | None], Outputs]
    reference: Callable[[], Outputs]
    moved_bytes: int = 0
    flops: float = 0.0
    tolerance: float | None = None


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, how it is compiled and what of it is tuned.

    name: as in `tuning.choose` and in the files of `configs/` · trial: tensors for a shape on a
    device · cases: a shape for each way in which the kernel is compiled ahead of time and compared
    with its reference; "least": 89 in it is of one that needs sm_89 · configs: those to try for a
    key; None for a kernel with nothing to tune · shapes: what is tuned unless a user names others,
    those of models and batches as they are served.
    """

    name: str
    trial: Callable[[Key, torch.device], Trial]
    cases: Sequence[Key]
    configs: Callable[[Key], Sequence[Config]] | None = None
    shapes: Sequence[Key] = ()


def specs_in(names: Iterable[str] = ()) -> list[Any]:
    """The specs of this package's modules and of further ones, by their names.

    ImportError, or ValueError if a further one has none. (A package that cannot import this one
    has specs of the same fields.)
    """
    own = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    found: list[Any] = []
    for name in [*(name for name in own if not name.endswith("__main__")), *names]:
        specs = getattr(importlib.import_module(name), "SPECS", ())
        if not specs and name not in own:
            raise ValueError(f"{name} has no SPECS")
        found += specs
    return found


def product_of(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations, as keyword arguments or sizes by name; the last name changes first."""
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


def dtype_of(shape: Key, name: str = "dtype", default: str = "bf16") -> torch.dtype:
    """The type that a shape names."""
    return DTYPES[str(shape.get(name, default))]


def small(shape: Key) -> Key:
    """The same case at sizes for Triton's interpreter."""
    return {**shape, **{name: size for name, size in _SMALL.items() if name in shape}}


def text_of(key: Mapping[str, object]) -> str:
    """As a user writes it: `rows=64 size=4096`."""
    return " ".join(f"{name}={value}" for name, value in key.items())


def error_of(trial: Trial) -> float:
    """The largest error of a launch as a share of what is allowed: over 1 is wrong."""
    pairs = zip(trial.run(None), trial.reference(), strict=True)
    return max(relative_error(*pair, trial.tolerance) for pair in pairs)


def relative_error(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> float:
    """The error of found `[rows, ...]`, over all and of the worst row, as a share of the tolerance.

    ValueError if shapes or types differ, if something is not finite, or if results that have to be
    equal to the bit, as whole numbers have, are not.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ValueError(f"{found.shape} {found.dtype}, not {wanted.shape} {wanted.dtype}")
    if tolerance == 0.0 or not wanted.is_floating_point():
        if not torch.equal(*(x.contiguous().view(torch.uint8) for x in (found, wanted))):
            raise ValueError("not equal to the bit")
        return 0.0
    if tolerance is None:
        tolerance = _BOUNDS[wanted.dtype] * (_INTERPRETED if wanted.device.type == "cpu" else 1)
    found, wanted = (x.reshape(len(x), -1).double() for x in (found, wanted))
    if not found.isfinite().all():
        raise ValueError("the result has elements that are not finite")
    apart, size = (found - wanted).norm(dim=1), wanted.norm(dim=1)
    mean = size.square().mean().sqrt().clamp_min(1e-30)
    # A row of zeros, or of nearly nothing, is compared with the others' size.
    worst_row = (apart / size.maximum(0.01 * mean)).max()
    overall = apart.norm() / size.norm().clamp_min(1e-30)
    return max(float(overall), float(worst_row) / _ONE_ROW) / tolerance
