"""Correctness and speed of kernels, engine and cluster on this machine's GPU, against floors.

Runs part after part within the given minutes, prints tables, and exits with status 1 if anything
failed. `--smoke` is a dry run on a CPU with interpreted kernels. The part "tune" keeps its
configurations for this user, as `python -m baton.engine.kernels.triton tune` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from baton.tables import align
from benchmarks.child import Child

# Share of the time and function of each part. Time that a part leaves goes to later parts.
PARTS = {
    "machine": (0.05, "benchmarks.gpu.kernels:machine"),
    "kernels": (0.20, "benchmarks.gpu.kernels:correctness"),
    "speed": (0.18, "benchmarks.gpu.kernels:speed"),
    "tune": (0.10, "benchmarks.gpu.kernels:tune"),
    "engine": (0.33, "benchmarks.gpu.engine:run"),
    "steps": (0.07, "benchmarks.gpu.steps:run"),
    "worker": (0.08, "benchmarks.gpu.worker:run"),
    "cluster": (0.14, "benchmarks.gpu.cluster:run"),
    "serve": (0.15, "benchmarks.gpu.cluster:served"),
}
GRACE_S = 30.0  # for the row that a part began before its time was over
DEFAULT_FILE = Path("gpu.json")
SCHEMA = "baton.bench.gpu/1"
DRY = "dry run on the CPU, kernels interpreted: the figures mean nothing"
VERDICTS = ("met", "missed", "not measured")
Message: TypeAlias = dict[str, Any]


class Target(NamedTuple):
    """A bound for one cell of a table; a lower one unless at_most."""

    table: str
    row: str
    cell: str
    bound: float
    at_most: bool = False

    @property
    def text(self) -> str:
        """Names the cell."""
        return f"{self.table}: {self.row}: {self.cell}"


# Shares of the floor, which is the time of bytes or arithmetic alone, whichever is longer.
_OF_FLOOR = {
    "decode": {
        "8B bf16, batch 1": 0.87, "8B bf16, batch 64": 0.83,
        "8B fp8, batch 1": 0.63, "8B fp8, batch 64": 0.66,
        "8B int4, batch 1": 0.45, "8B int4, batch 64": 0.50,
        "8B fp8 in blocks, batch 1": 0.60, "8B fp8 in blocks, batch 64": 0.60,
        "1B bf16, batch 1": 0.69, "1B bf16, batch 64": 0.72, "1B bf16, batch 256": 0.75,
        "A3B bf16, batch 1": 0.55,
    },
    "prefill": {
        "8B bf16, 512 tokens": 0.85, "8B int4, 512 tokens": 0.73,
        "1B bf16, 512 tokens": 0.57, "A3B bf16, 512 tokens": 0.58,
    },
}  # fmt: skip
TARGETS = (
    Target("decode attention", "bf16, batch 64, context 4096", "of copy rate", 0.80),
    Target("prefill attention", "2048 tokens", "of flash", 0.8),
    Target("prefill attention", "8192 tokens", "of flash", 0.8),
    *(
        Target(table, row, "of floor", share)
        for table, rows in _OF_FLOOR.items()
        for row, share in rows.items()
    ),
    Target("decode", "8B bf16, batch 64", "x transformers", 3.0),
    Target("prefill", "8B bf16, 2048 tokens", "of matmul rate", 0.85),
    Target("decode compared", "8B bf16, batch 64, top-p", "us more", 100, at_most=True),
    Target(
        "decode compared", "8B bf16, batch 64, one row with logprobs", "us more", 30, at_most=True
    ),
    Target("transfer", "cuda_ipc", "of copy kernel", 0.64),
    Target("transfer", "cuda_ipc", "open ms", 5.0, at_most=True),
    Target("handoff", "cuda_ipc", "bookkeeping p50 ms", 1.5, at_most=True),
    Target("serve", "8B, 64 streams", "x step", 1.1, at_most=True),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument(
        "--only", type=lambda text: _known(text, PARTS), default=tuple(PARTS), metavar="PART,...",
        help=f"parts: {', '.join(PARTS)}; machine (ceilings) runs before all but serve",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts (default: 8)")
    parser.add_argument(
        "--shape", type=lambda text: _known(text, {"8B", "1B"}), default=("8B", "1B"),
        metavar="NAME,...", help="models: 8B and 1B (default: both, as far as they fit)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=_device, default="cuda:0", metavar="cuda:N", help="default: cuda:0"
    )
    parser.add_argument("--smoke", action="store_true", help="a dry run on the CPU: no figures")
    parser.add_argument(
        "--json", type=Path, default=DEFAULT_FILE, metavar="FILE",
        help="file for all figures (default: gpu.json, none in a dry run); gpu.sm_90.json beside"
        " it has the measured and the shipped configurations",
    )  # fmt: skip


def _known(text: str, names: Collection[str]) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := [name for name in wanted if name not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(names)}")
    return wanted


def _device(text: str) -> str:
    """A device with a number, as setting a thread's device needs it."""
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not cuda:N; --smoke is a dry run on the CPU")
    return f"cuda:{int(number or 0)}"


