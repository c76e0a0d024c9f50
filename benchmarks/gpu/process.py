"""Our end of a part: starts its process, reads its events as they come, ends it in time."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from benchmarks.gpu.job import Doing, Event, Failed, Job, from_line

ROOT = Path(__file__).parents[2]
GRACE_S = 30.0  # for what a part began just before its time was over
_END_S = 20.0
_TOLD_LINES = 6


def command(job: Job) -> list[str]:
    """What a part's process is started with."""
    return [sys.executable, "-m", "benchmarks.gpu.part", job.to_json()]


def run(
    job: Job, log: Path, grace_s: float = GRACE_S, argv: Sequence[str] | None = None
) -> Iterator[Event]:
    """A part's events; how it ended badly, if it did, is the last. What it prints goes to `log`.

    argv: instead of the part's own program.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            argv or command(job),
            cwd=ROOT,
            env=environment(job),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # what it starts is ended with it
        )
    assert process.stdout is not None
    failed, place = False, ""
    try:
        for event in _events(process.stdout, job.seconds + grace_s):
            failed |= isinstance(event, Failed)
            if isinstance(event, Doing):
                place = f", at {event.table}, {event.name}"
            yield event
        status = process.wait(_END_S)
    except TimeoutError:
        late = f"not done {grace_s:.0f} s after its time was over{place}"
        yield Failed(job.part, "the whole part", late)
        return
    except subprocess.TimeoutExpired:
        yield Failed(job.part, "the whole part", "its process does not end")
        return
    finally:
        _end(process)
    if status and not failed:
        yield Failed(job.part, "the whole part", _ending(status, place, log))


def environment(job: Job) -> dict[str, str]:
    """A dry run's kernels are interpreted; a real one's never are, whatever this process has."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on: both ends of a pair on one GPU
    if job.smoke:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return env


def _events(out: IO[bytes], timeout_s: float) -> Iterator[Event]:
    """Events until the output ends. Raises TimeoutError."""
    until, rest = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError
            if not (chunk := os.read(out.fileno(), 1 << 16)):
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield from_line(line.decode())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _ending(status: int, place: str, log: Path) -> str:
    lines = deque(log.read_text(errors="replace").splitlines(), maxlen=_TOLD_LINES)
    return " | ".join([f"it ended with status {status}{place}", *lines])
