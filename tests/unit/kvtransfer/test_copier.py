"""Copying a pool's bytes as on a GPU, on the CPU: by torch and by interpreted kernels."""

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer import copier, incoming
from kvtransfer.copier import GpuCopier
from kvtransfer.kernels import reference
from kvtransfer.kernels.copy_and_checksum import BlockMover
from kvtransfer.pool import Slots
from tests.contract.kvtransfer_driver import CPU
from tests.contract.kvtransfer_parts import MemoryTransport, make_pool, slots


@pytest.fixture
def pools():
    both = make_pool(1, "gpu"), make_pool(2, "gpu")
    yield both
    for pool in both:
        pool.area.close()


@pytest.fixture(params=[lambda: reference, lambda: BlockMover(CPU)], ids=["torch", "triton"])
def ops(request):
    return request.param()


def test_a_copy_continues_the_checksum_and_a_failed_transfer_leaves_nothing(pools, ops):
    source, target = pools
    gpu, checksum = GpuCopier(source, ops), source.new_checksum()
    with pytest.raises(RuntimeError, match="lost"), gpu.transfer(source.new_checksum()):
        gpu.add_checksum(slots(4, 2))
        raise RuntimeError("lost")
    for local, remote in ((slots(8, 3, 1), slots(8, 5, 6)), (slots(5, 7, 8), slots(5, 1, 9))):
        with gpu.transfer(checksum):
            gpu.copy(local, target, remote)
            gpu.finish()
    assert checksum.value == target.checksum_of(Slots((5, 6, 1, 9), 13)).value


def test_preparing_runs_every_kernel_and_changes_no_byte(pools, monkeypatch):
    calls = []
    for name in ("gather", "scatter", "copy", "checksum"):
        original = getattr(BlockMover, name)

        def counted(*arguments, name=name, original=original):
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(BlockMover, name, counted)
    monkeypatch.setattr(copier, "block_ops", BlockMover)
    before = pools[0].tensor.clone()
    copier.prepare(pools[0])
    assert set(calls) == {"checksum", "copy", "gather", "scatter"}
    assert torch.equal(pools[0].tensor, before)


def test_blocks_that_cannot_be_read_back_fail_the_transfer(pools, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(reference, "checksum", broken)
    with pytest.raises(TransferFailed, match="cannot be read back: CUDA error"):
        copier.copier(pools[0]).checksum_of(slots(4, 1))


def test_a_links_checksums_take_one_stream(pools, monkeypatch):
    """Of torch's 32 a stream for each Commit would soon be one that another link waits on."""
    made, original = [], GpuCopier.__init__
    monkeypatch.setattr(
        GpuCopier, "__init__", lambda one, pool: made.append(pool) or original(one, pool)
    )
    transport, pool = MemoryTransport(), pools[0]
    link = incoming.IncomingLink("p", 1, transport, [pool], [transport.listen(pool)], None, 1.0)
    for _ in range(3):
        assert link._read_checksum(slots(8, 3, 1)).value == pool.checksum_of(slots(8, 3, 1)).value
    link.close_ends()
    assert made == [pools[0]]
