"""References to KV that outlive what they refer to: a request, blocks, an id, a process, a lease.

Other systems gave wrong text with status 200 for each of these. Here real workers run them, with
engines, gRPC and transports, and the moment at which it goes wrong is held. Every token that comes
must be that of one process that nothing disturbed (float32, greedy), and metrics must show what
happened. KV is pushed here: what can be stale is a sender's right to write into blocks.
"""

import asyncio
import threading

import pytest

from baton.config import EngineConfig
from baton.errors import Overloaded, Stale
from baton.generation.sampling_params import SamplingParams
from baton.local.single import SingleProcess
from baton.v1 import handoff_pb2
from tests.memory_registry import MemoryRegistry
from tests.unit.worker.running import (
    BLOCK_SIZE,
    BLOCKS,
    PATIENCE_S,
    Paced,
    Pair,
    Router,
    Worker,
    asked,
    directory,
    granted,
    pair_of,
    prompt,
    spec,
)
from tests.waiting import eventually

__all__ = ["directory"]

LOCAL = 512  # at most so many tokens decode computes itself
transports = pytest.mark.parametrize("transport", ["shm", "gloo"])


@pytest.fixture(scope="module")
def alone(directory):
    """What one process makes of a prompt."""
    settings = EngineConfig(
        model=str(directory), dtype="float32", device="cpu", kv_blocks=BLOCKS, threads=1,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    with SingleProcess(settings) as process:

        def tokens(token_ids, count):
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            return list(process.generate(token_ids, params).token_ids)

        yield tokens


class Cluster(Pair):
    """What a router asks of the two."""

    async def hand_over(self, name, token_ids, count):
        """Every token of a request that both workers serve."""
        first = await first_token(await self.start(spec(name, token_ids, count)))
        return [first, *await self.router.tokens(name)]

    async def compute(self, name, token_ids, count):
        """Every token of a request that the decode worker serves alone."""
        await self.router.reserve(spec(name, token_ids, count), LOCAL)
        return await self.router.tokens(name)

    async def begun(self, name, token_ids, count):
        """A stream that has begun and stands still, in blocks that hold its prompt's KV."""
        paced = Paced(self.decode)
        await self.router.reserve(spec(name, token_ids, count), LOCAL)
        paced.allow.release(len(token_ids) // 32 + 6)
        first = list((await self.router.event(name)).token_ids)

        async def rest():
            paced.allow.release(1000)
            return first + await self.router.tokens(name)

        return rest

    async def held_write(self, wanted):
        """A handoff whose bytes are about to be written, all else being done."""
        (link,) = self.prefill.prefilling._links._links.values()
        return HeldWrite(link), await self.start(wanted)

    async def written(self):
        """Returns when no block is in quarantine any more."""
        free = lambda load: load.blocks_quarantined == 0  # noqa: E731
        await eventually(self.decode.blocks, free, "the write does not end", PATIENCE_S)


class HeldWrite:
    """The link's next put, in its thread, waits for `go_on`, and those behind it with it."""

    def __init__(self, link):
        self._begun, self._go, self._ended = (threading.Event() for _ in range(3))
        self._put, link._put = link._put, self

    def __call__(self, *arguments):
        self._begun.set()
        assert self._go.wait(2 * PATIENCE_S)
        try:
            return self._put(*arguments)
        finally:
            self._ended.set()

    async def reached(self):
        """Returns when the write may begin, and would."""
        assert await asyncio.to_thread(self._begun.wait, PATIENCE_S)

    async def go_on(self):
        """Returns when that put has ended; those of later chunks follow."""
        self._go.set()
        assert await asyncio.to_thread(self._ended.wait, PATIENCE_S)


async def first_token(call):
    messages = await call.all()
    assert messages[-1].HasField("committed")
    return next(m.first_token.token_id for m in messages if m.HasField("first_token"))


def cluster(directory, transport, **decode):
    return pair_of(directory, Cluster, transport, **decode)


def metric(worker, series):
    """Its value on the worker's page of metrics; 0 where it is not there."""
    page = worker.node.metrics.render("")[1].decode()
    return sum(float(line.split()[1]) for line in page.splitlines() if line.startswith(series))


FAILURES = "baton_kv_transfer_failures_total"
STALE = f'{FAILURES}{{reason="Stale"}}'
QUARANTINED = 'baton_kv_blocks{state="quarantined"}'


@transports
async def test_a_request_is_aborted_while_its_kv_is_being_sent(directory, alone, transport):
    """Its blocks are nobody's until the write has ended: streams beside it and after it are right.

    sglang#24527: the blocks went to another request, and the late bytes into its KV.
    """
    beside, after = prompt(60, start=11), prompt(240, start=13)
    async with cluster(directory, transport) as c:
        write, call = await c.held_write(spec("aborted", prompt(100)))
        await write.reached()
        await c.router.cancel("aborted")
        with pytest.raises(Overloaded):  # the router waits for room, or takes another worker
            await c.router.reserve(spec("after", after, 8), LOCAL)
        rest = await c.begun("beside", beside, 40)
        assert metric(c.decode, QUARANTINED) == 7
        await write.go_on()
        assert await rest() == alone(beside, 40)
        with pytest.raises(Stale):
            await first_token(call)
        assert metric(c.prefill, STALE) == 1
        await c.written()
        assert await c.compute("after", after, 8) == alone(after, 8)  # in every block there is


@transports
async def test_decode_preempts_while_a_write_is_under_way(directory, alone, transport):
    """Streams that outgrow the pool preempt each other and never what is being written; and KV is
    sent once for each, not once more after a preemption.

    vllm#52360: preempted blocks were read and written by transfers that had them by number alone.
    vllm#53250: a preempted request asked again for KV that had been sent.
    """
    written, growing = prompt(90), {"a": prompt(60, start=21), "b": prompt(60, start=23)}
    async with cluster(directory, transport, prefix_cache=False) as c:
        wanted = spec("written", written, 20)
        write, call = await c.held_write(wanted)
        await write.reached()
        before = metric(c.prefill, "baton_kv_transfer_duration_seconds_count")
        gate, both = c.decode.hold_engine(), asked(c.decode, "reserve", 2)
        streams = [asyncio.create_task(c.compute(n, ids, 60)) for n, ids in growing.items()]
        await asyncio.wait_for(both.wait(), PATIENCE_S)
        gate.set()  # they run side by side
        assert await asyncio.gather(*streams) == [alone(ids, 60) for ids in growing.values()]
        assert metric(c.decode, "baton_engine_preemptions_total") > 0
        await write.go_on()
        tokens = [await first_token(call), *await c.router.tokens("written")]
        assert tokens == alone(written, 20)
        assert metric(c.prefill, "baton_kv_transfer_duration_seconds_count") == before + 1
        assert metric(c.prefill, FAILURES) == 0


@transports
async def test_a_request_id_is_used_again_while_the_old_one_is_being_sent(
    directory, alone, transport
):
    """A reservation has a token of its own: what the old one's sender does is nothing to the new
    one, be it its bytes, its Commit or its Abort.

    vllm#51637: completions of an earlier life were counted for the later one of the same id.
    """
    old, new = prompt(100), prompt(100, start=31)
    async with cluster(directory, transport) as c:
        write, call = await c.held_write(spec("same", old))
        await write.reached()
        await c.router.cancel("same")
        wanted = spec("same", new, 30)
        reserved = await c.router.reserve(wanted)
        await write.go_on()
        with pytest.raises(Stale):
            await first_token(call)
        await c.written()
        tokens = [await first_token(c.send(wanted, reserved)), *await c.router.tokens("same")]
        assert tokens == alone(new, 30)
        assert metric(c.prefill, STALE) == 1


async def test_a_restarted_prefill_worker_cannot_answer_for_the_one_before_it(directory, alone):
    """The same address and name, another incarnation: it neither commits nor aborts what the dead
    one had been granted, and its own handoffs are right.

    sglang#34289, vllm#49238: a replacement at the same address went on with stale state.
    """
    token_ids, store = prompt(100, start=41), MemoryRegistry()
    async with Worker("decode", directory, store) as decode, Router(decode) as router:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        names = await granted(decode, router, "half-sent", process.pid)
        async with (
            Worker("prefill", directory, store, incarnation="writer-2") as prefill,
            Router(prefill) as prompts,
        ):
            c = Cluster(prefill, decode, router, prompts)
            assert await c.hand_over("opens", token_ids, 8) == alone(token_ids, 8)
            (link,) = prefill.prefilling._links._links.values()
            claims = {**names, "incarnation": "writer-2"}
            commit = handoff_pb2.CommitRequest(**claims, epoch=link.epoch, num_tokens=20)
            for lives in (True, False):
                for request in (commit, handoff_pb2.AbortRequest(**claims, resend=True)):
                    with pytest.raises(Stale):
                        await decode.handoff.call(request, PATIENCE_S)
                if lives:
                    assert (await decode.blocks()).blocks_held == 2
                    process.kill()
                    await process.wait()
                    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
            assert await c.hand_over("half-sent", token_ids, 8) == alone(token_ids, 8)
            assert await c.clean()


@transports
async def test_a_lease_runs_out_and_the_blocks_are_given_to_another(directory, alone, transport):
    """The sender that comes late is refused before it writes; while one may write, the lease is
    renewed instead.

    vllm#21570, vllm#47021: blocks were freed on a time-out and read or written after it.
    """
    late, other = prompt(100), prompt(240, start=61)
    async with cluster(directory, transport, lease_s=0.5) as c:
        wanted = spec("late", late, 8)
        reserved = await c.router.reserve(wanted)
        assert "lease has passed" in (await c.router.event("late")).abort_reason
        rest = await c.begun("other", other, 8)  # in every block there is
        with pytest.raises(Stale, match="not reserved here"):
            await first_token(c.send(wanted, reserved))
        assert metric(c.prefill, STALE) == 1
        assert await rest() == alone(other, 8)

        write, call = await c.held_write(spec("slow", late, 8))
        await write.reached()
        await asyncio.sleep(1.0)  # two leases
        await write.go_on()
        assert [await first_token(call), *await c.router.tokens("slow")] == alone(late, 8)
