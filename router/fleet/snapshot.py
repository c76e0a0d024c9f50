"""An immutable picture of the fleet, for decisions that must not change while they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.v1 import common_pb2, worker_pb2
from router.placement.cached import CachedPrefixes

# A worker's own words are READY, STARTING and DRAINING; the others are what the router sees of it.
READY = "READY"
MISMATCH = "MISMATCH"  # with the router's model
UNREACHABLE = "UNREACHABLE"
SILENT = "SILENT"  # connected, but without a sign of life
STALLED = "STALLED"  # it answers, but its engine does not get on
EJECTED = "EJECTED"  # calls to it fail

_WORKERS_TOLD = 8  # in one message


@dataclass(frozen=True)
class Assigned:
    """A prompt that this router has sent to a prefill worker and not seen computed."""

    num_tokens: int  # left to compute, as far as the router knows
    due: float  # time.monotonic(): workers compute the one that is due first before the others


@dataclass(frozen=True)
class WorkerView:
    """One worker as the router sees it now."""

    record: common_pb2.WorkerRecord
    load: worker_pb2.Load
    state: str
    reason: str = ""  # why it is not READY
    assigned: tuple[Assigned, ...] = ()
    assigned_sequences: int = 0  # requests this router runs there; its load tells of them later
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)  # read at once: it goes on

    @property
    def incarnation(self) -> str:
        """The worker's name."""
        return self.record.incarnation

    @property
    def ready(self) -> bool:
        """Whether it takes work."""
        return self.state == READY

    @property
    def told(self) -> str:
        """Its state for people."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.incarnation} is {self.state}{reason}"

    @property
    def assigned_tokens(self) -> int:
        """Tokens this router has sent there and not seen computed."""
        return sum(prompt.num_tokens for prompt in self.assigned)

    @property
    def queue_tokens(self) -> int:
        """Tokens to compute: what it reports, or what we just sent it."""
        return max(self.load.queue_tokens, self.assigned_tokens)

    def tokens_ahead(self, due: float) -> int:
        """Tokens computed before a prompt that is due then: ours by their turn, others' all."""
        ours = sum(prompt.num_tokens for prompt in self.assigned if prompt.due <= due)
        return ours + max(0, self.load.queue_tokens - self.assigned_tokens)

    @property
    def blocks_available(self) -> int:
        """Blocks it could give to a new sequence."""
        return self.load.blocks_free + self.load.blocks_cached


@dataclass(frozen=True)
class Snapshot:
    """All workers at one moment."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    shut_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # and why

    @property
    def ready(self) -> bool:
        """Whether requests can be served: there is a usable pair."""
        return any(True for _ in self.usable_pairs())

    @property
    def why_not_ready(self) -> str:
        """What is missing, as a sentence; empty when `ready`."""
        if self.ready:
            return ""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.ready for worker in workers):
                told = "; ".join(worker.told for worker in workers[:_WORKERS_TOLD])
                more = len(workers) - _WORKERS_TOLD
                told += f"; and {more} more" if more > 0 else ""
                return f"no {role} worker is ready ({told or 'none is registered'})"
        ready = [(p, d) for p in self.prefill if p.ready for d in self.decode if d.ready]
        if not any(p.record.kv == d.record.kv for p, d in ready):
            difference = kv_difference(*ready[0])
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        told = "; ".join(f"{p} to {d}: {why}" for (p, d), why in sorted(self.shut_pairs.items()))
        return f"no prefill worker that is ready can hand over to a decode worker ({told})"

    def usable_pairs(self) -> Iterator[tuple[WorkerView, WorkerView]]:
        """READY workers whose KV caches mean the same and who are not shut to each other."""
        ready = [worker for worker in self.decode if worker.ready]
        for prefill in (worker for worker in self.prefill if worker.ready):
            for decode in ready:
                if (
                    prefill.record.kv == decode.record.kv
                    and (prefill.incarnation, decode.incarnation) not in self.shut_pairs
                ):
                    yield prefill, decode

    @property
    def max_context(self) -> int:
        """Longest sequence that every READY decode worker takes; 0 when there is none."""
        return min((w.record.max_context for w in self.decode if w.ready), default=0)


def kv_difference(prefill: WorkerView, decode: WorkerView) -> str:
    """Both sides and what differs between their KV caches."""
    mine, theirs = prefill.record.kv, decode.record.kv
    names = [field.name for field in mine.DESCRIPTOR.fields]
    differing = [name for name in names if getattr(mine, name) != getattr(theirs, name)]

    def side(worker: WorkerView) -> str:
        found = ((name, getattr(worker.record.kv, name)) for name in differing)
        values = (f"{name}={str(value)[:16] or 'none'}" for name, value in found)
        return f"{worker.incarnation} has {' '.join(values)}"

    return f"prefill worker {side(prefill)}, decode worker {side(decode)}"
