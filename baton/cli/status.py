"""`baton status`: routers, workers and the links between them, with their states and load."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from baton.cli import options
from baton.config import shares_text, shown_name
from baton.tables import table

_STATES = {
    "STARTING": "loads its model or warms up",
    "DRAINING": "finishes its requests and accepts no new ones",
    "MISMATCH": "serves another model than this router",
    "UNREACHABLE": "is registered, but cannot be connected to",
    "SILENT": "sent no heartbeat for half of --silence: gets nothing new",
    "STALLED": "answers, but its engine makes no progress",
    "EJECTED": "gets no requests for a while after failed calls",
    "QUARANTINED": "(pair) is not used for a while after a failed transfer",
    "NOT_SERVING": "(router) no pair of workers is ready, or it is draining",
}
_TEXT = "\n".join(
    [
        "Shows workers, their states, load and KV blocks, the links between them, routes of model",
        "names with their canaries, and the plan of `baton planner`.\n",
        "states other than READY, of a router SERVING, of a pair OPEN:",
        *(f"  {state:<13}{meaning}" for state, meaning in _STATES.items()),
    ]
)
_EXAMPLES = """\
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

_PLAN_COLUMNS = {
    "serves": "model", "role": "role", "need": "workers: needed", "ready": "ready",
    "wanted": "wanted",
}  # fmt: skip


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "show the cluster's state"
    parser = options.add_command(commands, "status", summary, _TEXT, _EXAMPLES)
    options.add_question_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with options.connected(args) as client:
        status = client.status(timeout=args.timeout)
    print(json.dumps(status) if args.json else render(status))
    return 0


def render(status: Mapping[str, Any]) -> str:
    """Renders the object of `baton status --json` as text."""
    router, workers, pairs = status["router"], status["workers"], status["pairs"]
    routers = [router, *status["siblings"]]  # processes at the same address
    lines = [
        *(line for one in routers for line in _router_lines(one)),
        "",
        *(table(_worker_columns(workers), list(map(_worker_row, workers))) or ["no workers"]),
    ]
    if routes := router["routes"]:
        lines += ["", *map(_route_line, routes)]
    if plan := router["plan"]:
        lines += ["", *_plan_lines(plan, time.time())]
    if pairs:
        slow = {"fallback": "a slow fallback"} if any(pair["fallback"] for pair in pairs) else {}
        lines += ["", *table({**_PAIR_COLUMNS, **slow}, pairs)]
    shown = {row["state"] for row in (*routers, *workers, *pairs)}
    legend = [f"{state}: {meaning}" for state, meaning in _STATES.items() if state in shown]
    return "\n".join([*lines, "", *legend] if legend else lines)


def _router_lines(router: Mapping[str, Any]) -> Sequence[str]:
    models = ", ".join(router["models"])
    registry = "" if router["registry_connected"] else ", REGISTRY UNREACHABLE"
    return (
        f"router {router['incarnation']} at {router['address']} (pid {router['pid']}): "
        f"{router['state']}, model {models}, cluster {router['cluster']}{registry}",
        f"requests: {router['running']} running, {router['queued']} queued",
    )


def _worker_row(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**worker, "serves": shown_name(worker["model"], worker["version"])}


def _route_line(route: Mapping[str, Any]) -> str:
    canary = route["canary"]
    more = f" ({canary['reason']})" if canary and canary["state"] == "running" else ""
    return f"route {route['name']}: {shares_text(route['targets'])}{more}"


def _plan_lines(plan: Mapping[str, Any], now_s: float) -> Sequence[str]:
    """The planner's plan; it is written again at most a minute after the last time."""
    how = "changes roles" if plan["applied"] else "a dry run"
    ago_s = max(0.0, now_s - plan["time_ms"] / 1e3)
    rows = [
        {**one, "serves": shown_name(one["model"], one["version"]), "need": f"{one['need']:.2f}"}
        for one in plan["roles"]
    ]
    return [f"plan of {plan['planner']} ({how}), {ago_s:.0f} s ago", *table(_PLAN_COLUMNS, rows)]


def _worker_columns(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """The columns of the workers' table; some only if they are informative."""
    on_gpus = any(worker.get("device", "cpu") != "cpu" for worker in workers)
    device = {"device": "computes on"} if on_gpus else {}
    reason = {"reason": "reason"} if any(worker["reason"] for worker in workers) else {}
    models = {(worker["model"], worker["version"]) for worker in workers}
    serves = {"serves": "model"} if len(models) > 1 or any(v for _, v in models) else {}
    return {**_WORKER_COLUMNS, **serves, **device, **reason}
