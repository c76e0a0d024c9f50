"""Hundreds of prompts cancelled at once, on the model that the demo runs."""

import asyncio

from baton.config import DEMO_MODEL
from baton.v1 import prefill_pb2
from tests.unit.worker.running import Paced, Router, Worker, asked, prompt, spec, target
from tests.waiting import eventually

STORM = 300
PATIENCE_S = 60.0


async def test_hundreds_of_cancelled_prompts_leave_both_workers_serving(store):
    async with (
        Worker("decode", DEMO_MODEL, store, max_batch=STORM, kv_blocks=4 * STORM) as decode,
        Worker("prefill", DEMO_MODEL, store, kv_blocks=128) as prefill,
        Router(decode) as router,
    ):

        async def start(name, token_ids):
            wanted = spec(name, token_ids)
            to = target(decode, await router.reserve(wanted))
            request = prefill_pb2.PrefillRequest(sequence=wanted, target=to)
            return prefill.prefill.Prefill(request, timeout=PATIENCE_S)

        paced, queued = Paced(prefill), asked(prefill, "add", STORM)
        names = [f"s{i}" for i in range(STORM)]
        calls = [await start(name, prompt(40, start=i)) for i, name in enumerate(names)]
        await asyncio.wait_for(queued.wait(), PATIENCE_S)
        await paced.waits()

        for call in calls:
            call.cancel()
        cancelled = asyncio.create_task(router.cancel(*names))
        await asyncio.wait_for(prefill.node.idle(), PATIENCE_S)
        paced.allow.release(99)
        await cancelled
        assert await prefill.clean()
        # A prefill worker does not wait long for answers to its Aborts.
        await eventually(decode.clean, bool, "blocks stay quarantined", PATIENCE_S)
        assert (await prefill.blocks()).steps == 1

        responses = [message async for message in await start("next", prompt(40, start=7))]
        assert responses[-1].HasField("committed")
        assert len(await router.tokens("next")) == 3
        assert (await prefill.blocks()).steps == 3  # of the two chunks, none waited for others
