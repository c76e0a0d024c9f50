"""What the decode side keeps of one handoff while bytes come in, and whom it asks for blocks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError, InvalidRequest, KvCorrupted
from baton.v1 import handoff_pb2
from kvtransfer.digest import Digest
from kvtransfer.pool import Slots


@dataclass(frozen=True)
class ReservedBlocks:
    """Blocks held for one sequence of `num_tokens` tokens.

    `block_ids` cover the whole sequence in order (more may follow); its first `cached_tokens`, a
    multiple of `block_size`, are valid already, perhaps shared, and never written. `token_digest`
    (`baton.prefix`) is that of the sequence: only its KV may come in.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    block_size: int
    token_digest: bytes


class Reservations(Protocol):
    """Who holds the blocks: the decode worker. Called on the event loop."""

    def find(self, handoff_id: str, token: str) -> ReservedBlocks:
        """What is reserved. Raises Stale when unknown, expired, or the token is wrong."""
        ...

    async def committed(self, handoff_id: str, token: str, first_token_id: int) -> None:
        """All KV is in place and verified: decoding starts with this token."""
        ...

    async def aborted(self, handoff_id: str, token: str, reason: str) -> None:
        """Nothing is written any more: the blocks can be used again.

        Also called for a reservation that is gone while its blocks wait for the last write; may be
        called twice.
        """
        ...


@dataclass(eq=False)
class Incoming:
    """One handoff's bytes so far: `[cached_tokens, next_token)` has been announced."""

    handoff_id: str
    token: str
    peer: str
    epoch: int
    reserved: ReservedBlocks
    next_token: int
    digest: Digest
    granted: bool = False  # a one-sided sender may write
    receives: set[asyncio.Task[None]] = field(default_factory=set)
    failure: BatonError | None = None
    ended: str | None = None  # why it was given up while bytes might still come
    resend: bool = False  # given up by its sender, who will send all of it again

    @property
    def writing(self) -> bool:
        """Whether the reserved blocks may still change."""
        return self.granted or bool(self.receives)

    @property
    def slots(self) -> Slots:
        """Everything announced so far."""
        return self._between(self.reserved.cached_tokens, self.next_token)

    def announce(self, first_token: int, num_tokens: int) -> Slots:
        """Where the next tokens go. Raises InvalidRequest when they are not the next ones."""
        reserved, end = self.reserved, first_token + num_tokens
        if first_token != self.next_token:
            raise InvalidRequest(
                f"tokens from {first_token} were announced, {self.next_token} are next"
                f" ({reserved.cached_tokens} are cached here)",
                "first_token",
            )
        if num_tokens == 0 or end > reserved.num_tokens:
            raise InvalidRequest(f"[{first_token}, {end}) is not reserved", "num_tokens")
        if end % reserved.block_size and end != reserved.num_tokens:
            raise InvalidRequest(f"only the last block may be partial, not at {end}", "num_tokens")
        self.next_token = end
        return self._between(first_token, end)

    def verify(self, request: handoff_pb2.CommitRequest, arrived: Digest) -> None:
        """Raises KvCorrupted unless exactly what was reserved and sent is here.

        InvalidRequest when it is the KV of other tokens than those that were reserved for.
        """
        reserved = self.reserved
        if request.token_digest != reserved.token_digest:
            raise InvalidRequest(
                f"handoff {self.handoff_id}: other tokens were prefilled than were reserved",
                "token_digest",
            )
        for what, theirs, ours in (
            ("tokens", request.num_tokens, reserved.num_tokens),
            ("tokens announced", self.next_token, reserved.num_tokens),
            ("bytes", request.num_bytes, arrived.num_bytes),
            ("checksum", request.checksum, arrived.value),
        ):
            if theirs != ours:
                raise KvCorrupted(f"handoff {self.handoff_id}: {what}: {theirs} != {ours}")

    def _between(self, first_token: int, end: int) -> Slots:
        size = self.reserved.block_size
        ids = self.reserved.block_ids[first_token // size : -(-end // size)]
        return Slots(ids, end - first_token)
