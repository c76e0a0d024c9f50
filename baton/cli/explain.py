"""`baton explain`: which workers a request would run on, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from baton.cli import options
from baton.cli.generate import add_prompt_options, prompt_of
from baton.tables import table

_TEXT = """\
Shows the router's estimate for every pair of workers (time to first token, time per output token,
tokens queued before it, cached tokens), the best first, and why pairs are left out. The request is
not run."""
_EXAMPLES = """\
  baton explain 'class Stack:'
  baton explain 'SELECT' --model sql
  cat main.py | baton explain - --max-tokens 500 --json"""
_COLUMNS = {
    "prefill": "prefill", "decode": "decode", "score": "score ms", "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms", "queue_tokens": "tokens first",
    "prefill_cached_tokens": "cached: prefill", "decode_cached_tokens": "decode",
    "same_host": "host", "refused": "left out",
}  # fmt: skip


def add_commands(commands: options.Commands) -> None:
    """Adds the command."""
    summary = "show where a request would run, and why"
    parser = options.add_command(commands, "explain", summary, _TEXT, _EXAMPLES)
    add_prompt_options(parser)
    add = parser.add_argument
    add("--model", metavar="NAME", help="model or adapter (default: the router's first model)")
    add("--max-tokens", type=int, metavar="TOKENS", help="longest completion (default: 64)")
    add("--cache-salt", metavar="TEXT", help="salt of the prefix cache (default: none)")
    options.add_question_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    prompt = prompt_of(args)
    asked = {name: getattr(args, name) for name in ("model", "max_tokens", "cache_salt")}
    with options.connected(args) as client:
        explanation = client.explain(prompt, timeout=args.timeout, **asked)
    print(json.dumps(explanation) if args.json else render(explanation))
    return 0


def render(explanation: Mapping[str, Any]) -> str:
    """Renders the object of `baton explain --json` as text."""
    model = f" for {explanation['model']}" if explanation["model"] else ""
    tenant = f" of tenant {explanation['tenant']}" if explanation["tenant"] else ""
    rows = [_row(candidate) for candidate in explanation["candidates"]]
    columns = dict(_COLUMNS)
    if not any(row["refused"] for row in rows):
        del columns["refused"]
    if explanation["refused"]:
        verdict = f"would be refused or wait: {explanation['refused']}"
    elif explanation["decode_prefills"]:
        best, instead = rows[0], "no pair of workers is ready"
        if best["prefill"]:
            instead = f"handed over in {best['handed_over_ttft_ms']:.1f} ms"
        verdict = (
            f"would run on {best['decode']}, which would compute the prompt itself: first token in "
            f"{best['ttft_ms']} ms, {instead}"
        )
    else:
        verdict = f"would run on {rows[0]['prefill']} and {rows[0]['decode']}"
    lines = [
        f"a prompt of {explanation['prompt_tokens']} tokens{tenant}{model}; "
        f"{explanation['queued']} requests wait at the router",
        verdict,
        "",
        *(table(columns, rows) or ["no workers"]),
    ]
    return "\n".join(lines)


def _row(candidate: Mapping[str, Any]) -> dict[str, Any]:
    rounded = {key: round(candidate[key], 1) for key in ("score", "ttft_ms", "tpot_ms")}
    return {**candidate, **rounded, "same_host": "same" if candidate["same_host"] else "other"}
