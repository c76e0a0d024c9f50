"""A reservation outlives a transfer that failed, for as long as its lease and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton import rpc
from baton.errors import KvCorrupted, Stale
from baton.prefix import token_digest
from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, handoff_pb2, prefill_pb2
from tests.unit.worker.running import PATIENCE_S, Router, Worker, prompt, spec, target

NUM_TOKENS = 20  # two blocks


@pytest.fixture
async def decode(directory: Path, store: MemoryStore) -> AsyncIterator[Worker]:
    async with Worker("decode", directory, store) as worker:
        yield worker


@pytest.fixture
async def short_lease(directory: Path, store: MemoryStore) -> AsyncIterator[Worker]:
    async with Worker("decode", directory, store, lease_s=1.0) as worker:
        yield worker


class Sender:
    """A prefill process as far as its messages go; its KV is never right."""

    def __init__(self, decode: Worker, handoff_id: str, reserved: Any) -> None:
        self._decode = decode
        self._named = {
            "handoff_id": handoff_id,
            "reservation_token": reserved.reservation_token,
            "incarnation": "sender",
        }

    async def fail_to_commit(self) -> None:
        """Takes a new link and the grant, and commits what never arrived."""
        record = self._decode.node.record
        self._decode.knows_prefill("sender")
        offer = handoff_pb2.OfferRequest(
            incarnation="sender", target_incarnation=record.incarnation,
            kv=record.kv, transports=[common_pb2.TRANSPORT_SHM],
        )  # fmt: skip
        epoch = (await self._decode.handoff.Offer(offer, timeout=PATIENCE_S)).epoch
        ready = handoff_pb2.ReadyRequest(**self._named, epoch=epoch, num_tokens=NUM_TOKENS)
        with rpc.translated():
            await self._decode.handoff.Ready(ready, timeout=PATIENCE_S)
        commit = handoff_pb2.CommitRequest(
            **self._named, epoch=epoch, num_tokens=NUM_TOKENS,
            token_digest=token_digest(prompt(NUM_TOKENS)),
        )  # fmt: skip
        with pytest.raises(KvCorrupted), rpc.translated():
            await self._decode.handoff.Commit(commit, timeout=PATIENCE_S)

    async def abort(self, resend: bool) -> None:
        request = handoff_pb2.AbortRequest(**self._named, reason="test", resend=resend)
        with rpc.translated():
            await self._decode.handoff.Abort(request, timeout=PATIENCE_S)


async def test_a_failed_commit_leaves_the_blocks_reserved_and_unwritten(decode: Worker) -> None:
    async with Router(decode) as router:
        sender = Sender(decode, "a", await router.reserve(spec("a", prompt(NUM_TOKENS))))
        await sender.fail_to_commit()
        load = await decode.blocks()
        assert (load.blocks_held, load.blocks_quarantined) == (2, 0)
        await sender.abort(resend=True)
        await sender.fail_to_commit()  # the second attempt is granted the same blocks
        assert (await decode.blocks()).blocks_held == 2
        await router.cancel("a")
        assert (await decode.blocks()).blocks_quarantined == 0
        assert await decode.clean()


async def test_the_lease_ends_what_is_never_sent_again(short_lease: Worker) -> None:
    async with Router(short_lease) as router:
        sender = Sender(short_lease, "a", await router.reserve(spec("a", prompt(NUM_TOKENS))))
        await sender.fail_to_commit()
        await sender.abort(resend=True)
        assert "lease" in (await router.event("a")).abort_reason
        assert await short_lease.clean()
        with pytest.raises(Stale):
            await sender.abort(resend=True)


async def test_an_abort_for_good_ends_what_was_to_be_sent_again(decode: Worker) -> None:
    async with Router(decode) as router:
        sender = Sender(decode, "a", await router.reserve(spec("a", prompt(NUM_TOKENS))))
        await sender.fail_to_commit()
        await sender.abort(resend=True)
        await sender.abort(resend=False)
        assert await decode.clean()


async def test_corrupted_kv_costs_a_resend_and_no_token(
    decode: Worker, directory: Path, store: MemoryStore
) -> None:
    receiver = decode.node.role._receiver  # type: ignore[attr-defined]
    commit, corrupted = receiver.commit, []

    async def corrupting(request: handoff_pb2.CommitRequest) -> Any:
        if not corrupted:
            block = receiver._incoming["a"].reserved.block_ids[0]
            receiver._pool.tensor[block] = float("nan")
            corrupted.append(block)
        return await commit(request)

    receiver.commit = corrupting
    wanted = spec("a", prompt(40), 6)
    async with Worker("prefill", directory, store) as prefill, Router(decode) as router:
        request = prefill_pb2.PrefillRequest(
            sequence=wanted, target=target(decode, await router.reserve(wanted))
        )
        call = prefill.prefill.Prefill(request, timeout=PATIENCE_S)
        told = [message async for message in call]
        tokens = [told[1].first_token.token_id, *await router.tokens("a")]
        assert told[-1].HasField("committed") and corrupted
        await router.reserve(spec("alone", prompt(40), 6, cache_salt="other"), local=40)
        assert tokens == await router.tokens("alone")
        assert await decode.clean() and await prefill.clean()


async def test_a_deadline_ends_a_reservation_that_waits_for_a_resend(decode: Worker) -> None:
    async with Router(decode) as router:
        wanted = spec("a", prompt(NUM_TOKENS), time_left_ms=1500)
        sender = Sender(decode, "a", await router.reserve(wanted))
        await sender.fail_to_commit()
        event = await asyncio.wait_for(router.event("a"), PATIENCE_S)
        assert "deadline" in event.abort_reason
        assert await decode.clean()
