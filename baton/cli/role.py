"""`baton role`: what routers prefer a worker for, changed while it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from baton.cli import options
from baton.config.worker import ROLES
from baton.errors import InvalidRequest, Unavailable
from baton.v1 import common_pb2

_TEXT = """\
Changes a worker's role. It needs no restart and no drain: what runs there goes on, cached KV stays,
and new requests follow the new role. The worker is found through a router. Where workers ask for
certificates, --tls-cert names the one of an `admin`."""
_EXAMPLES = """\
  baton role decode-0 prefill              the worker with that name, or that incarnation
  baton role mixed-1-3d8a1d05 decode --target 10.0.0.9:7700 \\
        --tls-ca tls/ca.pem --tls-cert tls/admin.pem --tls-key tls/admin-key.pem"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    parser = options.add_command(commands, "role", "change a worker's role", _TEXT, _EXAMPLES)
    parser.add_argument("worker", metavar="WORKER", help="its --name or its incarnation")
    parser.add_argument("role", choices=ROLES, help="what routers shall prefer it for")
    options.add_question_options(parser, json=False)
    parser.set_defaults(run=_run, extra="router")


def _run(args: argparse.Namespace) -> int:
    import grpc

    from baton.net import rpc
    from baton.v1 import worker_pb2, worker_pb2_grpc

    with options.connected(args) as client:
        workers = client.status(timeout=args.timeout)["workers"]
    addresses = {worker["incarnation"]: worker["address"] for worker in workers}
    name = find(args.worker, list(addresses))
    role = f"WORKER_ROLE_{args.role.upper()}"
    with (
        rpc.translated(),
        rpc.channel(addresses[name], role="worker", kind=grpc) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = stub.SetRole(worker_pb2.SetRoleRequest(role=role), timeout=args.timeout)
    before = common_pb2.WorkerRole.Name(answer.previous).removeprefix("WORKER_ROLE_").lower()
    print(f"{name}: {args.role}, before {before}")
    if not answer.registered:
        raise Unavailable("etcd does not answer: routers get to know the role once it does")
    return 0


def find(name: str, incarnations: Sequence[str]) -> str:
    """The incarnation that `name` is, or that a worker of this name has. Raises InvalidRequest."""
    found = [one for one in incarnations if name in (one, one.rpartition("-")[0])]
    if len(found) != 1:
        known = ", ".join(incarnations) or "none"
        text = f"{len(found) or 'no'} workers are called {name}; there are: {known}"
        raise InvalidRequest(text, "WORKER")
    return found[0]
