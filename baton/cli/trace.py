"""`baton trace`: one request's trace as a tree and a waterfall, or a list of requests."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.options import count, seconds
from baton.errors import InvalidRequest, Stale
from baton.tables import table

if TYPE_CHECKING:
    from baton.local.trace_source import KeptTraces
    from baton.local.trace_tree import TraceSummary

_TEXT = """\
Draws a request's spans in client, router and workers over time, and the share of its time that
they account for. `baton up` keeps the last traces in memory. `baton generate --json` and
`baton top` show trace ids; without one, the requests with traces are listed."""
_EXAMPLES = """\
  baton trace                                      the last requests
  baton trace --slowest 5                          those that took longest
  baton trace --last                               the trace of the last request
  baton trace 4bf92f3577b34da6a3ce929d0e0e4736"""
_COLUMNS = {
    "trace_id": "trace", "ended": "ended", "took": "took ms", "input_tokens": "tokens in",
    "output_tokens": "out", "attempts": "attempts", "spans": "spans", "error": "failed",
}  # fmt: skip
_MAX_LISTED = 20


def add_commands(commands: options.Commands) -> None:
    """Adds `trace`."""
    summary = "show where a request's time went"
    parser = options.add_command(commands, "trace", summary, _TEXT, _EXAMPLES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("trace_id", nargs="?", metavar="TRACE_ID", help="32 hexadecimal digits")
    which.add_argument("--last", action="store_true", help="the request that ended last")
    text = "list the N requests that took longest"
    which.add_argument("--slowest", type=count, metavar="N", help=text)
    source = parser.add_argument_group("where the traces are")
    options.add_target_option(source)
    options.add_key_option(source)
    text = "address at which `baton up` keeps traces (default: the router's --otlp)"
    source.add_argument("--from", dest="source", metavar="HOST:PORT", help=text)
    add = parser.add_argument
    add("--timeout", type=seconds, default=10.0, metavar="SECONDS", help="for the answer")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from baton.local import trace_tree

    trace_id = (args.trace_id or "").strip().lower().replace("-", "")
    if args.trace_id is not None and not trace_tree.is_trace_id(trace_id):
        text = f"{args.trace_id!r} is no trace id: it has 32 hexadecimal digits"
        raise InvalidRequest(text, "trace_id")
    source = _source(args)
    traces = source.traces(trace_id, args.timeout)
    if not trace_id:
        most = 1 if args.last else args.slowest or _MAX_LISTED
        found = trace_tree.summaries(traces, args.slowest is not None, most)
        if args.json and not args.last:
            print(json.dumps({"traces": [asdict(summary) for summary in found]}))
            return 0
        if not found:
            raise Stale(f"{source.name} has no trace of a request yet")
        if not args.last:
            failed = any(summary.error is not None for summary in found)
            columns = {key: title for key, title in _COLUMNS.items() if failed or key != "error"}
            print("\n".join(table(columns, [_row(summary) for summary in found])))
            return 0
        trace_id = found[0].trace_id
        traces = source.traces(trace_id, args.timeout)
    spans = [span for trace in traces for span in trace]
    if not spans:
        raise Stale(
            f"{source.name} has no trace {trace_id}: it was dropped as too old, not sampled, or "
            "belongs to another cluster"
        )
    if args.json:
        coverage = trace_tree.coverage(spans)
        ordered = sorted(spans, key=lambda span: span.start_ns)
        share = coverage.share if coverage else None
        spans_json = [asdict(span) for span in ordered]
        print(json.dumps({"trace_id": trace_id, "accounted_share": share, "spans": spans_json}))
    else:
        print(trace_tree.render(spans, trace_tree.width(), with_coverage=True))
    return 0


def _source(args: argparse.Namespace) -> KeptTraces:
    from baton.local import trace_source

    key = options.api_key(args)
    if args.source:
        return trace_source.KeptTraces(args.source, key)
    with options.calling(args.target, args.timeout):
        return trace_source.kept_by(args.target, key, args.timeout)


def _row(summary: TraceSummary) -> dict[str, Any]:
    ended = time.localtime(summary.start_ns / 1e9 + summary.took_ms / 1e3)
    return {
        **asdict(summary),
        "ended": time.strftime("%H:%M:%S", ended),
        "took": round(summary.took_ms, 1),
        "error": "" if summary.error is None else summary.error or "yes",
    }
