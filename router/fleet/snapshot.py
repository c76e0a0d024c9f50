"""An immutable picture of the fleet, for decisions that must not change while they are made.

It has each worker twice: as a view, for people, and as a row of numbers, for placement. Of many
workers the rows are also columns. A snapshot of the next moment copies the numbers and writes the
rows of those workers that changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton import kv_descriptor
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import KvIndex

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


class Row(NamedTuple):
    """The numbers of one worker, or of many: then each is a column."""

    ready: Any
    kv: Any  # the number of its KV cache's kind
    host: Any  # its number
    slot: Any  # in the prefix index
    block_size: Any
    token_bytes: Any
    chunk_tokens: Any
    max_batch: Any
    rate: Any  # prefill, tokens a second; 0: not measured
    step_ms: Any
    running: Any
    busy: Any  # sequences, also those its load does not show yet
    steps: Any
    reported_tokens: Any  # to compute, as it reports, and
    assigned_tokens: Any  # as this router has sent it
    queued_tokens: Any  # the larger of both
    num_assigned: Any
    blocks_available: Any
    blocks_cached: Any
    blocks_held: Any
    blocks_total: Any


_ROW = np.dtype(
    [("ready", np.bool_)]
    + [(name, np.int64) for name in ("kv", "host", "slot")]
    + [(name, np.float64) for name in Row._fields[4:]]
)


@dataclass(frozen=True)
class AssignedPrompt:
    """A prompt that this router has sent to a prefill worker and not seen computed."""

    num_tokens: int  # left to compute, as far as the router knows
    virtual_finish: float  # by fair queueing: workers compute the earliest first


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
    suspected: bool = False  # SILENT, and not for long enough to be lost: it may be back at once

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
    index: KvIndex = field(default_factory=KvIndex)  # the fleet's: it changes
    decode_alone: bool = False  # decode workers may compute all prompts, if nobody else does

    def __post_init__(self) -> None:
        views = (*self.prefill, *self.decode)
        self.rows = {view.incarnation: row for row, view in enumerate(views)}  # prefill first
        # KV caches that differ, and hosts, with their numbers in the columns "kv" and "host".
        self.kvs: dict[bytes, tuple[int, int, int]] = {}  # also a block's and a token's size
        self.hosts: dict[str, int] = {}
        self.numbers = [self._row(view) for view in views]
        self._find_usable()

    def replaced(
        self,
        views: Iterable[WorkerView],
        excluded_pairs: Mapping[tuple[str, str], str] | None = None,
    ) -> Snapshot:
        """The same workers, some of them changed."""
        new = Snapshot.__new__(Snapshot)  # `copy` takes several times as long
        new.__dict__.update(self.__dict__)
        every, split = [*self.prefill, *self.decode], len(self.prefill)
        new.numbers, changed = self.numbers.copy(), {}
        is_other = excluded_pairs is not None
        for view in views:
            row = self.rows[view.incarnation]
            before = every[row]
            is_other |= view.ready is not before.ready or view.record is not before.record
            is_other |= view.suspected is not before.suspected
            every[row] = changed[row] = view
            new.numbers[row] = self._row(view)
            if is_other or self.numbers[row].rate != new.numbers[row].rate:
                new.__dict__.pop("prefill_rate", None)
        new.prefill, new.decode = tuple(every[:split]), tuple(every[split:])
        if columns := new.__dict__.pop("columns", None):
            new.columns = columns.replaced(changed, new.numbers)
        if excluded_pairs is not None:
            new.excluded_pairs = excluded_pairs
        if is_other:
            new._find_usable()
        return new

    @cached_property
    def columns(self) -> Columns:
        """The numbers of all workers."""
        return Columns(self.numbers, self.prefill)

    def _row(self, view: WorkerView) -> Row:
        record, load = view.record, view.load
        kv = record.kv.SerializeToString()
        if kv not in self.kvs:
            self.kvs[kv] = len(self.kvs), record.kv.block_size, kv_descriptor.token_bytes(record.kv)
        number, block_size, token_bytes = self.kvs[kv]
        cached = load.blocks_cached
        return Row(
            view.ready,
            number,
            self.hosts.setdefault(record.host_id, len(self.hosts)),
            view.slot,
            max(1, block_size),
            token_bytes,
            load.chunk_tokens,
            record.max_batch,
            load.prefill_tokens_per_s,
            load.step_ms,
            load.running,
            max(load.running + load.waiting, view.assigned_sequences),
            load.steps,
            load.queue_tokens,
            assigned := view.assigned_tokens,
            max(load.queue_tokens, assigned),
            len(view.assigned),
            load.blocks_free + cached,
            cached,
            load.blocks_held,
            load.blocks_total,
        )

    def only(self, names: Set[str]) -> Snapshot:
        """Of these workers alone."""
        prefill, decode = (
            tuple(view for view in views if view.incarnation in names)
            for views in (self.prefill, self.decode)
        )
        return Snapshot(prefill, decode, self.excluded_pairs, self.index)

    def _find_usable(self) -> None:
        numbers, split, rows = self.numbers, len(self.prefill), self.rows
        # By row of a prefill worker: rows, among decode's, that it is excluded from.
        self.excluded_rows: dict[int, list[int]] = {}
        for names in self.excluded_pairs:
            if rows.keys() >= set(names):
                row, other = rows[names[0]], rows[names[1]] - split
                self.excluded_rows.setdefault(row, []).append(other)
        p, d = (
            Counter(row.kv for row in role if row.ready)
            for role in (numbers[:split], numbers[split:])
        )
        # Pairs of READY workers with equal KV caches that are not excluded from each other.
        self.num_usable = sum(count * d[kv] for kv, count in p.items()) - sum(
            self.fits(numbers[row], numbers[split + other])
            for row, others in self.excluded_rows.items()
            for other in others
        )
        # No prefill worker is READY or about to be: decode workers compute prompts themselves.
        suspected = any(view.suspected for view in self.prefill)
        self.alone = bool(self.decode_alone and d and not p and not suspected)
        views = (*self.prefill, *self.decode)
        # Longest sequence that every READY worker takes, so that each can go on with it when
        # another dies; 0 when there is none.
        self.max_context: int = min((v.record.max_context for v in views if v.ready), default=0)

    @staticmethod
    def fits(prefill: Row, decode: Row) -> bool:
        """Whether both are READY and have equal KV caches."""
        return bool(prefill.ready and decode.ready and prefill.kv == decode.kv)

    @property
    def has_idle_prefill(self) -> bool:
        """Whether a READY worker that computes prompts has none."""
        return any(row.ready and not row.queued_tokens for row in self.prefill_rows)

    @property
    def prefill_rows(self) -> Iterator[Row]:
        """The numbers of the workers that compute prompts: prefill workers, if any is READY."""
        split = len(self.prefill)
        return islice(self.numbers, split, None) if self.alone else islice(self.numbers, split)

    @cached_property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that the READY workers compute together; 0 if not measured yet.

        A worker without a measurement counts as the mean of the others.
        """
        rates = [row.rate for row in self.prefill_rows if row.ready]
        known = [rate for rate in rates if rate > 0]
        return sum(known) / len(known) * len(rates) if known else 0.0

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens that workers have and did not compute yet."""
        return sum(row.queued_tokens for row in self.prefill_rows)

    def split(self, column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Of all workers: that of prefill and of decode workers."""
        return column[: len(self.prefill)], column[len(self.prefill) :]

    def flags(self, names: Set[str]) -> tuple[Flags, Flags]:
        """Which prefill and which decode workers these are."""
        flags = np.zeros(len(self.rows), np.bool_)
        flags[[self.rows[name] for name in names if name in self.rows]] = True
        return self.split(flags)

    def usable(self) -> Flags:
        """[prefill workers, decode workers]: see `num_usable`. For large fleets it is large."""
        p, d = self.columns.prefill, self.columns.decode
        usable: Flags = p.ready[:, None] & d.ready & (p.kv[:, None] == d.kv)
        for row, others in self.excluded_rows.items():
            usable[row, others] = False
        return usable

    @property
    def why_not_ready(self) -> str:
        """What is missing to generate tokens, as a sentence; empty when nothing is."""
        return self.why_unserved(decodes=True)

    def why_unserved(self, decodes: bool) -> str:
        """What is missing to serve a request, as a sentence; empty when nothing is.

        One that `decodes` needs a usable pair or, without prefill workers, a decode worker; one
        that does not a prefill worker.
        """
        if decodes:
            return "" if self.alone else self._why_no_pair()
        if any(worker.ready for worker in self.prefill):
            return ""
        only = "; decode workers serve only what generates tokens" if self.alone else ""
        return self._why_no_pair() + only

    def _why_no_pair(self) -> str:
        if self.num_usable:
            return ""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.ready for worker in workers):
                states = "; ".join(worker.description for worker in workers[:_MOST_WORKERS])
                more = len(workers) - _MOST_WORKERS
                states += f"; and {more} more" if more > 0 else ""
                return f"no {role} worker is ready ({states or 'none is registered'})"
        split = len(self.prefill)
        ready = [
            {row.kv for row in role if row.ready}
            for role in (self.numbers[:split], self.numbers[split:])
        ]
        if not ready[0] & ready[1]:
            one, other = (next(w for w in all_ if w.ready) for all_ in (self.prefill, self.decode))
            difference = kv_difference(one, other)
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        pairs = sorted(self.excluded_pairs.items())
        reasons = "; ".join(f"{p} to {d}: {why}" for (p, d), why in pairs)
        return f"no prefill worker that is ready can hand over to a decode worker ({reasons})"


