"""Which block sizes, warps and stages a kernel is launched with, by GPU and shape.

Values come from `configs/`: one file for each compute capability, and one for the interpreter. They
are reasoned, not measured; what `python -m baton.engine.kernels.triton tune` measures on a GPU is
kept in the user's cache and goes before them. A file has, for each kernel, pairs of a shape, in
which a field that is not named does not matter, and the configuration for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import triton

from baton.engine.kernels.triton import timing
from baton.engine.kernels.triton.kernel_spec import Config, KernelSpec, Key, relative_error, text_of

SHIPPED = Path(__file__).parent / "configs"

# What was measured is used up to so many doublings from its shape; then reasoned values are.
REACH = 2.0

Measure: TypeAlias = Callable[[Sequence[timing.Launch], torch.device], float]

_FASTER = 0.99  # of the time before: less of a gain is noise


@dataclass(frozen=True)
class Configs:
    """A file of configurations: measured on a GPU, or reasoned."""

    measured: bool
    kernels: dict[str, list[tuple[Key, Config]]]

    def nearest(self, kernel: str, key: Key) -> Config | None:
        """That of the nearest shape, the first of equals.

        None without any, or where what was measured is too far to say anything.
        """
        reach = REACH if self.measured else 1e9
        near = [(_distance(when, key), config) for when, config in self.kernels.get(kernel, ())]
        distance, config = min(near, key=lambda pair: pair[0], default=(math.inf, None))
        return config if distance <= reach else None


def _distance(when: Key, key: Key) -> float:
    """How far a key is, in doublings over all its numbers; infinite if it is another's."""
    distance = 0.0
    for name, wanted in when.items():
        found = key.get(name)
        if isinstance(found, int) and isinstance(wanted, int):
            distance += abs(math.log2(max(found, 1) / max(wanted, 1)))
        elif found != wanted:
            return math.inf
    return distance


def choose(kernel: str, key: Key, device: torch.device) -> Config:
    """The configuration of a launch: about a microsecond once a key was seen.

    LookupError if no file names the kernel.
    """
    return _chosen(kernel, tuple(key.items()), device)


@lru_cache(maxsize=4096)
def _chosen(kernel: str, key: tuple[tuple[str, int | str], ...], device: torch.device) -> Config:
    for file in in_effect(device):
        if found := read(file).nearest(kernel, dict(key)):
            return found
    raise LookupError(f"no configuration of {kernel} for {dict(key)}")


def in_effect(device: torch.device) -> Sequence[Path]:
    """Files in order of precedence: the user's, if there is one, and the shipped one.

    Launches on the meta device are compiled for the architecture that Triton's driver names.
    """
    if device.type == "meta":
        return [shipped_for(triton.runtime.driver.active.get_current_target().arch)]
    if device.type != "cuda":
        return [SHIPPED / "interpreter.json"]
    major, minor = torch.cuda.get_device_capability(device)
    own = user_file(torch.cuda.get_device_name(device))
    return [*([own] if own.is_file() else []), shipped_for(major * 10 + minor)]


def shipped_for(capability: int) -> Path:
    """The file for a GPU of a capability such as 89: its own or the nearest lower."""
    known = sorted(int(file.stem[3:]) for file in SHIPPED.glob("sm_*.json"))
    nearest = max((one for one in known if one <= capability), default=known[0])
    return SHIPPED / f"sm_{nearest}.json"


def user_file(device_name: str) -> Path:
    """Where measured configurations of a device are kept, with this version of Triton."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device_name).strip("-")
    return cache_folder() / f"{name}-{triton.__version__}.json"


def cache_folder() -> Path:
    """For what is measured or compiled, in the user's cache."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "baton" / "kernels"


@cache
def read(file: Path) -> Configs:
    """ValueError, with the file's name, if it is not of the form that `write` gives."""
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        kernels: dict[str, list[tuple[Key, Config]]] = {
            name: [
                (dict(when), {size: int(value) for size, value in config.items()})
                for when, config in entries
            ]
            for name, entries in text["kernels"].items()
        }
        return Configs(bool(text["measured"]), kernels)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is no file of kernel configurations: {error!r}") from error


def write(file: Path, configs: Configs) -> None:
    """As `read` takes them; a reader sees the old file or all of the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(configs), indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    forget()


def forget() -> None:
    """Files are read again at the next launch."""
    _chosen.cache_clear()
    read.cache_clear()


class Tuned(NamedTuple):
    """What tuning a shape found: seconds of a launch with `config`, and with the one before it."""

    spec: KernelSpec
    key: Key
    config: Config
    seconds: float
    seconds_before: float
    text: str


def tune(
    work: Sequence[tuple[KernelSpec, Key]],
    device: torch.device,
    file: Path,
    seconds: float,
    measure: Measure = timing.seconds,
) -> Iterator[Tuned]:
    """Finds the fastest configuration of each kernel and shape, and keeps each as it is found.

    Stops after so many seconds, whatever is left. Raises ValueError, and keeps nothing, where the
    fastest has other results than the configuration in effect.
    """
    end = time.monotonic() + seconds
    for spec, shape in work:
        if time.monotonic() >= end:
            return
        if found := _tuned(spec, shape, device, end, measure):
            known = read(file).kernels if file.is_file() else {}
            others = [entry for entry in known.get(spec.name, ()) if entry[0] != dict(found.key)]
            entries = [*others, (dict(found.key), dict(found.config))]
            write(file, Configs(measured=True, kernels={**known, spec.name: entries}))
            yield found


def _tuned(
    spec: KernelSpec, shape: Key, device: torch.device, end: float, measure: Measure
) -> Tuned | None:
    """The configuration to keep for a shape; None if none ran.

    That is the fastest in two further passes if each shows it to be faster than the one in effect,
    which is kept otherwise: in the first pass alone, the best of many is also the luckiest.
    """
    assert spec.configs is not None
    trials = timing.rotated(
        lambda: spec.trial(shape, device), lambda trial: trial.moved_bytes, device
    )
    key, moved = trials[0].key, trials[0].moved_bytes
    in_effect = choose(spec.name, key, device)
    configs = {text_of(one): one for one in (in_effect, *spec.configs(key))}

    def timed(name: str) -> float:
        return measure([partial(trial.run, configs[name]) for trial in trials], device)

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
    took = {name: max(one[name] for one in passes) for name in passes[0]}
    best = min(took, key=lambda name: took[name])
    if any(one[best] > _FASTER * one[before] for one in passes):
        best = before
    if best != before:
        _compare(spec, shape, device, configs[best], configs[before])
    rate = f" {moved / took[best] / 1e9:.0f} GB/s" if moved else ""
    tried = f"{len(first) + failed} tried" + (f", {failed} failed" if failed else "")
    text = f"{spec.name} {text_of(key)}: {best}  {1e3 * took[best]:.4f} ms{rate} ({tried})"
    return Tuned(spec, key, configs[best], took[best], took[before], text)


def _compare(
    spec: KernelSpec, shape: Key, device: torch.device, config: Config, other: Config
) -> None:
    """Raises ValueError where two configurations' results differ by more than rounding."""
    outputs = []
    for one in (config, other):
        torch.manual_seed(0)  # on the same numbers, made anew: some kernels change theirs
        trial = spec.trial(shape, device)
        outputs.append(trial.run(one))
    for found, wanted in zip(*outputs, strict=True):
        error = relative_error(found, wanted, trial.tolerance)
        if not error <= 2:  # both may be off by what rounding explains
            raise ValueError(
                f"{spec.name} {text_of(trial.key)}: {text_of(config)} is off by {error:.2f} times"
                " the error that rounding explains"
            )
