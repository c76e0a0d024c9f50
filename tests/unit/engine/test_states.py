"""States of linear attention: their blocks, their place in the pool, and what they rule out."""

from dataclasses import replace

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.backends.gpu.backend import refused
from baton.engine.block_manager import BlockManager
from baton.engine.kernels.delta_rule import DeltaRuleShape, StateLayout
from baton.engine.kernels.torch.delta_rule import state_rows
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.scheduler import ChunkBudget, Scheduler
from baton.engine.sequence import Sequence
from baton.errors import ConfigError, Overloaded
from baton.generation.sampling_params import SamplingParams
from baton.kv_groups import KvGroups
from baton.local.model_check import check_model
from tests.unit.engine.bench import WAIT_S, Bench, load
from tests.unit.engine.checkpoints import make_checkpoint

SIZE = 4
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPTS = [[(7 * i + 5 * one) % 250 + 2 for i in range(10 + 30 * one)] for one in range(4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("states")
    make_checkpoint(path, "Qwen3_5ForCausalLM", tokenizer=True)
    return path


def test_rows_of_a_state_have_places_of_their_own_in_its_blocks():
    shape = DeltaRuleShape(key_heads=4, value_heads=8, key_size=16, value_size=24, kernel=4)
    # A chunk of 5 rows and a rest, as in 8 bits.
    layout = StateLayout(shape, layers=3, kv_heads=2, chunk_bytes=500, block_chunks=4)
    pool = torch.zeros(60, 2, 2, 2, 125, dtype=torch.float32)
    tables = torch.randperm(60)[: 2 * layout.num_blocks].view(2, -1)
    parts = [state_rows(pool, layout, table, layer) for table in tables for layer in range(3)]
    written = [torch.randn(4, shape.head_rows, 24) for _ in parts]
    for part, state in zip(parts, written, strict=True):
        part.write(state)
    assert all(torch.equal(part.read(), state) for part, state in zip(parts, written, strict=True))
    unused = set(range(60)) - set(tables.flatten().tolist())
    assert not pool[list(unused)].any()
    # The heads that belong to a KV head are in its chunks: what moves those, moves them.
    pool[:, :, :, 1] = 0
    for part, state in zip(parts, written, strict=True):
        assert torch.equal(part.read()[:2], state[:2])
        assert not part.read()[2:].any()


def test_blocks_that_held_a_state_are_zeroed_before_they_hold_kv():
    zeroed: list[list[int]] = []
    blocks = BlockManager(6, SIZE, zero=zeroed.append)
    state = blocks.allocate(4, states=True)
    blocks.release(state)
    again = blocks.allocate(3, states=True)
    assert not zeroed, "a state does not read what was there"
    blocks.release(again)
    assert set(blocks.allocate(6)) == set(range(6))
    assert zeroed == [sorted({*state, *again})]


def test_a_sequence_has_a_state_until_it_ends_or_is_preempted():
    blocks = BlockManager(12, SIZE, prefix_cache=False)
    scheduler = Scheduler(blocks, ChunkBudget(64), max_batch=4, state_blocks=3)
    first, second = (Sequence(name, [5] * 8, 8, GREEDY) for name in "ab")
    for one in (first, second):
        scheduler.add(one)
    for _ in range(12):
        step = scheduler.schedule()
        for one in step.sequences:
            assert len(one.sequence.state_blocks) == 3
        scheduler.update_after_launch(step)
        for one in step.sequences:
            scheduler.update_after_landing(one)
        blocks.check()
    assert scheduler.preemptions
    assert not second.state_blocks or not second.num_computed
    for one in (first, second):
        scheduler.remove(one)
        scheduler.free(one)
    assert blocks.num_free == 12


def test_a_handoff_is_the_blocks_of_tokens_and_then_the_states():
    sequence = Sequence("a", [1] * 9, 9, GREEDY, block_ids=[4, 5, 6, 7], state_blocks=[1, 2])
    assert sequence.handoff_blocks(9, SIZE) == [4, 5, 6, 1, 2]
    assert KvGroups((0,), SIZE, state_blocks=2).handoff_end(9) == 5 * SIZE
    assert KvGroups((0,), SIZE).handoff_end(9) == 9


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_tokens_are_the_same_alone_in_a_batch_and_after_preemption(kernels, directory):
    def generated(blocks, prompts):
        loaded = load(directory, kernels=kernels, kv_blocks=blocks, chunk_tokens=32)
        with Bench(loaded.engine) as bench:
            tokens = bench.tokens(
                *(Sequence(f"{n}", list(p), len(p), GREEDY) for n, p in enumerate(prompts))
            )
            return list(tokens.values()), bench.engine._scheduler.preemptions

    alone = [generated(128, [prompt])[0][0] for prompt in PROMPTS]
    assert generated(128, PROMPTS) == (alone, 0)
    crowded, preemptions = generated(55, PROMPTS)
    assert crowded == alone
    assert preemptions


def test_a_pool_has_room_for_a_state_and_a_context(directory):
    loaded = load(directory, kv_blocks=20)
    states = loaded.layout.state_blocks
    assert loaded.max_context == (20 - states) * 16 - 1
    with pytest.raises(ConfigError, match=f"state of a sequence takes {states} KV blocks, and"):
        load(directory, kv_blocks=states)
    with Bench(loaded.engine) as bench:
        held = Sequence("a", [5] * 8, 8, GREEDY)
        reserved = bench.engine.reserve(held).result(WAIT_S)
        assert len(reserved.block_ids) == 1 + states
        with pytest.raises(Overloaded):
            bench.engine.reserve(Sequence("b", [5] * 99, 99, GREEDY)).result(WAIT_S)
        bench.engine.release("a").result(WAIT_S)
        assert bench.engine.load().result(WAIT_S).blocks_free == 20


def test_a_state_that_a_sender_may_still_write_is_quarantined(directory):
    loaded = load(directory)
    states = loaded.layout.state_blocks
    with Bench(loaded.engine) as bench:
        sequence = Sequence("a", [5] * 8, 8, GREEDY)
        blocks = bench.engine.reserve(sequence).result(WAIT_S).block_ids
        quarantined = bench.engine.release("a", 0).result(WAIT_S)
        assert len(quarantined) == len(set(quarantined)) == 1 + states
        assert set(blocks) <= set(quarantined)
        loaded.runner.pool[blocks[-1]] = torch.nan
        bench.engine.end_quarantine(quarantined).result(WAIT_S)
        assert loaded.runner.pool.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"speculate": 4}, "--speculate"), ({"max_loras": 1}, "--max-loras")],
)
def test_options_that_states_rule_out_are_refused_by_name(settings, named, directory):
    settings = EngineConfig(str(directory), **settings)
    for refuses in (check_model, build.load):
        with pytest.raises(ConfigError, match=f"^{named}: Qwen3_5ForCausalLM has linear attention"):
            refuses(settings)


def test_ranks_and_devices_that_cannot_have_states_are_refused(directory):
    config = ModelConfig.load(directory)
    with pytest.raises(ConfigError, match="--tp 4 does not divide the model's 2 KV heads"):
        Shard(0, 4).check(config)
    own = Shard(1, 2).config(config).delta_rule.shape
    assert (own.key_heads, own.value_heads) == (2, 4)
    with pytest.raises(ConfigError, match="linear attention; add --tp-backend gloo"):
        load(directory, tp=2, threads=2)
    assert "linear attention" in refused(config, 16, (9, 0))


def test_layers_are_numbered_in_the_pool_and_among_states(directory):
    config = ModelConfig.load(directory)
    assert config.layer_groups.size == 1
    assert config.layer_groups.places[3] == (0, 0)
    assert config.delta_rule.state_layers == (0, 1, 2, None)
    assert replace(config, delta_rule=None).layer_groups.size == 4
