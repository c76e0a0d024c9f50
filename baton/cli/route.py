"""`baton route`: which versions of models answer to a name, changed while routers run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.config import CANARY_DEFAULTS, shares_text
from baton.errors import ConfigError, InvalidRequest
from baton.tables import table

if TYPE_CHECKING:
    from baton.client import Client

_TEXT = """\
Shows or sets the routes of model names. They are kept in etcd, and all routers follow them at once;
what runs goes on where it is. NAME is a model or a new name. A target is a version of NAME, another
model or name, or MODEL@VERSION, with a weight after a colon. Requests of one session
(prompt_cache_key or user; without it, of one tenant where there are several) stay together."""
_EXAMPLES = """\
  baton route                                    all routes
  baton route set chat=v1:90,v2:10               a tenth of the requests to v2
  baton route set chat=v2                        all of them, in one step
  baton route set gpt-4=chat                     another name for chat
  baton route canary chat=v2 --steps 10,50,100   more and more, and back if v2 is worse
  baton route delete chat                        as without a route"""
_COLUMNS = {"name": "name", "targets": "targets", "canary": "canary", "reason": "why"}


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    parser = options.add_command(
        commands, "route", "show or set which models answer to a name", _TEXT, _EXAMPLES
    )
    add = parser.add_argument
    choices = ("show", "set", "canary", "delete")
    add("action", nargs="?", choices=choices, default="show", help="what to do (default: show)")
    add("route", nargs="?", metavar="NAME[=TARGET[:WEIGHT],…]", help="the name, and its targets")
    group = parser.add_argument_group("canary")
    add = group.add_argument
    add(
        "--steps",
        type=percents,
        default=CANARY_DEFAULTS["steps"],
        metavar="PERCENTS",
        help="rising shares of the requests (default: 10,50,100)",
    )
    add(
        "--step-time",
        type=options.seconds,
        default=CANARY_DEFAULTS["step_s"],
        metavar="SECONDS",
        dest="step_s",
        help="shortest time of a step",
    )
    add(
        "--min-requests",
        type=options.count,
        default=CANARY_DEFAULTS["min_requests"],
        metavar="N",
        help="requests of the new version that must have ended before versions are compared",
    )
    add(
        "--max-slowdown",
        type=options.positive,
        default=CANARY_DEFAULTS["max_slowdown"],
        metavar="FACTOR",
        help="how much slower the new version's median TTFT and TPOT may be",
    )
    options.add_question_options(parser)
    parser.set_defaults(run=_run, extra="router")


def _run(args: argparse.Namespace) -> int:
    if args.action != "show" and not args.route:
        raise InvalidRequest(f"{args.action} needs a NAME", "NAME")
    with options.connected(args) as client:
        routes = _ask(client, args)
    if args.json:
        print(json.dumps({"routes": routes}))
    elif args.action == "delete":
        print(f"{args.route} has no route any more")
    else:
        print(render(routes))
    return 0


def _ask(client: Client, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Performs the command's action; returns the routes to print."""
    name, _, text = (args.route or "").partition("=")
    if args.action == "show":
        found = client.routes(timeout=args.timeout)
        return [one for one in found if name in ("", one["name"])]
    if args.action == "delete":
        client.delete_route(args.route, timeout=args.timeout)
        return []
    targets = dict(map(_weighted, filter(str.strip, text.split(","))))
    if not targets or (args.action == "canary" and len(targets) > 1):
        need = "one target" if args.action == "canary" else "targets"
        raise InvalidRequest(f"{args.action} needs a name and {need}, as {name or 'chat'}=v2")
    if args.action == "set":
        return [client.set_route(name, targets, timeout=args.timeout)]
    given = {key: vars(args)[key] for key in CANARY_DEFAULTS}
    return [client.start_canary(name, *targets, timeout=args.timeout, **given)]


def _weighted(text: str) -> tuple[str, float]:
    """Parses TARGET[:WEIGHT]."""
    target, colon, weight = text.strip().rpartition(":")
    if colon and re.fullmatch(r"\d+(\.\d*)?|\.\d+", weight):
        return target, float(weight)
    return text.strip(), 1.0


def percents(text: str) -> tuple[float, ...]:
    """Parses "10,50,100"."""
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} are no percents: write 10,50,100") from None


def render(routes: Sequence[Mapping[str, Any]]) -> str:
    """Renders the routes as text."""
    rows = [_row(one) for one in routes]
    columns = dict(_COLUMNS)
    if not any(row["canary"] for row in rows):
        del columns["canary"], columns["reason"]
    return "\n".join(table(columns, rows)) or "no routes: a model's first version has its requests"


def _row(route: Mapping[str, Any]) -> dict[str, Any]:
    canary = route["canary"] or {}
    step = ""
    if canary:
        step = canary["target"]
        if canary["state"] == "running":
            step += f" step {canary['step'] + 1} of {len(canary['steps'])}"
        else:
            step += f" {canary['state'].replace('_', ' ')}"
    return {
        "name": route["name"],
        "targets": shares_text(route["targets"]),
        "canary": step,
        "reason": canary.get("reason", ""),
    }
