"""`baton up`, also `baton serve`: a whole cluster on this machine."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli import options, process_setup
from baton.config import ClusterConfig

_TEXT = """\
Starts etcd, routers and workers as processes on this machine, divides its cores among the workers,
restarts processes that crash, and stops everything in order on ctrl-C. SIGHUP restarts all routers
and workers one by one: each ends when its successor serves, and no request fails.
`baton serve DIR` is short for `baton up --model DIR`; vLLM's names of options are accepted."""
_EXAMPLES = """\
  baton up                                       the built-in demo model, one worker of each role
  baton up --prefill 2 --decode 2 --trace        with the trace of every request
  baton up --routers 2                           routers at 7700 and 7701
  baton up --model /models/llama --device cuda --transport nccl
  baton up --config cluster.toml                 with the options that the file names"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "run a whole cluster on this machine"
    parser = options.add_command(commands, "up", summary, _TEXT, _EXAMPLES, ["serve"])
    parser.set_defaults(run=_run, extra="local", takes_model=True)
    options.add_declared(parser, ClusterConfig)
    options.add_config_option(parser)


def _run(args: argparse.Namespace) -> int:
    process_setup.raise_file_limit()
    config = options.settings(ClusterConfig, "up", args)
    process_setup.log_to_stderr(config.log_level, config.log_format)
    process_setup.require("router", "worker", *(("gateway",) if config.first_http_port else ()))
    from baton.local import up

    return asyncio.run(up.run(config))
