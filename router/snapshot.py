"""An immutable picture of the fleet, for decisions that must not change while they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.v1 import common_pb2, worker_pb2
from router.cached import CachedPrefixes

READY = "READY"


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
    state: str  # READY, STARTING, DRAINING, UNREACHABLE, MISMATCH
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
        """Whether requests can be served: a READY worker of each role."""
        return any(w.ready for w in self.prefill) and any(w.ready for w in self.decode)

    @property
    def max_context(self) -> int:
        """Longest sequence that every READY decode worker takes; 0 when there is none."""
        return min((w.record.max_context for w in self.decode if w.ready), default=0)
