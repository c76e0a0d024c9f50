"""An immutable state of the fleet, for decisions during which it must not change.

It has each worker as a view (its record, load and state) and as a row of numpy columns, which
placement computes with. The next snapshot copies the columns and writes the rows that changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton import kv_descriptor
from baton.errors import ModelNotFound
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import AssignedPrompt, KvIndex

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
MAX_PREFILL_SHARE = 0.9  # of its time that a worker with streams can spend on prompts

Column = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class WorkerColumns(NamedTuple):
    """The numbers of all workers, a column for each kind of number."""

    kv: Rows  # number of its kind of KV cache
    host: Rows  # number of its host
    slot: Rows  # in the KV index
    role: Rows  # a WorkerRole
    ready: Flags
    block_size: Column
    token_bytes: Column
    full_groups: Column  # groups of layers that attend to all tokens, with a block table each
    window_groups: Column  # those with a window
    window_tokens: Column  # the longest of these windows
    state_blocks: Column  # of each sequence's state
    chunk_tokens: Column
    rate: Column  # prefill, tokens a second; 0: not measured
    step_ms: Column
    running: Column
    max_busy: Column  # its batch and a spare eighth, so that a free place is filled at once
    steps: Column
    prefill_share: Column  # of its time lately, spent on prompts
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


_NUM_IDS = 4  # integer columns, of numbers that do not change with the load
_NUM_ASSIGNED = 4  # columns that change with each request
_PREFILL, _DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


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

    workers: tuple[WorkerView, ...]
    excluded_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # with the reasons
    index: KvIndex = field(default_factory=KvIndex)  # the fleet's, which changes
    decode_alone: bool = False  # decode workers compute prompts where no other can hand over
    is_named: bool = False  # a pair that a request names: none of them serves without the other

    def __post_init__(self) -> None:
        self.rows = {view.incarnation: row for row, view in enumerate(self.workers)}
        # Kinds of KV cache, each with its number and the size of a block and of a token.
        self.kvs: dict[bytes, tuple[int, int, tuple[int, int, int, int, int]]] = {}
        self.hosts: dict[str, int] = {}  # with their numbers
        numbers = [self._reported_numbers(view) for view in self.workers]
        self.table = Table(numbers, self.workers)
        self._holding = dict[str, Snapshot]()
        self._find_usable()

    @property
    def columns(self) -> WorkerColumns:
        return self.table.columns

    def replaced(
        self,
        views: Iterable[WorkerView],
        excluded_pairs: Mapping[tuple[str, str], str] | None = None,
    ) -> Snapshot:
        """A snapshot of the same workers, some of them changed."""
        new = Snapshot.__new__(Snapshot)  # `copy` takes several times as long
        new.__dict__.update(self.__dict__)
        new._holding = {}
        every = list(self.workers)
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
        new.workers = tuple(every)
        new.table = self.table.replaced(changed)
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
            groups = *kv_descriptor.groups(record.kv), record.kv.state_blocks
            sizes = kv_descriptor.token_bytes(record.kv), *groups
            self.kvs[kv] = len(self.kvs), record.kv.block_size, sizes
        number, block_size, sizes = self.kvs[kv]
        cached = load.blocks_cached
        return (
            number,
            self.hosts.setdefault(record.host_id, len(self.hosts)),
            view.slot,
            record.role,
            view.ready,
            max(1, block_size),
            *sizes,
            load.chunk_tokens,
            load.prefill_tokens_per_s,
            load.step_ms,
            load.running,
            batch + max(1, batch // _SPARE_SHARE) if (batch := record.max_batch) else math.inf,
            load.steps,
            min(load.prefill_share, MAX_PREFILL_SHARE),
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
                for view in self.workers
                if view.ready and not view.has_adapter(adapter)
            ]
            self._holding[adapter] = self.replaced(lacking) if lacking else self
        return self._holding[adapter]

    def only(self, names: Set[str]) -> Snapshot:
        workers = tuple(view for view in self.workers if view.incarnation in names)
        return Snapshot(workers, self.excluded_pairs, self.index, is_named=len(names) > 1)

    def _find_usable(self) -> None:
        rows, columns = self.rows, self.columns
        self.has_windows = bool(columns.window_groups.any())
        self.has_states = bool(columns.state_blocks.any())
        # READY workers for prompts, and for sequences, by their roles; a mixed one is for both.
        self.prefills: Flags = columns.ready & (columns.role != _DECODE)
        self.decodes: Flags = columns.ready & (columns.role != _PREFILL)
        # By row of a worker: rows of the others to which it does not hand over.
        self.excluded_rows: dict[int, list[int]] = {}
        for prefill, decode in self.excluded_pairs:
            if prefill in rows and decode in rows:
                self.excluded_rows.setdefault(rows[prefill], []).append(rows[decode])
        # Usable pairs: the first hands over to the second, or is the same, mixed worker.
        self.num_usable = sum(len(p) * len(d) for p, d in self.ready_by_kv) - sum(
            self.can_pair(row, other)
            for row, others in self.excluded_rows.items()
            for other in others
        )
        self.alone = np.zeros(columns.ready.shape, np.bool_)
        if not self.num_usable:
            self.alone |= self._alone()
        # Longest sequence that every READY worker accepts, so that each can continue a sequence of
        # another that died; 0 if no worker is READY.
        self.max_context: int = min(
            (v.record.max_context for v in self.workers if v.ready), default=0
        )

    def _alone(self) -> Flags:
        """The READY workers that serve requests alone, whatever their role, as the other role is
        missing and none of its workers is about to answer again."""
        if self.is_named:
            return np.zeros(self.columns.ready.shape, np.bool_)
        suspected = {view.record.role for view in self.workers if view.suspected}
        if self.decodes.any():
            may = self.decode_alone and not self.prefills.any() and not suspected - {_DECODE}
        else:
            may = not suspected - {_PREFILL}
        return self.columns.ready & may

    @cached_property
    def ready_by_kv(self) -> list[tuple[Rows, Rows]]:
        """For each kind of KV cache the rows of the workers for prompts and of those for
        sequences."""
        kinds, kv = range(len(self.kvs)), self.columns.kv
        if len(kinds) == 1:
            return [(np.flatnonzero(self.prefills), np.flatnonzero(self.decodes))]
        return [
            (
                np.flatnonzero(self.prefills & (kv == kind)),
                np.flatnonzero(self.decodes & (kv == kind)),
            )
            for kind in kinds
        ]

    def can_pair(self, prefill: int, decode: int) -> bool:
        """Whether these rows are for prompts and for sequences and have equal KV caches."""
        kv = self.columns.kv
        return bool(self.prefills[prefill] and self.decodes[decode] and kv[prefill] == kv[decode])

    @property
    def _computing(self) -> Flags:
        """The workers that compute prompts."""
        return self.prefills if self.prefills.any() else self.alone

    @cached_property
    def prefill_rate(self) -> float:
        """Prompt tokens a second of the READY workers in sum; 0 if not measured yet.

        A worker without a measurement counts as the mean of the others.
        """
        rates = self.columns.rate[self._computing]
        known = rates[rates > 0]
        return float(known.mean() * rates.size) if known.size else 0.0

    @property
    def has_idle_prefill(self) -> bool:
        """Whether a READY worker that computes prompts has none."""
        return bool((self._computing & (self.columns.queued_tokens == 0)).any())

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens that workers have and have not computed yet."""
        return int(self.columns.queued_tokens.sum())

    def flags(self, names: Set[str]) -> Flags:
        """Which workers have these names."""
        flags = np.zeros(len(self.rows), np.bool_)
        flags[[self.rows[name] for name in names if name in self.rows]] = True
        return flags

    def usable(self) -> Flags:
        """[workers, workers]: the pairs counted in `num_usable`.

        It is large for large fleets.
        """
        kv = self.columns.kv
        usable: Flags = self.prefills[:, None] & self.decodes & (kv[:, None] == kv)
        for row, others in self.excluded_rows.items():
            usable[row, others] = False
        return usable

    @property
    def why_not_ready(self) -> str:
        """What is missing to generate tokens, as a sentence; empty if nothing is."""
        return self.why_unserved(decodes=True)

    def why_unserved(self, decodes: bool) -> str:
        """What is missing to serve a request, as a sentence; empty if nothing is.

        A request that `decodes` needs a usable pair or, without one, a worker that serves alone;
        another needs any READY worker.
        """
        served = self.num_usable or self.alone.any() if decodes else self.columns.ready.any()
        return "" if served else self._why_no_pair()

    def check_adapter(self, adapter: str, decodes: bool) -> None:
        """Raises ModelNotFound for a LoRA adapter, by its identity, that no worker has.

        Not if a request without one could not be served either: who comes may have it.
        """
        if not adapter or any(view.has_adapter(adapter) for view in self.workers):
            return
        if not self.why_unserved(decodes):
            raise ModelNotFound("the adapter that the request names was unloaded")

    def _why_no_pair(self) -> str:
        if not self.workers:  # one of any role would do
            return "no worker is ready (none is registered)"
        for name, role, ready in (
            ("prefill", _DECODE, self.prefills),
            ("decode", _PREFILL, self.decodes),
        ):
            if not ready.any():
                workers = [view for view in self.workers if view.record.role != role]
                states = "; ".join(worker.description for worker in workers[:_MAX_LISTED])
                more = len(workers) - _MAX_LISTED
                states += f"; and {more} more" if more > 0 else ""
                return f"no {name} worker is ready ({states or 'none is registered'})"
        if not any(p.size and d.size for p, d in self.ready_by_kv):
            one, other = (self.workers[flags.argmax()] for flags in (self.prefills, self.decodes))
            difference = kv_difference(one, other)
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        pairs = sorted(self.excluded_pairs.items())
        reasons = "; ".join(f"{p} to {d}: {why}" for (p, d), why in pairs)
        return f"no prefill worker that is ready can hand over to a decode worker ({reasons})"


