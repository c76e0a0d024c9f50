"""`baton status`, `explain` and `health`: what a router knows, would do, and whether it serves."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from baton.cli import options
from baton.cli.generate import add_prompt_options, prompt_of
from baton.config import RouterConfig, split_address
from baton.errors import Unavailable

_STATES = {
    "STARTING": "loads its model or warms up",
    "DRAINING": "finishes its requests and takes no new ones",
    "MISMATCH": "serves another model than this router",
    "UNREACHABLE": "is registered, but there is no connection to it",
    "SILENT": "is connected, but without a heartbeat for longer than --silence",
    "STALLED": "answers, but its engine makes no progress",
    "EJECTED": "gets no requests for a while: calls to it failed",
    "QUARANTINED": "of a pair: is not used for a while after a failed transfer",
    "NOT_SERVING": "of a router: no pair of workers is ready, or it is draining",
}
_STATUS_TEXT = "\n".join(
    [
        "Shows workers, their states, load and KV blocks, and the links between them.\n",
        "states other than READY, of a router SERVING, of a pair OPEN:",
        *(f"  {state:<13}{meaning}" for state, meaning in _STATES.items()),
    ]
)
_STATUS_EXAMPLES = """\
  baton status
  baton status --target 10.0.0.9:7700 --json"""
_WORKER_COLUMNS = {
    "role": "role", "incarnation": "incarnation", "address": "address", "pid": "pid",
    "state": "state", "running": "running", "queue_tokens": "queued tokens",
    "blocks_free": "blocks: free", "blocks_cached": "cached", "blocks_held": "held",
    "blocks_quarantined": "quarantined", "blocks_total": "all",
}  # fmt: skip
_PAIR_COLUMNS = {
    **{name: name for name in ("prefill", "decode", "transport", "state")},
    "gb_per_s": "GB/s",
}  # fmt: skip
_EXPLAIN_TEXT = """\
Shows every pair of workers with what the router expects of it (time to first token, time per output
token, tokens to compute first, tokens cached), the best first, and why others are left out. Nothing
is run."""
_EXPLAIN_EXAMPLES = """\
  baton explain 'class Stack:'
  cat main.py | baton explain - --max-tokens 500 --json"""
_CANDIDATE_COLUMNS = {
    "prefill": "prefill", "decode": "decode", "score": "score ms", "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms", "queue_tokens": "tokens first",
    "prefill_cached_tokens": "cached: prefill", "decode_cached_tokens": "decode",
    "same_host": "host", "refused": "left out",
}  # fmt: skip
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - of services that listen there
_MOST_SAID = 1000  # bytes of an answer
_HEALTH_TEXT = """\
Asks a router or a worker by the gRPC health protocol (grpc.health.v1). Exit status 0 if it takes
work; 1 if it does not, with the reason on stderr. Without --target it asks the service whose
environment it shares, as in a container: at BATON_OPT_HEALTH_PORT by HTTP, else at BATON_OPT_PORT,
with the certificates that BATON_OPT_TLS_CERT and its like name."""
_HEALTH_EXAMPLES = """\
  baton health
  baton health --target 10.0.0.7:7710 --timeout 2"""


def add_commands(commands: options.Commands) -> None:
    """Adds the three commands."""
    summary = "show the cluster's state"
    parser = options.add_command(commands, "status", summary, _STATUS_TEXT, _STATUS_EXAMPLES)
    options.add_question_options(parser)
    options.add_key_option(parser)
    parser.set_defaults(run=_run_status)

    summary = "show where a request would run, and why"
    parser = options.add_command(commands, "explain", summary, _EXPLAIN_TEXT, _EXPLAIN_EXAMPLES)
    add_prompt_options(parser)
    add = parser.add_argument
    add("--max-tokens", type=int, metavar="TOKENS", help="in the completion (default: 64)")
    add("--cache-salt", metavar="TEXT", help="of the prefix cache it would use (default: none)")
    options.add_question_options(parser)
    options.add_key_option(parser)
    parser.set_defaults(run=_run_explain)

    summary = "ask whether a process takes work"
    parser = options.add_command(commands, "health", summary, _HEALTH_TEXT, _HEALTH_EXAMPLES)
    text = "address of a router or worker (default: of the service with this environment)"
    options.add_question_options(parser, text, json=False)
    parser.set_defaults(target="")
    parser.set_defaults(run=_run_health, extra="router")


def _run_status(args: argparse.Namespace) -> int:
    from baton import Client

    key = options.api_key(args)
    with options.calling(args.target, args.timeout), Client(args.target, api_key=key) as client:
        status = client.status(timeout=args.timeout)
    print(json.dumps(status) if args.json else render(status))
    return 0


def render(status: Mapping[str, Any]) -> str:
    """The object of `baton status --json` as text for people."""
    router, workers, pairs = status["router"], status["workers"], status["pairs"]
    routers = [router, *status["siblings"]]  # processes at the same address
    lines = [
        *(line for one in routers for line in _router_lines(one)),
        "",
        *(table(_worker_columns(workers), workers) or ["no workers"]),
    ]
    if pairs:
        slow = {"fallback": "a slow fallback"} if any(pair["fallback"] for pair in pairs) else {}
        lines += ["", *table({**_PAIR_COLUMNS, **slow}, pairs)]
    shown = {row["state"] for row in (*routers, *workers, *pairs)}
    legend = [f"{state}: {meaning}" for state, meaning in _STATES.items() if state in shown]
    return "\n".join([*lines, "", *legend] if legend else lines)


def _router_lines(router: Mapping[str, Any]) -> Sequence[str]:
    registry = "" if router["registry_connected"] else ", REGISTRY UNREACHABLE"
    return (
        f"router {router['incarnation']} at {router['address']} (pid {router['pid']}): "
        f"{router['state']}, model {router['model']}, cluster {router['cluster']}{registry}",
        f"requests: {router['running']} running, {router['queued']} queued",
    )


def _worker_columns(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """The columns of the workers' table: some are there only when they tell something."""
    on_gpus = any(worker.get("device", "cpu") != "cpu" for worker in workers)
    device = {"device": "computes on"} if on_gpus else {}
    reason = {"reason": "reason"} if any(worker["reason"] for worker in workers) else {}
    return {**_WORKER_COLUMNS, **device, **reason}


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines with aligned columns, numbers to the right; empty without rows."""
    if not rows:
        return []
    cells = [[str(row[key] if row[key] is not None else "-") for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns.values(), *cells, strict=True)]
    right = [isinstance(rows[0][key], int | float) for key in columns]

    def line(texts: Sequence[str]) -> str:
        aligned = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(texts, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return [line(list(columns.values())), *map(line, cells)]


def _run_explain(args: argparse.Namespace) -> int:
    prompt = prompt_of(args)
    asked = {"max_tokens": args.max_tokens, "cache_salt": args.cache_salt}
    from baton import Client

    key = options.api_key(args)
    with options.calling(args.target, args.timeout), Client(args.target, api_key=key) as client:
        explanation = client.explain(prompt, timeout=args.timeout, **asked)
    print(json.dumps(explanation) if args.json else render_explanation(explanation))
    return 0


def render_explanation(explanation: Mapping[str, Any]) -> str:
    """The object of `baton explain --json` as text for people."""
    tenant = f" of tenant {explanation['tenant']}" if explanation["tenant"] else ""
    rows = [_row(candidate) for candidate in explanation["candidates"]]
    columns = dict(_CANDIDATE_COLUMNS)
    if not any(row["refused"] for row in rows):
        del columns["refused"]
    if explanation["refused"]:
        verdict = f"would be refused or wait: {explanation['refused']}"
    elif explanation["decode_prefills"]:
        best, instead = rows[0], "no prefill worker is ready"
        if best["prefill"]:
            instead = f"handed over in {best['handed_over_ttft_ms']:.1f} ms"
        verdict = (
            f"would run on {best['decode']}, which would compute the prompt itself: first token in "
            f"{best['ttft_ms']} ms, {instead}"
        )
    else:
        verdict = f"would run on {rows[0]['prefill']} and {rows[0]['decode']}"
    lines = [
        f"a prompt of {explanation['prompt_tokens']} tokens{tenant}; "
        f"{explanation['queued']} requests wait at the router",
        verdict,
        "",
        *(table(columns, rows) or ["no workers"]),
    ]
    return "\n".join(lines)


def _row(candidate: Mapping[str, Any]) -> dict[str, Any]:
    rounded = {key: round(candidate[key], 1) for key in ("score", "ttft_ms", "tpot_ms")}
    return {**candidate, **rounded, "same_host": "same" if candidate["same_host"] else "other"}


def _run_health(args: argparse.Namespace) -> int:
    target = args.target
    if not target:
        own = options.service_values()
        host = str(own.get("host", RouterConfig.host))
        host = _LOOPBACK.get(host.strip("[]"), host)
        if (port := own.get("health-port")) is not None:
            return _ask_by_http(host, port, args.timeout)
        target = f"{host}:{own.get('port', RouterConfig.port)}"
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
            said = response.read(_MOST_SAID).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no answer at --health-port {port}: {error}") from error
    if response.status != HTTPStatus.OK:
        raise Unavailable(f"{host}:{port} says {said}")
    print(said)
    return 0


def _take_its_name(target: str, timeout_s: float) -> None:
    """Calls our own service by a name that its certificate has, whatever its address."""
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
