"""Kernel specs: how each kernel is compiled, tuned, tested and measured; `SPECS` of its module.

`KernelSpec.trial` makes the tensors of a launch: on the meta device for compiling without a GPU, on
a GPU for tuning and measuring, on a CPU or GPU for comparison with the reference.
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

# Bounds of the relative error by norm. Results and references are rounded to their type: the error
# of float32 (2**-24) grows with the length of sums, that of the others (2**-11, 2**-8) does not.
_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
_INTERPRETED = 2  # factor: Triton's interpreter truncates to bfloat16 where a GPU rounds
_ONE_ROW = 4.0  # factor for a single row, which has few elements

# Sizes at which interpreting a case is quick.
_SMALL = {
    "rows": 6, "columns": 300, "size": 300, "heads": 4, "kv_heads": 2,
    "batch": 3, "context": 40, "tokens": 18,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One launch on its tensors, and its reference on the same values.

    key: the kernel's key for `launch_configs.choose` · run: launches the kernel; config None is the
    one in effect · moved_bytes: minimum of bytes read and written, or 0 · flops: of products, or 0
    · tolerance: relative error allowed; None depends on the type, 0 is equality to the bit.
    """

    key: Key
    run: Callable[[Config | None], Outputs]
    reference: Callable[[], Outputs]
    moved_bytes: int = 0
    flops: float = 0.0
    tolerance: float | None = None


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and the launches that it is compiled, tested and tuned with.

    name: in `launch_configs.choose` and in the files of `configs/` · trial: makes a trial for a
    shape on a device · cases: shapes that are compiled and compared with the reference; "least": 89
    marks one that needs sm_89 · configs: candidates for a key; None if nothing is tuned · shapes:
    shapes of served models and batches, which are tuned by default.
    """

    name: str
    trial: Callable[[Key, torch.device], Trial]
    cases: Sequence[Key]
    configs: Callable[[Key], Sequence[Config]] | None = None
    shapes: Sequence[Key] = ()


def specs_in(names: Iterable[str] = ()) -> list[Any]:
    """The specs of this package's modules and of others by name.

    Raises ImportError, or ValueError if a named module has none. (kvtransfer, which cannot import
    this package, has specs with the same fields.)
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
    """All combinations of values by name; the last name varies fastest."""
    return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]


def dtype_of(shape: Key, name: str = "dtype", default: str = "bf16") -> torch.dtype:
    """The type named by a field of a shape."""
    return DTYPES[str(shape.get(name, default))]


def small(shape: Key) -> Key:
    """A case at small sizes, for Triton's interpreter."""
    return {**shape, **{name: size for name, size in _SMALL.items() if name in shape}}


def text_of(key: Mapping[str, object]) -> str:
    """Text such as `rows=64 size=4096`."""
    return " ".join(f"{name}={value}" for name, value in key.items())


def error_of(trial: Trial) -> float:
    """The largest error of a launch as a share of the allowed error; above 1 is wrong."""
    pairs = zip(trial.run(None), trial.reference(), strict=True)
    return max(relative_error(*pair, trial.tolerance) for pair in pairs)


def relative_error(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> float:
    """The error of found `[rows, ...]`, of all rows or the worst one, as a share of the tolerance.

    Raises ValueError if shapes or types differ, if an element is not finite, or if integers, or
    results with tolerance 0, are not equal to the bit.
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
    difference, size = (found - wanted).norm(dim=1), wanted.norm(dim=1)
    mean = size.square().mean().sqrt().clamp_min(1e-30)
    # A row of nearly zeros is compared with the mean size of rows.
    worst_row = (difference / size.maximum(0.01 * mean)).max()
    overall = difference.norm() / size.norm().clamp_min(1e-30)
    return max(float(overall), float(worst_row) / _ONE_ROW) / tolerance
