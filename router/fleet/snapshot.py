"""An immutable picture of the fleet, for decisions that must not change while they are made.

It has each worker twice: as a view, for people, and as a row of numbers, for placement. A snapshot
of the next moment copies the numbers and writes the rows of those workers that changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.v1 import common_pb2, worker_pb2
from router.fleet.prefix_index import PrefixIndex

# A worker reports READY, STARTING and DRAINING itself; the others are what the router sees of it.
READY = "READY"
MISMATCH = "MISMATCH"  # with the router's model
UNREACHABLE = "UNREACHABLE"
SILENT = "SILENT"  # connected, but without a heartbeat
STALLED = "STALLED"  # it answers, but its engine makes no progress
EJECTED = "EJECTED"  # calls to it fail

_MOST_WORKERS = 8  # in one message

Column = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_ROW = np.dtype(
    [("ready", np.bool_)]
    + [(name, np.int64) for name in ("kv", "host", "slot")]
    + [
        (name, np.float64)
        for name in (
            "block_size", "token_bytes", "chunk_tokens", "max_batch", "max_context", "rate",
            "step_ms", "running", "busy", "steps", "reported_tokens", "assigned_tokens",
            "num_assigned", "blocks_available", "blocks_cached", "blocks_held", "blocks_total",
        )
    ]
)  # fmt: skip


@dataclass(frozen=True)
class AssignedPrompt:
    """A prompt that this router has sent to a prefill worker and not seen computed."""

    num_tokens: int  # left to compute, as far as the router knows
    virtual_finish: float  # time.monotonic(): workers compute the earliest first


@dataclass(frozen=True)
class WorkerView:
    """One worker as the router sees it now."""

    record: common_pb2.WorkerRecord
    load: worker_pb2.Load
    state: str
    reason: str = ""  # why it is not READY
    assigned: tuple[AssignedPrompt, ...] = ()
    assigned_sequences: int = 0  # requests this router runs there; its load shows them later
    slot: int = 0  # in the prefix index

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    @property
    def ready(self) -> bool:
        return self.state == READY

    @property
    def description(self) -> str:
        """Its state for people."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.incarnation} is {self.state}{reason}"

    @property
    def assigned_tokens(self) -> int:
        """Tokens this router has sent there and not seen computed."""
        return sum(prompt.num_tokens for prompt in self.assigned)


