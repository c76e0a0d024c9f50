"""Part "cluster": KV transfers between processes by each transport, then handoffs of a cluster with
one prefill and one decode worker. Transports need neither gRPC nor etcd."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from baton.cuda import CudaArea, nccl_version
from baton.engine.backends.gpu.device import Work, new_stream
from baton.engine.kernels.triton import timing
from baton.rendezvous import open_store
from baton.shared_memory import SharedMemoryArea
from benchmarks.child import Child, messages
from benchmarks.gpu.kernels import device_of, specs
from benchmarks.gpu.part import Case, Cells, Part, failure, summary
from benchmarks.shapes import GPU_SHAPES
from kvtransfer import copier, transports
from kvtransfer.interface import Transport
from kvtransfer.pool import SCALE_BYTES, KvPool, Slots
from kvtransfer.transports.gloo_nccl import NcclTransport

_START_S, _TIMEOUT_S, _HOST = 60.0, 30.0, "127.0.0.1"
_MOVED = 512 << 20  # bytes
_ALONE = "nccl is left out: NCCL before 2.30 refuses two ranks on one GPU"


def run(part: Part) -> None:
    """Measures transports, then the cluster."""
    part.measure("transfer", _transfers(part))
    if part.cuda and torch.distributed.is_nccl_available():
        part.measure("nccl", [("a group of one", partial(nccl_alone, part))])
    try:
        from benchmarks.gpu.handoff import handoff, ranks  # noqa: PLC0415
    except Exception as error:  # protobuf refuses messages of a newer one with errors of its own
        part.note("handoff", f"no cluster is started: {summary(error)}")
        return
    names = ["cuda_ipc"] if part.cuda else ["shm"]
    if part.cuda and _nccl_shares_a_gpu():
        names.append("nccl")
    part.measure("handoff", [(name, partial(handoff, part, name)) for name in names])
    if part.cuda and torch.cuda.device_count() < 2 and not _nccl_shares_a_gpu():
        part.note("ranks", f"{_ALONE}, and there is one GPU")
        return
    part.measure("ranks", [("two ranks, demo model", partial(ranks, part))])


def served(part: Part) -> None:
    """Part "serve", if its packages can be imported."""
    try:
        from benchmarks.gpu.serve import serve  # noqa: PLC0415
    except Exception as error:  # as above
        part.note("serve", f"no cluster is started: {summary(error)}")
        return
    if not part.copy_bytes_per_s:  # part "machine" has not run
        part.row("machine", "device", device_of(part))
    part.measure("serve", [(shape.name, partial(serve, part, shape)) for shape in part.models])


def _nccl_shares_a_gpu() -> bool:
    """Whether NCCL allows both ends of a pair on one GPU."""
    if not torch.distributed.is_nccl_available():
        return False
    return tuple(torch.cuda.nccl.version()[:2]) >= (2, 30)


def _own_pids() -> list[str]:
    """Command prefix that starts a process in a pid namespace; empty if that is not allowed."""
    command = [shutil.which("unshare") or "", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if not command[0] or subprocess.run([*command, "true"], check=False).returncode:
        return []
    return command


@dataclass(frozen=True)
class End:
    """One end of a transfer of `num_blocks` blocks; its pool has 8 more.

    dtype: name of a torch type; rows of 8-bit elements are followed by their scales."""

    transport: str
    device: str
    num_blocks: int
    layers: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def row(self) -> int:
        """Elements of a row of one token and head, including its scale."""
        return self.head_size + (SCALE_BYTES if getattr(torch, self.dtype).itemsize == 1 else 0)

    def slots(self, seed: int) -> Slots:
        """The blocks, in random order."""
        ids = random.Random(seed).sample(range(self.num_blocks + 8), self.num_blocks)
        return Slots(tuple(ids), self.num_blocks * self.block_size)

    def opened(self) -> tuple[KvPool, Transport]:
        """Opens a pool and its transport, as a worker does. Raises OSError."""
        device, dtype = torch.device(self.device), getattr(torch, self.dtype)
        shape = self.num_blocks + 8, self.layers, 2, self.kv_heads, self.block_size, self.row
        nbytes = dtype.itemsize * math.prod(shape)
        area: CudaArea | SharedMemoryArea | None = None
        if self.transport == "cuda_ipc":
            area = CudaArea(nbytes, device)
        elif self.transport == "shm":
            area = SharedMemoryArea(nbytes)
        if area is None:
            pool = KvPool(torch.zeros(shape, dtype=dtype, device=device))
        else:
            pool = KvPool(area.tensor.view(dtype).view(shape), area)
        (transport,) = transports.usable(pool, _HOST, self.transport)
        return pool, transport


def _transfers(part: Part) -> Iterator[Case]:
    """A row for each transport: within this GPU, and to another one if there is one."""
    shape = GPU_SHAPES["smoke" if part.smoke else "8B"]
    block_bytes = 2 * 16 * 2 * shape.layers * shape.kv_heads * shape.head_size
    count = 6 if part.smoke else _MOVED // block_bytes
    size = (count, shape.layers, shape.kv_heads, shape.head_size)
    here = str(part.device)

    def case(
        name: str, transport: str, there: str = here, first: Sequence[str] = (),
        dtype: str = "bfloat16",
    ) -> Case:  # fmt: skip
        ends = (End(transport, device, *size, dtype=dtype) for device in (here, there))
        sending, receiving = ends
        return name, partial(transfer, part, sending, receiving, first)

    nearest = "cuda_ipc" if part.cuda else "shm"
    yield case(nearest, nearest)
    yield case(f"{nearest}, fp8 with scales", nearest, dtype="float8_e4m3fn")
    if own_pids := _own_pids():
        yield case(f"{nearest}, between pid namespaces", nearest, first=own_pids)
    else:
        part.note("transfer", "between pid namespaces: this machine allows no new one")
    if not part.cuda:
        yield case("gloo", "gloo")
        return
    others = [n for n in range(torch.cuda.device_count()) if n != part.device.index]
    for other in others[:1]:
        for name in ("cuda_ipc", "nccl"):
            yield case(f"{name}, to another GPU", name, f"cuda:{other}")
    if _nccl_shares_a_gpu():
        yield case("nccl, two ranks on one GPU", "nccl")
    elif not others:
        part.note("transfer", _ALONE)


def transfer(part: Part, sending: End, receiving: End, first: Sequence[str] = ()) -> Cells:
    """Measures puts, each verified by checksums at both ends. Raises AssertionError.

    first: command prefix of the receiving process."""
    pool, transport = sending.opened()
    copier.prepare(pool)  # as a worker does
    pool.tensor.view(torch.uint8).random_()
    if part.cuda:
        torch.cuda.synchronize(pool.device)
    times, checksums = [], [pool.new_checksum() for _ in range(1 + part.sized(5, 1))]
    argv = [*first, sys.executable, "-m", "benchmarks.gpu.cluster", json.dumps(asdict(receiving))]
    try:
        with tempfile.NamedTemporaryFile() as log, Child(argv, Path(log.name)) as peer:
            endpoint = bytes.fromhex(peer.answer(_START_S)["endpoint"])
            began = time.perf_counter()
            link = transport.connect(pool, endpoint, _TIMEOUT_S)
            open_s = time.perf_counter() - began
            try:
                assert peer.answer(_TIMEOUT_S)["accepted"]
                for number, checksum in enumerate(checksums):
                    slots = sending.slots(number)
                    if not transport.one_sided:
                        peer.send(100 + number)
                        assert peer.answer(_TIMEOUT_S)["posted"]
                    start = time.perf_counter()
                    link.put(slots, receiving.slots(100 + number), checksum, _TIMEOUT_S)
                    times.append(time.perf_counter() - start)
                    if transport.one_sided:
                        peer.send(100 + number)
                    arrived = peer.answer(_TIMEOUT_S)["checksum"]
                    assert arrived == checksum.value, "other bytes arrived"
                seconds, moved = statistics.median(times[1:]), pool.nbytes(slots)
                cells = {"MB": moved / 1e6, "ms": seconds * 1e3, **part.of_copy(2 * moved, seconds)}
                cells |= {"GB/s": moved / seconds / 1e9}  # each byte counted once
                cells |= {"open ms": open_s * 1e3}
                if part.cuda:  # a put cannot be faster than the kernel that copies its blocks
                    cells["of copy kernel"] = _kernel_s(part, sending) / seconds
                if transport.one_sided:
                    last = slots, receiving.slots(0), pool.new_checksum(), _TIMEOUT_S
                    cells |= beside_products(pool.device, partial(link.put, *last), seconds)
                return cells
            finally:
                link.close()
    finally:
        if pool.area is not None:
            pool.area.close()


def _kernel_s(part: Part, end: End) -> float:
    """Seconds to copy a transfer's blocks within the device by the copy kernel."""
    shape = {
        "use": "copy", "blocks": end.num_blocks, "layers": end.layers, "kv_heads": end.kv_heads,
        "dtype": end.dtype, "row": end.row,
    }  # fmt: skip
    trial = specs()["move_blocks"].trial(shape, part.device)
    return timing.seconds([partial(trial.run, None)], part.device, captured=False)


