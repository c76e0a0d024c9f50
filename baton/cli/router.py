"""`baton router`: one router, or several processes that serve at the same ports."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from baton.cli import options, process_setup
from baton.config import RouterConfig, new_incarnation

_TEXT = """\
Accepts requests (gRPC: baton.v1.InferenceService), places each on a prefill and a decode worker
registered in etcd, and streams the answer. It has no persistent state: run as many as needed. With
--router-processes N it is N processes at the same ports, which are restarted when they end and
share tenants' limits; their metrics are at N ports from --metrics-port on, and SIGHUP restarts them
in turn."""
_EXAMPLES = """\
  baton router --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0
  baton router --etcd 10.0.0.5:2379 --http-port 7780    with OpenAI's HTTP API
  baton router --etcd 10.0.0.5:2379 --router-processes 4 --metrics-port 9400    on four cores"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    parser = options.add_command(commands, "router", "run a router", _TEXT, _EXAMPLES)
    parser.set_defaults(run=_run, takes_model=True)
    options.add_declared(parser, RouterConfig)
    options.add_config_option(parser)
    process_setup.add_child_options(parser)
    # For one of several processes, from the process that starts them.
    parser.add_argument("--process-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)


def router_config(args: argparse.Namespace) -> RouterConfig:
    """A router's settings."""
    config = options.settings(RouterConfig, "router", args)
    return replace(config, incarnation=new_incarnation(config.name or "router"))


def _run(args: argparse.Namespace) -> int:
    config = router_config(args)
    process_setup.start_service(args, config, "router")
    shared = None
    if args.process_of:
        from router.shared_state import SharedState

        shared = SharedState(args.process_of, config.router_processes, args.process)
    elif config.router_processes > 1:
        process_setup.require("router", *(("gateway",) if config.http_port else ()))
        from baton.local import router_processes

        return asyncio.run(router_processes.run(config))
    from router import main

    frontends = []
    if config.http_port:
        from baton.gateway import routes

        frontends.append(routes.frontend(config))
    return main.run(config, frontends, shared)
