"""Faulty KV transfers: a wrapper around the real transports of a worker.

The prefill worker's end of a link is wrapped. What happens to a put is decided by a file, read
before each put, whose path is in the environment variable BATON_CHAOS_KV: a JSON object such as
`{"fault": "corrupt", "every": 2, "share": 0.5, "delay_s": 0.3}` hits each second put with a
probability of one half; no file is no fault. Each fault that was done is a line in the file beside
it that ends in `.done`.

corrupt  every byte arrives changed           lose   the last block does not arrive
fail     half arrives, then the link breaks   delay  the put waits first
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.errors import TransferFailed
from kvtransfer import transports
from kvtransfer.interface import Link, Listener, PutStats, Transport
from kvtransfer.pool import Digest, KvPool, Slots

VARIABLE = "BATON_CHAOS_KV"
_NOISE = 0x2A  # on every byte: a number becomes quite another one


class Control:
    """The fault of the next put, and the record of those that were done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dice = random.Random(os.getpid())
        self._puts = 0

    def draw(self) -> dict[str, Any]:
        """The fault of one put; without a "fault" there is none."""
        try:
            wanted: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # none, or it is being written
            return {}
        self._puts += 1
        spared = self._puts % int(wanted.get("every", 1))
        hit = not spared and self._dice.random() < float(wanted.get("share", 1.0))
        return wanted if hit else {}

    def done(self, fault: str) -> None:
        """Notes a fault that was done."""
        with self._path.with_suffix(".done").open("a") as file:
            file.write(f"{fault}\n")


class FaultyTransport(Transport):
    """Another transport whose puts may fail."""

    def __init__(self, inner: Transport, control: Control) -> None:
        self.name, self.kind, self.one_sided = inner.name, inner.kind, inner.one_sided
        self._inner, self._control = inner, control

    def listen(self, pool: KvPool, name: str) -> Listener:
        return self._inner.listen(pool, name)

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        source = pool if self.one_sided else _StagedPool(pool.tensor, pool.area)
        link = self._inner.connect(source, endpoint, pid, timeout_s)
        return _FaultyLink(link, pool, self.one_sided, self._control)


class _FaultyLink(Link):
    def __init__(self, inner: Link, pool: KvPool, one_sided: bool, control: Control) -> None:
        self._inner, self._pool = inner, pool
        self._one_sided, self._control = one_sided, control

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        wanted = self._control.draw()
        fault = str(wanted.get("fault", ""))
        if fault == "delay":
            time.sleep(min(float(wanted.get("delay_s", 0.3)), timeout_s))
        if fault not in ("corrupt", "lose", "fail"):
            stats = self._inner.put(local, remote, digest, timeout_s)
        elif fault == "fail":
            self._control.done(fault)
            self._break(local, remote, timeout_s)
        elif self._one_sided:
            stats = self._corrupt_written(fault, local, remote, digest, timeout_s)
        else:
            stats = self._inner.put(local, remote, _CorruptingDigest(digest, fault), timeout_s)
        if fault:
            self._control.done(fault)
        return stats

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _break(self, local: Slots, remote: Slots, timeout_s: float) -> None:
        """Sends the first half of the blocks and breaks the link."""
        half = len(local.block_ids) // 2
        if half:
            tokens = half * self._pool.block_size
            self._inner.put(
                Slots(local.block_ids[:half], tokens),
                Slots(remote.block_ids[:half], tokens),
                Digest(),
                timeout_s,
            )
        self._inner.abort()
        raise TransferFailed("the link was broken by a test")

    def _corrupt_written(
        self, fault: str, local: Slots, remote: Slots, digest: Digest, timeout_s: float
    ) -> PutStats:
        """Writes, then changes what has been written in the receiver's pool."""
        target: KvPool = self._inner._remote  # type: ignore[attr-defined]
        last = remote.block_ids[-1]
        before = target.blocks[last].clone()
        stats = self._inner.put(local, remote, digest, timeout_s)
        if fault == "lose":
            target.blocks[last].copy_(before)
        else:  # those slots and no others: a wider change is not checked
            data = torch.empty(target.nbytes(remote), dtype=torch.uint8)
            target.scatter(target.gather(remote, data).bitwise_xor_(_NOISE), remote)
        return stats


class _StagedPool(KvPool):
    """Has all that is sent copied first, so that a copy of it can be changed."""

    def in_place(self, slots: Slots) -> None:
        return None


class _CorruptingDigest(Digest):
    """Counts what should travel, and then changes it where it waits to be sent."""

    def __init__(self, real: Digest, fault: str) -> None:
        self._real, self._fault = real, fault

    def update(self, data: torch.Tensor) -> None:
        self._real.update(data)
        if self._fault == "lose":
            data[data.numel() // 2 :] = 0
        else:
            data.bitwise_xor_(_NOISE)


def install(path: Path) -> None:
    """From now on the transports of a worker in this process fail as `path` says."""
    usable: Callable[..., list[Transport]] = transports.usable
    control = Control(path)

    def faulty(pool: KvPool, host: str, choice: str = "auto") -> list[Transport]:
        return [FaultyTransport(one, control) for one in usable(pool, host, choice)]

    transports.usable = faulty