def nccl_alone(part: Part) -> Cells:
    """Builds an NCCL group of this process alone, sends to itself, aborts it, and repeats.

    Raises AssertionError if other bytes arrive, or RuntimeError."""
    transport = NcclTransport(_HOST)
    cells: Cells = {"version": ".".join(map(str, nccl_version()))}
    for again in ("", " anew"):
        store, _ = open_store(_HOST)
        began = time.perf_counter()
        group = transport.build(store, 0, _TIMEOUT_S, ranks=1)
        sent = torch.randint(256, (4 << 20,), dtype=torch.uint8, device=part.device)
        arrived = torch.zeros_like(sent)
        group._start_coalescing()  # send and receive would wait for each other
        group.send([sent], 0, 0)
        group.recv([arrived], 0, 0)
        group._end_coalescing().wait()
        torch.cuda.synchronize(part.device)
        cells[f"built{again}, sent ms"] = (time.perf_counter() - began) * 1e3
        assert torch.equal(arrived, sent), "other bytes arrived"
        began = time.perf_counter()
        group.abort()
        cells[f"aborted{again} ms"] = (time.perf_counter() - began) * 1e3
        store.close()
    return cells


def beside_products(device: torch.device, put: Work, put_s: float) -> Cells:
    """Interference of a put and matrix products on an engine's stream, as of a prompt, that take
    three times as long: the time of the put, and the slowdown of the products."""
    stream, size = new_stream(device), 8192 if device.type == "cuda" else 64
    factor = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(factor)
    multiply = partial(torch.mm, factor, factor, out=product)

    def timed(count: int, beside: Work = lambda: None) -> tuple[float, float]:
        """Seconds of `beside`, and of everything."""
        began = time.perf_counter()
        for _ in range(count):
            stream.put(multiply)
        end, queued = stream.record_event(), time.perf_counter()
        beside()
        beside_s = time.perf_counter() - queued
        end.synchronize()
        return beside_s, time.perf_counter() - began

    timed(3)  # loads kernels and allocates memory
    count = max(1, math.ceil(3 * put_s / timed(1)[1]))
    _, alone_s = timed(count)
    beside_s, both_s = timed(count, put)
    return {"ms beside products": beside_s * 1e3, "products slower by": both_s / alone_s - 1}


def main() -> None:
    """The receiving process: sends the checksum of the received slots for each seed."""
    end, send = End(**json.loads(sys.argv[1])), messages()
    try:
        if end.device != "cpu":
            torch.cuda.set_device(end.device)
        pool, transport = end.opened()
        copier.prepare(pool)
        listener = transport.listen(pool)
        reader = copier.copier(pool)
        send({"endpoint": listener.endpoint.hex()})
        listener.accept(_TIMEOUT_S)
        send({"accepted": True})
        for line in sys.stdin:
            slots = end.slots(json.loads(line))
            if transport.one_sided:
                checksum = reader.checksum_of(slots)
            else:
                checksum = pool.new_checksum()
                listener.receive(slots, checksum, _TIMEOUT_S, partial(send, {"posted": True}))
            send({"checksum": checksum.value})
    except Exception as error:
        send(failure(error))


if __name__ == "__main__":
    main()
