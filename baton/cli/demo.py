"""`baton demo`: a cluster, a completion, and where it ran, in half a minute."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli import options, process_setup
from baton.config import ClusterConfig

_TEXT = """\
Starts a cluster of the built-in demo model, streams one completion, shows its route, KV transfer
and trace, and stops everything. Exit status 0 only if all of it worked."""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "show Baton at work, in half a minute"
    parser = options.add_command(commands, "demo", summary, _TEXT, "  baton demo")
    parser.set_defaults(run=_run, extra="local")


def _run(args: argparse.Namespace) -> int:
    process_setup.raise_file_limit()
    process_setup.log_to_stderr(ClusterConfig.log_level, ClusterConfig.log_format)
    process_setup.require("router", "worker")
    from baton.local import demo

    return asyncio.run(demo.run())
