"""Copying a pool's bytes as on a GPU, on the CPU: by torch and by interpreted kernels."""

from unittest import mock

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer import copier
from kvtransfer.copier import GpuCopier
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


def test_a_copy_continues_the_digest_and_a_failed_transfer_leaves_nothing(pools, ops):
    source, target = pools
    gpu, digest = GpuCopier(source, ops), source.new_digest()
    with pytest.raises(RuntimeError, match="lost"), gpu.transfer(source.new_digest()):
        gpu.checksum(slots(4, 2))
        raise RuntimeError("lost")
    for local, remote in ((slots(8, 3, 1), slots(8, 5, 6)), (slots(5, 7, 8), slots(5, 1, 9))):
        with gpu.transfer(digest):
            gpu.copy(local, target, remote)
            gpu.finish()
    assert digest.value == target.digest(Slots((5, 6, 1, 9), 13)).value


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


def test_work_is_queued_on_a_stream_of_highest_priority_and_waited_for_once(pools, monkeypatch):
    source, target = pools
    cuda, device, zeros = mock.MagicMock(), torch.device("cuda", 1), torch.zeros
    for name in ("Stream", "Event", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, **_: zeros(size, dtype=dtype))
    monkeypatch.setattr(source, "device", device)
    gpu, digest = GpuCopier(source, cuda.ops), source.new_digest()
    cuda.reset_mock()
    with gpu.transfer(digest):
        gpu.copy(slots(4, 1), target, slots(4, 2))
        gpu.copy(slots(4, 2), target, slots(4, 3))
        gpu.finish()
    cuda.stream.assert_called_with(gpu._stream)
    cuda.Event.assert_called_with(blocking=True)  # a waiting thread sleeps
    # Whatever went wrong, nothing goes on when a transfer is left.
    waited = ["Event", "Event().record", "Event().synchronize"]
    queued = ["stream().__enter__", "ops.copy", "ops.copy", *waited, *waited, "stream().__exit__"]
    calls = [name for name, *_ in cuda.mock_calls]
    assert calls[calls.index("stream().__enter__") :][: len(queued)] == queued
    GpuCopier(source, cuda.ops)
    cuda.Stream.assert_called_once_with(device, priority=-1)
