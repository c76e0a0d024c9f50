"""Handoffs between workers whose ranks have KV pools of their own, of like and unlike numbers."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import KvCorrupted, TransferFailed
from kvtransfer import outgoing, remote_pool
from kvtransfer.pairing import rank_pairs
from kvtransfer.remote_pool import RemoteChecksum
from kvtransfer.transports.gloo_nccl import GlooTransport
from tests.waiting import WAIT_S

from .kvtransfer_parts import (
    POOLS,
    STAGING_BYTES,
    TRANSPORTS,
    Times,
    across_hosts,
    expect_only,
    make_pool,
    make_rank_pools,
    slots,
)

WAYS = [(2, 1), (1, 2), (2, 2), (2, 4), (4, 2)]  # of two KV heads: four ranks have one twice
every_way = pytest.mark.parametrize("ways", WAYS, ids=[f"{p} to {d}" for p, d in WAYS])


@pytest.fixture(autouse=True)
def connects_in_the_end(monkeypatch):
    """However busy the machine is."""
    monkeypatch.setattr(outgoing, "_CONNECT_S", WAIT_S)


async def joined(join, name, ways, **options):
    where = POOLS.get(name, "host")
    prefill, decode = (
        {"pools": make_rank_pools(seed + 1, n, where), **options} for seed, n in enumerate(ways)
    )
    return await join(name, decode, prefill)


@pytest.mark.parametrize(
    ("name", "see"),
    [*((name, None) for name in TRANSPORTS), ("gloo", across_hosts)],
    ids=[*TRANSPORTS, "gloo across hosts"],
)
@every_way
async def test_each_rank_gets_its_heads_in_one_handoff(join, name, see, ways):
    prefill, decode = await joined(join, name, ways, see=see)
    before = [pool.tensor.clone() for pool in decode.pools]
    to = decode.reserve("h", 18, 9, 4, 5, 6, 20)
    stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(10, 3, 8, 7))
    for pool, held, content in zip(decode.pools, make_rank_pools(1, ways[1]), before, strict=True):
        expect_only(held, slots(18, 1, 2, 3, 8, 7), pool, slots(18, 9, 4, 5, 6, 20), content)
        held.area.close()
    assert decode.committed_tokens == {"h": 7}
    assert stats.num_bytes == sum(pool.nbytes(slots(18, *range(5))) for pool in decode.pools)
    assert [pair.state for pair in prefill.links.status()] == ["OPEN"]


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
async def test_other_bytes_in_any_rank_are_found_at_commit(join, name):
    prefill, decode = await joined(join, name, (1, 2))

    def corrupt(request):
        decode.pools[1].tensor[4, 1, 1] += 1

    decode.service.acts = {"commit": Times(1, corrupt)}
    with pytest.raises(KvCorrupted, match="checksum"):
        await prefill.hand_over(decode.reserve("h", 8, 9, 4), "h", slots(8, 1, 2))
    assert "checksum" in decode.reasons["h"]
    assert decode.committed_tokens == {}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("name", "see"), [("shm", None), ("gloo", None), ("gloo", across_hosts)])
async def test_a_link_of_one_rank_that_fails_has_all_sent_again(join, name, see, failing):
    prefill, decode = await joined(join, name, (2, 1), see=see)
    before = decode.pool.tensor.clone()
    await prefill.hand_over(decode.reserve("first", 4, 0), "first", slots(4, 0))
    (link,) = prefill.links._links.values()
    link.ends[failing].abort()
    stats = await prefill.hand_over(decode.reserve("h", 8, 9, 4), "h", slots(8, 1, 2))
    assert stats.resends == 1
    assert decode.committed_tokens == {"first": 7, "h": 7}
    (whole,) = make_rank_pools(1, 1)
    before[0] = whole.tensor[0]
    expect_only(whole, slots(8, 1, 2), decode.pool, slots(8, 9, 4), before)
    whole.area.close()


def test_every_receiver_gets_each_of_its_heads_once_from_one_that_holds_it():
    for senders, receivers, heads in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)
    ):
        pairs = rank_pairs(senders, receivers, heads)
        for receiver in range(receivers):
            got = [head for one in pairs if one.receiver == receiver for head in one.heads]
            share = heads // receivers
            first = receiver * share if share else receiver * heads // receivers
            assert got == list(range(first, first + max(share, 1)))
        for pair in pairs:
            holds = {head * senders // heads for head in pair.heads}
            own = heads // senders
            if own:
                assert holds == {pair.sender}
            else:
                assert {pair.sender * heads // senders} == set(pair.heads)
    replicated = rank_pairs(4, 4, 2)
    assert [(one.sender, one.receiver) for one in replicated] == [(n, n) for n in range(4)]


@contextlib.contextmanager
def remote_ends():
    """A link between two pools of which each is on another host, connected, and the target."""
    transport = GlooTransport("127.0.0.1", STAGING_BYTES)
    source, target = make_pool(1), make_pool(2)
    sender, receiver = (across_hosts([None, pool], transport)[1] for pool in (source, target))
    listener = receiver.listen(transport)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, 5.0)
        link = sender.connect(transport, listener.endpoint, 5.0)
        accepted.result()
    yield link, listener, target
    for end in (link, listener):
        end.close()
    for served in (one for one in threading.enumerate() if one.name == "kv-served"):
        served.join(WAIT_S)
        assert not served.is_alive()
    for pool in (source, target):
        pool.area.close()


def test_a_receive_on_another_host_that_was_given_up_writes_nothing_more():
    with remote_ends() as (link, listener, target), ThreadPoolExecutor(1) as thread:
        content, posted = target.tensor.clone(), threading.Event()
        receive = thread.submit(listener.receive, slots(8, 3, 4), RemoteChecksum(), 1.0, posted.set)
        assert posted.wait(WAIT_S)
        listener.abort()
        with pytest.raises(TransferFailed):
            receive.result(WAIT_S)
        with contextlib.suppress(TransferFailed):  # its group is gone, but it may not know that yet
            link.put(slots(8, 1, 2), slots(8, 3, 4), RemoteChecksum(), 1.0)
    assert target.tensor.equal(content)


def test_a_call_that_fails_on_another_host_says_why_and_one_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(remote_pool, "_ANSWER_S", 0.1)
    with remote_ends() as (link, listener, _):
        with pytest.raises(TransferFailed, match="on another host: gloo: send failed"):
            link.put(slots(4, 1), slots(4, 3), RemoteChecksum(), 0.1)  # no receive is posted
        monkeypatch.setattr(remote_pool._ServedEnd, "_result", lambda *_: time.sleep(0.5))
        with pytest.raises(TransferFailed, match="does not answer"):
            listener.accept(0.1)
