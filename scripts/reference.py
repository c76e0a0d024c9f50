"""Writes what is generated in docs/; `--check`, as in `make lint`, only compares it.

In each page it is what lies between two marks: metrics from their table, options from the command
line's parser, gRPC's services and messages from the comments in protos/.
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

ROOT = Path(__file__).resolve().parent.parent
DOCS, PROTOS = ROOT / "docs", ROOT / "protos"
END = "<!-- generated: end -->"


def metrics() -> Iterator[str]:
    """The table of metrics, and the histograms' buckets."""
    for title, process in (
        ("The router", table.ROUTER),
        ("Both workers", table.WORKERS),
        ("The prefill worker", table.PREFILL),
        ("The decode worker", table.DECODE),
        ("Every process", table.EVERYBODY),
    ):
        yield f"## {title}\n"
        yield "| name in Prometheus, in OpenTelemetry | kind, unit | attributes | |"
        yield "|---|---|---|---|"
        processes = process if isinstance(process, tuple) else (process,)
        for one in table.TABLE:
            if one.processes == processes:
                attributes = ", ".join(f"`{name}`" for name in one.attributes)
                series = one.samples[0] if one.kind == table.COUNTER else one.series
                names = f"`{series}`<br>`{one.name}`"
                yield f"| {names} | {one.kind}, `{one.unit}` | {attributes} | {one.text} |"
        yield ""
    yield "## Buckets\n\n| histogram | upper bounds |\n|---|---|"
    for one in table.TABLE:
        if one.buckets:
            yield f"| `{one.name}` | {', '.join(f'{bound:g}' for bound in one.buckets)} |"
    yield ""


def commands() -> Iterator[str]:
    """Each command's options, as its parser has them."""
    for name, parser in _parsers("", cli.parser()):
        yield f"## baton {name}\n\n{_outside_code(parser.description)}\n"
        for group in parser._action_groups:
            shown = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            rows = [_option_row(one) for one in shown if "--help" not in one.option_strings]
            if rows:
                yield "\n".join([f"| {group.title} | |", "|---|---|", *rows, ""])
        examples = parser.epilog.partition("\n")[2]
        yield f"```sh\n{textwrap.dedent(examples).strip()}\n```\n"


def _parsers(prefix: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """All commands with their parsers, `bench serve` for a command of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = list(_parsers(f"{prefix}{name} ", command))
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


# Callers' services first.
_FILES = ("inference", "fleet", "trace", "prefill", "decode", "handoff", "worker", "common")
_SCALARS = {
    getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}"): name
    for name in ("bool", "uint32", "uint64", "int32", "int64", "float", "double", "string", "bytes")
}


def grpc() -> Iterator[str]:
    """Services, messages and enums of our protos, with their comments."""
    paths = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.glob("baton/v1/*.proto"))]
    assert {Path(path).stem for path in paths} == {*_FILES, "etcd"}, "a proto without a place"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "all.pb"
        flags = [f"-I{path}" for path in (PROTOS, resources.files("grpc_tools") / "_proto")]
        if protoc.main(["protoc", *flags, "--include_source_info", f"-o{out}", *paths]) != 0:
            sys.exit("protoc failed: see above")
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    files = {Path(file.name).stem: file for file in described.file}
    for name in _FILES:
        yield f"## {name}.proto\n"
        yield from _file_lines(files[name])


def _file_lines(file: Any) -> Iterator[str]:
    comments = {
        tuple(where.path): " ".join(where.leading_comments.split()).replace("|", chr(92) + "|")
        for where in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        yield f"### {service.name}\n\n{comments[6, index]}\n"
        yield "| RPC | request → response | |\n|---|---|---|"
        for number, method in enumerate(service.method):
            request, response = _type_name(method.input_type), _type_name(method.output_type)
            request = f"{'stream ' if method.client_streaming else ''}{request}"
            response = f"{'stream ' if method.server_streaming else ''}{response}"
            text = comments[6, index, 2, number]
            yield f"| `{method.name}` | {request} → {response} | {text} |"
        yield ""
    yield from _type_lines("", file.message_type, file.enum_type, (), (4, 5), comments)


def _type_lines(
    prefix: str, messages: Any, enums: Any, path: tuple[int, ...], kinds: Any, comments: Any
) -> Iterator[str]:
    """Messages and enums of a file or of a message, whose numbers in a path are `kinds`."""
    for index, message in enumerate(messages):
        if message.options.map_entry:
            continue
        here, name = (*path, kinds[0], index), f"{prefix}{message.name}"
        yield f"### {name}\n\n{comments[here]}\n"
        if message.field:
            yield "| field | type | |\n|---|---|---|"
            maps = {one.name: one for one in message.nested_type if one.options.map_entry}
            for number, field in enumerate(message.field):
                text = comments[(*here, 2, number)]
                yield f"| {field.number} `{field.name}` | {_field_type(field, maps)} | {text} |"
            yield ""
        inner = (message.nested_type, message.enum_type)
        yield from _type_lines(f"{name}.", *inner, here, (3, 4), comments)
    for index, enum in enumerate(enums):
        here = (*path, kinds[1], index)
        yield f"### {prefix}{enum.name}\n\n{comments[here]}\n\n| value | |\n|---|---|"
        for number, value in enumerate(enum.value):
            yield f"| {value.number} `{value.name}` | {comments[(*here, 2, number)]} |"
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


PAGES = {"metrics.md": metrics, "reference/cli.md": commands, "reference/grpc.md": grpc}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args().check
    for name, lines in PAGES.items():
        path = DOCS / name
        before, generated = path.read_text(), "\n".join(lines()) + "\n"
        head, mark, rest = before.partition(" by scripts/reference.py -->\n")
        assert END in rest, f"docs/{name} has no marks"
        page = f"{head}{mark}{generated}{END}{rest.partition(END)[2]}"
        if not check:
            path.write_text(page)
        elif page != before:
            sys.exit(f"docs/{name} is stale: run scripts/reference.py")
    print(f"{', '.join(PAGES)}: {'up to date' if check else 'written'}")


if __name__ == "__main__":
    main()
