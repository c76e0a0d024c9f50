"""How NCCL is asked for, and what a transfer over it does, with torch's part of it written down."""

import os
import threading
import time
import types

import pytest
import torch
from torch.distributed import HashStore

from baton import rendezvous
from baton.errors import TransferFailed
from baton.rendezvous import Rendezvous
from kvtransfer.deadline import Deadline
from kvtransfer.pool import Slots
from kvtransfer.transports import gloo_nccl
from kvtransfer.transports.gloo_nccl import NcclTransport, Staging
from tests.contract.kvtransfer_parts import make_pool, slots
from tests.waiting import WAIT_S


class ProcessGroupNCCL:
    """Does at once what NCCL queues; `journal` has the calls in their order."""

    @staticmethod
    def Options(**chosen):
        return types.SimpleNamespace(**chosen, config=types.SimpleNamespace())

    def __init__(self, store, rank, size, options):
        self.store = store
        self.rank, self.size, self.options = rank, size, options
        self.journal, self.aborted = [], threading.Event()

    def send(self, tensors, peer, tag):
        self.journal.append(("send", tensors[0].numel()))
        return types.SimpleNamespace(wait=lambda: self.journal.append("wait"))

    def recv(self, tensors, peer, tag):
        self.journal.append(("recv", tensors[0].numel()))
        if len(self.journal) < 4:
            tensors[0].copy_(self.store.hello(peer))
        return types.SimpleNamespace(wait=lambda: self.journal.append("wait"))

    def abort(self):
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch):
    fake = types.SimpleNamespace(is_nccl_available=lambda: True, ProcessGroupNCCL=ProcessGroupNCCL)
    for module in (gloo_nccl, rendezvous):
        monkeypatch.setattr(module, "distributed", fake)
    monkeypatch.setattr(gloo_nccl, "nccl_version", lambda: (2, 27, 5))
    for name in (*gloo_nccl.NCCL_ENVIRONMENT, "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return NcclTransport("127.0.0.1", 8 << 20)


def test_a_group_is_non_blocking_narrow_and_ahead_of_the_engine(nccl):
    store = HashStore()
    group = nccl.build(Rendezvous(store, b"secret"), 1, 0.05)
    config = group.options.config
    assert (group.rank, group.size, config.blocking, config.min_ctas) == (1, 2, 0, 1)
    assert config.max_ctas == gloo_nccl.NCCL_MAX_CTAS
    assert group.options.is_high_priority_stream
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        store.get("0:1")  # as torch does for the communicator's id, which an abort cannot end


@pytest.mark.parametrize("version, shared", [((2, 27, 5), None), ((2, 30, 3), "1")])
def test_one_gpu_is_shared_where_nccl_can(nccl, monkeypatch, version, shared):
    monkeypatch.setattr(gloo_nccl, "nccl_version", lambda: version)
    NcclTransport("127.0.0.1")
    assert os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == shared
    # Four times this is how long a group with a lost peer could not be freed.
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


@pytest.fixture
def pool():
    pool = make_pool(1, "gpu")
    yield pool
    pool.area.close()


@pytest.fixture
def link(nccl, pool, monkeypatch):
    """A sender's link, connected; its group's journal is empty."""
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *place, **options: HashStore())
    endpoint = b'{"host": "h", "port": 1, "secret": "00", "message_bytes": 2048}'
    link = nccl.connect(pool, endpoint, 5.0)
    assert link._group.journal == [("send", 32), "wait", ("recv", 32), "wait"]
    link._group.journal.clear()
    yield link
    link.close()


def test_messages_are_queued_in_order_and_no_wait_has_a_time_out_of_its_own(link, pool):
    checksum = pool.new_checksum()
    link.put(slots(18, 1, 5, 2, 3, 9), slots(18, 1, 2, 3, 4, 5), checksum, WAIT_S)
    # The next message is gathered while one travels, and is sent when that one is through.
    sends = [("send", 2048), ("send", 2048), ("send", 512)]
    assert link._group.journal == [entry for send in sends for entry in (send, "wait")]
    assert checksum.value == pool.checksum_of(Slots((1, 5, 2, 3, 9), 18)).value
    for thread in threading.enumerate():
        if thread.name == "kv-deadline":  # no timer is left behind
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_transfer_that_hangs_is_aborted_at_its_deadline(link, pool, monkeypatch):
    finish = link._copier.finish

    def hanging():
        assert link._group.aborted.wait(WAIT_S)  # as kernels that end when their group is aborted
        finish()

    monkeypatch.setattr(link._copier, "finish", hanging)
    start = time.monotonic()
    with pytest.raises(TransferFailed, match="its time was over"):
        link.put(slots(4, 1), slots(4, 1), pool.new_checksum(), 0.1)
    assert 0.05 < time.monotonic() - start < WAIT_S


def test_a_link_whose_abort_fails_is_closed_all_the_same(link, pool, monkeypatch, caplog):
    def abort(group):
        raise RuntimeError("NCCL timeout in: NCCLUtils.cpp")

    monkeypatch.setattr(ProcessGroupNCCL, "abort", abort)
    link.abort()
    with pytest.raises(TransferFailed, match="aborted"):
        link.put(slots(4, 1), slots(4, 1), pool.new_checksum(), WAIT_S)
    link.close()
    assert link._group is None
    assert "nccl: the abort failed: NCCL timeout" in caplog.text


def lend(staging, num_bytes=8, timeout_s=0.0):
    return staging.lend(num_bytes, torch.device("cpu"), Deadline(timeout_s))


def test_staging_memory_is_lent_again_unless_something_failed():
    staging = Staging()
    with lend(staging) as first:
        assert first.shape == (2, 8)
    with lend(staging, 4) as again:
        assert again is first
    with lend(staging, 16) as larger:
        assert larger.shape == (2, 16)
    with lend(staging, 16) as again:
        assert again is larger
    with pytest.raises(RuntimeError, match="lost"), lend(staging):
        raise RuntimeError("lost")
    with lend(staging) as fresh:
        assert fresh is not larger


def test_no_more_staging_memory_is_lent_than_there_may_be():
    staging = Staging(max_lent=1)
    lent = threading.Event()

    def wait():
        with lend(staging, 8, WAIT_S):
            lent.set()

    waiter = threading.Thread(target=wait)
    with lend(staging):
        with pytest.raises(RuntimeError, match="no staging memory"), lend(staging, 8, 0.02):
            pass
        waiter.start()
        assert not lent.wait(0.02)
    assert lent.wait(WAIT_S)
    waiter.join(WAIT_S)
