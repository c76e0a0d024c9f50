"""`baton trace`: one request's trace as a tree and a waterfall, or a list of requests."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.options import count, seconds
from baton.cli.status import table
from baton.errors import InvalidRequest, Stale

if TYPE_CHECKING:
    from baton.local.span_store import Span
    from baton.local.trace_source import Jaeger, KeptTraces
    from baton.v1.trace_pb2 import TraceSummary

_TEXT = """\
Draws what a request did, and when, in client, router and workers, and says how much of its time
the spans account for. `baton up` keeps the last traces in memory, and a router says where. A trace
id is what `baton generate --json` and `baton top` show; without one the requests whose traces
are kept are listed."""
_EXAMPLES = """\
  baton trace                                      the last requests
  baton trace --slowest 5                          those that took longest
  baton trace --last                               the whole trace of the last request
  baton trace 4bf92f3577b34da6a3ce929d0e0e4736
  baton trace 4bf92f3577b34da6a3ce929d0e0e4736 --jaeger http://jaeger:16686"""
_COLUMNS = {
    "trace_id": "trace",
    "ended": "ended",
    "took": "took ms",
    "input_tokens": "tokens in",
    "output_tokens": "out",
    "attempts": "attempts",
    "spans": "spans",
    "error": "failed",
}
_MAX_LISTED = 20
_MAX_WIDTH = 160
_FILE_WIDTH = 100  # where there is no terminal


def add_commands(commands: options.Commands) -> None:
    """Adds `trace`."""
    summary = "show where a request's time went"
    parser = options.add_command(commands, "trace", summary, _TEXT, _EXAMPLES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("trace_id", nargs="?", metavar="TRACE_ID", help="32 hexadecimal digits")
    which.add_argument("--last", action="store_true", help="the request that ended last")
    which.add_argument(
        "--slowest", type=count, metavar="N", help="list the N requests that took longest"
    )
    source = parser.add_argument_group("where the traces are")
    options.add_target_option(source)
    other = source.add_mutually_exclusive_group()
    other.add_argument(
        "--from",
        dest="source",
        metavar="HOST:PORT",
        help="where `baton up` keeps traces (default: where the router exports to)",
    )
    other.add_argument(
        "--jaeger", metavar="URL", help="read Jaeger's HTTP API, as http://HOST:16686"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="SECONDS", help="for the answer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    trace_id = checked(args.trace_id) if args.trace_id else ""
    source = _source(args)
    if not trace_id:
        most = 1 if args.last else args.slowest or _MAX_LISTED
        found = source.summaries(args.slowest is not None, most, args.timeout)
        if args.json and not args.last:
            print(json.dumps({"traces": [_fields(summary) for summary in found]}))
            return 0
        if not found:
            raise Stale(f"{source.name} keeps no trace of a request yet")
        if not args.last:
            print("\n".join(listed(found)))
            return 0
        trace_id = found[0].trace_id
    spans = source.trace(trace_id, args.timeout)
    if not spans:
        raise Stale(
            f"{source.name} has no trace {trace_id}: it is older than those that are kept, was not "
            "sampled, or belongs to another cluster"
        )
    print(json.dumps(as_json(spans)) if args.json else render(spans, _width()))
    return 0


def checked(text: str) -> str:
    """The id that `text` names, also as UUID or in capitals. Raises InvalidRequest."""
    from baton.local.trace_tree import is_trace_id

    trace_id = text.strip().lower().replace("-", "")
    if not is_trace_id(trace_id):
        raise InvalidRequest(f"{text!r} is no trace id: it has 32 hexadecimal digits", "trace_id")
    return trace_id


def render(spans: Sequence[Span], width: int) -> str:
    """Tree, waterfall, and how much of the request's time is accounted for."""
    from baton.local import trace_tree

    parts = trace_tree.render(spans, width), trace_tree.render_coverage(spans, width)
    return "\n".join(filter(None, parts))


def as_json(spans: Sequence[Span]) -> dict[str, Any]:
    """The object of `--json`."""
    from baton.local.trace_tree import coverage

    found = coverage(spans)
    return {
        "trace_id": spans[0].trace_id,
        "accounted_share": found.share if found else None,
        "spans": [asdict(span) for span in sorted(spans, key=lambda span: span.start_ns)],
    }


def _source(args: argparse.Namespace) -> Jaeger | KeptTraces:
    from baton.local import trace_source

    if args.jaeger:
        return trace_source.Jaeger(args.jaeger)
    if args.source:
        return trace_source.KeptTraces(args.source)
    with options.calling(args.target, args.timeout):
        return trace_source.kept_by(args.target, args.timeout)


def listed(found: Sequence[TraceSummary]) -> list[str]:
    """Requests as lines of a table."""
    failed = any(summary.HasField("error") for summary in found)
    columns = {key: title for key, title in _COLUMNS.items() if failed or key != "error"}
    return table(columns, [_row(summary) for summary in found])


def _fields(summary: TraceSummary) -> dict[str, Any]:
    """Of `--json`; `error` is why the request failed, possibly empty, None when it did not."""
    values = {field.name: getattr(summary, field.name) for field in summary.DESCRIPTOR.fields}
    return {**values, "error": summary.error if summary.HasField("error") else None}


def _row(summary: TraceSummary) -> dict[str, Any]:
    ended = time.localtime(summary.start_ns / 1e9 + summary.took_ms / 1e3)
    return {
        **_fields(summary),
        "ended": time.strftime("%H:%M:%S", ended),
        "took": round(summary.took_ms, 1),
        "error": (summary.error or "yes") if summary.HasField("error") else "",
    }


def _width() -> int:
    if not sys.stdout.isatty():
        return _FILE_WIDTH
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)
