"""States of linear attention: their blocks, their place in the pool, and what they rule out."""

import random
from dataclasses import replace

import pytest
import torch

from baton.block_hash import root_hash
from baton.config import EngineConfig
from baton.engine import build, state_cache
from baton.engine.kernels.delta_rule import DeltaRuleShape, StateLayout
from baton.engine.kernels.torch.delta_rule import state_rows
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.scheduler import ChunkBudget, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.proposer import Proposer
from baton.engine.speculative.verify import verify
from baton.engine.state_cache import CachedPrefix, StateBlockManager
from baton.errors import ConfigError, Overloaded
from baton.generation.sampling_params import SamplingParams
from baton.kv_groups import KvGroups
from baton.local.model_check import check_model
from tests.unit.engine.bench import WAIT_S, Bench, load
from tests.unit.engine.checkpoints import assert_greedy, load_reference, make_checkpoint

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
    blocks = StateBlockManager(6, SIZE, True, 4, zeroed.append, zip)
    state = blocks.allocate_state()
    blocks.release(state)
    again = blocks.allocate_state()
    assert not zeroed, "a state does not read what was there"
    blocks.release(again)
    assert set(blocks.allocate(6)) == set(range(6))
    assert zeroed == [sorted({*state, *again})]


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
    assert loaded.descriptor.state_blocks == states
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


def test_options_that_states_rule_out_are_refused_by_name(directory):
    settings = EngineConfig(str(directory), speculate=65)
    for refuses in (check_model, build.load):
        with pytest.raises(ConfigError, match=r"^--speculate 65: .* at most 64 tokens"):
            refuses(settings)
    on_gpu = replace(settings, speculate=4, device="cuda:0")
    with pytest.raises(ConfigError, match=r"^--speculate: Qwen3_5ForCausalLM has linear"):
        check_model(on_gpu)


def test_ranks_and_devices_that_cannot_have_states_are_refused(directory):
    config = ModelConfig.load(directory)
    with pytest.raises(ConfigError, match="--tp 4 does not divide the model's 2 KV heads"):
        config.check_ranks(EngineConfig(tp=4))
    own = Shard(1, 2).config(config).delta_rule.shape
    assert (own.key_heads, own.value_heads) == (2, 4)
    with pytest.raises(ConfigError, match="linear attention; add --tp-backend gloo"):
        load(directory, tp=2, threads=2)


def test_layers_are_numbered_in_the_pool_and_among_states(directory):
    config = ModelConfig.load(directory)
    assert config.layer_groups.size == 1
    assert config.layer_groups.places[3] == (0, 0)
    assert config.delta_rule.state_layers == (0, 1, 2, None)
    assert replace(config, delta_rule=None).layer_groups.size == 4


class Guesses(Proposer):
    """Proposes any tokens."""

    def propose(self, sequences, limits, rows):
        choose = random.Random(rows)
        return [tuple(choose.choices(range(2), k=limit)) for limit in limits]

    def learn(self, sequence, sampled):
        pass

    def record_step(self, rows, proposed, seconds):
        pass


