"""An immutable picture of the fleet, for decisions that must not change while they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from baton.v1 import common_pb2, worker_pb2

# A worker reports READY, STARTING and DRAINING itself; the others are what the router sees of it.
READY = "READY"
MISMATCH = "MISMATCH"  # with the router's model
UNREACHABLE = "UNREACHABLE"
SILENT = "SILENT"  # connected, but without a heartbeat
STALLED = "STALLED"  # it answers, but its engine makes no progress
EJECTED = "EJECTED"  # calls to it fail

_MOST_WORKERS = 8  # in one message


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
    # Hashes of the whole blocks that its prefix cache holds (`baton.prefix.hash_chain`), as its
    # events report: a hint, as only the worker compares tokens. Read at once: the set changes.
    cached: Set[int] = frozenset()

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

    @property
    def queue_tokens(self) -> int:
        """Tokens to compute: what it reports, or what this router just sent it."""
        return max(self.load.queue_tokens, self.assigned_tokens)

    def tokens_ahead(self, virtual_finish: float) -> int:
        """Tokens computed before a prompt with that virtual finish; other routers' count fully."""
        ours = sum(p.num_tokens for p in self.assigned if p.virtual_finish <= virtual_finish)
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
    excluded_pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # and why

    def usable_pairs(self) -> Iterator[tuple[WorkerView, WorkerView]]:
        """READY workers with compatible KV caches that are not excluded from each other."""
        ready = [worker for worker in self.decode if worker.ready]
        for prefill in (worker for worker in self.prefill if worker.ready):
            for decode in ready:
                names = prefill.incarnation, decode.incarnation
                if prefill.record.kv == decode.record.kv and names not in self.excluded_pairs:
                    yield prefill, decode

    @property
    def why_not_ready(self) -> str:
        """What is missing to serve requests, as a sentence; empty when there is a usable pair."""
        if any(True for _ in self.usable_pairs()):
            return ""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.ready for worker in workers):
                states = "; ".join(worker.description for worker in workers[:_MOST_WORKERS])
                more = len(workers) - _MOST_WORKERS
                states += f"; and {more} more" if more > 0 else ""
                return f"no {role} worker is ready ({states or 'none is registered'})"
        ready = [(p, d) for p in self.prefill if p.ready for d in self.decode if d.ready]
        if not any(p.record.kv == d.record.kv for p, d in ready):
            difference = kv_difference(*ready[0])
            return f"no prefill and decode worker have compatible KV caches: {difference}"
        pairs = sorted(self.excluded_pairs.items())
        reasons = "; ".join(f"{p} to {d}: {why}" for (p, d), why in pairs)
        return f"no prefill worker that is ready can hand over to a decode worker ({reasons})"

    @property
    def max_context(self) -> int:
        """Longest sequence that every READY decode worker takes; 0 when there is none."""
        return min((w.record.max_context for w in self.decode if w.ready), default=0)


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
