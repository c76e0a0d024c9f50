"""What a kernel's module tells of it: `SPEC`, from which it is compiled, tuned and configured.

A spec has no code that launches anything by itself; it is read by `baton.engine.ops.triton.check`
and
`baton.engine.ops.triton.tune`. A module has one `SPEC` or several `SPECS`; those of a package that
may not import this one are of classes of its own, with the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from triton import JITFunction

Key = Mapping[str, int | str]
"""What a configuration depends on, such as `{"rows": 64, "head_size": 128}`."""


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
        sizes = [f"{name}={size}" for name, size in self.sizes.items()]
        return " ".join([*sizes, f"warps={self.num_warps}", f"stages={self.num_stages}"])


@dataclass(frozen=True)
class CompileCase:
    """One way in which a kernel is compiled without a GPU.

    name: what is special, such as `"bf16 128 int8"` · fn: what `triton.jit` made of the function ·
    types: Triton's type of each argument that is no `constexpr`, such as `"*bf16"`, `"i32"`,
    `"fp32"` · constexprs: values of all others; None for a pointer that is left out · least: the
    compute capability that it needs, 80 for sm_80 · aligned: integer arguments that are multiples
    of 16 in use (pointers always are).
    """

    name: str
    fn: JITFunction
    types: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    least: int = 80
    aligned: Sequence[str] = ()


@dataclass(frozen=True)
class Trial:
    """One launch on tensors made for it.

    key: what the kernel gives to `tuning.choose` for these tensors · run: launches it as configured
    · moved_bytes: read and written at least, for a rate in GB/s; 0 where that says nothing.
    """

    key: Key
    run: Callable[[Config], object]
    moved_bytes: int = 0


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, how it is compiled and what of it is tuned.

    name: as in `tuning.choose` and in the files of `configs/` · cases: what `check` compiles ·
    candidates: the configurations to try for a key; a list of one is nothing to tune · shapes: what
    is tuned unless a user names others; those of models and batches as they are served ·
    inputs: a trial of a shape on a device.
    """

    name: str
    cases: Sequence[CompileCase]
    candidates: Callable[[Key], Sequence[Config]]
    shapes: Sequence[Key]
    inputs: Callable[[Key, torch.device], Trial]
