"""Writes what is generated in docs/; `--check`, as in `make lint`, only compares it.

In each page it is what lies between two marks: metrics from their table, options from the command
line's parser, gRPC's services and messages from protos/.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton import cli
from baton.cli.options import HelpFormatter
from baton.metrics import table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
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


def grpc() -> Iterator[str]:
    """The commented protos, callers' services first."""
    callers, workers = ("inference", "fleet", "trace"), ("prefill", "decode", "handoff", "worker")
    names = (*callers, "dispatch", *workers, "common")
    files = {path.stem: path for path in (ROOT / "protos/baton/v1").glob("*.proto")}
    assert files.keys() == {*names, "etcd"}, "a proto without a place"
    for name in names:
        yield f"## {name}.proto\n\n```proto\n{files[name].read_text().strip()}\n```\n"


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
