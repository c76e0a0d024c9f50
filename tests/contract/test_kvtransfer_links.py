"""The contract of a transport, both ends in one process."""

import contextlib
import threading
import time

import pytest
import torch

from baton.engine.kv_cache import KvLayout
from baton.engine.weights.quantize import pack_rows, unpack_rows
from baton.errors import Stale, TransferFailed
from kvtransfer.digest import WordDigest
from kvtransfer.pool import Digest, KvPool

from .kvtransfer_parts import (
    BLOCK_SIZE,
    BLOCKS,
    POOLS,
    TOKEN_BYTES,
    TRANSPORTS,
    Pair,
    expect_only,
    make_area,
    make_pool,
    slots,
)

GPUS = "gloo of GPUs"  # messages are gathered and digested where the pool is


@pytest.fixture(params=[*TRANSPORTS, GPUS])
def pair(request):
    made = {}
    if request.param == GPUS:
        made = {"source": make_pool(1, "gpu"), "target": make_pool(2, "gpu")}
    pair = Pair(TRANSPORTS["gloo" if made else request.param](), **made)
    yield pair
    pair.close()


@pytest.fixture
def gloo_pair():
    pair = Pair(TRANSPORTS["gloo"]())
    yield pair
    pair.close()


CASES = {
    "one block": (slots(4, 3), slots(4, 5)),
    "partial tail": (slots(3, 3), slots(3, 5)),
    "a run": (slots(16, 2, 3, 4, 5), slots(16, 10, 11, 12, 13)),
    "a run to scattered blocks": (slots(16, 2, 3, 4, 5), slots(16, 9, 1, 20, 7)),
    "scattered to a run with a tail": (slots(10, 9, 1, 20), slots(10, 4, 5, 6)),
    "the other order": (slots(16, 5, 4, 3, 2), slots(16, 10, 11, 12, 13)),
    "many messages with a tail": (
        slots(4 * BLOCKS - 1, *range(BLOCKS)),
        slots(4 * BLOCKS - 1, *reversed(range(BLOCKS))),
    ),
}


def test_only_the_filled_slots_of_reserved_blocks_change(pair):
    """On one link, again and again; both ends' digests agree, and tell order and content apart."""
    digests = set()
    for local, remote in CASES.values():
        before = pair.target.tensor.clone()
        stats, sent, arrived = pair.move(local, remote)
        expect_only(pair.source, local, pair.target, remote, before)
        num_bytes = local.num_tokens * TOKEN_BYTES
        assert stats.num_bytes == sent.num_bytes == arrived.num_bytes == num_bytes
        assert sent.value == arrived.value == pair.target.digest(remote).value
        assert isinstance(sent, WordDigest) == pair.source.on_gpu
        digests.add(sent.value)
    assert len(digests) == len(CASES) - 1  # a run has its digest wherever it goes


def test_links_do_not_disturb_each_other(pair):
    name = pair.transport.name
    other = Pair(TRANSPORTS[name]() if pair.transport.one_sided else pair.transport, 2, peer="q")
    try:
        moved = [p.move(slots(4, 1), slots(4, n)) for n, p in enumerate((pair, other, pair))]
    finally:
        other.close()
    assert all(sent.value == arrived.value for _, sent, arrived in moved)


def test_put_on_a_closed_receiver_fails(pair):
    pair.listener.close()
    # Mapped for as long as the process lives, which is proof enough.
    mapped = pair.transport.name in ("shm", "cuda_ipc")
    with contextlib.nullcontext() if mapped else pytest.raises(TransferFailed):
        pair.link.put(slots(4, 1), slots(4, 1), pair.source.new_digest(), 5.0)


@pytest.mark.parametrize("pair", ["gloo", GPUS], indirect=True)
def test_digests_go_on_from_chunk_to_chunk(pair):
    sent, arrived = pair.source.new_digest(), pair.target.new_digest()
    for local, remote in (
        (slots(12, 9, 4, 5), slots(12, 1, 2, 3)),
        (slots(6, 7, 8), slots(6, 5, 4)),
    ):
        receive, digest = pair.post(remote, digest=arrived)
        pair.link.put(local, remote, sent, 5.0)
        receive.result(5)
        assert digest is arrived
    assert sent.value == arrived.value == pair.source.digest(slots(18, 9, 4, 5, 7, 8)).value


def test_silence_fails_both_ends_on_time_and_a_new_epoch_works(gloo_pair):
    start = time.monotonic()
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=0.2)
    with pytest.raises(TransferFailed):
        receive.result(5)
    assert 0.15 < time.monotonic() - start < 1.5
    again = Pair(gloo_pair.transport, 2, gloo_pair.source, gloo_pair.target)
    _, sent, arrived = again.move(slots(4, 1), slots(4, 1))
    assert sent.value == arrived.value
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        again.link.put(slots(4, 1), slots(4, 1), Digest(), 0.2)
    assert time.monotonic() - start < 1.5
    again.close()


def test_sender_that_closes_wakes_the_receive(gloo_pair):
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=30.0)
    gloo_pair.link.close()
    with pytest.raises(TransferFailed):
        receive.result(5)


def test_another_epoch_is_stale_and_a_link_without_a_peer_fails(gloo_pair):
    with pytest.raises(Stale):
        gloo_pair.listener.receive("p", 9, slots(4, 1), Digest(), 1.0, threading.Event().set)
    gloo_pair.listener.offer("late", 7)
    with pytest.raises(TransferFailed):
        gloo_pair.listener.accept("late", 7, 0.2)


LAYOUT = KvLayout(BLOCKS, 2, 2, BLOCK_SIZE, 16, torch.int8)


def int8_pool(seed, where="host"):
    """(a pool in memory to share, the numbers that are packed in it)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*LAYOUT.shape[:-1], LAYOUT.head_size, generator=generator)
    area = make_area(LAYOUT.num_bytes, where)
    pool = KvPool(area.tensor.view(torch.int8).view(LAYOUT.shape), area)
    pool.tensor.copy_(pack_rows(numbers))
    return pool, numbers


@pytest.mark.parametrize("name", TRANSPORTS)
def test_int8_rows_arrive_with_their_scales(name):
    """An int8 pool moves as any other; an element and a scale are part of the digest."""
    where = POOLS.get(name, "host")
    (source, numbers), (target, _) = int8_pool(1, where), int8_pool(2, where)
    before = target.tensor.clone()
    pair = Pair(TRANSPORTS[name](), source=source, target=target)
    try:
        stats, sent, arrived = pair.move(slots(10, 9, 1, 20), slots(10, 4, 5, 7))
        assert stats.num_bytes == 10 * LAYOUT.bytes_per_token
        assert sent.value == arrived.value
        moved = unpack_rows(target.tensor, torch.float32)
        unit = numbers.abs().amax(-1, keepdim=True) / 127
        for here, there, fill in ((9, 4, 4), (1, 5, 4), (20, 7, 2)):
            left, right = moved[there, ..., :fill, :], numbers[here, ..., :fill, :]
            assert ((left - right).abs() <= 0.501 * unit[here, ..., :fill, :]).all()
        assert torch.equal(target.tensor[7, ..., 2:, :], before[7, ..., 2:, :])
        others = [block for block in range(BLOCKS) if block not in (4, 5, 7)]
        assert torch.equal(target.tensor[others], before[others])
        for byte in (0, LAYOUT.row_size - 1):
            source.tensor[1, 1, 1, 1, 3, byte] ^= 1
            assert source.digest(slots(10, 9, 1, 20)).value != sent.value
            source.tensor[1, 1, 1, 1, 3, byte] ^= 1
    finally:
        pair.close()