@dataclass(eq=False)
class Snapshot:
    """All workers at one moment, sorted by name. Treat as frozen."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    excluded_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # and why
    index: PrefixIndex = field(default_factory=PrefixIndex)  # the fleet's: it changes

    def __post_init__(self) -> None:
        views = (*self.prefill, *self.decode)
        self.rows = {view.incarnation: row for row, view in enumerate(views)}  # prefill first
        # KV caches that differ, and hosts, with their numbers in the columns "kv" and "host".
        self.kvs: dict[bytes, tuple[int, int, int]] = {}  # also a block's and a token's size
        self.hosts: dict[str, int] = {}
        self._table = np.zeros(len(views), _ROW)
        # Of the prompts that are assigned to each prefill worker, in any order.
        self._tokens = np.zeros((len(self.prefill), 1))
        self._finish = np.zeros((len(self.prefill), 1))
        self._write(enumerate(views))
        self._find_usable()

    def replaced(
        self,
        views: Iterable[WorkerView],
        excluded_pairs: Mapping[tuple[str, str], str] | None = None,
    ) -> Snapshot:
        """The same workers, some of them changed."""
        every, split = [*self.prefill, *self.decode], len(self.prefill)
        by_row = {self.rows[view.incarnation]: view for view in views}
        for row, view in by_row.items():
            every[row] = view
        new = copy(self)
        new.prefill, new.decode = tuple(every[:split]), tuple(every[split:])
        new.excluded_pairs = self.excluded_pairs if excluded_pairs is None else excluded_pairs
        new._table = self._table.copy()
        new._tokens, new._finish = self._tokens.copy(), self._finish.copy()
        new._write(by_row.items())
        changed = ((new._table[name] != self._table[name]).any() for name in ("ready", "kv"))
        if excluded_pairs is not None or any(changed):
            new._find_usable()
        return new

    def only(self, names: Set[str]) -> Snapshot:
        """Of these workers alone."""
        prefill, decode = (
            tuple(view for view in views if view.incarnation in names)
            for views in (self.prefill, self.decode)
        )
        return Snapshot(prefill, decode, self.excluded_pairs, self.index)

    def _write(self, views: Iterable[tuple[int, WorkerView]]) -> None:
        """Rows of numbers, and what follows from them."""
        for row, view in views:
            record, load = view.record, view.load
            kv = record.kv.SerializeToString()
            if kv not in self.kvs:
                self.kvs[kv] = len(self.kvs), record.kv.block_size, _token_bytes(record.kv)
            number, block_size, token_bytes = self.kvs[kv]
            self._table[row] = (
                view.ready,
                number,
                self.hosts.setdefault(record.host_id, len(self.hosts)),
                view.slot,
                max(1, block_size),
                token_bytes,
                record.chunk_tokens,
                record.max_batch,
                record.max_context,
                load.prefill_tokens_per_s,
                load.step_ms,
                load.running,
                max(load.running + load.waiting, view.assigned_sequences),
                load.steps,
                load.queue_tokens,
                view.assigned_tokens,
                len(view.assigned),
                load.blocks_free + load.blocks_cached,
                load.blocks_cached,
                load.blocks_held,
                load.blocks_total,
            )
            if row < len(self.prefill):
                self._write_assigned(row, view.assigned)
        p, _ = self.of_prefill, self.of_decode = self.split(self._table)
        # By prefill worker, to compute: what it reports, or what this router just sent it.
        self.queued_tokens = np.maximum(p["reported_tokens"], p["assigned_tokens"])

    def _find_usable(self) -> None:
        p, d, rows = self.of_prefill, self.of_decode, self.rows
        # By row of a prefill worker: rows, among decode's, that it is excluded from.
        self.excluded_rows: dict[int, list[int]] = {}
        for names in self.excluded_pairs:
            if rows.keys() >= set(names):
                row, other = rows[names[0]], rows[names[1]] - len(self.prefill)
                self.excluded_rows.setdefault(row, []).append(other)
        by_kv = (np.bincount(w["kv"][w["ready"]], minlength=len(self.kvs)) for w in (p, d))
        # Pairs of READY workers with equal KV caches that are not excluded from each other.
        self.num_usable = int(np.dot(*by_kv)) - sum(
            bool(p["ready"][row] and d["ready"][other] and p["kv"][row] == d["kv"][other])
            for row, others in self.excluded_rows.items()
            for other in others
        )

    def _write_assigned(self, row: int, prompts: Sequence[AssignedPrompt]) -> None:
        if (more := len(prompts) - self._tokens.shape[1]) > 0:
            wider = ((0, 0), (0, more + self._tokens.shape[1]))
            self._tokens, self._finish = np.pad(self._tokens, wider), np.pad(self._finish, wider)
        self._tokens[row] = 0.0
        for column, prompt in enumerate(prompts):
            self._tokens[row, column] = prompt.num_tokens
            self._finish[row, column] = prompt.virtual_finish

    def split(self, column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Of all workers: that of prefill and of decode workers."""
        return column[: len(self.prefill)], column[len(self.prefill) :]

    def flags(self, names: Set[str]) -> tuple[Flags, Flags]:
        """Which prefill and which decode workers these are."""
        flags = np.zeros(len(self.rows), np.bool_)
        flags[[self.rows[name] for name in names if name in self.rows]] = True
        return self.split(flags)

    def assigned_before(self, virtual_finish: float) -> Column:
        """By prefill worker: tokens of its assigned prompts that are computed by then."""
        before: Column = (self._tokens * (self._finish <= virtual_finish)).sum(1)
        return before

    def usable(self) -> Flags:
        """[prefill workers, decode workers]: see `num_usable`. For large fleets it is large."""
        p, d = self.of_prefill, self.of_decode
        usable: Flags = p["ready"][:, None] & d["ready"] & (p["kv"][:, None] == d["kv"])
        for row, others in self.excluded_rows.items():
            usable[row, others] = False
        return usable

    @property
    def why_not_ready(self) -> str:
        """What is missing to serve requests, as a sentence; empty when there is a usable pair."""
        if self.num_usable:
            return ""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.ready for worker in workers):
                states = "; ".join(worker.description for worker in workers[:_MOST_WORKERS])
                more = len(workers) - _MOST_WORKERS
                states += f"; and {more} more" if more > 0 else ""
                return f"no {role} worker is ready ({states or 'none is registered'})"
        p, d = self.of_prefill, self.of_decode
        if not set(p["kv"][p["ready"]]) & set(d["kv"][d["ready"]]):
            one, other = (next(w for w in all_ if w.ready) for all_ in (self.prefill, self.decode))
            difference = kv_difference(one, other)
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        pairs = sorted(self.excluded_pairs.items())
        reasons = "; ".join(f"{p} to {d}: {why}" for (p, d), why in pairs)
        return f"no prefill worker that is ready can hand over to a decode worker ({reasons})"

    @property
    def max_context(self) -> int:
        """Longest sequence that every READY decode worker takes; 0 when there is none."""
        longest = self.of_decode["max_context"][self.of_decode["ready"]]
        return int(longest.min()) if longest.size else 0


def _token_bytes(kv: common_pb2.KvDescriptor) -> int:
    """Of one token's KV: elements, and for one-byte types a float32 scale for each head."""
    element, scale = {"float32": (4, 0), "int8": (1, 4), "float8_e4m3fn": (1, 4)}.get(
        kv.dtype, (2, 0)
    )
    token: int = 2 * kv.num_layers * kv.num_kv_heads * (kv.head_size * element + scale)
    return token


def kv_difference(prefill: WorkerView, decode: WorkerView) -> str:
    """Both workers and what differs between their KV caches."""
    one, other = prefill.record.kv, decode.record.kv
    names = [field.name for field in one.DESCRIPTOR.fields]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]

    def side(worker: WorkerView) -> str:
        found = ((name, getattr(worker.record.kv, name)) for name in differing)
        values = (f"{name}={str(value)[:16] or 'none'}" for name, value in found)
        return f"{worker.incarnation} has {' '.join(values)}"

    return f"prefill worker {side(prefill)}, decode worker {side(decode)}"
