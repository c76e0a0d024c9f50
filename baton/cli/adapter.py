"""`baton adapter`: LoRA adapters, loaded and unloaded while the cluster serves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.cli import options
from baton.errors import BatonError
from baton.tables import table

_TEXT = """\
Loads a LoRA adapter in PEFT's format on all workers, unloads it, or lists what is loaded. Requests
choose an adapter by giving its name as their model. Workers need memory for adapters (--max-loras),
and read the directory on their own host. A worker that starts loads what the others have: when all
workers of a model end together, nothing stays loaded but what --lora of a worker names."""
_EXAMPLES = """\
  baton adapter load sql /models/sql-lora
  baton generate 'SELECT' --model sql
  baton adapter list
  baton adapter unload sql --wait 30"""
_COLUMNS = {"name": "name", "identity": "content", "rank": "rank", "workers": "workers"}
_SHORT = 12  # characters of an identity


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "load, unload and list LoRA adapters"
    parser = options.add_command(commands, "adapter", summary, _TEXT, _EXAMPLES)
    add = parser.add_argument
    add("action", choices=("load", "unload", "list"), help="what to do")
    add("name", nargs="?", metavar="NAME", help="the model name for requests")
    add("directory", nargs="?", metavar="DIR", help="load: the adapter's directory on each host")
    add("--model", default="", metavar="NAME", help="load: the model that it adapts")
    add(
        "--wait", type=options.seconds, default=0.0, metavar="SECONDS",
        help="unload: for sequences that use it; then it stays (default: as workers drain)",
    )  # fmt: skip
    options.add_question_options(parser)
    parser.set_defaults(run=_run, timeout=120.0, parser=parser)


def _run(args: argparse.Namespace) -> int:
    given = (args.name is not None) + (args.directory is not None)
    if given != {"load": 2, "unload": 1, "list": 0}[args.action]:
        args.parser.error("write: load NAME DIR, unload NAME, or list")
    with options.connected(args) as client:
        if args.action == "list":
            found = listed(client.status(timeout=args.timeout)["workers"])
            rows = [{**one, "identity": one["identity"][:_SHORT]} for one in found]
            print(json.dumps(found) if args.json else "\n".join(table(_COLUMNS, rows) or ["none"]))
            return 0
        if args.action == "load":
            directory = str(Path(args.directory).resolve())
            results = client.load_adapter(
                args.name, directory, model=args.model, timeout=args.timeout
            )
        else:
            results = client.unload_adapter(args.name, wait_s=args.wait, timeout=args.timeout)
    if args.json:
        print(json.dumps(results))
    else:
        print("\n".join(f"{worker}: {error or 'done'}" for worker, error in results.items()))
    if failed := sum(map(bool, results.values())):
        raise BatonError(
            f"{failed} of {len(results)} workers did not {args.action} adapter {args.name}"
        )
    return 0


def listed(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The adapters of all workers of `baton status --json`, and which workers have each."""
    found = dict[tuple[str, str], dict[str, Any]]()
    for worker in workers:
        for adapter in worker["adapters"]:
            key = adapter["name"], adapter["identity"]
            one = found.setdefault(key, {**adapter, "workers": []})
            one["workers"].append(worker["incarnation"])
    rows = [{**one, "workers": ", ".join(one["workers"])} for one in found.values()]
    return sorted(rows, key=lambda one: one["name"])
