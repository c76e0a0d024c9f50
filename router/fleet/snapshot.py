"""An immutable state of the fleet, for decisions during which it must not change.

It has each worker as a view (its record, load and state) and as a row of numpy columns, which
placement computes with. The next snapshot copies the columns and writes the rows that changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton import kv_descriptor
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import KvIndex

# Workers report READY, STARTING and DRAINING themselves; the router derives the other states.
READY = "READY"
MISMATCH = "MISMATCH"  # with the router's model
UNREACHABLE = "UNREACHABLE"
SILENT = "SILENT"  # connected, but without a heartbeat
STALLED = "STALLED"  # it answers, but its engine makes no progress
EJECTED = "EJECTED"  # calls to it fail
NO_ADAPTER = "NO_ADAPTER"  # it does not have the request's LoRA adapter

_MAX_LISTED = 8  # workers in one message
_SPARE_SHARE = 8  # of a batch

Column = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class WorkerColumns(NamedTuple):
    """The numbers of all workers of one role, a column for each kind of number."""

    kv: Rows  # number of its kind of KV cache
    host: Rows  # number of its host
    slot: Rows  # in the KV index
    ready: Flags
    block_size: Column
    token_bytes: Column
    chunk_tokens: Column
    rate: Column  # prefill, tokens a second; 0: not measured
    step_ms: Column
    running: Column
    max_busy: Column  # its batch and a spare eighth, so that a free place is filled at once
    steps: Column
    blocks_available: Column
    blocks_cached: Column
    blocks_held: Column
    blocks_freeable: Column  # available ones; infinite for an idle pool, which gets no emptier
    blocks_total: Column
    # Those of `_assigned_numbers`.
    busy: Column  # sequences, also those that its load does not show yet
    queued_tokens: Column  # to compute: reported by it or assigned by this router
    others_tokens: Column  # of these, the tokens that this router has not assigned
    num_assigned: Column


_NUM_IDS = 3  # integer columns, of numbers that do not change with the load
_NUM_ASSIGNED = 4  # columns that change with each request
_SLOT = WorkerColumns._fields.index("slot")
_RATE, _BLOCK_SIZE, _CACHED = (
    WorkerColumns._fields.index(name) - _NUM_IDS for name in ("rate", "block_size", "blocks_cached")
)


@dataclass(frozen=True)
class AssignedPrompt:
    """A prompt sent to a prefill worker by this router and not known to be computed."""

    num_tokens: int  # left to compute, to the router's knowledge
    virtual_finish: float  # workers compute the earliest first


@dataclass(frozen=True)
class WorkerView:
    """One worker in its current state."""

    record: common_pb2.WorkerRecord
    load: worker_pb2.Load
    state: str
    reason: str = ""  # why it is not READY
    assigned: tuple[AssignedPrompt, ...] = ()
    assigned_sequences: int = 0  # this router's requests there; the load shows them later
    slot: int = 0  # in the KV index
    suspected: bool = False  # SILENT, but not long enough to be lost

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    @property
    def ready(self) -> bool:
        return self.state == READY

    @property
    def description(self) -> str:
        """Its state as a text."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.incarnation} is {self.state}{reason}"

    def has_adapter(self, identity: str) -> bool:
        return any(one.identity == identity for one in self.record.adapters)

    @property
    def assigned_tokens(self) -> int:
        """Tokens sent there by this router and not known to be computed."""
        return sum(prompt.num_tokens for prompt in self.assigned)


