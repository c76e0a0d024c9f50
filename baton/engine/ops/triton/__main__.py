"""`python -m baton.engine.ops.triton`: compiles kernels without a GPU, tunes them on one.

check  compiles every kernel for A100 (sm_80), H100 (sm_90) and B200 (sm_100); needs no GPU
tune   measures configurations on this GPU and keeps the fastest for this user
show   prints the configurations in effect on this GPU, or those for an architecture
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baton.engine.ops.triton import tuning
from baton.engine.ops.triton.check import ARCHITECTURES, check, specs_in, spread
from baton.engine.ops.triton.spec import KernelSpec, Key
from baton.engine.ops.triton.tune import tune


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a kernel failed to compile, 2 for what cannot be done here."""
    args = _parser().parse_args(argv)
    try:
        specs = specs_in(args.module)
        if args.kernel:
            specs = _named(specs, args.kernel)
        return int(args.run(args, specs))
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
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this one; repeatable"
    )
    shared.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="MODULE",
        help="a further module with kernels, such as kvtransfer.kernels.specs; repeatable",
    )

    command = commands.add_parser(
        "check", parents=[shared], help="compile every kernel; needs no GPU"
    )
    command.add_argument(
        "--arch",
        default=ARCHITECTURES,
        type=_architectures,
        metavar="80,90,100",
        help="compute capabilities to compile for, as 80 for 8.0 (default: all)",
    )
    command.add_argument(
        "--most", type=int, metavar="N", help="at most N cases of a kernel, from all over its list"
    )
    command.add_argument("--ptx", type=Path, metavar="FOLDER", help="keep the PTX there")
    command.set_defaults(run=_check)

    command = commands.add_parser("tune", parents=[shared], help="measure on this GPU")
    command.add_argument(
        "--shape",
        action="append",
        type=_shape,
        default=[],
        metavar="rows=64,size=4096",
        help="a shape to tune instead of the kernel's own; repeatable, with one --kernel",
    )
    command.add_argument(
        "--device", type=int, default=0, metavar="N", help="which GPU (default: 0)"
    )
    command.add_argument(
        "--seconds", type=float, default=900.0, help="stop after so long (default: 900)"
    )
    command.set_defaults(run=_tune)

    command = commands.add_parser("show", parents=[shared], help="print configurations in effect")
    command.add_argument(
        "--arch",
        default=(),
        type=_architectures,
        metavar="80,90,100",
        help="shipped ones for these instead of this GPU's",
    )
    command.set_defaults(run=_show)
    return parser


def _architectures(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shape(text: str) -> Key:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def _named(specs: Sequence[KernelSpec], names: Sequence[str]) -> list[KernelSpec]:
    known = {spec.name: spec for spec in specs}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _check(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if args.most is not None:
        specs = [replace(spec, cases=spread(spec.cases, args.most)) for spec in specs]
    results = check(specs, args.arch, _say, args.ptx)
    bad = [result for result in results if result.complaint]
    for result in bad:
        sys.stderr.write(
            f"{result.kernel} ({result.case}) for sm_{result.architecture}: {result.complaint}\n"
        )
    _say(f"{len(results) - len(bad)} of {len(results)} compiled")
    return 1 if bad else 0


def _tune(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs an NVIDIA GPU; `check` compiles without one")
    if args.shape and len(args.kernel) != 1:
        raise ValueError("--shape needs one --kernel, whose shape it is")
    device = torch.device("cuda", args.device)
    torch.cuda.set_device(device)
    file = tuning.user_file(torch.cuda.get_device_name(device))
    work = [
        (spec, shape)
        for spec in specs
        for shape in args.shape or spec.shapes
        if len(spec.candidates(shape)) > 1
    ]
    _say(f"{len(work)} shapes, at most {args.seconds:.0f} s; results go to {file}")
    done = 0
    for best in tune(work, device, file, args.seconds):
        done += 1
        _say(f"[{done}/{len(work)}] {best}")
    if done < len(work):
        _say(f"{len(work) - done} shapes are left: time is up, or none of their candidates ran")
    return 0


def _show(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if args.arch:
        files = [tuning.read(tuning.shipped_for(arch)[0]) for arch in args.arch]
    elif torch.cuda.is_available():
        files = list(tuning.in_effect(torch.device("cuda", torch.cuda.current_device())))
    else:
        raise RuntimeError("no NVIDIA GPU is here; `show --arch 90` prints what is shipped for one")
    wanted = {spec.name for spec in specs}
    for configs in files:
        _say(f"{configs.source} ({'measured' if configs.measured else 'reasoned, not measured'})")
        for kernel, entries in configs.kernels.items():
            for entry in entries if kernel in wanted else ():
                shape = " ".join(f"{name}={value}" for name, value in entry.when.items())
                _say(f"  {kernel:<20} {shape:<44} {entry.config}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
