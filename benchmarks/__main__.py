"""`python -m benchmarks NAME`: comparisons with other engines, the GPU's, and scenarios."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import signal
import sys

# Module, and what it measures. Scenarios have a function of their name and one for its options.
COMMANDS = {
    "engine": ("benchmarks.engine.compare", "decode steps and prompts, no server around them"),
    "serve": ("benchmarks.serve", "servers under load: interference and a mixed load"),
    "step-profile": ("benchmarks.scenarios.step_profile", "where the time of a decode step goes"),
    "speculation": ("benchmarks.scenarios.speculation", "what n-gram speculation gains and costs"),
    "quality": ("benchmarks.scenarios.quality", "how well a model predicts text at low precision"),
    "gpu": ("benchmarks.gpu.run", "kernels, engine and cluster on this machine's GPU"),
}
SCENARIOS = {
    "latency": ("latency", "TTFT and TPOT of a local cluster, and what long prompts cost streams"),
    "local_prefill": ("latency", "up to which length decode should compute a prompt itself"),
    "placement": ("placement", "Baton's choice of workers against baselines, on a trace"),
    "overload": ("overload", "several times the load that a cluster can carry"),
    "tenants": ("overload", "what a tenant that floods the cluster costs another one"),
    "router_cost": ("cost", "CPU seconds of a router for 1,000 requests"),
    "served_decode": ("cost", "what serving takes from the decode rate of a bare engine"),
    "handoff_cost": ("cost", "what a handoff costs beyond computing and copying"),
}


def parser(name: str) -> argparse.ArgumentParser:
    """All options of the command `name`, and the others' names.

    Only its own module is imported: another may need what is not installed.
    """
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kinds = top.add_subparsers(title="what", metavar="NAME", required=True)
    for other, (_, text) in {**COMMANDS, **SCENARIOS}.items():
        if other != name:
            kinds.add_parser(other, help=text)
    if name in COMMANDS:
        module = importlib.import_module(COMMANDS[name][0])
        command = kinds.add_parser(
            name,
            help=COMMANDS[name][1],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(command)
        command.set_defaults(main=module.main)
    elif name in SCENARIOS:
        module = importlib.import_module(f"benchmarks.scenarios.{SCENARIOS[name][0]}")
        run = getattr(module, name)
        command = kinds.add_parser(
            name,
            help=SCENARIOS[name][1],
            description=inspect.getdoc(run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        getattr(module, f"{name}_options")(command)
        command.set_defaults(main=lambda args: int(asyncio.run(run(args)) or 0))
    return top


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