def main(args: argparse.Namespace) -> int:
    """Runs the parts; the exit status is 1 if anything failed."""
    began, parts = time.monotonic(), [one for one in PARTS if one in args.only]
    if parts != ["serve"]:  # serve needs no ceilings
        parts = [one for one in PARTS if one in ("machine", *parts)]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30: both ends of a pair on one GPU
    os.environ.pop("TRITON_INTERPRET", None)
    if args.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = "cpu" if args.smoke else args.device
    kept = not args.smoke or args.json != DEFAULT_FILE
    settings = {"device_name": device, "shapes": args.shape, "smoke": args.smoke,
                "json": str(args.json) if kept else ""}  # fmt: skip
    report: dict[str, Any] = {
        "schema": SCHEMA, "date": date, "smoke": args.smoke, "parts": parts,
        "shapes": list(args.shape), "seconds": 0.0, "tables": {}, "notes": [], "failed": [],
        "targets": [],
    }  # fmt: skip
    for message in run(parts, settings, 60 * args.minutes):
        add(report, message)
        report["seconds"] = round(time.monotonic() - began, 1)
        report["targets"] = [] if args.smoke else verdicts(report["tables"])
        if (
            kept and report["tables"]
        ):  # after each message: an outer time limit may end this process
            partial = args.json.with_name(f"{args.json.name}.partial")
            partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            partial.replace(args.json)
    print("\n".join(text_of(report)))
    if kept and report["tables"]:
        print(f"all figures: {args.json}")
    return int(bool(report["failed"]))


