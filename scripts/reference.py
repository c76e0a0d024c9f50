"""Writes the reference pages in docs/; `--check`, as in `make lint`, only compares them.

metrics.md comes from the table of metrics, reference/cli.md from the command line's parser,
reference/grpc.md from the comments in protos/.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from baton import cli
from baton.cli.options import HelpFormatter
from baton.metrics import table
from baton.metrics.table import Instrument

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROTOS = ROOT / "protos"

_METRICS_HEAD = """\
<!-- Written by scripts/reference.py from baton/metrics/table.py: change it there, and run it. -->
# Metrics

With `--metrics-port` a process serves its metrics for Prometheus at `http://HOST:PORT/metrics`;
`baton up --metrics-port 9400` gives its processes that port and the ones after it, and prints them.
A router that speaks HTTP shows the same page there. Without the option nothing listens.

They are kept by prometheus_client. Names follow OpenTelemetry's semantic conventions for generative
AI where they have one; a name in a query has `_` for `.`, its unit at the end, and `_total`,
`_bucket`, `_sum` or `_count` behind that. `target_info` tells a process's service and incarnation.

A request is timed at the router, from its arrival there. Its times are those that callers get in
`timing`.
"""

_METRICS_TAIL = """\
## Queries

| what | query |
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

* failed after the first call to a worker, or for a reason other than the caller's mistake or a
  refusal for lack of room;
* needed more than one attempt;
* had their first token later than `--trace-slow`, or met none of the `--slo` classes.

This is tail sampling: the decision falls when a request ends, so every process records all spans
and buffers those that were not sampled (the last 16,384; at 20 a request the last 800 requests).
The router decides and calls the workers that the request ran on. Spans are lost if their worker
died, overwrote them, or could not be reached; spans of the caller's own process are not covered.
"""


def metrics_page() -> str:
    """The table of metrics, and queries over it."""
    parts = [_METRICS_HEAD]
    for title, process in (
        ("The router", table.ROUTER),
        ("Both workers", table.WORKERS),
        ("The prefill worker", table.PREFILL),
        ("The decode worker", table.DECODE),
        ("Every process", table.EVERYBODY),
    ):
        processes = process if isinstance(process, tuple) else (process,)
        rows = [_metric_row(one) for one in table.TABLE if one.processes == processes]
        parts.append("\n".join([f"## {title}\n", *_METRIC_COLUMNS, *rows, ""]))
    return "\n".join([*parts, _buckets(), _METRICS_TAIL])


_METRIC_COLUMNS = (
    "| name in Prometheus, in OpenTelemetry | kind, unit | attributes | |",
    "|---|---|---|---|",
)


def _metric_row(one: Instrument) -> str:
    attributes = ", ".join(f"`{name}`" for name in one.attributes)
    series = one.samples[0] if one.kind == table.COUNTER else one.series
    names = f"`{series}`<br>`{one.name}`"
    return f"| {names} | {one.kind}, `{one.unit}` | {attributes} | {one.text} |"


def _buckets() -> str:
    lines = ["## Buckets\n", "| histogram | upper bounds |", "|---|---|"]
    for one in table.TABLE:
        if one.buckets:
            lines.append(f"| `{one.name}` | {', '.join(f'{bound:g}' for bound in one.buckets)} |")
    return "\n".join([*lines, ""])


_CLI_HEAD = """\
<!-- Written by scripts/reference.py from the options' declarations: change them, and run it. -->
# Command line

`baton COMMAND --help` shows the same. Exit status: 0 on success, 1 for an error (one line on
stderr), 2 for bad usage, 130 after ctrl-C.

Options of `up`, `router`, `prefill-worker`, `decode-worker` and `generate --local` can also come
from the environment and from a file. The command line goes first, then the environment, then the
file:

* `--max-batch 32` on the command line;
* `BATON_OPT_MAX_BATCH=32` in the environment: the flag in capitals, with `_` for `-`;
* `max-batch = 32` in the TOML file that `--config` names.

A switch is `--graphs` or `--no-graphs`, and `true` or `false` elsewhere. Repeatable options are
lists in the file and separated by `;` in the environment. One file or environment may serve all
commands: each takes the options it has. A name that no command has is an error.
"""


def cli_page() -> str:
    """Each command's options, as its parser has them."""
    parts = [_CLI_HEAD]
    for name, parser in _commands("", cli.parser()):
        parts.append(f"## baton {name}\n\n{_outside_code(parser.description)}\n")
        for group in parser._action_groups:
            shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            rows = [_option_row(one) for one in shown if "--help" not in one.option_strings]
            if rows:
                parts.append("\n".join([f"| {group.title} | |", "|---|---|", *rows, ""]))
        examples = parser.epilog.partition("\n")[2]
        parts.append(f"```sh\n{textwrap.dedent(examples).strip()}\n```\n")
    return "\n".join(parts)


