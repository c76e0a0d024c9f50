"""The command line: `python -m benchmarks engine`, `serve` and `gpu`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from benchmarks import checkpoint, machine
from benchmarks.shapes import SHAPES

ROOMS = {
    "engine": ("benchmarks.engine.run", "decode steps and prompts, no server around them"),
    "serve": ("benchmarks.serving.run", "servers under load: interference and a mixed load"),
    "gpu": ("benchmarks.gpu.run", "kernels, engine and cluster on this machine's GPU"),
}


def parser(asked: str) -> argparse.ArgumentParser:
    """All options of the command that is asked for, and the others' names.

    Only its own room is imported: another may need what is not installed.
    """
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kinds = top.add_subparsers(title="what", metavar="WHAT", required=True)
    for name, (module, text) in ROOMS.items():
        if name != asked:
            kinds.add_parser(name, help=text)
            continue
        room = importlib.import_module(module)
        command = kinds.add_parser(name, help=text, description=room.__doc__)
        if name != "gpu":
            _add_common(command)
        room.add_options(command)
        command.set_defaults(main=room.main)
    return top


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--shape", choices=sorted(SHAPES), default="M", help="default: M")
    command.add_argument(
        "--rivals", type=_directory, metavar="VENV", help="virtual environment with the others"
    )
    command.add_argument(
        "--llama-cpp",
        type=_directory,
        metavar="DIR",
        help="where llama.cpp was built: libllama and llama-server (default: the package's own)",
    )
    command.add_argument(
        "--cache",
        type=Path,
        default=checkpoint.default_cache(),
        metavar="DIR",
        help="keeps the models that are made (default: the user's cache)",
    )
    command.add_argument(
        "--cpus",
        type=_cpus,
        default=machine.cores()[:2],
        metavar="N,N",
        help="cores for everybody (default: the first two)",
    )
    command.add_argument("--threads", type=int, default=0, metavar="N", help="default: a core each")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _directory(text: str) -> Path | None:
    """None of an empty text, so that a Makefile may pass a variable that is not set."""
    path = Path(text).expanduser().absolute()
    if text and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path if text else None


def _cpus(text: str) -> tuple[int, ...]:
    cpus = tuple(sorted({int(part) for part in text.split(",")}))
    if missing := set(cpus) - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"core {min(missing)} is not for this process")
    return cpus


def main() -> int:
    """The exit status; ctrl-C and SIGTERM end it, and what it started, with 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args = parser(sys.argv[1] if len(sys.argv) > 1 else "").parse_args()
        status: int = args.main(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
