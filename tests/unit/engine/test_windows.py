"""Groups of layers with windows: the same tokens, and no more blocks than the windows need."""

import random

import pytest
import torch

from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.kv_cache import KvLayout
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from baton.kv_descriptor import differences
from baton.kv_groups import NO_BLOCK, LayerGroups, held
from tests.unit.engine.bench import WAIT_S, Bench, load
from tests.unit.engine.checkpoints import assert_greedy, make_checkpoint
from tests.unit.engine.test_scheduler import finish, run

WINDOW = 40
MODELS = {
    "one full layer, five with a window": (
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    ),
    "every other layer, with sinks": (
        "GptOssForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "num_local_experts": 4},
    ),
    "all layers": ("MistralForCausalLM", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
}
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    architecture, changes = MODELS[request.param]
    directory = tmp_path_factory.mktemp("windowed")
    return directory, make_checkpoint(directory, architecture, **changes)


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 300), k=length)


def a_sequence(name, tokens, params=GREEDY):
    return Sequence(name, list(tokens), len(tokens), params)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_tokens_are_those_of_transformers(checkpoint, kernels):
    directory, reference = checkpoint
    prompts = {"long": prompt(150), "short": prompt(9, seed=1)}
    loaded = load(directory, kernels=kernels, chunk_tokens=32)
    groups = loaded.layout.groups
    with Bench(loaded.engine) as bench:
        got = bench.tokens(*(a_sequence(*one) for one in prompts.items()))
        for name, tokens in prompts.items():
            assert_greedy(reference, [*tokens, *got[name]], len(tokens))
        most = max(report.load.blocks_held for report in bench.reports)
        assert most <= sum(groups.most_blocks(len(one) + 64, 32) for one in prompts.values())
        # The prompt again, and a further turn of it, from what was cached.
        again = a_sequence("again", prompts["long"])
        assert bench.tokens(again) == {"again": got["long"]}
        assert again.num_cached == 144
        turn = [*prompts["long"], *got["long"], *prompt(20, seed=2)]
        further = a_sequence("further", turn)
        assert_greedy(reference, [*turn, *bench.tokens(further)["further"]], len(turn))
        assert further.num_cached == 208
    few = load(directory, kernels=kernels, chunk_tokens=32, kv_blocks=groups.most_blocks(216, 32))
    with Bench(few.engine) as bench:
        both = (a_sequence(name, prompts["long"]) for name in ("one", "other"))
        assert bench.tokens(*both) == dict.fromkeys(("one", "other"), got["long"])
        assert bench.engine.load().result(WAIT_S).preemptions


def test_layers_form_groups_of_one_size_with_little_padding():
    def groups(full, windowed):
        found = LayerGroups.from_windows([128] * windowed + [None] * full)
        assert len(set(found.places)) == full + windowed
        assert all(index < found.size for _, index in found.places)
        assert all(
            found.windows[group] == (128 if layer < windowed else 0)
            for layer, (group, _) in enumerate(found.places)
        )
        return found.size, found.windows.count(0), found.windows.count(128)

    assert groups(32, 0) == (32, 1, 0) and groups(0, 32) == (32, 0, 1)
    assert groups(12, 12) == (12, 1, 1)  # gpt-oss
    assert groups(5, 29) == (5, 1, 6) and groups(4, 22) == (4, 1, 6)  # Gemma 3
    # Two layers of full attention have the place of one.
    found = LayerGroups.from_windows([128] * 50 + [None] * 10, [1] * 50 + [2] * 10)
    assert (found.size, found.windows.count(0), found.windows.count(128)) == (5, 1, 10)
    assert {at for group, at in found.places[50:]} == set(range(10))
    assert groups(8, 24) == (8, 1, 3) and groups(13, 12) == (13, 1, 1)


def test_blocks_are_flat_over_ten_thousand_tokens():
    blocks = BlockManager(40, 16, windows=(100, 30))
    scheduler = Scheduler(blocks, ChunkBudget(64), max_batch=2)
    sequences = [a_sequence(name, prompt(250, seed)) for seed, name in enumerate("ab")]
    for sequence in sequences:
        scheduler.add(sequence)
    most = 0
    while min(sequence.num_tokens for sequence in sequences) < 10_000:
        step = scheduler.schedule()
        assert step.sequences
        scheduler.update_after_launch(step)
        for one in step.sequences:
            sequence, end = one.sequence, one.start + one.count
            firsts = blocks.groups.first_blocks(one.start)
            for at, block in enumerate(sequence.block_ids[: -(-end // 16) * 2]):
                assert (block != NO_BLOCK) or at // 2 < firsts[at % 2], "no block within a window"
            scheduler.update_after_landing(one)
        most = max(most, blocks.num_held)
    blocks.check()
    assert most <= 2 * blocks.groups.most_blocks(10_000, 64) and not scheduler.preemptions
    for sequence in sequences:
        assert len(held(sequence.block_ids)) <= 100 // 16 + 30 // 16 + 2 * 2
        finish(scheduler, sequence)
    assert blocks.num_held == 0


def test_prompts_that_grow_into_each_other_preempt_the_last_one():
    """Windows take blocks chunk by chunk, so that prompts can run out of them half-way."""
    blocks = BlockManager(56, 16, prefix_cache=False, windows=(0, 64))
    scheduler = Scheduler(blocks, ChunkBudget(128), max_batch=4)
    sequences = [a_sequence(f"{seed}", prompt(300, seed)) for seed in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    done = set()
    while len(done) < 3:
        step = scheduler.schedule()
        assert step.sequences
        run(scheduler, step)
        for one in step.sequences:
            assert one.sequence.num_slots >= one.start + one.count
            if one.sequence.num_tokens == 310:
                done.add(one.sequence.seq_id)
                finish(scheduler, one.sequence)
    assert blocks.num_held == 0 and scheduler.preemptions


@pytest.mark.parametrize("windows", [(0, 24), (24,), (0, 0, 9), (0, 16, 40)])
def test_cached_prefixes_have_every_block_that_a_window_reaches(windows):
    dice = random.Random(3)
    blocks, count = BlockManager(400, 4, windows=windows), len(windows)
    scheduler = Scheduler(blocks, ChunkBudget(16), max_batch=4)
    shared = prompt(120)
    for turn in range(60):
        tokens = shared[: dice.randrange(8, 120)] + prompt(dice.randrange(1, 20), turn)
        sequence = a_sequence(f"{turn}", tokens)
        scheduler.use_cache(sequence)
        hit = sequence.num_computed
        firsts = blocks.groups.first_blocks(hit)
        for at, block in enumerate(sequence.block_ids):
            assert (block != NO_BLOCK) == (at // count >= firsts[at % count])
            if block != NO_BLOCK:
                entry = blocks._entries[block]
                assert entry.group == at % count
                assert list(entry.tokens) == tokens[at // count * 4 :][:4]
        assert hit < len(tokens)
        scheduler.add(sequence)
        while sequence.num_tokens == len(tokens):
            run(scheduler, scheduler.schedule())
        finish(scheduler, sequence)
    assert hit > 0


def test_halves_with_other_groups_are_told_apart():
    halves = [
        KvLayout(8, 2, 2, 16, 16, torch.float32, windows=windows).descriptor("x", torch.float32)
        for windows in ((0, 128), (0, 64), (0,))
    ]
    assert differences(*halves[:2]) == ["group_windows: [0, 128] != [0, 64]"]
    assert differences(*halves[1:]) == ["group_windows: [0, 64] != []"]
    assert differences(halves[2], halves[2]) == []
