"""`baton certs`: makes a CA and certificates for trying TLS or for a small cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.cli import options

_TEXT = """\
Writes ca.pem, ca-key.pem, and for each of router, worker and admin NAME.pem and
NAME-key.pem. Processes of the cluster identify each other by these names; clients check a router's
host name: give each with --host. KEDA checks a planner's: give it with --planner-host. If DIR has a
ca-key.pem, new certificates are signed with it, and running processes reload them. Keep ca-key.pem
off the machines that serve."""
_EXAMPLES = """\
  baton certs tls --host router.example.com --host 10.0.0.9
  baton router --tls-cert tls/router.pem --tls-key tls/router-key.pem --tls-ca tls/ca.pem
  baton worker --tls-cert tls/worker.pem --tls-key tls/worker-key.pem --tls-client-ca tls/ca.pem
  baton generate 'class Stack:' --target 10.0.0.9:7700 --tls-ca tls/ca.pem"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    parser = options.add_command(commands, "certs", "make certificates for TLS", _TEXT, _EXAMPLES)
    parser.add_argument("dir", type=Path, metavar="DIR", help="directory to write to")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or IP address of a router; may be repeated (localhost is included)",
    )
    parser.add_argument(
        "--planner-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or IP address by which KEDA calls a planner; may be repeated",
    )
    parser.add_argument("--days", type=options.count, default=365, help="validity in days")
    parser.set_defaults(run=_run, extra="local")


def _run(args: argparse.Namespace) -> int:
    from baton.local import certs
    from baton.net import tls

    certs.write(args.dir, args.host, args.days, args.planner_host)
    print(f"{args.dir}: ca.pem, and for {', '.join(tls.ROLES)} NAME.pem and NAME-key.pem")
    return 0
