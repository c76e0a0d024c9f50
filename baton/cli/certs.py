"""`baton certs`: an authority and certificates to try TLS with, or to run a small cluster on."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.cli import options

_TEXT = """\
Writes ca.pem, ca-key.pem, and for each of router, prefill, decode and admin ROLE.pem and
ROLE-key.pem. A process of the cluster knows the others by these names, whatever their addresses;
callers of a router check its host name, so that --host has to name every one of a router's. With a
ca-key.pem in DIR, certificates are made anew and signed by that authority: processes take them up
without a restart. Keep ca-key.pem off the machines that serve."""
_EXAMPLES = """\
  baton certs tls --host router.example.com --host 10.0.0.9
  baton router --tls-cert tls/router.pem --tls-key tls/router-key.pem --tls-ca tls/ca.pem
  baton decode-worker --tls-cert tls/decode.pem --tls-key tls/decode-key.pem \\
        --tls-client-ca tls/ca.pem
  baton generate 'class Stack:' --target 10.0.0.9:7700 --tls-ca tls/ca.pem"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    parser = options.add_command(commands, "certs", "make certificates for TLS", _TEXT, _EXAMPLES)
    parser.add_argument("dir", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or IP address of routers; once for each (always: localhost)",
    )
    parser.add_argument("--days", type=options.count, default=365, help="that they are valid for")
    parser.set_defaults(run=_run, extra="local")


def _run(args: argparse.Namespace) -> int:
    from baton.local import certs
    from baton.net import tls

    certs.write(args.dir, args.host, args.days)
    print(f"{args.dir}: ca.pem, and for {', '.join(tls.ROLES)} NAME.pem and NAME-key.pem")
    return 0
