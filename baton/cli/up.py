"""`baton up` and `baton demo`: a cluster on this machine."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli import options, telemetry
from baton.cli.extras import require
from baton.cli.services import add_limit_options
from baton.config import HTTP_PORT, ClusterConfig, EngineConfig, RouterLimits

_UP_TEXT = """\
Starts etcd, routers and workers as processes of this machine, shares its cores out to the workers,
restarts what crashes, and stops everything in order on ctrl-C. SIGHUP restarts all routers and
workers, one after the other, each when the one before serves again."""
_UP_EXAMPLES = """\
  baton up                                       the built-in demo model, one worker of each role
  baton up --prefill 2 --decode 2 --trace        with the trace of every request
  baton up --routers 2                           routers at 7700 and 7701
  baton up --model /models/llama --device cuda --transport nccl"""
_DEMO_TEXT = """\
Starts a cluster of the built-in demo model, streams one completion, shows where it ran, how its KV
cache moved and its trace, then stops everything. Exit status 0 only if all of it worked."""


def add_commands(commands: options.Commands) -> None:
    """Adds `up` and `demo`."""
    parser = options.add_command(
        commands, "up", "run a whole cluster on this machine", _UP_TEXT, _UP_EXAMPLES
    )
    group = parser.add_argument_group("cluster")
    for option, field, what in (
        ("--prefill", "prefill", "prefill workers"),
        ("--decode", "decode", "decode workers"),
        ("--routers", "routers", "routers"),
    ):
        default = getattr(ClusterConfig, field)
        group.add_argument(option, type=int, default=default, metavar="N", help=what)
    group.add_argument(
        "--prefill-nice",
        type=int,
        default=ClusterConfig.prefill_nice,
        metavar="N",
        help="from 0 to 19: how far prompts stand back for streams and routers where they share "
        "cores, but for every other busy process too: at 10 they get a tenth of a core beside one",
    )
    group.add_argument("--host", default=ClusterConfig.host, help="address the routers listen on")
    group.add_argument(
        "--port",
        type=int,
        default=ClusterConfig.port,
        help="the first router's port, others follow; 0 takes free ones",
    )
    group.add_argument(
        "--http-port",
        type=int,
        default=ClusterConfig.http_port,
        metavar="PORT",
        help="OpenAI's HTTP API at the first router, others follow; 0 for none "
        f"(default: {HTTP_PORT}; none where --port is 0)",
    )
    options.add_transport_option(group)
    group.add_argument(
        "--no-restart",
        dest="restart",
        action="store_false",
        help="leave a process that ended alone (default: start it again, later each time)",
    )
    options.add_drain_option(group, ClusterConfig.drain_s)
    group.add_argument(
        "--etcd", metavar="HOST:PORT", help="use this etcd (default: start one for the cluster)"
    )
    options.add_etcd_access_options(group)
    group.add_argument(
        "--cluster", default=ClusterConfig.cluster, metavar="NAME", help="its name in etcd"
    )
    options.add_model_name_option(group)
    telemetry.add_price_option(group)
    options.add_engine_options(parser)
    add_limit_options(parser)
    telemetry.add_options(parser, ClusterConfig.log_level)
    parser.add_argument("--trace", action="store_true", help="draw the trace of each request here")
    parser.add_argument(
        "--keep-traces",
        type=int,
        default=ClusterConfig.keep_traces,
        metavar="N",
        help="of the last requests, in memory, for `baton trace`; --otlp gets them all",
    )
    parser.set_defaults(run=_run_up, extra="local")
    demo = options.add_command(
        commands, "demo", "show Baton at work, in half a minute", _DEMO_TEXT, "  baton demo"
    )
    demo.set_defaults(run=_run_demo, extra="local")


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    """The cluster's settings."""
    engine = options.filled(EngineConfig, args)
    return options.filled(
        ClusterConfig, args, engine=engine, limits=options.filled(RouterLimits, args)
    )


def _run_up(args: argparse.Namespace) -> int:
    telemetry.log_to_stderr(args.log_level, args.log_format)
    config = cluster_config(args)
    require("router", "worker", *(("gateway",) if config.first_http_port else ()))
    from baton.local import up

    return asyncio.run(up.run(config))


def _run_demo(args: argparse.Namespace) -> int:
    telemetry.log_to_stderr(ClusterConfig.log_level)
    require("router", "worker")
    from baton.local import demo

    return asyncio.run(demo.run())