class Table:
    """The numbers of a snapshot's workers, and the prompts assigned to them."""

    columns: WorkerColumns
    reported: Table  # that of the last snapshot in which a worker had reported another load

    def __init__(
        self, reported: Sequence[tuple[float, ...]], workers: Sequence[WorkerView]
    ) -> None:
        num_reported = len(WorkerColumns._fields) - _NUM_ASSIGNED
        values = np.array(reported, np.float64).reshape(-1, num_reported).T
        self._ids = values[:_NUM_IDS].astype(np.intp)
        self._values = values[_NUM_IDS:].copy()
        assigned = [_assigned_numbers(view) for view in workers]
        self._assigned = np.array(assigned, np.float64).reshape(-1, _NUM_ASSIGNED).T.copy()
        # [workers, prompts]: the prompts assigned to each, in any order.
        self._tokens = np.zeros((len(workers), 1))
        self._finish = np.zeros((len(workers), 1))
        for row, view in enumerate(workers):
            self._write_assigned(row, view.assigned)
        self._name_columns(is_reported=True)

    def replaced(self, changed: Mapping[int, tuple[WorkerView, tuple[float, ...] | None]]) -> Table:
        """Returns a copy in which these rows have new views and, unless None, reported numbers.

        Columns that do not change are shared.
        """
        new = Table.__new__(Table)
        new.__dict__.update(self.__dict__)
        new._assigned = self._assigned.copy()
        new._tokens, new._finish = self._tokens.copy(), self._finish.copy()
        is_reported = False
        for row, (view, numbers) in changed.items():
            new._assigned[:, row] = _assigned_numbers(view)
            new._write_assigned(row, view.assigned)
            if numbers is None:
                continue
            if not is_reported:
                new._values, is_reported = self._values.copy(), True
            new._values[:, row] = numbers[_NUM_IDS:]
            if tuple(self._ids[:, row]) != numbers[:_NUM_IDS]:
                new._ids = new._ids.copy()
                new._ids[:, row] = numbers[:_NUM_IDS]
        new._name_columns(is_reported)
        return new

    def assigned_before(self, virtual_finish: float) -> Column:
        """Tokens of assigned prompts that are computed by this virtual time, by worker."""
        before: Column = np.add.reduce(self._tokens * (self._finish <= virtual_finish), 1)
        return before

    def _name_columns(self, is_reported: bool) -> None:
        if is_reported:
            self.reported = self
            self._named = (*self._ids, self._values[0] > 0, *self._values[1:])
        self.columns = WorkerColumns._make((*self._named, *self._assigned))

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
