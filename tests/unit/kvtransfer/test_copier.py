"""Copying a pool's bytes as on a GPU, on the CPU: by torch and by interpreted kernels."""

import contextlib

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer import copier
from kvtransfer.copier import GpuCopier, HostCopier, Stream
from kvtransfer.digest import Digest
from kvtransfer.kernels import blocks, reference
from kvtransfer.pool import Slots
from tests.contract.kvtransfer_parts import make_pool, slots


@pytest.fixture
def pools():
    both = make_pool(1, "gpu"), make_pool(2, "gpu")
    yield both
    for pool in both:
        pool.area.close()


@pytest.fixture(params=[reference, blocks], ids=["torch", "triton"])
def ops(request):
    return request.param


def test_a_transfer_in_parts_has_the_digest_of_the_whole(pools, ops):
    source, target = pools
    sender, receiver = GpuCopier(source, ops), GpuCopier(target, ops)
    sent, arrived = source.new_digest(), target.new_digest()
    staging = torch.empty(2 * source.block_bytes, dtype=torch.uint8)
    parts = [(slots(8, 3, 1), slots(8, 5, 6)), (slots(8, 7, 8), slots(8, 1, 9))]
    parts.append((slots(3, 2), slots(3, 0)))
    with sender.transfer(sent), receiver.transfer(arrived):
        for local, remote in parts:
            receiver.scatter(sender.gather(local, staging), remote)
        sender.finish()
        receiver.finish()
    there = Slots((5, 6, 1, 9, 0), 19)
    assert sent.value == arrived.value == source.digest(Slots((3, 1, 7, 8, 2), 19)).value
    assert sent.num_bytes == arrived.num_bytes == source.nbytes(there)
    assert copier.digest(target, there).value == sent.value


def test_a_copy_continues_the_digest(pools, ops):
    source, target = pools
    gpu, digest = GpuCopier(source, ops), source.new_digest()
    for local, remote in ((slots(8, 3, 1), slots(8, 5, 6)), (slots(5, 7, 8), slots(5, 1, 9))):
        with gpu.transfer(digest):
            gpu.copy(local, target, remote)
            gpu.finish()
    assert digest.value == target.digest(Slots((5, 6, 1, 9), 13)).value


def test_what_lies_in_one_piece_is_not_copied(pools, ops):
    source, _ = pools
    gpu, digest = GpuCopier(source, ops), source.new_digest()
    with gpu.transfer(digest):
        data = gpu.gather(slots(8, 4, 5), torch.empty(0, dtype=torch.uint8))
        gpu.finish()
    assert data.data_ptr() == source.blocks[4].data_ptr()
    assert digest.value == source.digest(slots(8, 4, 5)).value


def test_a_transfer_that_fails_leaves_nothing_for_the_next(pools, ops):
    source, _ = pools
    gpu = GpuCopier(source, ops)
    with pytest.raises(RuntimeError, match="lost"), gpu.transfer(source.new_digest()):
        gpu.checksum(slots(4, 2))
        raise RuntimeError("lost")
    digest = source.new_digest()
    with gpu.transfer(digest):
        gpu.checksum(slots(4, 3))
        gpu.finish()
    assert digest.value == source.digest(slots(4, 3)).value


def test_every_pool_has_its_copier_and_digest(pools):
    host = make_pool(1)
    assert isinstance(copier.copier(host), HostCopier)
    assert isinstance(copier.copier(pools[0]), GpuCopier)
    with pytest.raises(AssertionError), GpuCopier(pools[0]).transfer(Digest()):
        pass
    host.area.close()


def test_preparing_runs_every_kernel_and_changes_no_byte(pools, monkeypatch):
    calls = []
    for name in ("gather", "scatter", "copy", "checksum"):
        original = getattr(blocks, name)

        def counted(*arguments, name=name, original=original):
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(blocks, name, counted)
    monkeypatch.setattr(copier, "block_ops", lambda device: blocks)
    before = pools[0].tensor.clone()
    copier.prepare(pools[0])
    assert sorted(calls) == ["checksum", "copy", "gather", "scatter"]
    assert torch.equal(pools[0].tensor, before)


def test_blocks_that_cannot_be_read_back_fail_the_transfer(pools, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(reference, "checksum", broken)
    with pytest.raises(TransferFailed, match="cannot be read back: CUDA error"):
        copier.digest(pools[0], slots(4, 1))


class Journal(Stream):
    """Records when a copier's work is queued and waited for."""

    def __init__(self):
        self.calls, self.inside = [], False

    @contextlib.contextmanager
    def current(self):
        self.inside = True
        yield
        self.inside = False

    def record(self):
        assert self.inside
        self.calls.append("record")
        return len(self.calls)

    def synchronize(self, event):
        assert event == len(self.calls)
        self.calls.append("synchronize")


def test_work_is_queued_on_the_stream_and_waited_for_once(pools):
    source, target = pools
    journal = Journal()

    class Ops:
        def copy(self, *arguments):
            assert journal.inside
            journal.calls.append("copy")
            reference.copy(*arguments)

    gpu = GpuCopier(source, Ops(), journal)
    with gpu.transfer(source.new_digest()):
        gpu.copy(slots(4, 1), target, slots(4, 2))
        gpu.copy(slots(4, 2), target, slots(4, 3))
        gpu.finish()
        finished = list(journal.calls)
    assert finished == ["copy", "copy", "record", "synchronize"]
    assert journal.calls[4:] == ["record", "synchronize"]  # whatever went wrong, nothing goes on


def test_a_cuda_stream_has_the_highest_priority_and_waits_sleeping(monkeypatch):
    calls = []

    class Fake:
        def __init__(self, *arguments, **options):
            calls.append((*arguments, options))

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

        def record(self, stream):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

    for name in ("Stream", "Event", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    device = torch.device("cuda", 1)
    stream = copier.stream(device)
    with stream.current():
        stream.synchronize(stream.record())
    assert calls[:2] == [(device, {"priority": -1}), (device, {})]
    assert calls[3:] == [({"blocking": True},), "record", "synchronize"]
