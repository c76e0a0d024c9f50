"""Tuning: measures candidate configurations of kernels on this GPU and keeps the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import IMapIterator, Pool
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import triton

from baton.cuda import compute_capability
from baton.engine.kernels.triton import timing
from baton.engine.kernels.triton.check import Target, compile_target, results_until
from baton.engine.kernels.triton.launch_configs import Configs, choose, read, write
from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, relative_error, text_of

Measure: TypeAlias = Callable[[Sequence[timing.Launch], torch.device], float]

_FASTER = 0.99  # of the previous time; a smaller gain is noise
_CANDIDATES_S = 30.0  # longest wait for the candidates of a shape to be compiled


class Tuned(NamedTuple):
    """Result of tuning a shape. seconds, seconds_before: of a launch with `config`, and before."""

    spec: KernelSpec
    key: Key
    config: Config
    seconds: float
    seconds_before: float
    text: str


def tune(
    work: Sequence[tuple[KernelSpec, Key]], device: torch.device, file: Path, seconds: float,
    measure: Measure = timing.seconds, pool: Pool | None = None,
) -> Iterator[Tuned]:  # fmt: skip
    """Tunes each kernel and shape as `tune_shape` does, until `seconds` are over.

    pool: processes that compile the candidates ahead.
    """
    end = time.monotonic() + seconds
    for spec, shape, compiled in with_candidates(work, device, pool):
        if time.monotonic() >= end:
            return
        if found := tune_shape(spec, shape, device, file, end, measure, compiled):
            yield found


def with_candidates(
    work: Sequence[tuple[KernelSpec, Key]], device: torch.device, pool: Pool | None
) -> list[tuple[KernelSpec, Key, IMapIterator[str] | None]]:
    """Begins to compile the candidates of all shapes, and gives each shape with its results."""
    found: list[tuple[KernelSpec, Key, IMapIterator[str] | None]] = []
    for spec, shape in work:
        compiled = None
        if pool is not None:
            assert spec.configs is not None
            candidates = spec.configs(spec.trial(shape, torch.device("meta")).key)
            capability = compute_capability(device)
            targets = [Target(spec.name, shape, capability, one) for one in candidates]
            compiled = pool.imap(compile_target, targets)
        found.append((spec, shape, compiled))
    return found


def tune_shape(
    spec: KernelSpec, shape: Key, device: torch.device, file: Path, end: float,
    measure: Measure = timing.seconds, compiled: IMapIterator[str] | None = None,
) -> Tuned | None:  # fmt: skip
    """Finds the fastest configuration for a shape and keeps it in `file`; None if none ran.

    It replaces the configuration in effect only if it is faster in two further passes: in the first
    pass, the best of many candidates is also the luckiest. end: by time.monotonic() · compiled:
    results of compiling the candidates, which are waited for; None if that was not begun. Raises
    ValueError, and keeps nothing, if the fastest has other results than the configuration in
    effect.
    """
    assert spec.configs is not None
    if compiled is not None:
        list(results_until(min(end, time.monotonic() + _CANDIDATES_S), compiled))
    trials = timing.trials_of(spec, shape, device)
    key, moved = trials[0].key, trials[0].moved_bytes
    in_effect = choose(spec.name, key, device)
    configs = {text_of(one): one for one in (in_effect, *spec.configs(key))}

    def timed(name: str) -> float:
        return measure(timing.launches_of(trials, configs[name]), device)

    first = dict[str, float]()
    failed = 0
    for name in configs:
        if first and time.monotonic() >= end:
            break
        try:
            first[name] = timed(name)
        except (triton.OutOfResources, triton.CompilationError, RuntimeError):
            failed += 1  # too large for this GPU: another configuration will do
    if not first:
        return None
    fastest = sorted(first, key=lambda name: first[name])[:2]
    before = text_of(in_effect) if text_of(in_effect) in first else fastest[0]
    passes = [{name: timed(name) for name in {*fastest, before}} for _ in range(2)]
    slowest = {name: max(one[name] for one in passes) for name in passes[0]}
    best = min(slowest, key=lambda name: slowest[name])
    if any(one[best] > _FASTER * one[before] for one in passes):
        best = before
    if best != before:
        _compare(spec, shape, device, configs[best], configs[before])
    _keep(file, spec.name, key, configs[best])
    rate = f" {moved / slowest[best] / 1e9:.0f} GB/s" if moved else ""
    tried = f"{len(first) + failed} tried" + (f", {failed} failed" if failed else "")
    text = f"{spec.name} {text_of(key)}: {best}  {1e3 * slowest[best]:.4f} ms{rate} ({tried})"
    return Tuned(spec, key, configs[best], slowest[best], slowest[before], text)


def _keep(file: Path, kernel: str, key: Key, config: Config) -> None:
    """Writes a measured configuration, in place of the one for the same key."""
    known = read(file).kernels if file.is_file() else {}
    others = [entry for entry in known.get(kernel, ()) if entry[0] != dict(key)]
    entries = [*others, (dict(key), dict(config))]
    write(file, Configs(measured=True, kernels={**known, kernel: entries}))


def _compare(
    spec: KernelSpec, shape: Key, device: torch.device, config: Config, other: Config
) -> None:
    """Raises ValueError if two configurations' results differ by more than rounding."""
    outputs = []
    for one in (config, other):
        torch.manual_seed(0)  # the same inputs, made again: some kernels change theirs
        trial = spec.trial(shape, device)
        outputs.append(trial.run(one))
    for found, wanted in zip(*outputs, strict=True):
        error = relative_error(found, wanted, trial.tolerance)
        if not error <= 2:  # both may be off by what rounding explains
            raise ValueError(
                f"{spec.name} {text_of(trial.key)}: {text_of(config)} is off by {error:.2f} times"
                " the error that rounding explains"
            )
