"""An immutable picture of the fleet, for decisions that must not change while they are made."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import common_pb2, worker_pb2

READY = "READY"


@dataclass(frozen=True)
class WorkerView:
    """One worker as the router sees it now."""

    record: common_pb2.WorkerRecord
    load: worker_pb2.Load
    state: str  # READY, STARTING, DRAINING, UNREACHABLE, MISMATCH
    reason: str = ""  # why it is not READY
    assigned_tokens: int = 0  # tokens this router has sent there and not seen computed
    assigned_sequences: int = 0  # requests this router runs there; its load tells of them later

    @property
    def incarnation(self) -> str:
        """The worker's name."""
        return self.record.incarnation

    @property
    def ready(self) -> bool:
        """Whether it takes work."""
        return self.state == READY

    @property
    def queue_tokens(self) -> int:
        """Tokens to compute before a new prompt: what it reports, or what we just sent it."""
        return max(self.load.queue_tokens, self.assigned_tokens)

    @property
    def blocks_available(self) -> int:
        """Blocks it could give to a new sequence."""
        return self.load.blocks_free + self.load.blocks_cached


@dataclass(frozen=True)
class Snapshot:
    """All workers at one moment."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]

    @property
    def ready(self) -> bool:
        """Whether requests can be served: a READY worker of each role."""
        return any(w.ready for w in self.prefill) and any(w.ready for w in self.decode)

    @property
    def max_context(self) -> int:
        """Longest sequence that every READY decode worker takes; 0 when there is none."""
        return min((w.record.max_context for w in self.decode if w.ready), default=0)