class Columns:
    """The numbers of all workers of a snapshot by role, quicker for many than row by row."""

    def __init__(self, numbers: Sequence[Row], prefill: Sequence[WorkerView]) -> None:
        self._table = np.array(numbers, _ROW)
        self._num_prefill = len(prefill)
        # Of the prompts that are assigned to each prefill worker, in any order.
        self._tokens = np.zeros((len(prefill), 1))
        self._finish = np.zeros((len(prefill), 1))
        for row, view in enumerate(prefill):
            self._write_assigned(row, view.assigned)
        self._split()

    def replaced(self, views: Mapping[int, WorkerView], numbers: Sequence[Row]) -> Columns:
        """The same workers, some of them, by row, changed."""
        new = copy(self)
        new._table = self._table.copy()
        new._tokens, new._finish = self._tokens.copy(), self._finish.copy()
        for row, view in views.items():
            new._table[row] = numbers[row]
            if row < self._num_prefill:
                new._write_assigned(row, view.assigned)
        new._split()
        return new

    def assigned_before(self, virtual_finish: float) -> Column:
        """By prefill worker: tokens of its assigned prompts that are computed by then."""
        before: Column = (self._tokens * (self._finish <= virtual_finish)).sum(1)
        return before

    def _split(self) -> None:
        columns = [self._table[name] for name in Row._fields]
        self.prefill = Row(*(column[: self._num_prefill] for column in columns))
        self.decode = Row(*(column[self._num_prefill :] for column in columns))

    def _write_assigned(self, row: int, prompts: Sequence[AssignedPrompt]) -> None:
        if (more := len(prompts) - self._tokens.shape[1]) > 0:
            wider = ((0, 0), (0, more + self._tokens.shape[1]))
            self._tokens, self._finish = np.pad(self._tokens, wider), np.pad(self._finish, wider)
        self._tokens[row] = 0.0
        for column, prompt in enumerate(prompts):
            self._tokens[row, column] = prompt.num_tokens
            self._finish[row, column] = prompt.virtual_finish


def kv_difference(prefill: WorkerView, decode: WorkerView) -> str:
    """Both workers and what differs between their KV caches."""
    fields = kv_descriptor.differences(prefill.record.kv, decode.record.kv)
    workers = f"prefill worker {prefill.incarnation} and decode worker {decode.incarnation}"
    return f"{workers} differ in {'; '.join(fields)}"