def _commands(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """All commands with their parsers, `bench serve` for a command of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = list(_commands(f"{prefix}{name} ", command))
                yield from inner or [(f"{prefix}{name}", command)]


def _outside_code(description: str) -> str:
    """Indented lines, as tables of terms, become code blocks."""
    lines: list[str] = []
    for line in description.splitlines():
        if line.startswith("  ") and not (lines and lines[-1].startswith("  ")):
            lines.append("")
        lines.append(f"  {line}" if line.startswith("  ") else line)
    return "\n".join(lines)


def _option_row(one: argparse.Action) -> str:
    formatter = HelpFormatter("")
    value = "" if one.nargs == 0 else " " + formatter._format_args(one, (one.dest or "").upper())
    names = " / ".join(one.option_strings)
    usage = f"{names}{value}" if names else value.strip()
    return f"| `{usage.replace('|', chr(92) + '|')}` | {formatter._expand_help(one)} |"


_GRPC_HEAD = """\
<!-- Written by scripts/reference.py from protos/: change the comments there, and run it. -->
# gRPC

Callers use `InferenceService` of a router, operators its `FleetService`. The other services are
between routers and workers and may change with any minor version. Every server also has
`grpc.health.v1` and reflection. Errors are gRPC statuses with google.rpc details: `RetryInfo` (when
to try again), `BadRequest` (which field) and `ErrorInfo` (which error, where several share a
status): [Python SDK and errors](sdk.md#errors).
"""

# Callers' services first.
_FILES = ("inference", "fleet", "trace", "prefill", "decode", "handoff", "worker", "common")
_SCALARS = {
    getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}"): name
    for name in ("bool", "uint32", "uint64", "int32", "int64", "float", "double", "string", "bytes")
}


def grpc_page() -> str:
    """Services, messages and enums of our protos, with their comments."""
    described = {Path(file.name).stem: file for file in _descriptors().file}
    ours = {Path(path).stem for path in _proto_names()}
    assert ours == {*_FILES, "etcd"}, "a proto without a place on the page"
    parts = [_GRPC_HEAD]
    for name in _FILES:
        parts += [f"## {name}.proto\n", *_file_lines(described[name])]
    return "\n".join(parts)


def _proto_names() -> list[str]:
    return [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.glob("baton/v1/*.proto"))]


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    includes = [PROTOS, resources.files("grpc_tools") / "_proto"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "all.pb"
        flags = [*(f"-I{path}" for path in includes), "--include_source_info", f"-o{out}"]
        if protoc.main(["protoc", *flags, *_proto_names()]) != 0:
            sys.exit("protoc failed: see above")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def _file_lines(file: Any) -> Iterator[str]:
    comments = {
        tuple(where.path): " ".join(where.leading_comments.split()).replace("|", chr(92) + "|")
        for where in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        yield f"### {service.name}\n\n{comments[6, index]}\n"
        yield "| RPC | request → response | |\n|---|---|---|"
        for number, method in enumerate(service.method):
            ends = [
                f"{'stream ' if streams else ''}{_type_name(kind)}"
                for streams, kind in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            ]
            yield f"| `{method.name}` | {' → '.join(ends)} | {comments[6, index, 2, number]} |"
        yield ""
    for index, message in enumerate(file.message_type):
        yield from _message_lines(message, (4, index), message.name, comments)
    for index, enum in enumerate(file.enum_type):
        yield from _enum_lines(enum, (5, index), enum.name, comments)


def _message_lines(message: Any, path: tuple[int, ...], name: str, comments: Any) -> Iterator[str]:
    yield f"### {name}\n\n{comments[path]}\n"
    if message.field:
        yield "| field | type | |\n|---|---|---|"
        maps = {one.name: one for one in message.nested_type if one.options.map_entry}
        for number, field in enumerate(message.field):
            text = comments[(*path, 2, number)]
            yield f"| {field.number} `{field.name}` | {_field_type(field, maps)} | {text} |"
        yield ""
    for number, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from _message_lines(inner, (*path, 3, number), f"{name}.{inner.name}", comments)
    for number, inner in enumerate(message.enum_type):
        yield from _enum_lines(inner, (*path, 4, number), f"{name}.{inner.name}", comments)


def _enum_lines(enum: Any, path: tuple[int, ...], name: str, comments: Any) -> Iterator[str]:
    yield f"### {name}\n\n{comments[path]}\n\n| value | |\n|---|---|"
    for number, value in enumerate(enum.value):
        yield f"| {value.number} `{value.name}` | {comments[(*path, 2, number)]} |"
    yield ""


def _field_type(field: Any, maps: dict[str, Any]) -> str:
    kind = _SCALARS.get(field.type) or _type_name(field.type_name)
    if entry := maps.get(field.type_name.rpartition(".")[2]):
        return f"map of {_field_type(entry.field[0], {})} to {_field_type(entry.field[1], {})}"
    if field.label == field.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _type_name(full: str) -> str:
    name = full.removeprefix(".baton.v1.")
    return f"[{name}](#{name.lower().replace('.', '')})" if full.startswith(".baton.v1.") else name


PAGES = {"metrics.md": metrics_page, "reference/cli.md": cli_page, "reference/grpc.md": grpc_page}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"docs/{name} is stale: run scripts/reference.py")
    print(f"{', '.join(PAGES)}: {'up to date' if check else 'written'}")


if __name__ == "__main__":
    main()
