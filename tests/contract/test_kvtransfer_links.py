"""The contract of a transport, both ends in one process."""

import contextlib
import threading
import time

import pytest

from baton.errors import TransferFailed
from kvtransfer.pool import Digest

from .kvtransfer_parts import BLOCKS, TOKEN_BYTES, TRANSPORTS, Pair, expect_only, slots


@pytest.fixture(params=list(TRANSPORTS))
def pair(request):
    pair = Pair(TRANSPORTS[request.param]())
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
    "many messages with a tail": (
        slots(4 * BLOCKS - 1, *range(BLOCKS)),
        slots(4 * BLOCKS - 1, *reversed(range(BLOCKS))),
    ),
}


@pytest.mark.parametrize("local, remote", CASES.values(), ids=CASES)
def test_only_the_filled_slots_of_reserved_blocks_change(pair, local, remote):
    before = pair.target.tensor.clone()
    stats, sent, arrived = pair.move(local, remote)
    expect_only(pair.source, local, pair.target, remote, before)
    assert stats.num_bytes == sent.num_bytes == arrived.num_bytes == local.num_tokens * TOKEN_BYTES
    assert sent.value == arrived.value


def test_a_link_is_used_again_and_again(pair):
    for block in range(5):
        _, sent, arrived = pair.move(slots(4, block), slots(4, block + 5))
        assert sent.value == arrived.value


def test_links_do_not_disturb_each_other(pair):
    name = pair.transport.name
    other = Pair(TRANSPORTS[name]() if pair.transport.one_sided else pair.transport, 2, peer="q")
    try:
        moved = [p.move(slots(4, 1), slots(4, n)) for n, p in enumerate((pair, other, pair))]
    finally:
        other.close()
    assert all(sent.value == arrived.value for _, sent, arrived in moved)


def test_digest_tells_other_bytes_and_other_order(pair):
    _, straight, _ = pair.move(slots(8, 1, 2), slots(8, 3, 4))
    _, swapped, _ = pair.move(slots(8, 2, 1), slots(8, 3, 4))
    assert straight.value != swapped.value


def test_put_on_a_closed_receiver_fails(pair):
    pair.listener.close()
    # Mapped for as long as the process lives, which is proof enough.
    mapped = pair.transport.name in ("shm", "cuda_ipc")
    with contextlib.nullcontext() if mapped else pytest.raises(TransferFailed):
        pair.link.put(slots(4, 1), slots(4, 1), pair.source.new_digest(), 5.0)


def test_silent_sender_fails_the_receive_on_time_and_a_new_epoch_works(gloo_pair):
    start = time.monotonic()
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=0.2)
    with pytest.raises(TransferFailed):
        receive.result(5)
    assert 0.15 < time.monotonic() - start < 1.5
    again = Pair(gloo_pair.transport, 2, gloo_pair.source, gloo_pair.target)
    _, sent, arrived = again.move(slots(4, 1), slots(4, 1))
    assert sent.value == arrived.value
    again.close()


def test_silent_receiver_fails_the_put_on_time(gloo_pair):
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        gloo_pair.link.put(slots(4, 1), slots(4, 1), Digest(), 0.2)
    assert time.monotonic() - start < 1.5


def test_sender_that_closes_wakes_the_receive(gloo_pair):
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=30.0)
    gloo_pair.link.close()
    with pytest.raises(TransferFailed):
        receive.result(5)


def test_receive_on_a_closed_listener_fails(gloo_pair):
    gloo_pair.listener.close()
    with pytest.raises(TransferFailed):
        gloo_pair.listener.receive(slots(4, 1), Digest(), 1.0, threading.Event().set)


def test_a_link_without_a_peer_fails(gloo_pair):
    late = gloo_pair.transport.listen(gloo_pair.target, "late/7")
    with pytest.raises(TransferFailed):
        late.accept(0.2)
