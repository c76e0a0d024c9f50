"""One handoff on the decode worker: its state, its blocks, and its sender's transfer.

    state         blocks   a sender may write   steps run   the router gets tokens
    REQUESTED     -        -                    -           -
    RESERVED      held     -                    -           -
    WRITING       held     yes                  -           -
    WITHDRAWN     held     posted receives      -           -
    COMMITTED     held     -                    yes         -  (the checksum is being verified)
    RUNNING       held     -                    yes         yes
    QUARANTINED   kept     yes                  -           -
    ENDED         -        -                    -           -

`TRANSITIONS` lists every change of state; `decode_worker.reservations` makes them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.engine.sequence import Sequence
from baton.engine.step_report import SequenceProgress
from baton.errors import BatonError, InvalidRequest, KvCorrupted, Stale
from baton.generation.structured_output import GrammarMatcher
from baton.kv_groups import KvGroups
from baton.log_format import about
from baton.v1 import handoff_pb2 as pb
from decode_worker.events import EventStream
from decode_worker.spans import DecodeSpans
from kvtransfer.incoming import IncomingLink
from kvtransfer.pool import Slots, handoff_slots
from kvtransfer.rank_ends import LinkChecksum

log = logging.getLogger(__name__)


class State(Enum):
    """See the table above."""

    REQUESTED = auto()  # its grammar is compiled, or the engine has not answered
    RESERVED = auto()
    WRITING = auto()
    WITHDRAWN = auto()  # its sender will send everything again once the posted receives have ended
    COMMITTED = auto()
    RUNNING = auto()
    QUARANTINED = auto()  # over for its router
    ENDED = auto()


_S = State
TRANSITIONS: Mapping[State, frozenset[State]] = {
    _S.REQUESTED: frozenset({_S.RESERVED, _S.RUNNING, _S.ENDED}),
    _S.RESERVED: frozenset({_S.WRITING, _S.ENDED}),
    _S.WRITING: frozenset(
        {_S.RESERVED, _S.WITHDRAWN, _S.COMMITTED, _S.RUNNING, _S.QUARANTINED, _S.ENDED}
    ),
    _S.WITHDRAWN: frozenset({_S.RESERVED, _S.QUARANTINED, _S.ENDED}),
    _S.COMMITTED: frozenset({_S.RUNNING, _S.ENDED}),
    _S.RUNNING: frozenset({_S.ENDED}),
    _S.QUARANTINED: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}
BEFORE_COMMIT = frozenset({_S.REQUESTED, _S.RESERVED, _S.WRITING, _S.WITHDRAWN})
DECODING = frozenset({_S.COMMITTED, _S.RUNNING})


@dataclass(eq=False)
class Transfer:
    """One attempt of a sender: tokens up to `next_token` have been announced or were cached."""

    link: IncomingLink
    next_token: int
    checksum: LinkChecksum  # of the bytes received; a one-sided link reads them back at Commit
    granted: bool = False  # a one-sided sender may write
    receives: set[asyncio.Task[None]] = field(default_factory=set)
    failure: BatonError | None = None

    @property
    def may_write(self) -> bool:
        """Whether bytes may still come into the blocks."""
        return self.granted or bool(self.receives)

    async def receives_end(self) -> None:
        if self.receives:
            await asyncio.wait(set(self.receives))


@dataclass(eq=False)
class Handoff:
    """A sequence that holds blocks here, or asks for them.

    `block_ids` (`Sequence.handoff_blocks`) cover its `num_slots` token slots in order, as far as
    windows need them: those of its `num_tokens` tokens, and then those of its state; more may
    follow. The first `cached_tokens`, a multiple of the block size, are valid already, perhaps
    shared, and never written. Only KV of the tokens of `token_digest` (`baton.block_hash`) may come
    in. `deadline`: of the event loop's
    clock.
    """

    handoff_id: str
    sequence: Sequence
    groups: KvGroups
    deadline: float | None
    events: EventStream
    spans: DecodeSpans
    state: State = State.REQUESTED
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    block_ids: tuple[int, ...] | None = None
    cached_tokens: int = 0
    token_digest: bytes = b""
    compiled: asyncio.Future[GrammarMatcher] | None = None  # its grammar, while it is compiled
    transfer: Transfer | None = None
    unverified: list[SequenceProgress] = field(default_factory=list)  # computed while COMMITTED
    has_decoded: bool = False  # steps ran, or may have run
    released: Future[list[int]] | None = None  # blocks in quarantine, once the engine has answered
    timer: asyncio.TimerHandle | None = None
    silent_leases: int = 0  # leases that passed since its sender's last message

    def __post_init__(self) -> None:
        self.num_tokens = self.sequence.num_tokens  # of the prompt; the sequence grows
        self.num_slots = self.groups.handoff_end(self.num_tokens)

    @property
    def about(self) -> Mapping[str, str]:
        """Fields of its log lines."""
        return about(trace_id=self.spans.trace_id, handoff_id=self.handoff_id)

    @property
    def may_be_written(self) -> bool:
        return self.transfer is not None and self.transfer.may_write

    def enter(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state.name} → {state.name}"
        self.state = state

    def warn(self, sender: str, error: Exception) -> None:
        """Logs what went wrong with a transfer of that prefill process."""
        log.warning("handoff %s from %s: %s", self.handoff_id, sender, error, extra=self.about)

    def check_sender(self, token: str, incarnation: str) -> None:
        """Raises Stale unless the message comes from the sender of the current transfer."""
        sender = self.transfer.link.peer if self.transfer else None
        if self.token != token or sender != incarnation:
            raise Stale(f"handoff {self.handoff_id} belongs to another sender")

    def announce(self, transfer: Transfer, first_token: int, num_tokens: int) -> Slots:
        """Where the next tokens go. Raises InvalidRequest if they are not the next ones."""
        end = first_token + num_tokens
        if first_token != transfer.next_token:
            text = f"tokens from {first_token} were announced, {transfer.next_token} are next"
            cached = f" ({self.first_token} are not needed)"
            raise InvalidRequest(text + cached, "first_token")
        if num_tokens == 0 or end > self.num_slots:
            raise InvalidRequest(f"[{first_token}, {end}) is not reserved", "num_tokens")
        if end % self.groups.block_size and end != self.num_slots:
            raise InvalidRequest(f"only the last block may be partial, not at {end}", "num_tokens")
        transfer.next_token = end
        return self._slots(first_token, end)

    @property
    def received_slots(self) -> Slots:
        """All slots that the handoff's sender wrote, once everything has been announced."""
        return self._slots(self.first_token, self.num_slots)

    @property
    def first_token(self) -> int:
        """The first token whose KV is sent."""
        return self.groups.handoff_start(self.cached_tokens, self.num_tokens)

    def check_tokens(self, transfer: Transfer, request: pb.CommitRequest) -> None:
        """Raises KvCorrupted unless all reserved tokens were sent, and InvalidRequest for the KV of
        other tokens."""
        if request.token_digest != self.token_digest:
            text = f"handoff {self.handoff_id}: other tokens were prefilled than were reserved"
            raise InvalidRequest(text, "token_digest")
        self._compare("tokens", request.num_tokens, self.num_slots)
        self._compare("tokens announced", transfer.next_token, self.num_slots)

    def check_bytes(self, request: pb.CommitRequest, arrived: LinkChecksum) -> None:
        """Raises KvCorrupted unless exactly the sent bytes are here."""
        self._compare("bytes", request.num_bytes, arrived.num_bytes)
        self._compare("checksum", request.checksum, arrived.value)

    def _compare(self, what: str, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise KvCorrupted(f"handoff {self.handoff_id}: {what}: {theirs} != {ours}")

    def _slots(self, first_token: int, end: int) -> Slots:
        assert self.block_ids is not None, "nothing is written before blocks are reserved"
        return handoff_slots(self.groups, self.block_ids, first_token, end, self.num_tokens)

    def check(self) -> None:
        """Asserts what holds of its state between two turns of the event loop."""
        state, transfer = self.state, self.transfer
        assert state is not _S.ENDED, "an ended handoff is in no table"
        assert (transfer is not None) == (state in (_S.WRITING, _S.WITHDRAWN, _S.QUARANTINED))
        assert self.block_ids is not None or state in (_S.REQUESTED, _S.RUNNING)
        assert self.has_decoded == (state in DECODING)
        assert (self.released is not None) == (state is _S.QUARANTINED)
        assert not self.unverified or state is _S.COMMITTED
        assert not self.events.started or state is _S.RUNNING
        if transfer is not None and state is not _S.WRITING:
            assert transfer.may_write, "nothing is waited for"
            assert not transfer.granted or state is _S.QUARANTINED
        if state in BEFORE_COMMIT:
            assert self.timer is not None, "a reservation has a lease"
