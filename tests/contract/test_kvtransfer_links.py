"""The contract of a transport, both ends in one process."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import TCPStore

from baton.errors import TransferFailed
from baton.rendezvous import Rendezvous
from kvtransfer.checksum import WordChecksum
from kvtransfer.pool import Checksum
from kvtransfer.transports import gloo_nccl
from tests.waiting import WAIT_S

from .kvtransfer_parts import BLOCKS, POOLS, TRANSPORTS, Pair, expect_only, make_pool, slots

GPUS = "gloo of GPUs"  # messages are gathered and summed where the pool is
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
    """On one link, again and again; both checksums agree, and depend on order and content."""
    checksums = set()
    for local, remote in CASES.values():
        before = pair.target.tensor.clone()
        sent, arrived = pair.move(local, remote)
        expect_only(pair.source, local, pair.target, remote, before)
        num_bytes = local.num_tokens * pair.source.token_bytes
        assert sent.num_bytes == arrived.num_bytes == num_bytes
        assert sent.value == arrived.value == pair.target.checksum_of(remote).value
        assert isinstance(sent, WordChecksum) == pair.source.on_gpu
        checksums.add(sent.value)
    assert len(checksums) == len(CASES) - 1  # a run has its checksum wherever it goes


def test_put_on_a_closed_receiver_fails(pair):
    pair.listener.close()
    # Mapped for as long as the process lives, which is proof enough.
    mapped = pair.transport.name in ("shm", "cuda_ipc")
    with contextlib.nullcontext() if mapped else pytest.raises(TransferFailed):
        pair.link.put(slots(4, 1), slots(4, 1), pair.source.new_checksum(), 5.0)


@pytest.mark.parametrize("pair", ["gloo", GPUS], indirect=True)
def test_checksums_go_on_from_chunk_to_chunk(pair):
    sent, arrived = pair.source.new_checksum(), pair.target.new_checksum()
    for local, remote in (
        (slots(12, 9, 4, 5), slots(12, 1, 2, 3)),
        (slots(6, 7, 8), slots(6, 5, 4)),
    ):
        receive, checksum = pair.post(remote, checksum=arrived)
        pair.link.put(local, remote, sent, WAIT_S)
        receive.result(WAIT_S)
        assert checksum is arrived
    assert sent.value == arrived.value == pair.source.checksum_of(slots(18, 9, 4, 5, 7, 8)).value


def test_silence_fails_both_ends_on_time_and_a_new_epoch_works(gloo_pair):
    start = time.monotonic()
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=0.2)
    with pytest.raises(TransferFailed):
        receive.result(WAIT_S)
    assert 0.15 < time.monotonic() - start < WAIT_S
    again = Pair(gloo_pair.transport, gloo_pair.source, gloo_pair.target)
    sent, arrived = again.move(slots(4, 1), slots(4, 1))
    assert sent.value == arrived.value
    start = time.monotonic()
    with pytest.raises(TransferFailed):
        again.link.put(slots(4, 1), slots(4, 1), Checksum(), 0.2)
    assert time.monotonic() - start < WAIT_S
    again.close()


def test_sender_that_closes_wakes_the_receive(gloo_pair):
    receive, _ = gloo_pair.post(slots(4, 1), timeout_s=WAIT_S)
    gloo_pair.link.close()
    with pytest.raises(TransferFailed):
        receive.result(WAIT_S)


def test_a_closed_listener_and_a_link_without_a_peer_fail(gloo_pair):
    gloo_pair.listener.close()
    with pytest.raises(TransferFailed):
        gloo_pair.listener.receive(slots(4, 1), Checksum(), 1.0, threading.Event().set)
    late = gloo_pair.transport.listen(gloo_pair.target)
    with pytest.raises(TransferFailed):
        late.accept(0.2)


def stranger_with(endpoint):
    """A client of a link's store that knows all of the endpoint but its secret."""
    place = json.loads(endpoint)
    within = timedelta(seconds=WAIT_S)
    return TCPStore(place["host"], place["port"], None, False, within, wait_for_workers=False)


def fails_in_time(end):
    begun = time.monotonic()
    with pytest.raises(TransferFailed) as caught:
        end()
    assert time.monotonic() - begun < WAIT_S
    return str(caught.value)


def test_a_stranger_that_reaches_the_port_cannot_join_and_a_new_link_opens(gloo_pair):
    """It can write what it likes, and take the sender's place as far as it gets."""
    transport, pool = gloo_pair.transport, gloo_pair.target
    with ThreadPoolExecutor(1) as thread:
        for secret, says in (("00" * 32, "a stranger wrote '0/0'"), (None, "a stranger wrote")):
            listener = transport.listen(pool)
            accepted = thread.submit(listener.accept, 2.0)
            place = json.loads(listener.endpoint)
            if secret:
                guessed = json.dumps({**place, "secret": secret}).encode()
                connect = partial(transport.connect, gloo_pair.source, guessed, 2.0)
                fails_in_time(connect)
            else:
                store = stranger_with(listener.endpoint)
                assert "secret" not in str(store.list_keys())
                store.set("0/0", b"x" * 170)  # where the sender would say who it is
            assert says in fails_in_time(partial(accepted.result, WAIT_S))
            listener.close()
    again = Pair(transport, gloo_pair.source, pool)
    sent, arrived = again.move(slots(4, 1), slots(4, 1))
    assert sent.value == arrived.value
    again.close()


@pytest.mark.parametrize("stranger", ["sender", "receiver"])
def test_who_has_the_connection_but_not_the_secret_is_found_out_by_its_hello(
    gloo_pair, monkeypatch, stranger
):
    transport, hello, main = gloo_pair.transport, Rendezvous.hello, threading.current_thread()
    close, closed = gloo_nccl._GroupEnd.close, []
    monkeypatch.setattr(gloo_nccl._GroupEnd, "close", lambda end: closed.append(end) or close(end))

    def guessed(meeting, rank):
        """Zeros where an end would send its own hello, if it is the stranger."""
        end = "sender" if threading.current_thread() is main else "receiver"
        sends = end == ("sender", "receiver")[rank]
        if end == stranger and sends:
            return torch.zeros(32, dtype=torch.uint8)
        return hello(meeting, rank)

    monkeypatch.setattr(Rendezvous, "hello", guessed)
    listener = transport.listen(gloo_pair.target)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept, 2.0)
        connect = partial(transport.connect, gloo_pair.source, listener.endpoint, 2.0)
        found = {"receiver": fails_in_time(connect)}
        if stranger == "sender":
            found["sender"] = fails_in_time(partial(accepted.result, WAIT_S))
    assert "not the one that this link was offered to" in found[stranger]
    assert len(set(closed)) == len(found), "an end that did not open keeps its group"
    listener.close()


def test_the_port_of_a_link_is_closed_once_it_is_open_or_has_failed(gloo_pair):
    def port_of(listener):
        place = json.loads(listener.endpoint)
        return place["host"], place["port"]

    late = gloo_pair.transport.listen(gloo_pair.target)
    with socket.create_connection(port_of(late), 5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(TransferFailed):
            late.accept(0.2)
    for listener in (gloo_pair.listener, late):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(port_of(listener), 5)
    gloo_pair.move(slots(4, 1), slots(4, 1))
