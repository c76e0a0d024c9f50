"""Kernels, engine and cluster on this machine's GPU: right, how fast, and against what floor.

Runs part after part within the minutes it is given, prints tables, and ends with status 1 if
anything failed. `--smoke` runs the same lines on a CPU, with the kernels interpreted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.part import Event, Job, work

# Each part's share of the minutes, and what it runs: each may lack what another needs. What a part
# leaves over goes to those after it.
PARTS = {
    "machine": (0.06, "benchmarks.gpu.kernels:machine"),
    "kernels": (0.20, "benchmarks.gpu.kernels:correctness"),
    "speed": (0.22, "benchmarks.gpu.kernels:speed"),
    "engine": (0.36, "benchmarks.gpu.engine:run"),
    "cluster": (0.16, "benchmarks.gpu.cluster:run"),
}
GRACE_S = 30.0  # for what a part began just before its time was over
DEFAULT_FILE = Path("gpu.json")
_LOG_LINES, _LOG_LINES_OF_A_CRASH = 60, 6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument(
        "--only", type=lambda text: _known(text, PARTS), default=tuple(PARTS), metavar="PART,...",
        help=f"of {', '.join(PARTS)}; machine, whose ceilings the others need, always runs",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: 8)")
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
        help="all figures (default: gpu.json here; of a dry run none)",
    )  # fmt: skip


def _known(text: str, names: Collection[str]) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := [name for name in wanted if name not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(names)}")
    return wanted


def _device(text: str) -> str:
    """Always with a number, as a thread's device needs one."""
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no cuda:N; --smoke is a dry run on the CPU")
    return f"cuda:{int(number or 0)}"


def main(args: argparse.Namespace) -> int:
    """Runs it; 1 if anything failed."""
    began, parts = time.monotonic(), [one for one in PARTS if one in ("machine", *args.only)]
    head: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "smoke": args.smoke,
        "parts": parts, "shapes": list(args.shape),
    }  # fmt: skip
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30: both ends of a pair on one GPU
    os.environ.pop("TRITON_INTERPRET", None)
    if args.smoke:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    device = "cpu" if args.smoke else args.device
    job = Job("", "", device, 60 * args.minutes, args.shape, args.smoke)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
        logs = {part: Path(folder) / f"{part}.log" for part in parts}
        events = list(run(job, logs))
        failed = any(event.kind == "failed" for event in events)
        measured = any(event.kind == "row" for event in events)
        if failed and measured:
            head["logs"] = {part: _tail(log, _LOG_LINES) for part, log in logs.items()}
    head["seconds"] = round(time.monotonic() - began, 1)
    print("\n".join(report.text_of(events, head)))
    if measured and (not args.smoke or args.json != DEFAULT_FILE):
        text = json.dumps(report.json_of(events, head), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"all figures: {args.json}")
    return int(failed)


def run(whole: Job, logs: dict[str, Path]) -> Iterator[Event]:
    """All that parts find, as it comes; each takes its share of what is left of the time."""
    began, left = time.monotonic(), list(logs)

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    for part, log in logs.items():
        share, function = PARTS[part]
        share /= sum(PARTS[one][0] for one in left)
        seconds = share * (began + whole.seconds - GRACE_S - time.monotonic())
        left.remove(part)
        if seconds <= 0:
            text = "no time is left: give more --minutes"
            yield Event("failed", part, "the whole part", text=text)
            continue
        say(f"{part}: up to {seconds:.0f} s")
        for event in run_part(replace(whole, part=part, function=function, seconds=seconds), log):
            say(report.line_of(event))
            if event.table == "ceilings" and event.kind == "row":
                copy, matmul = (float(event.cells[n] or 0) for n in ("copy GB/s", "matmul TFLOP/s"))
                whole = replace(whole, copy_bytes_per_s=copy * 1e9, matmul_flops=matmul * 1e12)
            yield event
        if part == "machine" and not whole.copy_bytes_per_s:
            return  # what failed has been reported, and would fail everywhere


def run_part(job: Job, log: Path, grace_s: float = GRACE_S) -> Iterator[Event]:
    """A part's events; how it ended badly, if it did, is the last. What it prints goes to `log`.

    Parts are forked from a process that has imported what all of them need and touched no GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])
    events, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, log, theirs))
    process.start()
    theirs.close()
    failed, place, end = False, "", time.monotonic() + job.seconds + grace_s
    ended = f"not done {grace_s:.0f} s after its time was over"
    try:
        while events.poll(max(0.0, end - time.monotonic())):
            event: Event = events.recv()
            if event.kind == "doing":
                place = f", at {event.table}, {event.name}"
                continue
            failed |= event.kind == "failed"
            yield event
    except (EOFError, ConnectionResetError):
        process.join(grace_s)
        status = process.exitcode
        ended = f"it ended with status {status}" if status and not failed else ""
    finally:
        with suppress(ProcessLookupError):  # what the part started ends with it
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    if ended:
        lines = _tail(log, _LOG_LINES_OF_A_CRASH) if "status" in ended else []
        yield Event("failed", job.part, "the whole part", text=" | ".join([ended + place, *lines]))


def _tail(log: Path, lines: int) -> list[str]:
    """The last of what a part printed: its errors in full."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
