"""A worker's adapters: loaded, listed, unloaded when no sequence uses them, never in its tokens."""

import asyncio
import threading
from pathlib import Path

import pytest

from baton.block_hash import adapted_salt
from baton.engine.sequence import Sequence
from baton.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from baton.generation.sampling_params import SamplingParams
from baton.v1 import common_pb2
from baton.worker.adapters import Adapters
from tests.unit.engine.bench import WAIT_S, Bench, load
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.test_lora import ALL, make_adapter

PROMPT = [(7 * i) % 250 + 2 for i in range(40)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapted")
    model = make_checkpoint(directory / "base")
    for seed, name in enumerate("abc"):
        make_adapter(directory / name, model, modules=ALL, seed=seed)
    make_adapter(directory / "large", model, rank=17)
    return directory


class Fixture:
    def __init__(self, directory, **settings):
        self.directory, self.published, self.loads = directory, [], []
        self.loaded = load(directory / "base", **settings)

    async def __aenter__(self):
        self.bench = Bench(self.loaded.engine).__enter__()
        self.adapters = Adapters(self.bench.engine, self.loaded, self._publish, self.loads.append)
        return self

    async def __aexit__(self, *error):
        self.bench.__exit__(*error)

    async def _publish(self, adapters):
        self.published.append([adapter.name for adapter in adapters])

    async def load(self, name, folder=None):
        return await self.adapters.load(name, self.directory / (folder or name))

    def sequence(self, name, adapter="", max_tokens=8, **changes):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        salt = adapted_salt("", adapter)
        return Sequence(name, list(PROMPT), 40, params, salt, adapter=adapter, **changes)

    async def tokens(self, sequence):
        return (await asyncio.to_thread(self.bench.tokens, sequence))[sequence.seq_id]


async def test_names_of_equal_content_share_a_place_and_places_are_bounded(directory):
    async with Fixture(directory, max_loras=2) as worker:
        first = await worker.load("a")
        assert (first.rank, first.directory) == (4, str(directory / "a"))
        assert await worker.load("a") == first, "it is loaded already"
        assert (await worker.load("other", "a")).identity == first.identity
        await worker.load("b")
        with pytest.raises(Overloaded, match="all 2 places for adapters are taken"):
            await worker.load("c")
        with pytest.raises(InvalidRequest, match="another adapter is loaded as a: unload it first"):
            await worker.load("a", "c")
        await worker.adapters.unload("a", WAIT_S)
        await worker.adapters.unload("other", WAIT_S)
        await worker.load("a", "c")
        with pytest.raises(ModelNotFound):
            await worker.adapters.unload("other", WAIT_S)
        assert worker.published[-1] == ["b", "a"]
        assert worker.loads == ["loaded"] * 4 + ["failed"] * 2 + ["loaded"]


async def test_what_cannot_be_loaded_is_refused_with_the_reason(directory):
    async with Fixture(directory, max_loras=1) as worker:
        for folder, reason in (
            ("large", "rank 17, and this worker holds adapters up to rank 16: start workers with"),
            ("base", r"adapter_config\.json is missing"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await worker.load("x", folder)
        with pytest.raises(InvalidRequest, match="whole path"):
            await worker.adapters.load("x", Path("a"))
        with pytest.raises(InvalidRequest, match="a name has 1 to 256 characters"):
            await worker.load("", "a")
        assert not worker.published
    async with Fixture(directory) as worker:
        with pytest.raises(InvalidRequest, match="no memory for adapters: start workers with"):
            await worker.load("a")


async def test_a_sequence_keeps_its_adapter_until_it_ends(directory):
    """Unloading waits for it, or gives up; then the adapter serves as before."""
    async with Fixture(directory, max_loras=2) as worker:
        made, engine = await worker.load("a"), worker.bench.engine
        expected = await worker.tokens(worker.sequence("1", made.identity))
        assert expected != await worker.tokens(worker.sequence("2"))
        reserved = worker.sequence("3", made.identity)  # without KV it runs only once resumed
        assert engine.reserve(reserved).result(WAIT_S).num_cached == 32
        with pytest.raises(Unavailable, match="1 sequences still use adapter a after 0 s"):
            await worker.adapters.unload("a", 0.0)
        assert worker.published == [["a"], [], ["a"]]
        assert await worker.tokens(worker.sequence("4", made.identity)) == expected
        unloading = asyncio.create_task(worker.adapters.unload("a", WAIT_S))
        while worker.published[-1]:  # noqa: ASYNC110 (the engine's own thread retires it before)
            await asyncio.sleep(0.001)
        with pytest.raises(Unavailable, match="does not have the adapter"):
            engine.add(worker.sequence("5", made.identity)).result(WAIT_S)
        assert not unloading.done()
        engine.release("3").result(WAIT_S)
        await unloading
        with pytest.raises(Unavailable, match="does not have the adapter"):
            engine.reserve(worker.sequence("6", made.identity)).result(WAIT_S)


@pytest.mark.parametrize("command", ["load_adapter", "retire_adapter", "remove_adapter"])
async def test_a_caller_that_leaves_does_not_stop_a_change_half_way(directory, command):
    """The engine and the table of names agree afterwards: it can be changed again."""
    async with Fixture(directory, max_loras=1) as worker:
        engine, called = worker.bench.engine, asyncio.Event()
        command_of_engine, gate = getattr(engine, command), threading.Event()

        def held(*args):
            engine.submit(gate.wait)
            called.set()
            return command_of_engine(*args)

        if command != "load_adapter":
            await worker.load("a")
        setattr(engine, command, held)
        adapters = worker.adapters
        change = worker.load("a") if command == "load_adapter" else adapters.unload("a", WAIT_S)
        changing = asyncio.create_task(change)
        await asyncio.wait_for(called.wait(), WAIT_S)
        changing.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await changing
        setattr(engine, command, command_of_engine)
        if command == "load_adapter":
            await worker.adapters.unload("a", WAIT_S)
        await worker.load("b")
        assert worker.published[-1] == ["b"]


async def test_cached_blocks_are_those_of_one_adapter(directory):
    async with Fixture(directory, max_loras=2) as worker:
        identities = ["", (await worker.load("a")).identity, (await worker.load("b")).identity]
        for turn, cached in ((0, 0), (1, 32)):
            for number, identity in enumerate(identities):
                sequence = worker.sequence(f"{turn} {number}", identity)
                await worker.tokens(sequence)
                assert sequence.num_cached == cached


async def test_a_worker_that_joins_takes_on_the_adapters_of_its_model(directory, caplog):
    async with Fixture(directory, max_loras=2) as worker:
        made = await worker.load("a")
        gone = common_pb2.Adapter(name="gone", directory=str(directory / "gone"))
        kv, ready = worker.loaded.descriptor, common_pb2.WORKER_STATE_READY
        records = [
            common_pb2.WorkerRecord(kv=kv, state=ready, adapters=[made, gone]),
            common_pb2.WorkerRecord(state=ready, adapters=[common_pb2.Adapter(name="of another")]),
        ]
    async with Fixture(directory, max_loras=2) as worker:
        await worker.adapters.load_as(records)
        assert worker.published == [["a"]]
        assert "adapter gone of other workers is not loaded" in caplog.text
    async with Fixture(directory) as worker:
        await worker.adapters.load_as(records)
        assert not worker.published
