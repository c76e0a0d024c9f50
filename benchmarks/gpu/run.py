"""Kernels, engine and cluster on this machine's GPU: right, how fast, and against what floor.

Runs part after part within the minutes it is given, prints tables, and ends with status 1 if
anything failed. `--smoke` runs the same lines on a CPU, with the kernels interpreted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.part import PARTS, Event, Job
from benchmarks.shapes import GPU_SHAPES

ROOT = Path(__file__).parents[2]
# Of the minutes; what a part leaves over goes to those after it.
SHARES = {"machine": 0.06, "kernels": 0.20, "speed": 0.22, "engine": 0.36, "cluster": 0.16}
GRACE_S = 30.0  # for what a part began just before its time was over
_STARTING_S = 3.0  # of a part's process, before its own time begins
_LAST_OVER = 0.2  # of the last part's time, for what it began before its end
_LOG_LINES, _LOG_LINES_TOLD = 60, 6
DEFAULT_FILE = Path("gpu.json")


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
    began = time.monotonic()
    job = Job("", "cpu" if args.smoke else args.device, 60 * args.minutes, args.shape, args.smoke,
              args.quick)  # fmt: skip
    head: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "smoke": args.smoke,
        "quick": args.quick, "parts": list(args.only), "shapes": list(args.shape),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        logs = {part: Path(folder) / f"{part}.log" for part in args.only}
        events = list(run(job, logs))
        failed = any(event.kind == "failed" for event in events)
        measured = any(event.kind == "row" for event in events)
        if failed and measured:
            head["logs"] = {part: tail(log, _LOG_LINES) for part, log in logs.items()}
    head["seconds"] = round(time.monotonic() - began, 1)
    print("\n".join(report.text_of(events, head)))
    if measured and (not args.smoke or args.json != DEFAULT_FILE):
        text = json.dumps(report.json_of(events, head), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"all figures: {args.json}")
    return int(failed)


def run(whole: Job, logs: dict[str, Path]) -> Iterator[Event]:
    """All that parts find, as it comes; each takes its share of what is left of the time."""
    began = time.monotonic()
    until, left = began + whole.seconds, list(logs)
    for part, log in logs.items():
        remaining = until - time.monotonic()
        over = min(_LAST_OVER * remaining, GRACE_S) if len(left) == 1 else 0.0
        share = SHARES[part] / sum(SHARES[one] for one in left)
        seconds = share * remaining - over - _STARTING_S
        left.remove(part)
        if seconds <= 0:
            text = "no time is left: give more --minutes"
            yield Event("failed", part, "the whole part", text=text)
            continue
        _say(began, f"{part}: up to {seconds:.0f} s")
        # The whole's own end is the limit, so that all is over when the minutes are.
        grace_s = min(GRACE_S, max(_STARTING_S, until - time.monotonic() - seconds))
        for event in run_part(replace(whole, part=part, seconds=seconds), log, grace_s):
            if event.kind == "doing":
                continue
            _say(began, report.line_of(event))
            if event.table == "ceilings" and event.kind == "row":
                copy, matmul = (float(event.cells[n] or 0) for n in ("copy GB/s", "matmul TFLOP/s"))
                whole = replace(whole, copy_bytes_per_s=copy * 1e9, matmul_flops=matmul * 1e12)
            yield event
        if part == "machine" and not whole.copy_bytes_per_s:
            return  # what failed has been reported, and would fail everywhere


def _say(began: float, line: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)


def run_part(
    job: Job, log: Path, grace_s: float = GRACE_S, argv: Sequence[str] = ()
) -> Iterator[Event]:
    """A part's events; how it ended badly, if it did, is the last. What it prints goes to `log`.

    argv: instead of the part's own program.
    """
    program = argv or [sys.executable, "-m", "benchmarks.gpu.part", json.dumps(asdict(job))]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            program, cwd=ROOT, env=environment(job), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=errors, process_group=0,
        )  # fmt: skip
    late = threading.Event()

    def end(because_late: bool = True) -> None:
        """What the part started ends with it."""
        if process.poll() is None:
            if because_late:
                late.set()
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(job.seconds + grace_s, end)
    timer.start()
    failed, place = False, ""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event = Event(**json.loads(line))
            failed |= event.kind == "failed"
            if event.kind == "doing":
                place = f", at {event.table}, {event.name}"
            yield event
        status = process.wait()  # bounded by the timer
    finally:
        timer.cancel()
        end(because_late=False)
        process.wait()
        process.stdout.close()
    if late.is_set():
        text = f"not done {grace_s:.0f} s after its time was over{place}"
    elif status and not failed:
        text = " | ".join([f"it ended with status {status}{place}", *tail(log, _LOG_LINES_TOLD)])
    else:
        return
    yield Event("failed", job.part, "the whole part", text=text)


def environment(job: Job) -> dict[str, str]:
    """A dry run's kernels are interpreted; a real one's never are, whatever this process has."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on: both ends of a pair on one GPU
    if job.smoke:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return env


def tail(log: Path, lines: int) -> list[str]:
    """The last of what a part printed: its errors in full."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def _device(text: str) -> str:
    """Always with a number, as a thread's device needs one."""
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no cuda:N; --smoke is a dry run on the CPU")
    return f"cuda:{int(number or 0)}"


def _parts(text: str) -> tuple[str, ...]:
    wanted = _known(text, PARTS)
    return tuple(name for name in PARTS if name in ("machine", *wanted))


def _shapes(text: str) -> tuple[str, ...]:
    return _known(text, [name for name in GPU_SHAPES if name != "smoke"])


def _known(text: str, names: Sequence[str] | dict[str, Any]) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := [name for name in wanted if name not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(names)}")
    return wanted
