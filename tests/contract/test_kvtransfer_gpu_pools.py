"""What only pools on a GPU do, with pools that are taken for such: two-sided, and falling back."""

import contextlib

import pytest

from baton.errors import TransferFailed
from kvtransfer.digest import WordDigest
from kvtransfer.transports.cuda import CudaError
from kvtransfer.transports.cuda_ipc import CudaIpcTransport

from .kvtransfer_driver import MemfdDriver
from .kvtransfer_parts import (
    TOKEN_BYTES,
    TRANSPORTS,
    Decode,
    Pair,
    Prefill,
    expect_only,
    make_pool,
    slots,
)
from .test_kvtransfer_links import CASES


@pytest.fixture
def gloo_pair():
    pair = Pair(TRANSPORTS["gloo"](), source=make_pool(1, "gpu"), target=make_pool(2, "gpu"))
    yield pair
    pair.close()


@pytest.mark.parametrize("local, remote", CASES.values(), ids=CASES)
def test_messages_are_gathered_and_digested_where_the_pool_is(gloo_pair, local, remote):
    pair, before = gloo_pair, gloo_pair.target.tensor.clone()
    stats, sent, arrived = pair.move(local, remote)
    expect_only(pair.source, local, pair.target, remote, before)
    assert isinstance(sent, WordDigest)
    assert stats.num_bytes == sent.num_bytes == arrived.num_bytes == local.num_tokens * TOKEN_BYTES
    assert sent.value == arrived.value == pair.target.digest(remote).value


def test_digests_go_on_from_chunk_to_chunk(gloo_pair):
    pair, sent = gloo_pair, gloo_pair.source.new_digest()
    arrived = pair.target.new_digest()
    for local, remote in (
        (slots(12, 9, 4, 5), slots(12, 1, 2, 3)),
        (slots(6, 7, 8), slots(6, 5, 4)),
    ):
        receive, digest = pair.post(remote, digest=arrived)
        pair.link.put(local, remote, sent, 5.0)
        receive.result(5)
    assert digest is arrived
    assert sent.value == arrived.value == pair.source.digest(slots(18, 9, 4, 5, 7, 8)).value


class Sightless(MemfdDriver):
    """In a container that does not see the receiver's GPU."""

    def open(self, device, handle):
        raise CudaError("cuIpcOpenMemHandle_v2", 101, "invalid device ordinal")


@contextlib.asynccontextmanager
async def unopenable(*others):
    others = [TRANSPORTS[name]() for name in others]
    sightless = CudaIpcTransport(Sightless())
    async with (
        Decode(TRANSPORTS["cuda_ipc"](), *others, pool=make_pool(2, "gpu")) as decode,
        Prefill(sightless, *others, pool=make_pool(1, "gpu"), backoff_s=60.0) as prefill,
    ):
        yield prefill, decode


async def test_memory_that_cannot_be_opened_is_left_out_and_the_pair_uses_the_next(caplog):
    async with unopenable("gloo") as (prefill, decode):
        stats = await prefill.hand_over(decode.reserve("h", 4, 9), "h", slots(4, 1))
        assert (stats.transport, stats.resends) == ("gloo", 0)
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert warning.getMessage() == (
            "link to decode d falls from cuda_ipc to gloo, because cuda_ipc: cannot open the"
            " receiver's memory on no GPU: cuIpcOpenMemHandle_v2 failed with CUDA error 101,"
            " invalid device ordinal (show every GPU of the machine to every worker)"
        )
        link = prefill.links._links["d"]
        prefill.links.remove(link, quarantine=False)
        again = await prefill.hand_over(decode.reserve("i", 4, 9), "i", slots(4, 1))
        assert again.transport == "gloo"
        assert [pair.epoch for pair in prefill.links.status()] == [3]
        assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


async def test_memory_that_cannot_be_opened_fails_where_nothing_else_is_left():
    async with unopenable() as (prefill, decode):
        with pytest.raises(TransferFailed, match="invalid device ordinal"):
            await prefill.hand_over(decode.reserve("h", 4, 9), "h", slots(4, 1))
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]
