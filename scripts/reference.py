"""Writes the reference pages, or checks that they are up to date: `make lint` runs `--check`.

docs/metrics.md comes from the one table of metrics, docs/reference-cli.md from the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton import cli, options
from baton.cli.options import CONFIGS
from baton.metrics import table
from baton.metrics.table import Instrument

DOCS = Path(__file__).resolve().parent.parent / "docs"

_HEAD = """\
<!-- Written by scripts/reference.py from baton/metrics/table.py: change it there, and run it. -->
# Metrics

With `--metrics-port` a process serves its metrics for Prometheus at `http://HOST:PORT/metrics`;
`baton up --metrics-port 9400` gives its processes that port and the ones after it, and prints them.
A router that speaks HTTP shows the same page there. Without the option nothing listens.

They are kept by prometheus_client. Names follow OpenTelemetry's semantic conventions for generative
AI where they have one; a name in a query has `_` for `.`, its unit at the end, and `_total`,
`_bucket`, `_sum` or `_count` behind that. `target_info` tells a process's service and incarnation.

A request is timed at the router, from its arrival there. Times of a request are measured the same
way that `timing` tells callers.
"""

_AFTER = """\
## What follows from them

| figure | query |
|---|---|
| output tokens a second | `sum(rate(baton_tokens_output_total[1m]))` |
| p99 of time to first token | `histogram_quantile(0.99, sum by (le) \
(rate(gen_ai_server_time_to_first_token_seconds_bucket[5m])))` |
| goodput of a class, share | `sum by (slo) (rate(baton_slo_requests_total{met="true"}[5m])) / \
sum by (slo) (rate(baton_slo_requests_total[5m]))` |
| prefix-hit ratio | `sum(rate(baton_tokens_cached_total[5m])) / \
sum(rate(baton_tokens_input_total[5m]))` |
| share of drafts that were right | `sum(rate(baton_engine_drafts_total{right="yes"}[5m])) / \
sum(rate(baton_engine_drafts_total[5m]))` |
| mean batch of decode | `rate(baton_engine_batch_size_sum[1m]) / \
rate(baton_engine_batch_size_count[1m])` |
| KV blocks in use, share | `sum by (instance) (baton_kv_blocks{state="held"}) / \
sum by (instance) (baton_kv_blocks)` |
| price of 1,000 output tokens | `1000 * sum(rate(baton_worker_cost_total[1h])) / \
sum(rate(baton_tokens_output_total[1h]))` |
| CPU seconds per 1,000 requests, a router | `1000 * sum by (instance) \
(rate(process_cpu_time_seconds_total[5m])) / sum by (instance) \
(rate(baton_requests_ended_total[5m]))` |

Cost is counted at the workers (`--worker-price`, for an hour), because each of several routers sees
all workers but its own tokens only.

## From a bucket to its trace

Histograms of requests, prompts and transfers carry the trace of the last exported request in each
bucket as an OpenMetrics exemplar. Prometheus asks for that format by itself and keeps exemplars
with `--enable-feature=exemplar-storage`. Single gaps between tokens
(`baton.request.inter_token_latency`) carry none: they are counted too often.

`--trace-sample SHARE` says how many traces are exported: a share by trace id where the trace begins
at a router, and what the caller decided where the caller sent one. Whatever it says, traces are
kept of requests that

* failed after a worker had been asked for anything, or for a reason that is not the caller's or a
  refusal for want of room;
* needed more than one attempt;
* had their first token later than `--trace-slow`, or kept none of the `--slo` classes.

That is known at the end, so every process records all spans and holds those that were not sampled
(the last 16,384; at 20 a request the last 800 requests). The router decides and tells the workers
that the request was on. What cannot be kept: spans of a worker that died, of one that held too many
others meanwhile, or that the router could not reach; and spans of the caller's own process.
"""


_CLI_HEAD = f"""\
<!-- Written by scripts/reference.py from the options' declarations: change them, and run it. -->
# Command line

