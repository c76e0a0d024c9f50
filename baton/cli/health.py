"""`baton health`: whether a router or a worker takes requests."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import socket
from http import HTTPStatus
from typing import Any

from baton.cli import options
from baton.config import RouterConfig, join_address, split_address
from baton.errors import Unavailable

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - of services that listen there
_MAX_ANSWER_BYTES = 1000
_TEXT = """\
Queries a router or a worker by the gRPC health protocol (grpc.health.v1). Exit status 0 if it
accepts requests, else 1 with the reason on stderr. Without --target it queries the service in the
same container: at BATON_OPT_HEALTH_PORT by HTTP, else at BATON_OPT_PORT, with the certificates of
BATON_OPT_TLS_CERT and the like."""
_EXAMPLES = """\
  baton health
  baton health --target 10.0.0.7:7710 --timeout 2"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "check whether a process accepts requests"
    parser = options.add_command(commands, "health", summary, _TEXT, _EXAMPLES)
    text = "address of a router or worker (default: from this environment)"
    options.add_target_option(parser, text)
    options.add_timeout_option(parser)
    parser.set_defaults(run=_run, extra="router", target="")


def _run(args: argparse.Namespace) -> int:
    target = args.target
    if not target:
        own = options.service_values()
        host = str(own.get("host", RouterConfig.host))
        host = _LOOPBACK.get(host.strip("[]"), host)
        if (port := own.get("health-port")) is not None:
            return _ask_by_http(host, port, args.timeout)
        target = join_address(host, own.get("port", RouterConfig.port))
        if args.tls_ca and not args.tls_name:
            _take_its_name(target, args.timeout)
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from baton.net import rpc

    asking = options.calling(target, args.timeout, "router or worker")
    with asking, rpc.translated(), rpc.channel(target, kind=grpc) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=args.timeout)
    status = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    if status != "SERVING":
        raise Unavailable(f"{target} says {status}")
    print(status)
    return 0


def _ask_by_http(host: str, port: int, timeout_s: float) -> int:
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=timeout_s)
    try:
        with contextlib.closing(connection):
            connection.request("GET", "/ready")
            response = connection.getresponse()
            said = response.read(_MAX_ANSWER_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no answer at --health-port {port}: {error}") from error
    if response.status != HTTPStatus.OK:
        raise Unavailable(f"{join_address(host, port)} says {said}")
    print(said)
    return 0


def _take_its_name(target: str, timeout_s: float) -> None:
    """Sets the TLS server name to one in the certificate of this container's service."""
    from baton.net import tls

    host, port = split_address(target)
    context = tls.current().client_context()
    context.check_hostname = False  # its authority is verified
    try:
        with (
            socket.create_connection((host.strip("[]"), port), timeout_s) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            certificate: dict[str, Any] = encrypted.getpeercert() or {}
    except OSError as error:
        raise Unavailable(f"no answer at {target}: {error}") from error
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    tls.current().server_name = (*names, "")[0]
