"""`baton explain`: where a router would run a request now, and why, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from baton.cli import options
from baton.cli.prompt import add_prompt_options, prompt_of
from baton.cli.status import table
from baton.cli.values import seconds

_TEXT = """\
Shows every pair of workers with what the router expects of it (time to first token, time per output
token, tokens to compute first, tokens cached), the best first, and why others are left out. Nothing
is run."""
_EXAMPLES = """\
  baton explain 'class Stack:'
  cat main.py | baton explain - --max-tokens 500 --json"""
_COLUMNS = {
    "prefill": "prefill",
    "decode": "decode",
    "score": "score ms",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "queue_tokens": "tokens first",
    "prefill_cached_tokens": "cached: prefill",
    "decode_cached_tokens": "decode",
    "same_host": "host",
    "refused": "left out",
}


def add_commands(commands: options.Commands) -> None:
    """Adds `explain`."""
    parser = options.add_command(
        commands, "explain", "show where a request would run, and why", _TEXT, _EXAMPLES
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="TOKENS", help="in the completion (default: 64)"
    )
    parser.add_argument(
        "--cache-salt", metavar="TEXT", help="of the prefix cache it would use (default: none)"
    )
    options.add_target_option(parser)
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="for the router's answer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    prompt = prompt_of(args)
    from baton import Client

    with options.calling(args.target, args.timeout), Client(args.target) as client:
        explanation = client.explain(
            prompt,
            max_tokens=args.max_tokens,
            cache_salt=args.cache_salt,
            timeout=args.timeout,
        )
    print(json.dumps(explanation) if args.json else render(explanation))
    return 0


def render(explanation: Mapping[str, Any]) -> str:
    """The object of `baton explain --json` as text for people."""
    tenant = f" of tenant {explanation['tenant']}" if explanation["tenant"] else ""
    lines = [
        f"a prompt of {explanation['prompt_tokens']} tokens{tenant}; "
        f"{explanation['queued']} requests wait at the router",
        _verdict(explanation),
    ]
    rows = [_row(candidate) for candidate in explanation["candidates"]]
    return "\n".join([*lines, "", *(table(_columns(rows), rows) or ["no workers"])])


def _verdict(explanation: Mapping[str, Any]) -> str:
    if explanation["refused"]:
        return f"would be refused or wait: {explanation['refused']}"
    best = explanation["candidates"][0]
    if explanation["decode_prefills"]:
        return f"would run on {best['decode']}, which would compute the prompt itself"
    return f"would run on {best['prefill']} and {best['decode']}"


def _columns(rows: list[dict[str, Any]]) -> Mapping[str, str]:
    """Why pairs are left out, only where there are such."""
    if any(row["refused"] for row in rows):
        return _COLUMNS
    return {key: title for key, title in _COLUMNS.items() if key != "refused"}


def _row(candidate: Mapping[str, Any]) -> dict[str, Any]:
    rounded = {key: round(candidate[key], 1) for key in ("score", "ttft_ms", "tpot_ms")}
    return {**candidate, **rounded, "same_host": "same" if candidate["same_host"] else "other"}
