"""`python -m baton.engine.ops.triton`: compiles kernels without a GPU, tunes them on one.

check  compiles every kernel for A100 (sm_80), H100 (sm_90) and B200 (sm_100); needs no GPU
tune   measures configurations on this GPU and keeps the fastest for this user
show   prints the configurations in effect on this GPU, or those for an architecture
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from baton.engine.ops.triton import tuning
from baton.engine.ops.triton.check import ARCHITECTURES, check
from baton.engine.ops.triton.spec import Config, KernelSpec, Key, specs_in, text_of
from baton.engine.ops.triton.tuning import Configs


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a kernel failed to compile, 2 for what cannot be done here."""
    args = _parser().parse_args(argv)
    try:
        specs = specs_in(args.module)
        known = {spec.name: spec for spec in specs}
        if unknown := [name for name in args.kernel if name not in known]:
            raise ValueError(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
        return int(args.run(args, [known[name] for name in args.kernel] or specs))
    except (ImportError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m baton.engine.ops.triton",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="check|tune|show")

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text)
        made.set_defaults(run=run)
        made.add_argument(
            "--kernel", action="append", default=[], metavar="NAME",
            help="only this one; repeatable",
        )  # fmt: skip
        made.add_argument(
            "--module", action="append", default=[], metavar="MODULE",
            help="a further module with kernels, such as kvtransfer.kernels.blocks; repeatable",
        )  # fmt: skip
        return made

    checks = command("check", _check, "compile every kernel; needs no GPU")
    checks.add_argument(
        "--arch", default=ARCHITECTURES, type=_architectures, metavar="80,90,100",
        help="compute capabilities to compile for, as 80 for 8.0 (default: all)",
    )  # fmt: skip
    checks.add_argument(
        "--most", type=int, metavar="N", help="at most N cases of a kernel, from all over its list"
    )
    checks.add_argument("--ptx", type=Path, metavar="FOLDER", help="keep the PTX there")

    tunes = command("tune", _tune, "measure on this GPU")
    tunes.add_argument(
        "--shape", action="append", type=_shape, default=[], metavar="rows=64,size=4096",
        help="a shape to tune instead of the kernel's own; repeatable, with one --kernel",
    )  # fmt: skip
    tunes.add_argument("--device", type=int, default=0, metavar="N", help="which GPU (default: 0)")
    tunes.add_argument(
        "--seconds", type=float, default=900.0, help="stop after so long (default: 900)"
    )

    shows = command("show", _show, "print configurations in effect")
    shows.add_argument(
        "--arch", default=(), type=_architectures, metavar="80,90,100",
        help="shipped ones for these instead of this GPU's",
    )  # fmt: skip
    return parser


def _architectures(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shape(text: str) -> Key:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _check(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    total, complaints = check(specs, args.arch, _say, args.ptx, args.most)
    sys.stderr.writelines(f"{complaint}\n" for complaint in complaints)
    _say(f"{total - len(complaints)} of {total} compiled")
    return 1 if complaints else 0


def _show(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if args.arch:
        files = [tuning.shipped_for(arch)[0] for arch in args.arch]
    elif torch.cuda.is_available():
        files = list(tuning.in_effect(torch.device("cuda", torch.cuda.current_device())))
    else:
        raise RuntimeError("no NVIDIA GPU is here; `show --arch 90` prints what is shipped for one")
    for file in files:
        configs = tuning.read(file)
        _say(f"{file} ({'measured' if configs.measured else 'reasoned, not measured'})")
        for spec in specs:
            for when, config in configs.kernels.get(spec.name, ()):
                _say(f"  {spec.name:<20} {text_of(when):<44} {text_of(config)}")
    return 0


def _tune(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs an NVIDIA GPU; `check` compiles without one")
    if args.shape and len(args.kernel) != 1:
        raise ValueError("--shape needs one --kernel, whose shape it is")
    device = torch.device("cuda", args.device)
    torch.cuda.set_device(device)
    file = tuning.user_file(torch.cuda.get_device_name(device))
    work = [(spec, shape) for spec in specs if spec.configs for shape in args.shape or spec.shapes]
    _say(f"{len(work)} shapes, at most {args.seconds:.0f} s; results go to {file}")
    done = 0
    for best in tune(work, device, file, args.seconds):
        done += 1
        _say(f"[{done}/{len(work)}] {best}")
    if done < len(work):
        _say(f"{len(work) - done} shapes are left: time is up, or none of their candidates ran")
    return 0


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
        _keep(file, spec.name, trial.key, config)
        rate = f" {trial.moved_bytes / ms / 1e6:.0f} GB/s" if trial.moved_bytes else ""
        tried = f"{len(timed) + failed} tried" + (f", {failed} failed" if failed else "")
        yield f"{spec.name} {text_of(trial.key)}: {text_of(config)}  {ms:.4f} ms{rate} ({tried})"


def _keep(file: Path, kernel: str, key: Key, config: Config) -> None:
    """Puts a result into the user's file, in place of what was there for its shape."""
    known = tuning.read(file).kernels if file.is_file() else {}
    others = [entry for entry in known.get(kernel, ()) if entry[0] != dict(key)]
    kernels = {**known, kernel: [*others, (dict(key), dict(config))]}
    tuning.write(file, Configs(measured=True, kernels=kernels))


if __name__ == "__main__":
    sys.exit(main())
