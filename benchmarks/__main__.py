"""`python -m benchmarks NAME`: comparisons with other engines, the GPU's, and scenarios."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import signal
import sys

# Module, with `add_options` and `main`, and what it measures.
COMMANDS = {
    "engine": ("engine.compare", "decode steps and prompts, no server around them"),
    "serve": ("serve", "servers under load: interference and a mixed load"),
    "gpu": ("gpu.run", "kernels, engine and cluster on this machine's GPU"),
    "quality": ("scenarios.quality", "how well a model predicts text at low precision"),
    "structured_output": ("scenarios.structured_output", "how much of JSON Schema is kept to"),
    "router_cost": ("scenarios.router_cost", "CPU seconds of a router for 1,000 requests"),
    "roles": ("scenarios.roles", "goodput of mixed workers and of fixed roles, simulated"),
    "day": ("scenarios.day", "goodput by hour of a day, planner and fixed roles, simulated"),
    "fleet": ("scenarios.fleet", "one router in front of a thousand workers"),
}


def parser(name: str) -> argparse.ArgumentParser:
    """All options of the command `name`, and the others' names.

    Only its own module is imported: another may need what is not installed.
    """
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kinds = top.add_subparsers(title="what", metavar="NAME", required=True)
    for command, (path, text) in COMMANDS.items():
        if command != name:
            kinds.add_parser(command, help=text)
            continue
        module = importlib.import_module(f"benchmarks.{path}")
        own = kinds.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(own)
        own.set_defaults(main=module.main)
    return top


def main() -> int:
    """The exit status; ctrl-C and SIGTERM end it, and what it started, with 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args = parser(sys.argv[1] if len(sys.argv) > 1 else "").parse_args()
        done = args.main(args)
        return int((asyncio.run(done) if inspect.iscoroutine(done) else done) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
