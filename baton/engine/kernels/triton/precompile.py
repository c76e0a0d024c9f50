"""Compiles launches in other processes, on all cores, into Triton's cache.

By itself Triton compiles on one core, when a kernel is first launched.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.pool import IMapIterator, Pool
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from baton.engine.kernels.triton.check import check
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, specs_in

T = TypeVar("T")


class Target(NamedTuple):
    """A launch to compile. capability: such as 90 · module: of the spec, if not one of ours."""

    kernel: str
    shape: Key
    capability: int
    config: Config | None = None
    module: str = ""


@contextmanager
def compilers(count: int = 0) -> Iterator[Pool]:
    """Processes for `compile_target`: one a core, or `count`. They are killed at the end."""
    # Where launches look, which is not where `check` keeps what it compiles.
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    with multiprocessing.get_context("spawn").Pool(count or len(os.sched_getaffinity(0))) as pool:
        yield pool


def compile_target(target: Target) -> str:
    """Compiles a launch and its launcher; why it does not compile, or nothing."""
    modules = [target.module] if target.module else []
    spec = next(one for one in specs_in(modules) if one.name == target.kernel)
    run = JITFunction.run

    def trial(shape: Key, device: torch.device) -> Any:
        return SimpleNamespace(run=lambda _: spec.trial(shape, device).run(target.config))

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        binary = run(self, *args, **kwargs)
        if hasattr(nvidia, "make_launcher"):  # before Triton 3.7: in C, one for each signature
            with suppress(Exception):  # without a C compiler or CUDA's library no launch will work
                nvidia.CudaLauncher(binary.src, binary.metadata)
        return binary

    JITFunction.run = compiled
    try:
        one = KernelSpec(target.kernel, trial, [target.shape])
        _, complaints = check([one], [target.capability], lambda line: None)
    finally:
        JITFunction.run = run  # `check` replaces it, too
    return complaints[0] if complaints else ""


def results_until(end: float, results: IMapIterator[T]) -> Iterator[T]:
    """Results of a pool's `imap` that come before `end`, by time.monotonic()."""
    with suppress(StopIteration, multiprocessing.TimeoutError):
        while True:
            yield results.next(max(0.0, end - time.monotonic()))
