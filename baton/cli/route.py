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
    of_a_canary = (
        ("--steps", "steps", percents, "PERCENTS", "rising shares of the requests"),
        ("--step-time", "step_s", options.seconds, "SECONDS", "shortest time of a step"),
        ("--min-requests", "min_requests", options.count, "N",
         "requests of the new version that must have ended before versions are compared"),
        ("--max-slowdown", "max_slowdown", options.positive, "FACTOR",
         "how much slower the new version's median TTFT and TPOT may be"),
    )  # fmt: skip
    for flag, name, parse, metavar, what in of_a_canary:
        default = CANARY_DEFAULTS[name]
        numbers = default if isinstance(default, tuple) else (default,)
        text = f"{what} (default: {','.join(f'{number:g}' for number in numbers)})"
        group.add_argument(
            flag, dest=name, type=parse, metavar=metavar, help=text, default=argparse.SUPPRESS
        )
    options.add_question_options(parser)
    parser.set_defaults(run=_run, extra="router")


def _run(args: argparse.Namespace) -> int:
    if args.action != "canary" and CANARY_DEFAULTS.keys() & vars(args).keys():
        named = "--steps, --step-time, --min-requests and --max-slowdown"
        args.parser.error(f"{named} are for canary, not for {args.action}")
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
    given = {key: vars(args)[key] for key in CANARY_DEFAULTS if key in args}
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