@dataclass(eq=False)
class Snapshot:
    """All workers at one moment, sorted by name. Treat as frozen."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    excluded_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # with the reasons
    index: KvIndex = field(default_factory=KvIndex)  # the fleet's, which changes
    decode_alone: bool = False  # decode workers compute prompts where there are no prefill workers

    def __post_init__(self) -> None:
        views = (*self.prefill, *self.decode)
        self.rows = {view.incarnation: row for row, view in enumerate(views)}  # prefill first
        # Kinds of KV cache, each with its number and the size of a block and of a token.
        self.kvs: dict[bytes, tuple[int, int, int]] = {}
        self.hosts: dict[str, int] = {}  # with their numbers
        numbers = [self._reported_numbers(view) for view in views]
        self.columns = Columns(numbers, views, len(self.prefill))
        self._holding = dict[str, Snapshot]()
        self._find_usable()

    def replaced(
        self,
        views: Iterable[WorkerView],
        excluded_pairs: Mapping[tuple[str, str], str] | None = None,
    ) -> Snapshot:
        """A snapshot of the same workers, some of them changed."""
        new = Snapshot.__new__(Snapshot)  # `copy` takes several times as long
        new.__dict__.update(self.__dict__)
        new._holding = {}
        every, split = [*self.prefill, *self.decode], len(self.prefill)
        changed: dict[int, tuple[WorkerView, tuple[float, ...] | None]] = {}
        usable_changed = excluded_pairs is not None
        rates_changed = False
        for view in views:
            row = self.rows[view.incarnation]
            before = every[row]
            is_other = view.ready is not before.ready or view.record is not before.record
            usable_changed |= is_other or view.suspected is not before.suspected
            numbers = None
            if is_other or view.load is not before.load:
                rates = before.load.prefill_tokens_per_s, view.load.prefill_tokens_per_s
                rates_changed |= rates[0] != rates[1]
                numbers = self._reported_numbers(view)
            every[row] = view
            changed[row] = view, numbers
        new.prefill, new.decode = tuple(every[:split]), tuple(every[split:])
        new.columns = self.columns.replaced(changed)
        if usable_changed or rates_changed:
            new.__dict__.pop("prefill_rate", None)
        if usable_changed:
            new.__dict__.pop("ready_by_kv", None)
            if excluded_pairs is not None:
                new.excluded_pairs = excluded_pairs
            new._find_usable()
        return new

    def _reported_numbers(self, view: WorkerView) -> tuple[float, ...]:
        """The worker's row, in the order of WorkerColumns, without `_assigned_numbers`."""
        record, load = view.record, view.load
        kv = record.kv.SerializeToString()
        if kv not in self.kvs:
            self.kvs[kv] = len(self.kvs), record.kv.block_size, kv_descriptor.token_bytes(record.kv)
        number, block_size, token_bytes = self.kvs[kv]
        cached = load.blocks_cached
        return (
            number,
            self.hosts.setdefault(record.host_id, len(self.hosts)),
            view.slot,
            view.ready,
            max(1, block_size),
            token_bytes,
            load.chunk_tokens,
            load.prefill_tokens_per_s,
            load.step_ms,
            load.running,
            batch + max(1, batch // _SPARE_SHARE) if (batch := record.max_batch) else math.inf,
            load.steps,
            available := load.blocks_free + cached,
            cached,
            held := load.blocks_held,
            available if held else math.inf,
            load.blocks_total,
        )

    def holding(self, adapter: str) -> Snapshot:
        """A snapshot in which only workers with a LoRA adapter, by its identity, are READY.

        The same one where all have it, and without an adapter.
        """
        if not adapter:
            return self
        if adapter not in self._holding:
            reason = f"it does not have the adapter {adapter}"
            lacking = [
                replace(view, state=NO_ADAPTER, reason=reason)
                for view in (*self.prefill, *self.decode)
                if view.ready and not view.has_adapter(adapter)
            ]
            self._holding[adapter] = self.replaced(lacking) if lacking else self
        return self._holding[adapter]

    def only(self, names: Set[str]) -> Snapshot:
        """A snapshot of these workers only."""
        prefill, decode = (
            tuple(view for view in views if view.incarnation in names)
            for views in (self.prefill, self.decode)
        )
        return Snapshot(prefill, decode, self.excluded_pairs, self.index)

    def _find_usable(self) -> None:
        split, rows, (p, d) = (
            len(self.prefill),
            self.rows,
            (self.columns.prefill, self.columns.decode),
        )
        # By row of a prefill worker: rows of the decode workers that it is excluded from.
        self.excluded_rows: dict[int, list[int]] = {}
        for names in self.excluded_pairs:
            if rows.keys() >= set(names):
                row, other = rows[names[0]], rows[names[1]] - split
                self.excluded_rows.setdefault(row, []).append(other)
        # Pairs of READY workers with equal KV caches that are not excluded from each other.
        self.num_usable = sum(len(p) * len(d) for p, d in self.ready_by_kv) - sum(
            self.can_pair(row, other)
            for row, others in self.excluded_rows.items()
            for other in others
        )
        # No prefill worker is READY or about to be: decode workers compute prompts themselves.
        suspected = any(view.suspected for view in self.prefill)
        ready = p.ready.any(), d.ready.any()
        self.alone = bool(self.decode_alone and ready[1] and not ready[0] and not suspected)
        views = (*self.prefill, *self.decode)
        # Longest sequence that every READY worker accepts, so that each can continue a sequence of
        # another that died; 0 if no worker is READY.
        self.max_context: int = min((v.record.max_context for v in views if v.ready), default=0)

    @cached_property
    def ready_by_kv(self) -> list[tuple[Rows, Rows]]:
        """For each kind of KV cache the rows of the READY prefill and decode workers."""
        p, d = self.columns.prefill, self.columns.decode
        if len(self.kvs) == 1:
            return [(np.flatnonzero(p.ready), np.flatnonzero(d.ready))]
        return [
            (np.flatnonzero(p.ready & (p.kv == kv)), np.flatnonzero(d.ready & (d.kv == kv)))
            for kv in range(len(self.kvs))
        ]

    def can_pair(self, prefill: int, decode: int) -> bool:
        """Whether both are READY and have equal KV caches; rows of each role."""
        p, d = self.columns.prefill, self.columns.decode
        return bool(p.ready[prefill] and d.ready[decode] and p.kv[prefill] == d.kv[decode])

    @property
    def _computing(self) -> WorkerColumns:
        """The workers that compute prompts: prefill workers, unless decode workers serve alone."""
        return self.columns.decode if self.alone else self.columns.prefill

    @cached_property
    def prefill_rate(self) -> float:
        """Prompt tokens a second of the READY workers in sum; 0 if not measured yet.

        A worker without a measurement counts as the mean of the others.
        """
        rates = self._computing.rate[self._computing.ready]
        known = rates[rates > 0]
        return float(known.mean() * rates.size) if known.size else 0.0

    @property
    def has_idle_prefill(self) -> bool:
        """Whether a READY worker that computes prompts has none."""
        return bool((self._computing.ready & (self._computing.queued_tokens == 0)).any())

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens that workers have and have not computed yet."""
        return int(self._computing.queued_tokens.sum())

    def split(self, column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A column of all workers as one of prefill and one of decode workers."""
        return column[: len(self.prefill)], column[len(self.prefill) :]

    def flags(self, names: Set[str]) -> tuple[Flags, Flags]:
        """Which prefill and which decode workers have these names."""
        flags = np.zeros(len(self.rows), np.bool_)
        flags[[self.rows[name] for name in names if name in self.rows]] = True
        return self.split(flags)

    def usable(self) -> Flags:
        """[prefill workers, decode workers]: the pairs counted in `num_usable`.

        It is large for large fleets.
        """
        p, d = self.columns.prefill, self.columns.decode
        usable: Flags = p.ready[:, None] & d.ready & (p.kv[:, None] == d.kv)
        for row, others in self.excluded_rows.items():
            usable[row, others] = False
        return usable

    @property
    def why_not_ready(self) -> str:
        """What is missing to generate tokens, as a sentence; empty if nothing is."""
        return self.why_unserved(decodes=True)

    def why_unserved(self, decodes: bool) -> str:
        """What is missing to serve a request, as a sentence; empty if nothing is.

        A request that `decodes` needs a usable pair or, without prefill workers, a decode worker;
        another needs a prefill worker.
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
                states = "; ".join(worker.description for worker in workers[:_MAX_LISTED])
                more = len(workers) - _MAX_LISTED
                states += f"; and {more} more" if more > 0 else ""
                return f"no {role} worker is ready ({states or 'none is registered'})"
        if not any(p.size and d.size for p, d in self.ready_by_kv):
            one, other = (next(w for w in all_ if w.ready) for all_ in (self.prefill, self.decode))
            difference = kv_difference(one, other)
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        pairs = sorted(self.excluded_pairs.items())
        reasons = "; ".join(f"{p} to {d}: {why}" for (p, d), why in pairs)
        return f"no prefill worker that is ready can hand over to a decode worker ({reasons})"


class Columns:
    """The numbers of a snapshot's workers, and the prompts assigned to its prefill workers."""

    prefill: WorkerColumns
    decode: WorkerColumns
    # Columns of the workers of both roles, prefill workers first.
    slot: Rows
    rate: Column
    block_size: Column
    blocks_cached: Column
    reported: Columns  # those of the last snapshot in which a worker had reported another load

    def __init__(
        self, reported: Sequence[tuple[float, ...]], views: Sequence[WorkerView], num_prefill: int
    ) -> None:
        num_reported = len(WorkerColumns._fields) - _NUM_ASSIGNED
        values = np.array(reported, np.float64).reshape(-1, num_reported).T
        self._ids = values[:_NUM_IDS].astype(np.intp)
        self._values = values[_NUM_IDS:].copy()
        assigned = [_assigned_numbers(view) for view in views]
        self._assigned = np.array(assigned, np.float64).reshape(-1, _NUM_ASSIGNED).T.copy()
        self._num_prefill = num_prefill
        # [prefill workers, prompts]: the prompts assigned to each, in any order.
        self._tokens = np.zeros((num_prefill, 1))
        self._finish = np.zeros((num_prefill, 1))
        for row, view in enumerate(views[:num_prefill]):
            self._write_assigned(row, view.assigned)
        self._split_reported()
        self._split_assigned()

    def replaced(
        self, changed: Mapping[int, tuple[WorkerView, tuple[float, ...] | None]]
    ) -> Columns:
        """Returns a copy in which these rows have new views and, unless None, reported numbers.

        Columns that do not change are shared.
        """
        new = Columns.__new__(Columns)
        new.__dict__.update(self.__dict__)
        new._assigned = self._assigned.copy()
        if any(row < self._num_prefill for row in changed):
            new._tokens, new._finish = self._tokens.copy(), self._finish.copy()
        is_reported = False
        for row, (view, numbers) in changed.items():
            new._assigned[:, row] = _assigned_numbers(view)
            if row < self._num_prefill:
                new._write_assigned(row, view.assigned)
            if numbers is None:
                continue
            if not is_reported:
                new._values, is_reported = self._values.copy(), True
            new._values[:, row] = numbers[_NUM_IDS:]
            if tuple(self._ids[:, row]) != numbers[:_NUM_IDS]:
                new._ids = new._ids.copy()
                new._ids[:, row] = numbers[:_NUM_IDS]
        if is_reported:
            new._split_reported()
        new._split_assigned()
        return new

    def assigned_before(self, virtual_finish: float) -> Column:
        """By prefill worker: tokens of its assigned prompts that are computed by then."""
        before: Column = np.add.reduce(self._tokens * (self._finish <= virtual_finish), 1)
        return before

    def _split_reported(self) -> None:
        self.reported = self
        split, ready = self._num_prefill, self._values[0] > 0
        self.slot, self.rate = self._ids[_SLOT], self._values[_RATE]
        self.block_size, self.blocks_cached = self._values[_BLOCK_SIZE], self._values[_CACHED]
        ids, values = self._ids, self._values[1:]
        self._prefill = (*ids[:, :split], ready[:split], *values[:, :split])
        self._decode = (*ids[:, split:], ready[split:], *values[:, split:])

    def _split_assigned(self) -> None:
        split, assigned = self._num_prefill, self._assigned
        self.prefill = WorkerColumns._make((*self._prefill, *assigned[:, :split]))
        self.decode = WorkerColumns._make((*self._decode, *assigned[:, split:]))

    def _write_assigned(self, row: int, prompts: Sequence[AssignedPrompt]) -> None:
        if (more := len(prompts) - self._tokens.shape[1]) > 0:
            wider = ((0, 0), (0, more + self._tokens.shape[1]))
            self._tokens, self._finish = np.pad(self._tokens, wider), np.pad(self._finish, wider)
        self._tokens[row] = 0.0
        for column, prompt in enumerate(prompts):
            self._tokens[row, column] = prompt.num_tokens
            self._finish[row, column] = prompt.virtual_finish


def _assigned_numbers(view: WorkerView) -> tuple[float, ...]:
    """The last columns of a worker's row: they change with each request that it is given."""
    load, assigned = view.load, view.assigned_tokens
    return (
        max(load.running + load.waiting, view.assigned_sequences),
        max(load.queue_tokens, assigned),
        max(0, load.queue_tokens - assigned),
        len(view.assigned),
    )


def kv_difference(prefill: WorkerView, decode: WorkerView) -> str:
    """A text with both workers and the differences of their KV caches."""
    fields = kv_descriptor.differences(prefill.record.kv, decode.record.kv)
    workers = f"prefill worker {prefill.incarnation} and decode worker {decode.incarnation}"
    return f"{workers} differ in {'; '.join(fields)}"
