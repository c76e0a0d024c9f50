"""Kernels, engine and cluster on this machine's GPU: right, how fast, and against what floor.

Runs part after part within the minutes it is given, prints tables, and ends with status 1 if
anything failed. `--smoke` runs the same lines on a CPU, with the kernels interpreted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import process, report
from benchmarks.gpu.job import Ceilings, Doing, Event, Failed, Job, Row
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.progress import Progress
from benchmarks.shapes import GPU_SHAPES

# Of the minutes; what a part leaves over goes to those after it.
SHARES = {"machine": 0.06, "kernels": 0.20, "speed": 0.22, "engine": 0.36, "cluster": 0.16}
DEFAULT_FILE = Path("gpu.json")
_TOLD_LINES = 60  # of a log
_LAST_OVER = 0.2  # of the last part's time, for what it began before its end
_STARTING_S = 3.0  # of a part's process, before its own time begins


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    parts: Sequence[str]
    minutes: float
    shapes: tuple[str, ...]
    device: str
    smoke: bool
    quick: bool


def run(settings: Settings, logs: Path, progress: Progress) -> Iterator[Event]:
    """All that parts find, as it comes; what they are doing is only shown."""
    until = time.monotonic() + 60 * settings.minutes
    ceilings: Ceilings | None = None
    for at, part in enumerate(settings.parts):
        seconds = _seconds(part, settings.parts[at:], until - time.monotonic())
        if seconds <= 0:
            yield Failed(part, "the whole part", "no time is left: give more --minutes")
            continue
        progress.say(f"{part}: up to {seconds:.0f} s")
        job = Job(
            part, settings.device, seconds, settings.shapes, settings.smoke, settings.quick,
            ceilings,
        )  # fmt: skip
        # The parent's own end is the limit, so that all is over when the minutes are.
        grace_s = min(process.GRACE_S, max(_STARTING_S, until - time.monotonic() - seconds))
        for event in process.run(job, logs / f"{part}.log", grace_s):
            ceilings = ceilings_of(event) or ceilings
            progress.show(event)
            if not isinstance(event, Doing):
                yield event
        if part == "machine" and ceilings is None:
            return  # what failed has been told, and would fail everywhere


def _seconds(part: str, left: Sequence[str], seconds: float) -> float:
    """A part's share of what is left, without what it may run over; the last one has no other."""
    share = SHARES[part] / sum(SHARES[one] for one in left)
    over = min(_LAST_OVER * seconds, process.GRACE_S) if len(left) == 1 else 0.0
    return share * seconds - over - _STARTING_S


def ceilings_of(event: Event) -> Ceilings | None:
    """Those that the machine part told, if this is where it told them."""
    if not isinstance(event, Row) or event.table != "ceilings":
        return None
    copy, matmul = (float(event.cells[name] or 0) for name in ("copy GB/s", "matmul TFLOP/s"))
    return Ceilings(copy * 1e9, matmul * 1e12)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument(
        "--only", type=_parts, default=tuple(PARTS), metavar="PART,...",
        help=f"of {', '.join(PARTS)}; machine, whose ceilings the others need, always runs",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: 8)")
    parser.add_argument(
        "--shape", type=_shapes, default=("8B", "1B"), metavar="NAME,...",
        help="models: 8B and 1B (default: both, as far as they fit)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=_device, default="cuda:0", metavar="cuda:N", help="default: cuda:0"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--smoke", action="store_true", help="a dry run on the CPU: no figures")
    parser.add_argument(
        "--json", type=Path, default=DEFAULT_FILE, metavar="FILE",
        help="all figures (default: gpu.json here; of a dry run none)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Runs it; 1 if anything failed."""
    settings = Settings(
        args.only, args.minutes, args.shape, "cpu" if args.smoke else args.device, args.smoke,
        args.quick,
    )  # fmt: skip
    began = time.monotonic()
    head: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "smoke": settings.smoke,
        "quick": settings.quick,
        "parts": list(settings.parts),
        "shapes": list(settings.shapes),
    }
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as logs:
        progress = Progress(columns=shutil.get_terminal_size().columns)
        events = list(run(settings, Path(logs), progress))
        progress.end()
        failed = any(isinstance(event, Failed) for event in events)
        measured = any(isinstance(event, Row) for event in events)
        if failed and measured:
            head["logs"] = {part: tail(Path(logs) / f"{part}.log") for part in settings.parts}
    head["seconds"] = round(time.monotonic() - began, 1)
    print("\n".join(report.text_of(events, head)))
    if measured and (not settings.smoke or args.json != DEFAULT_FILE):
        text = json.dumps(report.json_of(events, head), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"all figures: {args.json}")
    return int(failed)


def tail(log: Path) -> list[str]:
    """The last of what a part printed: its errors in full."""
    if not log.exists():
        return []
    return log.read_text(errors="replace").splitlines()[-_TOLD_LINES:]


def _device(text: str) -> str:
    """Always with a number, as a thread's device needs one."""
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no cuda:N; --smoke is a dry run on the CPU")
    return f"cuda:{int(number or 0)}"


def _parts(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in ("machine", *wanted))


def _shapes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = [name for name in GPU_SHAPES if name != "smoke"]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
    return names
