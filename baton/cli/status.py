"""`baton status`: what a router knows of its cluster, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.cli import options
from baton.cli.values import seconds

_TEXT = "Shows workers, their states, load and KV blocks, and the links between them."
_EXAMPLES = """\
  baton status
  baton status --target 10.0.0.9:7700 --json"""
_WORKER_COLUMNS = {
    "role": "role",
    "incarnation": "incarnation",
    "address": "address",
    "pid": "pid",
    "state": "state",
    "running": "running",
    "queue_tokens": "queued tokens",
    "blocks_free": "blocks: free",
    "blocks_cached": "cached",
    "blocks_held": "held",
    "blocks_quarantined": "quarantined",
    "blocks_total": "all",
}
_PAIR_COLUMNS = {
    "prefill": "prefill",
    "decode": "decode",
    "transport": "transport",
    "state": "state",
}


def add_commands(commands: options.Commands) -> None:
    """Adds `status`."""
    parser = options.add_command(commands, "status", "show the cluster's state", _TEXT, _EXAMPLES)
    options.add_target_option(parser)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="for the router's answer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from baton import Client

    with options.calling(args.target, args.timeout), Client(args.target) as client:
        status = client.status(timeout=args.timeout)
    print(json.dumps(status) if args.json else render(status))
    return 0


def render(status: Mapping[str, Any]) -> str:
    """The object of `baton status --json` as text for people."""
    router = status["router"]
    registry = "" if router["registry_connected"] else ", REGISTRY UNREACHABLE"
    lines = [
        f"router {router['incarnation']} at {router['address']} (pid {router['pid']}): "
        f"{router['state']}, model {router['model']}, cluster {router['cluster']}{registry}",
        f"requests: {router['running']} running, {router['queued']} queued",
        "",
        *(table(_worker_columns(status["workers"]), status["workers"]) or ["no workers"]),
    ]
    if status["pairs"]:
        lines += ["", *table(_PAIR_COLUMNS, status["pairs"])]
    return "\n".join(lines)


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
