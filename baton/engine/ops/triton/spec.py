"""What a kernel's module declares of it: `SPEC`, from which it is compiled, tuned and tested.

Tensors for a launch are made in one place, `KernelSpec.trial`: on the meta device for compiling
without a GPU, on a GPU for tuning and measuring, on either for comparison with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = Mapping[str, int | str]
"""Sizes and types by name: a shape, or what a configuration depends on, as `{"rows": 64}`."""

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


@dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    num_warps: warps of a program · num_stages: loads of a loop in flight · sizes: the kernel's own
    `constexpr` sizes by their names, such as `{"BLOCK_N": 64}`.
    """

    num_warps: int
    num_stages: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def launch(self) -> dict[str, int]:
        """As keyword arguments of a launch: `kernel[grid](..., **config.launch)`."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.sizes}

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def __str__(self) -> str:
        return text_of({**self.sizes, "warps": self.num_warps, "stages": self.num_stages})


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

    def error(self) -> float:
        """The largest error of a launch as a share of what is allowed: over 1 is wrong."""
        pairs = zip(self.run(None), self.reference(), strict=True)
        return max(relative_error(*pair, self.tolerance) for pair in pairs)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, how it is compiled and what of it is tuned.

    name: as in `tuning.choose` and in the files of `configs/` · trial: tensors for a shape on a
    device · cases: (shape, configuration) for each way in which the kernel is compiled ahead of
    time and compared with its reference; "least": 89 in a shape is of one that needs sm_89 ·
    configs: those to try for a key; None for a kernel with nothing to tune · shapes: what is tuned
    unless a user names others, those of models and batches as they are served.
    """

    name: str
    trial: Callable[[Key, torch.device], Trial]
    cases: Sequence[tuple[Key, Config]]
    configs: Callable[[Key], Sequence[Config]] | None = None
    shapes: Sequence[Key] = ()

    @property
    def launches(self) -> dict[str, tuple[int, Callable[[torch.device], object]]]:
        """The cases by name, as `baton.engine.ops.triton.check` compiles them."""

        def launch(shape: Key, config: Config) -> Callable[[torch.device], object]:
            return lambda device: self.trial(shape, device).run(config)

        return {
            f"{text_of(shape)} {config}": (int(shape.get("least", 80)), launch(shape, config))
            for shape, config in self.cases
        }


def text_of(key: Mapping[str, object]) -> str:
    """As a user writes it: `rows=64 size=4096`."""
    return " ".join(f"{name}={value}" for name, value in key.items())


def relative_error(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> float:
    """The error of found `[rows, ...]`, over all and of the worst row, as a share of the tolerance.

    ValueError if shapes or types differ, if something is not finite, or if results that have to be
    equal to the bit are not.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ValueError(f"{found.shape} {found.dtype}, not {wanted.shape} {wanted.dtype}")
    if tolerance == 0.0:
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
