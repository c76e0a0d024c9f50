"""Faulty KV transfers: a wrapper around the real transports of a worker.

The prefill worker's end of a link is wrapped. What happens to a put is decided by a file, read
before each put, whose path is in the environment variable BATON_CHAOS_KV: a JSON object such as
`{"fault": "corrupt", "every": 2, "share": 0.5}` hits each second put with a
probability of one half; no file is no fault. Each fault that was done is a line in the file beside
it that ends in `.done`.

corrupt  every byte arrives changed           lose   the last block does not arrive
fail     half arrives, then the link breaks   delay  the put waits first
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from baton.errors import TransferFailed
from kvtransfer import transports
from kvtransfer.checksum import Checksum
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pool import KvPool, Slots

VARIABLE = "BATON_CHAOS_KV"
_DELAY_S = 0.4
_NOISE = 0x2A  # on every byte: a number becomes quite another one


def done(path: Path) -> Counter[str]:
    """The faults that were done, by kind, since the file beside `path` was removed."""
    with contextlib.suppress(FileNotFoundError):
        return Counter(path.with_suffix(".done").read_text().split())
    return Counter()


class Control:
    """The fault of the next put, and the record of those that were done."""

    def __init__(self, path: Path) -> None:
        self._path, self._dice, self._puts = path, random.Random(os.getpid()), 0

    def next_fault(self) -> dict[str, Any]:
        """The fault of one put, noted as done; without a "fault" there is none."""
        try:
            wanted: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # none, or it is being written
            return {}
        self._puts += 1
        if self._puts % wanted.get("every", 1) or self._dice.random() >= wanted.get("share", 1.0):
            return {}
        with self._path.with_suffix(".done").open("a") as file:
            file.write(f"{wanted['fault']}\n")
        return wanted


class FaultyTransport(Transport):
    """Another transport whose puts may fail."""

    def __init__(self, inner: Transport, control: Control) -> None:
        self.name, self.kind, self.one_sided = inner.name, inner.kind, inner.one_sided
        self._inner, self._control = inner, control

    def listen(self, pool: KvPool) -> ReceivingEnd:
        return self._inner.listen(pool)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        sent = KvPool(torch.empty_like(pool.tensor), heads=pool.heads)
        link = self._inner.connect(sent, endpoint, timeout_s)
        return _FaultyLink(link, pool, sent, self._control)


class _FaultyLink(SendingEnd):
    """Sends from a copy of the blocks; where that is changed, checksums the blocks themselves."""

    def __init__(self, inner: SendingEnd, pool: KvPool, sent: KvPool, control: Control) -> None:
        self._inner, self._pool, self._sent, self._control = inner, pool, sent, control

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
        self._inner, self._sent = (
            SendingEnd(),
            self._pool,
        )  # frees the copy before the garbage collector

    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        blocks = list(local.block_ids)
        self._sent.blocks[blocks] = self._pool.blocks[blocks]
        wanted = self._control.next_fault()
        match wanted.get("fault"):
            case "delay":
                time.sleep(min(_DELAY_S, timeout_s))
            case "corrupt":
                self._sent.blocks[blocks] ^= _NOISE
            case "lose":
                self._sent.blocks[blocks[-1]] = 0
            case "fail":
                if half := len(blocks) // 2:
                    tokens = half * self._pool.block_size
                    here, there = (Slots(s.block_ids[:half], tokens) for s in (local, remote))
                    self._inner.put(here, there, Checksum(), timeout_s)
                self._inner.abort()
                raise TransferFailed("the link was broken by a test")
        changed = wanted.get("fault") in ("corrupt", "lose")
        self._inner.put(local, remote, Checksum() if changed else checksum, timeout_s)
        if not changed:
            return
        data = torch.empty(self._pool.nbytes(local), dtype=torch.uint8)
        checksum.update(self._pool.gather(local, data))


def install(path: Path) -> None:
    """From now on the transports of a worker in this process fail as `path` says."""
    usable, control = transports.usable, Control(path)

    def faulty(*given: Any) -> list[Transport]:
        return [FaultyTransport(one, control) for one in usable(*given)]

    transports.usable = faulty
