"""The contract of a transport, both ends in one process."""

import contextlib
import threading
import time

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer.digest import WordDigest
from kvtransfer.pool import Digest

from .kvtransfer_parts import (
    BLOCKS,
    POOLS,
    TRANSPORTS,
    Pair,
    expect_only,
    make_pool,
    slots,
)

GPUS = "gloo of GPUs"  # messages are gathered and digested where the pool is
INT8 = [f"{name} of int8" for name in TRANSPORTS]  # rows with their scales: 20 bytes a slot


@pytest.fixture(params=[*TRANSPORTS, GPUS, *INT8])
def pair(request):
    name, _, kind = request.param.partition(" of ")
    where = "gpu" if kind == "GPUs" else POOLS.get(name, "host")
    rows = {"dtype": torch.int8, "head_size": 20} if kind == "int8" else {}
    pools = {"source": make_pool(1, where, **rows), "target": make_pool(2, where, **rows)}
    pair = Pair(TRANSPORTS[name](), **pools)
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
        sent, arrived = pair.move(local, remote)
        expect_only(pair.source, local, pair.target, remote, before)
        num_bytes = local.num_tokens * pair.source.token_bytes
        assert sent.num_bytes == arrived.num_bytes == num_bytes
        assert sent.value == arrived.value == pair.target.digest(remote).value
        assert isinstance(sent, WordDigest) == pair.source.on_gpu
        digests.add(sent.value)
    assert len(digests) == len(CASES) - 1  # a run has its digest wherever it goes


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
    sent, arrived = again.move(slots(4, 1), slots(4, 1))
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


def test_a_closed_listener_and_a_link_without_a_peer_fail(gloo_pair):
    gloo_pair.listener.close()
    with pytest.raises(TransferFailed):
        gloo_pair.listener.receive(slots(4, 1), Digest(), 1.0, threading.Event().set)
    late = gloo_pair.transport.listen(gloo_pair.target, "late/7")
    with pytest.raises(TransferFailed):
        late.accept(0.2)
