"""`python -m baton.engine.kernels.triton`: compiles kernels without a GPU, and tunes them on one.

check  compiles every kernel for A100 (sm_80), H100 (sm_90) and B200 (sm_100); needs no GPU
tune   measures configurations on this GPU, and keeps the fastest for this user
show   prints the configurations in effect on this GPU, or the shipped ones of an architecture
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from baton.engine.kernels.triton import launch_configs, tuning
from baton.engine.kernels.triton.check import SHARED_BYTES, check, compilers
from baton.engine.kernels.triton.specs import KernelSpec, Key, specs_in, text_of


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if a kernel fails to compile, 2 if the command cannot run here."""
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
        prog="python -m baton.engine.kernels.triton",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="check|tune|show")
    checks = commands.add_parser("check", help="compile every kernel; needs no GPU")
    tunes = commands.add_parser("tune", help="measure on this GPU")
    shows = commands.add_parser("show", help="print configurations in effect")
    for command, run in ((checks, _check), (tunes, _tune), (shows, _show)):
        command.set_defaults(run=run)
        add = partial(command.add_argument, action="append", default=[])
        add("--kernel", metavar="NAME", help="only this kernel; repeatable")
        more = "another module with kernels, such as kvtransfer.kernels.blocks; repeatable"
        add("--module", metavar="MODULE", help=more)
    for command, default, text in (
        (
            checks,
            tuple(SHARED_BYTES),
            "compute capabilities to compile for, 80 for 8.0 (default: all)",
        ),
        (shows, (), "shipped configurations of these compute capabilities, not this GPU's"),
    ):
        command.add_argument(
            "--arch", default=default, type=_architectures, metavar="80,90,100", help=text
        )
    most = "compile at most N cases of a kernel, evenly chosen"
    checks.add_argument("--most", type=int, metavar="N", help=most)
    served = "compile the shapes of served models, and compare with budgets.json"
    checks.add_argument("--served", action="store_true", help=served)
    checks.add_argument(
        "--ptx", type=Path, metavar="FOLDER", help="write the PTX of each launch to this folder"
    )
    tunes.add_argument(
        "--shape", action="append", type=_shape, default=[], metavar="rows=64,size=4096",
        help="a shape to tune in place of the default ones; repeatable, with one --kernel",
    )  # fmt: skip
    tunes.add_argument("--device", type=int, default=0, metavar="N", help="which GPU (default: 0)")
    limit = "stop after this time (default: 900)"
    tunes.add_argument("--seconds", type=float, default=900.0, help=limit)
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
    total, complaints = check(specs, args.arch, _say, args.ptx, args.most, args.served)
    sys.stderr.writelines(f"{complaint}\n" for complaint in complaints)
    _say(f"{total - len(complaints)} of {total} compiled")
    return 1 if complaints else 0


def _show(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if args.arch:
        files = [launch_configs.shipped_for(arch) for arch in args.arch]
    elif torch.cuda.is_available():
        files = list(launch_configs.in_effect(torch.device("cuda", torch.cuda.current_device())))
    else:
        raise RuntimeError(
            "there is no NVIDIA GPU; `show --arch 90` prints what is shipped for an architecture"
        )
    for file in files:
        configs = launch_configs.read(file)
        _say(f"{file} ({'measured' if configs.measured else 'derived, not measured'})")
        for spec in specs:
            for when, config in configs.kernels.get(spec.name, ()):
                _say(f"  {spec.name:<20} {text_of(when):<44} {text_of(config)}")
    return 0


def _tune(args: argparse.Namespace, specs: Sequence[KernelSpec]) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs an NVIDIA GPU; `check` compiles without one")
    if args.shape and len(args.kernel) != 1:
        raise ValueError("--shape needs exactly one --kernel")
    device = torch.device("cuda", args.device)
    torch.cuda.set_device(device)
    file = launch_configs.user_file(torch.cuda.get_device_name(device))
    work = [(spec, shape) for spec in specs if spec.configs for shape in args.shape or spec.shapes]
    _say(f"{len(work)} shapes, at most {args.seconds:.0f} s; results go to {file}")
    done = 0
    with compilers() as pool:
        tuned = tuning.tune(work, device, file, args.seconds, pool=pool)
        for done, best in enumerate(tuned, 1):
            _say(f"[{done}/{len(work)}] {best.text}")
    if done < len(work):
        _say(f"{len(work) - done} shapes are not tuned: time is up, or no candidate ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
