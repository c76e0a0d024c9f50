"""How fast KV blocks go from one process to another, by each transport alone."""

from __future__ import annotations

import base64
import contextlib
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import device_of
from benchmarks.gpu.job import Case, Cell, Job
from benchmarks.gpu.process import ROOT
from benchmarks.gpu.targets import OF_COPY
from benchmarks.gpu.transport import PROGRAM, TIMEOUT_S, Plan, pool_of, transport_of
from benchmarks.shapes import GPU_SHAPES
from kvtransfer.interface import Link
from kvtransfer.pool import Slots

_MOVED = 512 << 20  # bytes
_TIMES = 5
_NCCL_OF_ONE_GPU = (2, 30)  # refuses two ranks on one GPU before


def cases(job: Job) -> tuple[list[Case], list[str]]:
    """A case for each transport that can be had here, and why others cannot."""
    plans, notes = _plans(job)
    return [(name, partial(measure, job, *ends)) for name, ends in plans.items()], notes


def _plans(job: Job) -> tuple[dict[str, tuple[Plan, Plan]], list[str]]:
    """(the sender's, the receiver's) plan by name."""
    shape = GPU_SHAPES["smoke" if job.smoke else "8B"]
    block_bytes = 2 * 16 * 2 * shape.layers * shape.kv_heads * shape.head_size
    count = job.sized(_MOVED // block_bytes, _MOVED // block_bytes, 6)
    size = (count, shape.layers, shape.kv_heads, shape.head_size)
    if job.device == "cpu":
        ends = {name: Plan(name, "cpu", *size) for name in ("shm", "gloo")}
        return {name: (plan, plan) for name, plan in ends.items()}, []
    here = device_of(job).index or 0
    others = [n for n in range(torch.cuda.device_count()) if n != here]
    ipc, nccl = (Plan(name, f"cuda:{here}", *size) for name in ("cuda_ipc", "nccl"))
    plans, notes = {"cuda_ipc": (ipc, ipc)}, []
    for other in others[:1]:
        there = f"cuda:{other}"
        plans["cuda_ipc, to another GPU"] = (ipc, replace(ipc, device=there))
        plans["nccl, to another GPU"] = (nccl, replace(nccl, device=there))
    if nccl_shares_a_gpu():
        plans["nccl, two ranks on one GPU"] = (nccl, nccl)
    elif not others:
        notes.append("nccl is left out: before NCCL 2.30 it refuses two ranks on one GPU")
    return plans, notes


def nccl_shares_a_gpu() -> bool:
    """Whether both ends of a pair may be on one GPU."""
    if not torch.distributed.is_nccl_available():
        return False
    return tuple(torch.cuda.nccl.version()[:2]) >= _NCCL_OF_ONE_GPU


def measure(job: Job, sending: Plan, receiving: Plan) -> dict[str, Cell]:
    """Median of some puts, each checked by its checksum at both ends. Raises AssertionError."""
    pool = pool_of(replace(sending, transport="none"))
    pool.tensor.normal_()
    if sending.device != "cpu":
        torch.cuda.synchronize(sending.device)
    transport = transport_of(sending.transport)
    times = []
    with _Peer(receiving) as peer:
        endpoint = base64.b64decode(peer.ask({"do": "offer"})["endpoint"])
        peer.say({"do": "accept"})  # while we connect
        link = transport.connect(pool, endpoint, peer.pid, TIMEOUT_S)
        try:
            peer.hear()
            for number in range(1 + job.sized(_TIMES, _TIMES, 1)):
                remote = {"seed": 100 + number}
                if not transport.one_sided:
                    peer.ask({"do": "receive", **remote})  # it has posted
                digest = pool.new_digest()
                put = _put(link, sending.slots(number), receiving.slots(100 + number), digest)
                found = (
                    peer.hear()
                    if not transport.one_sided
                    else (peer.ask({"do": "digest", **remote}))
                )
                assert found["digest"] == digest.value, "other bytes arrived"
                times.append(put)
        finally:
            link.close()
    seconds, moved = statistics.median(times[1:]), pool.nbytes(sending.slots(0))
    cells: dict[str, Cell] = {
        "MB": moved / 1e6, "ms": seconds * 1e3, "GB/s": moved / seconds / 1e9
    }  # fmt: skip
    if job.ceilings:
        cells[OF_COPY] = 2 * moved / seconds / job.ceilings.copy_bytes_per_s
    return cells


def _put(link: Link, local: Slots, remote: Slots, digest: Any) -> float:
    return link.put(local, remote, digest, TIMEOUT_S).wire_s


class _Peer:
    """The receiving process."""

    def __init__(self, plan: Plan) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, plan.to_json()],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its next answer."""
        self.say(request)
        return self.hear()

    def say(self, request: dict[str, Any]) -> None:
        """Asks for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise RuntimeError(f"the receiver: {answer['error']}")
        return answer
