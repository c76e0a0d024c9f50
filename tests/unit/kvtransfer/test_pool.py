"""Which bytes stand for which tokens, how runs are cut, what the checksum covers."""

from types import SimpleNamespace

import pytest
import torch
import xxhash

from baton.errors import InvalidRequest
from kvtransfer.pool import Checksum, KvPool, Slots, copy_slots, runs
from tests.contract.kvtransfer_parts import by_token

SHAPE = (6, 2, 2, 3, 4, 5)


LATENT = (6, 2, 1, 1, 4, 5)
KINDS = {str(dtype): (SHAPE, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)}


@pytest.fixture(params=[*KINDS.values(), (LATENT, torch.float32)], ids=[*KINDS, "latent"])
def pool(request):
    shape, dtype = request.param
    return KvPool((50 * torch.randn(shape)).to(dtype))


def first_slots(tensor, block, count):
    """What a block holds of its first tokens: rows, or elements and then scales."""
    return [part[block, ..., :count, :] for part in by_token(tensor)]


def staging(pool):
    return torch.empty(4 * pool.block_bytes, dtype=torch.uint8)


def test_bytes_are_gathered_in_canonical_order_and_scattered_back(pool):
    slots = Slots((4, 1, 2), 11)
    data = pool.gather(slots, staging(pool))
    parts = [pool.tensor[4], pool.tensor[1], *first_slots(pool.tensor, 2, 3)]
    expected = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])
    assert torch.equal(data, expected)
    checksum = pool.checksum_of(slots)
    assert checksum.value == xxhash.xxh3_64_intdigest(expected.numpy().data)
    assert checksum.num_bytes == len(expected) == pool.nbytes(slots)
    before = pool.tensor.clone()
    pool.tensor.zero_()
    pool.scatter(data, slots)
    assert torch.equal(pool.tensor[[4, 1]], before[[4, 1]])
    for back, sent in zip(first_slots(pool.tensor, 2, 3), first_slots(before, 2, 3), strict=True):
        assert torch.equal(back, sent)
        back.zero_()
    assert not pool.tensor[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("max_bytes, counts", [(1, [4, 4, 3]), (10**9, [11]), (321, [8, 3])])
def test_parts_are_whole_blocks_within_the_limit(max_bytes, counts):
    pool = KvPool(torch.zeros((6, 1, 2, 1, 4, 5)))  # 160 bytes a block
    parts = pool.split(Slots((4, 1, 2), 11), max_bytes)
    assert [part.num_tokens for part in parts] == counts
    assert sum((part.block_ids for part in parts), ()) == (4, 1, 2)


def test_runs_end_where_either_list_jumps():
    assert list(runs((1, 2, 3, 7), (5, 6, 9, 10))) == [(0, 1, 5, 2), (2, 3, 9, 1), (3, 7, 10, 1)]
    assert list(runs((), ())) == []
    assert list(runs((3, 2))) == [(0, 3, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    "slots",
    [
        Slots((1,), 5),
        Slots((1, 2), 4),
        Slots((1, 1), 8),
        Slots((6,), 4),
        Slots((-1,), 4),
        Slots((), -1),
    ],
)
def test_slots_that_do_not_fit_are_refused_before_a_byte_moves(pool, slots):
    target = KvPool(torch.zeros_like(pool.tensor))
    with pytest.raises(InvalidRequest):
        copy_slots(pool, Slots((1,), 4), target, slots, Checksum())
    assert not target.tensor.any()


@pytest.mark.parametrize("piece", [1, 100, 480, 1 << 20])
def test_a_copy_is_the_same_in_pieces_of_any_size(pool, piece, monkeypatch):
    monkeypatch.setattr("kvtransfer.pool.PIECE_BYTES", piece)
    target, checksum = KvPool(torch.zeros_like(pool.tensor)), Checksum()
    local, remote = Slots((1, 2, 4, 0), 14), Slots((2, 3, 5, 1), 14)
    copy_slots(pool, local, target, remote, checksum)
    expected = torch.zeros_like(pool.tensor)
    expected[[2, 3, 5]] = pool.tensor[[1, 2, 4]]
    for there, here in zip(
        first_slots(expected, 1, 2), first_slots(pool.tensor, 0, 2), strict=True
    ):
        there.copy_(here)
    assert torch.equal(target.tensor, expected)
    assert checksum.value == pool.checksum_of(local).value == target.checksum_of(remote).value
    assert checksum.num_bytes == pool.nbytes(local)


@pytest.mark.parametrize("pool", KINDS.values(), ids=KINDS, indirect=True)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_heads_of_a_pool_are_a_pool_of_their_own(pool, piece, monkeypatch):
    """Copied to another place in other pools, gathered, scattered: the same bytes and checksum."""
    monkeypatch.setattr("kvtransfer.pool.CHUNK_BYTES", piece)
    part, local, remote = (
        pool.with_heads(range(1, 3)),
        Slots((1, 2, 4, 0), 14),
        Slots((2, 3, 5, 1), 14),
    )
    own = KvPool(pool.tensor[:, :, :, 1:3].contiguous())
    other = KvPool(torch.zeros(6, 2, 2, 4, 4, 5, dtype=pool.tensor.dtype))
    expected = own.checksum_of(local).value
    for source in (part, own):
        for target in (other.with_heads(range(2, 4)), KvPool(torch.zeros_like(own.tensor))):
            checksum = Checksum()
            copy_slots(source, local, target, remote, checksum)
            assert checksum.value == expected == target.checksum_of(remote).value
            assert checksum.num_bytes == part.nbytes(local) == own.nbytes(local)
            data = target.gather(remote, staging(target)[: target.nbytes(remote)])
            assert torch.equal(data, own.gather(local, torch.empty_like(data)))
            before = target.tensor.clone()
            target.tensor.zero_()
            target.scatter(data, remote)
            assert torch.equal(target.tensor, before)
    assert not other.tensor[:, :, :, :2].any()


def test_a_tensor_that_is_no_pool_is_refused():
    gpu = SimpleNamespace(tensor=torch.zeros(1, 1, 2, 1, 2, 3, dtype=torch.bfloat16), on_gpu=True)
    for tensor, area, why in (
        (torch.zeros(SHAPE).transpose(3, 4), None, "contiguous"),
        (torch.zeros(6, 2, 2, 3), None, "num_blocks"),
        (gpu.tensor, gpu, "multiples of 4 and 16 bytes"),
        (torch.zeros(SHAPE), gpu, "where its shared memory begins"),
    ):
        with pytest.raises(ValueError, match=why):
            KvPool(tensor, area)