class Machine:
    """A scheduler whose blocks hold what was computed into them: tokens, instead of numbers."""

    def __init__(self, num_blocks, state_blocks=3, proposer=None):
        self.memory, self.state_blocks = dict.fromkeys(range(num_blocks)), state_blocks
        self.blocks = StateBlockManager(
            num_blocks, SIZE, True, state_blocks, copy=self.copy,
            zero=lambda blocks: self.memory.update(dict.fromkeys(blocks)),
        )  # fmt: skip
        self.scheduler = Scheduler(self.blocks, ChunkBudget(24), 3, proposer)
        self.accepted = 0
        self.told = set()

    def copy(self, source, target):
        self.memory.update(zip(target, [self.memory[block] for block in source], strict=True))

    def step(self):
        """Computes a step: what a sequence reads has to be what its tokens give."""
        step, choose = self.scheduler.schedule(), random.Random(5)
        for item in step.sequences:
            sequence, start = item.sequence, item.start
            known = tuple(sequence.tokens)
            assert start == sequence.num_computed
            states = [self.memory[block] for block in sequence.state_blocks]
            assert len(states) == self.state_blocks
            assert not start or states == [known[:start]] * len(states)
            for index in range(start // SIZE):
                block = sequence.block_ids[index]
                assert self.memory[block] == known[: (index + 1) * SIZE]
            end = start + item.count - len(item.proposed)  # which no state keeps
            for index in range(start // SIZE, -(-end // SIZE)):
                self.memory[sequence.block_ids[index]] = known[: min(end, (index + 1) * SIZE)]
            self.memory.update(dict.fromkeys(sequence.state_blocks, known[:end]))
        takes, before = self.scheduler.takes_checkpoint(step), set(self.blocks._checkpoints)
        self.scheduler.update_after_launch(step)
        for item in step.sequences:
            sequence, sampled = item.sequence, []
            if item.samples and sequence.awaits_token:
                sampled = [choose.randrange(2) for _ in range(len(item.proposed) + 1)]
                sampled = sampled[: verify(item.proposed, sampled)]
                sequence.tokens[-1:] = sampled
                sequence.awaits_token = False
                self.accepted += len(sampled) - 1
            self.scheduler.update_after_landing(item, sampled)
            if sequence.num_tokens >= sequence.limit:
                self.drop(sequence)
        known = takes or step.num_proposed or before >= set(self.blocks._checkpoints)
        assert known, "it was known before the launch"
        waiting = [one for one in self.scheduler.waiting if not one.num_computed]
        assert not any(one.state_blocks for one in waiting), "nor has a preempted one a state"
        self.check()
        return [item.sequence for item in step.sequences]

    def drop(self, sequence):
        self.scheduler.remove(sequence)
        self.scheduler.free(sequence)

    def run(self, *sequences):
        for sequence in sequences:
            sequence.limit = sequence.limit if sequence.limit < 999 else sequence.num_tokens + 1
            self.scheduler.add(sequence)
        while self.scheduler.running or self.scheduler.num_waiting:
            assert self.step(), "some sequence always runs"

    def check(self):
        self.blocks.check()
        changes = self.blocks.take_changes()
        self.told = (self.told - changes.evicted) | changes.stored
        assert self.told == self.blocks._by_hash[0].keys()


@pytest.fixture
def short_checkpoints(monkeypatch):
    monkeypatch.setattr(state_cache, "MIN_CHECKPOINT", 2 * SIZE)


def prompt_of(tokens):
    return Sequence("s", list(tokens), len(tokens), GREEDY)


def cached(machine, tokens):
    """How many of a prompt's tokens it finds cached; it runs to its first token."""
    sequence = prompt_of(tokens)
    machine.run(sequence)
    return sequence.num_cached


def test_a_prompt_resumes_at_its_last_full_block_and_where_others_left_it(short_checkpoints):
    machine, shared = Machine(200, state_blocks=40), list(range(50))
    assert cached(machine, shared) == 0
    assert cached(machine, shared) == 48, "one of 50 tokens at least is computed"
    left = [[*shared[:30], *[one] * 30] for one in (98, 97, 96)]
    assert cached(machine, left[0]) == 0, "nobody left it there before"
    assert cached(machine, left[1]) == 28
    assert cached(machine, left[2]) == 28
    assert cached(machine, left[1]) == 56
    assert cached(machine, list(range(200, 200 + SIZE))) == 0
    assert cached(machine, list(range(200, 200 + SIZE))) == 0, "too short to be worth a copy"


def test_long_prompts_have_checkpoints_where_kv_takes_as_many_blocks(short_checkpoints):
    machine, shared = Machine(400, state_blocks=5), list(range(110))
    cached(machine, shared)
    assert len(machine.blocks._checkpoints) == 6  # 5 of 20 tokens, and the last
    assert cached(machine, [*shared[:59], *[98] * 9]) == 40


def test_without_a_prefix_cache_no_step_ends_for_a_checkpoint(short_checkpoints):
    blocks = StateBlockManager(60, SIZE, False, 3, zero=list, copy=zip)
    scheduler = Scheduler(blocks, ChunkBudget(64), max_batch=3)
    scheduler.add(prompt_of([7] * 30))
    step = scheduler.schedule()
    assert [one.count for one in step.sequences] == [30]
    scheduler.update_after_launch(step)
    scheduler.update_after_landing(step.sequences[0])
    blocks.check()
    assert not blocks.num_cached


def test_an_answer_is_cached_up_to_a_checkpoint_that_moves_along(short_checkpoints):
    machine = Machine(60)
    sequence = prompt_of([7] * 21)
    sequence.limit = 21 + 40
    machine.run(sequence)
    assert len(machine.blocks._checkpoints) == 3, "two of the prompt, one of the answer"
    again = prompt_of([*sequence.tokens, 9, 9, 9])
    machine.run(again)
    assert again.num_cached == 60


def test_the_oldest_checkpoint_is_evicted_with_the_kv_that_led_to_it_alone(short_checkpoints):
    machine, shared = Machine(60, state_blocks=9), list(range(24))
    prompts = [[*shared, *[one] * 9] for one in (90, 91)]
    for prompt in (*prompts, prompts[1]):
        cached(machine, prompt)
    blocks = machine.blocks
    # 6 blocks of both, 2 of each, and 3 checkpoints: of each, and where the second left the first.
    assert (blocks.num_cached, blocks.num_free) == (10 + 3 * 9, 23)
    held = blocks.allocate(24)
    machine.check()
    assert (blocks.num_cached, blocks.num_free) == (8 + 2 * 9, 10), (
        "that of the first prompt is gone"
    )
    blocks.release(held)
    assert cached(machine, prompts[0]) == 24
    assert cached(machine, prompts[1]) == 32
    held = blocks.allocate(blocks.num_available)
    machine.check()
    assert not machine.told
    assert len(held) == blocks.num_held == 60


def test_a_prefix_whose_checkpoint_its_own_blocks_evict_is_computed(short_checkpoints):
    machine, tokens = Machine(30, state_blocks=9), list(range(34))
    assert cached(machine, tokens) == 0
    assert (machine.blocks.num_cached, machine.blocks.num_free) == (8 + 9, 13)
    held = machine.blocks.allocate(12)
    sequence = prompt_of(tokens)
    machine.run(sequence)
    assert sequence.num_cached == 0
    machine.blocks.release(held)


def test_content_that_is_broken_leaves_the_cache_with_its_checkpoints(short_checkpoints):
    machine, tokens = Machine(60), list(range(34))
    cached(machine, tokens)
    sequence = prompt_of([*tokens, 1, 2, 3])
    sequence.limit = 90
    machine.scheduler.add(sequence)
    machine.step()
    assert sequence.num_cached == 32
    private = machine.scheduler.uncache(sequence)
    machine.check()
    assert private == sequence.block_ids
    assert not machine.blocks.num_cached
    machine.drop(sequence)
    assert cached(machine, tokens) == 0


def test_other_content_under_the_same_hash_gets_no_checkpoint():
    blocks, tokens = StateBlockManager(20, SIZE, True, 2, zero=list, copy=zip), [1, 2, 3, 4]
    (state, kv), hashes = (blocks.allocate_state(), blocks.allocate(1)), [77]
    assert blocks.cache_state(state, kv, CachedPrefix(hashes, root_hash(""), tokens))
    other = CachedPrefix(hashes, root_hash(""), [5, 6, 7, 8])
    assert not blocks.cache_state(state, blocks.allocate(1), other)
    blocks.check()


@pytest.mark.parametrize("seed", range(9))
def test_whatever_is_resumed_is_the_state_of_its_tokens(seed, short_checkpoints):
    """Prompts that share prefixes come and go; a small pool evicts checkpoints and preempts."""
    proposer = Guesses(3, 999) if seed > 5 else None
    choose, machine, resumed = random.Random(seed), Machine(38, proposer=proposer), 0
    live, stems = list[Sequence](), [[one] * 60 for one in range(2)]
    for at in range(400):
        if len(live) < 5 and choose.random() < 0.3:
            known = [one.tokens for one in live] + stems
            stem = choose.choice(known)[: choose.randrange(1, 60)]
            sequence = prompt_of([*stem, *choose.choices(range(2), k=choose.randrange(1, 9))])
            sequence.limit = sequence.num_tokens + choose.randrange(1, 30)
            stems[at % 2] = sequence.tokens
            machine.scheduler.add(sequence)
            live.append(sequence)
        machine.step()
        if live and choose.random() < 0.05:
            machine.drop(live[0])
            live[0].limit = 0
        resumed += sum(one.num_cached > 0 for one in live if one.num_tokens >= one.limit)
        live = [one for one in live if one.num_tokens < one.limit]
    for one in live:
        machine.drop(one)
    machine.check()
    assert resumed
    assert bool(machine.accepted) == (proposer is not None)
    assert machine.scheduler.preemptions
    assert not machine.blocks.num_held


@pytest.mark.parametrize(
    "engine",
    [{"kernels": "native"}, {"kernels": "torch"}, {"tp": 2, "tp_backend": "gloo", "threads": 2}],
    ids=["native", "torch", "ranks"],
)
def test_logits_are_the_same_with_and_without_a_warm_cache(engine, directory):
    """The tokens' log-probabilities, which a wrong state changes even where no token changes."""
    shared, params = (
        [(7 * i) % 250 + 2 for i in range(430)],
        replace(GREEDY, max_tokens=16, logprobs=4),
    )

    def generated(prompts, **settings):
        loaded = load(directory, kv_blocks=400, chunk_tokens=200, **engine, **settings)
        with Bench(loaded.engine) as bench:
            for number, prompt in enumerate(prompts):
                sequence = Sequence(f"{number}", list(prompt), len(prompt), params)
                got = bench.finish(sequence)[sequence.seq_id]
                yield sequence, [one for progress in got for one in progress.logprobs]
            assert not bench.engine.load().result(WAIT_S).blocks_held

    (first, _), *_ = generated([shared])
    goes_on = [*first.tokens, 5, 5, 5]
    others = [[*shared[:300], 9, 8, 7], [*shared[:300], 7, 8, 9]]
    prompts = [shared, shared, *others, goes_on]
    warm, cold = list(generated(prompts)), list(generated(prompts, prefix_cache=False))
    assert [one.num_cached for one, _ in warm] == [0, 416, 256, 256, 416]
    assert [one.num_cached for one, _ in cold] == [0] * 5
    assert [logprobs for _, logprobs in warm] == [logprobs for _, logprobs in cold]
    reference = load_reference(directory)
    for one, _ in warm:
        assert_greedy(reference, one.tokens, one.prompt_tokens)


def test_a_decode_worker_gets_only_the_rest_and_the_state_or_starts_by_itself(directory):
    """And a handoff needs no checkpoint of a prefix whose KV is cached."""
    tokens = [(7 * i) % 250 + 2 for i in range(430)]
    parts = [*tokens[:250], *[9] * 20]
    loaded = load(directory, kv_blocks=400)
    with Bench(loaded.engine) as bench:
        expected = bench.tokens(Sequence("a", list(tokens), 430, GREEDY))["a"]
        held = Sequence("b", list(tokens), 430, GREEDY)
        reserved = bench.engine.reserve(held).result(WAIT_S)
        assert (reserved.num_cached, reserved.started) == (416, False)
        assert len(reserved.block_ids) == 27 + loaded.layout.state_blocks
        bench.engine.release("b").result(WAIT_S)
        local = Sequence("c", list(tokens), 430, GREEDY)
        assert bench.engine.reserve(local, start_tokens=14).result(WAIT_S).started
        got: list[int] = []
        while len(got) < len(expected):
            got += bench.until("c", "token_ids").token_ids
        assert got == expected
        handed_over = Sequence("d", list(parts), 270, GREEDY)
        assert bench.engine.reserve(handed_over).result(WAIT_S).num_cached == 240
        bench.engine.release("d").result(WAIT_S)
        here = Sequence("e", list(parts), 270, GREEDY)
        assert bench.engine.reserve(here, 270).result(WAIT_S).started
        bench.until("e", "token_ids")
        assert here.num_cached == 0