def run(parts: Sequence[str], settings: dict[str, Any], seconds: float) -> Iterator[Message]:
    """Messages of all parts as they come; each part gets its share of the remaining time."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    for at, part in enumerate(parts):
        share = PARTS[part][0] / sum(PARTS[one][0] for one in parts[at:])
        left = share * (began + seconds - GRACE_S - time.monotonic())
        if left <= 0:
            yield {"table": part, "name": "the whole part", "trace": [],
                   "error": "no time is left: give more --minutes"}  # fmt: skip
            continue
        say(f"{part}: up to {left:.0f} s")
        late = False
        for message in run_part(part, PARTS[part][1], {**settings, "seconds": left}):
            say(_line(message))
            if "progress" in message:
                continue
            late |= "late" in message
            if message["table"] == "ceilings" and (cells := message.get("cells")):
                settings = {
                    **settings, "copy_bytes_per_s": cells["copy GB/s"] * 1e9,
                    "matmul_flops": cells["matmul TFLOP/s"] * 1e12,
                    "eight_bit_flops": cells["8-bit TFLOP/s"] * 1e12,
                }  # fmt: skip
            if message["table"] == "decode" and (cells := message.get("cells")):
                steps = {**settings.get("step_ms", {}), message["name"]: cells["ms a step"]}
                settings = {**settings, "step_ms": steps}
            yield message
        if part == "machine" and "copy_bytes_per_s" not in settings and not late:
            return  # the failure is reported, and would repeat in every part


def run_part(
    part: str, function: str, settings: dict[str, Any], grace_s: float = GRACE_S,
    first: Sequence[str] = (),
) -> Iterator[Message]:  # fmt: skip
    """Messages of a part; the last one tells if it failed. first: a program that runs it."""
    argv = [*first, sys.executable, "-m", "benchmarks.gpu.part", function, json.dumps(settings)]
    place, failed, bad = "", False, dict[str, Any]()
    end = time.monotonic() + settings["seconds"] + grace_s
    with tempfile.NamedTemporaryFile() as log, Child(argv, Path(log.name)) as child:
        try:
            while True:
                message: Message = child.read(end - time.monotonic())
                if "doing" in message:
                    place = f", at {message['table']}, {message['name']}"
                    continue
                failed |= "error" in message
                yield {**message, "table": message["table"] or part}
        except EOFError:
            if (status := child.wait()) and not failed:
                bad = {"error": f"it ended with status {status}{place}"}
        except TimeoutError:
            error = f"not done {grace_s:.0f} s after its time was over{place}"
            bad = {"error": error, "late": True}
        if bad:
            trace = Path(log.name).read_text(errors="replace").splitlines()[-30:]
            yield {"table": part, "name": "the whole part", **bad, "trace": trace}


def add(report: dict[str, Any], message: Message) -> None:
    """Adds a message to the report."""
    table, name = message["table"], message.get("name", "")
    if "cells" in message:
        report["tables"].setdefault(table, []).append({"name": name, **message["cells"]})
    elif "note" in message:
        report["notes"].append({"table": table, "text": message["note"]})
    else:
        report["failed"].append(message)


def verdicts(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All targets with values and verdicts."""
    cells = {(table, row["name"]): row for table, rows in tables.items() for row in rows}
    found = []
    for one in TARGETS:
        value = cells.get((one.table, one.row), {}).get(one.cell)
        met, missed, verdict = VERDICTS
        if value is not None:
            verdict = met if (value <= one.bound if one.at_most else value >= one.bound) else missed
        target = {"target": one.text, "cell": one.cell, "value": value, "bound": one.bound}
        found.append({**target, "at_most": one.at_most, "verdict": verdict})
    return found


def text_of(report: dict[str, Any]) -> Iterator[str]:
    """Tables in order of their first row, then failures, then targets."""
    yield f"bench gpu, {report['date']}, {report['seconds']:.0f} s"
    if report["smoke"]:
        yield DRY
    notes = [(note["table"], note["text"]) for note in report["notes"]]
    for table in dict.fromkeys([*report["tables"], *(table for table, _ in notes)]):
        rows = report["tables"].get(table, [])
        columns = list(dict.fromkeys(name for row in rows for name in row))[1:]
        yield ""
        if table == "machine":  # text, not figures
            yield from (table, *(f"  {name}: {rows[0][name]}" for name in columns))
        else:
            cells = [[row["name"], *(_cell(n, row.get(n)) for n in columns)] for row in rows]
            yield from align([[table, *columns], *cells])
        yield from (f"  {text}" for of, text in notes if of == table)
    if failed := report["failed"]:
        yield f"\nfailed: {len(failed)}"
        for one in failed:
            yield f"  {one['table']}, {one['name']}: {one['error']}"
            yield from (f"    {line}" for line in one["trace"])
    if report["targets"] and "ceilings" in report["tables"]:
        lines = [["target", "wanted", "measured", "verdict"]]
        for one in report["targets"]:
            wanted = f"{'<=' if one['at_most'] else '>='} {_cell(one['cell'], one['bound'])}"
            measured = _cell(one["cell"], one["value"])
            lines.append([one["target"], wanted, measured, one["verdict"]])
        counts = Counter(one["verdict"] for one in report["targets"])
        yield from ("", *align(lines))
        yield f"targets: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


def _line(message: Message) -> str:
    """One line for a message, printed as progress."""
    if "note" in message:
        return f"  {message['table']}: {message['note']}"
    found = f"  {message['table']}: {message['name']}"
    if "error" in message:
        return f"{found}: FAILED: {message['error']}"
    if "progress" in message:
        return f"{found}: {message['progress']}"
    cells = (f"{name} {_cell(name, cell)}" for name, cell in message["cells"].items())
    return f"{found}: {', '.join(cells)}"


def _cell(column: str, value: float | str | None) -> str:
    """Text of a cell: shares as percentages, integers, and three digits for all else."""
    if value is None or isinstance(value, str):
        return value or "-"
    if column.startswith("of "):
        return f"{value:.1%}"
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"
