"""Which block sizes, warps and stages a kernel is launched with, by GPU and shape.

Values come from `configs/`: one file for each compute capability, and one for the interpreter. They
are reasoned, not measured; what `python -m baton.engine.ops.triton tune` measures on a GPU is kept
in the user's cache and goes before them. A file has, for each kernel, pairs of the shape that a
configuration is for, in which a field that is not named does not matter, and the configuration.
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

import torch
import triton

from baton.engine.ops.triton.spec import Config, KernelSpec, Key, text_of

SHIPPED = Path(__file__).parent / "configs"

# What was measured is used up to so many doublings from its shape; then reasoned values are.
REACH = 2.0


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


def median_ms(run: Callable[[], object]) -> float:
    """The median of some launches with a cold L2 cache, on the GPU."""
    return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))


def tune(
    work: Sequence[tuple[KernelSpec, Key]],
    device: torch.device,
    file: Path,
    seconds: float,
    measure: Callable[[Callable[[], object]], float] = median_ms,
) -> Iterator[str]:
    """Finds the fastest configuration of each kernel and shape, and keeps each as it is found.

    measure: milliseconds that a launch takes. Stops after so many seconds, whatever is left.
    """
    end = time.monotonic() + seconds
    for spec, shape in work:
        if time.monotonic() >= end:
            return
        assert spec.configs is not None
        trial, timed, failed = spec.trial(shape, device), list[tuple[float, Config]](), 0
        for config in spec.configs(trial.key):
            if time.monotonic() >= end:
                break
            try:
                timed.append((measure(partial(trial.run, config)), config))
            except (triton.OutOfResources, triton.CompilationError, RuntimeError):
                failed += 1  # too large for this GPU: another configuration will do
        if not timed:
            continue
        ms, config = min(timed, key=lambda pair: pair[0])
        known = read(file).kernels if file.is_file() else {}
        others = [entry for entry in known.get(spec.name, ()) if entry[0] != dict(trial.key)]
        found = [*others, (dict(trial.key), dict(config))]
        write(file, Configs(measured=True, kernels={**known, spec.name: found}))
        rate = f" {trial.moved_bytes / ms / 1e6:.0f} GB/s" if trial.moved_bytes else ""
        tried = f"{len(timed) + failed} tried" + (f", {failed} failed" if failed else "")
        yield f"{spec.name} {text_of(trial.key)}: {text_of(config)}  {ms:.4f} ms{rate} ({tried})"
