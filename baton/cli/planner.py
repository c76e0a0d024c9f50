"""`baton planner`: how many workers of which role."""

from __future__ import annotations

import argparse
from dataclasses import replace

from baton.cli import options, process_setup
from baton.config import PlannerConfig, new_incarnation

_TEXT = """\
Asks the routers for arrivals, lengths, cache hits, latencies and rates, and decides how many
workers of which role the targets of --slo need. With --apply it changes roles of workers between
prefill and decode; without, it says what it would change. Wanted replicas are published for
autoscalers in any case: in etcd, as metrics, and to KEDA, whose external scaler it is at --port
(metadata of the trigger: role: prefill, decode or mixed). Of several planners one leads, by
election in etcd; all answer KEDA. Every decision is logged with its figures."""
_EXAMPLES = """\
  baton planner --target 10.0.0.9:7700 --etcd 10.0.0.5:2379
  baton planner --target routers.serving:7700 --etcd 10.0.0.5:2379 --slo ttft=0.5,tpot=0.04 \\
        --max-prefill 4 --max-decode 8 --apply"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "plan how many workers of which role"
    parser = options.add_command(commands, "planner", summary, _TEXT, _EXAMPLES)
    parser.set_defaults(run=_run, extra="router")
    options.add_declared(parser, PlannerConfig)
    options.add_key_option(parser)
    options.add_config_option(parser)
    process_setup.add_child_options(parser)


def planner_config(args: argparse.Namespace) -> PlannerConfig:
    """A planner's settings."""
    config = options.settings(PlannerConfig, "planner", args)
    return replace(config, incarnation=new_incarnation(config.name or "planner"))


def _run(args: argparse.Namespace) -> int:
    config = planner_config(args)
    process_setup.start_service(args, config)
    from baton.net.server import run_service
    from baton.planner import main

    return run_service(main.run(config, options.api_key(args)))
