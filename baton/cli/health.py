"""`baton health`: whether one process of a cluster takes work, as an exit status."""

from __future__ import annotations

import argparse

from baton.cli import options
from baton.cli.values import seconds
from baton.errors import Unavailable

_TEXT = """\
Asks a router or a worker by the gRPC health protocol (grpc.health.v1). Exit status 0 if it takes
work; 1 if it does not, with the reason on stderr. Made for health checks of containers."""
_EXAMPLES = """\
  baton health
  baton health --target 10.0.0.7:7710 --timeout 2"""


def add_commands(commands: options.Commands) -> None:
    """Adds `health`."""
    parser = options.add_command(
        commands, "health", "ask whether a process takes work", _TEXT, _EXAMPLES
    )
    parser.add_argument(
        "--target",
        default=options.DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="address of a router or worker",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="for its answer"
    )
    parser.set_defaults(run=_run, extra="router")


def _run(args: argparse.Namespace) -> int:
    status = check(args.target, args.timeout)
    if status != "SERVING":
        raise Unavailable(f"{args.target} says {status}")
    print(status)
    return 0


def check(target: str, timeout_s: float) -> str:
    """The name of the target's ServingStatus. Raises BatonError when it does not answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from baton import rpc

    with rpc.translated(), grpc.insecure_channel(target, options=rpc.OPTIONS) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