`baton COMMAND --help` shows the same. Times are in seconds. Exit status: 0 when it did what it was
asked to, 1 for an error (one line on stderr), 2 for bad usage, 130 after ctrl-C.

Options of {", ".join(f"`{name}`" for name in CONFIGS)}
(there those for `--local`) can also come from the environment and from a file. The command line
goes first, then the environment, then the file:

* `--max-batch 32` on the command line;
* `{options.PREFIX}MAX_BATCH=32` in the environment: the flag in capitals, with `_` for `-`;
* `max-batch = 32` in the TOML file that `--config` names.

A switch is `--graphs` or `--no-graphs`, and `true` or `false` elsewhere. What can be repeated is a
list in the file and separated by `;` in the environment. One file or environment may serve all
commands: each takes the options it has. A name that no command has is an error.
"""


def cli_page() -> str:
    """Each command's options, as its parser has them."""
    parts = [_CLI_HEAD]
    for name, parser in _commands("", cli.parser()):
        parts.append(f"## baton {name}\n\n{parser.description}\n")
        for group in parser._action_groups:
            shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            rows = [_option_row(one) for one in shown if "--help" not in one.option_strings]
            if rows:
                title = group.title or ""
                parts.append("\n".join([f"| {title} | |", "|---|---|", *rows, ""]))
        parts.append(
            f"```sh\n{parser.epilog.removeprefix('examples:')}\n```\n".replace("\n\n", "\n")
        )
    return "\n".join(parts)


def _commands(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """All commands with their parsers, `bench serve` for a command of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = list(_commands(f"{prefix}{name} ", command))
                yield from inner or [(f"{prefix}{name}", command)]


def _option_row(one: argparse.Action) -> str:
    formatter = cli.options.HelpFormatter("")
    value = "" if one.nargs == 0 else " " + formatter._format_args(one, (one.dest or "").upper())
    names = " / ".join(one.option_strings)
    usage = f"{names}{value}" if names else value.strip()
    return f"| `{usage}` | {formatter._expand_help(one)} |".replace("|cpu|cuda|", r"\|cpu\|cuda\|")


def metrics_page() -> str:
    """The table of metrics, and what can be asked of it."""
    parts = [_HEAD]
    for title, process in (
        ("The router", table.ROUTER),
        ("Both workers", table.WORKERS),
        ("The prefill worker", table.PREFILL),
        ("The decode worker", table.DECODE),
        ("Every process", table.EVERYBODY),
    ):
        processes = process if isinstance(process, tuple) else (process,)
        rows = [_row(one) for one in table.TABLE if one.processes == processes]
        parts.append("\n".join([f"## {title}\n", *_COLUMNS, *rows, ""]))
    return "\n".join([*parts, _buckets(), _AFTER])


_COLUMNS = (
    "| name | for Prometheus | kind | unit | attributes | meaning |",
    "|---|---|---|---|---|---|",
)


def _row(one: Instrument) -> str:
    attributes = ", ".join(f"`{name}`" for name in one.attributes)
    series = one.samples[0] if one.kind == table.COUNTER else one.series
    return f"| `{one.name}` | `{series}` | {one.kind} | `{one.unit}` | {attributes} | {one.text} |"


def _buckets() -> str:
    lines = ["## Buckets\n", "| histogram | upper bounds |", "|---|---|"]
    for one in table.TABLE:
        if one.buckets:
            lines.append(f"| `{one.name}` | {', '.join(f'{bound:g}' for bound in one.buckets)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    for name, text in (("metrics.md", metrics_page()), ("reference-cli.md", cli_page())):
        page = DOCS / name
        if not check:
            page.write_text(text)
        elif not page.exists() or page.read_text() != text:
            sys.exit(f"docs/{name} is stale: run scripts/reference.py")
        else:
            print(f"docs/{name} is up to date")


if __name__ == "__main__":
    main()
