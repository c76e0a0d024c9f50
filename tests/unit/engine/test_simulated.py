"""The simulated engine: equal tokens however they came about, and no wrong block goes unnoticed."""

import dataclasses
import random
import time
from pathlib import Path

import pytest
import torch

from baton.config import EngineConfig, SimulatedSpeed
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.engine.simulated import SimulatedRunner
from baton.errors import ConfigError, InternalError
from baton.generation.sampling_params import SamplingParams
from kvtransfer.pool import Checksum, KvPool, Slots, copy_slots

TINY = Path(__file__).parents[3] / "benchmarks" / "scenarios" / "tiny.json"
VOCAB, BLOCK, EOS = 500, 4, 7
GREEDY = SamplingParams(max_tokens=8)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
PENALTIES = SamplingParams(max_tokens=8, repetition_penalty=1.9, logit_bias={3: 9.0}, logprobs=2)


def runner(dtype=torch.float32, speed="1e9,0", blocks=16):
    pool = torch.zeros(blocks, 2, 2, 2, BLOCK, 8, dtype=dtype)
    return SimulatedRunner(SimulatedSpeed.parse(speed), pool, Sampler(frozenset({EOS}), VOCAB))


def sequence(length, blocks, params=GREEDY, salt=""):
    tokens = [(31 * i) % VOCAB for i in range(length)]
    return Sequence("s", tokens, length, params, salt, block_ids=blocks)


def compute(engine, of, start, count):
    drawn = engine.run(ScheduledStep([ScheduledSequence(of, start, count)])).get(of.seq_id)
    return drawn.token_ids[0] if drawn else None


def decode(engine, of, steps):
    """Goes on from a computed prompt and its first token."""
    new = []
    for _ in range(steps):
        token = compute(engine, of, of.num_tokens - 1, 1)
        assert token is not None
        of.tokens.append(token)
        new.append(token)
    return new


class TestKv:
    """Slots hold what their sequence wrote, and a step that reads notices when they do not."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_prompt_may_be_computed_in_any_chunks(self, dtype):
        blocks = random.Random(1).sample(range(1300), 1300)
        whole, parts = runner(dtype, blocks=1300), runner(dtype, blocks=1300)
        first = compute(whole, sequence(5000, blocks), 0, 5000)
        other = sequence(5000, blocks)
        tokens = list(other.tokens)
        for start, end in ((0, 1), (1, 2), (2, 2050), (2050, 4999), (4999, 5000)):
            other.tokens = tokens[:end]  # its tokens may come one by one, too
            last = compute(parts, other, start, end - start)
        assert last == first
        assert torch.equal(whole.pool.view(torch.int16), parts.pool.view(torch.int16))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
    def test_blocks_from_elsewhere_are_read_in_full(self, dtype):
        sender, receiver = runner(dtype), runner(dtype)
        compute(sender, sequence(11, [0, 1, 2]), 0, 11)
        slots = Slots((0, 1, 2), 11), Slots((9, 8, 7), 11)
        copy_slots(KvPool(sender.pool), slots[0], KvPool(receiver.pool), slots[1], Checksum())
        moved = sequence(11, [9, 8, 7])
        moved.tokens.append(42)
        assert compute(receiver, moved, 11, 1) is not None

    @pytest.mark.parametrize("position", range(12))
    def test_one_wrong_slot_is_noticed(self, position):
        engine = runner()
        compute(engine, sequence(12, [0, 1, 2]), 0, 12)
        engine.pool.view(torch.int32)[position // BLOCK, 1, 1, 1, position % BLOCK, 5] ^= 1
        with pytest.raises(InternalError, match=rf"token {position}$"):
            compute(engine, sequence(13, [0, 1, 2, 3]), 12, 1)

    def test_wrong_kv_is_noticed_once_it_is_said_to_be_right(self):
        """A model cannot know: its worker gives up what was computed from it."""
        engine, moved = runner(), sequence(12, [0, 1, 2, 3])
        moved.tokens.append(42)
        moved.unverified = True
        assert compute(engine, moved, 12, 1) is not None
        moved.unverified = False
        with pytest.raises(InternalError, match=r"token 0$"):
            decode(engine, moved, 1)

    def test_a_block_of_another_prompt_position_salt_layer_or_head_is_noticed(self):
        engine = runner()
        compute(engine, sequence(12, [0, 1, 2]), 0, 12)
        for wrong in ([1, 0, 2, 3], [0, 0, 2, 3]):
            with pytest.raises(InternalError, match="does not hold"):
                compute(engine, sequence(13, wrong), 12, 1)
        with pytest.raises(InternalError, match="block 0 does not hold the KV of token 0"):
            compute(engine, sequence(13, [0, 1, 2, 3], salt="other"), 12, 1)
        block = engine.pool[0].clone()
        for axis in range(3):  # layers, K and V, heads
            engine.pool[0] = block.flip(axis)
            with pytest.raises(InternalError, match=r"token 0$"):
                compute(engine, sequence(5, [0, 4]), 4, 1)

    def test_in_a_batch_a_block_is_noticed_within_a_round_over_all(self):
        engine = runner(blocks=32)
        running = [sequence(12, list(range(at, at + 8))) for at in (0, 8, 16)]
        for number, one in enumerate(running):
            one.seq_id = str(number)
            one.tokens.append(compute(engine, one, 0, 12) or 0)
        engine.zero_blocks([17])
        with pytest.raises(InternalError, match="sequence 2: block 17 "):
            for _ in range(3 * 8):
                step = [ScheduledSequence(one, one.num_tokens - 1, 1) for one in running]
                found = engine.run(ScheduledStep(step))
                for one in running:
                    one.tokens.append(found[one.seq_id].token_ids[0])

    def test_after_a_preemption_all_is_read_again(self):
        engine, running = runner(), sequence(12, [0, 1, 2])
        compute(engine, running, 0, 12)
        running.block_ids = [0, 5, 6]  # the first block was still cached
        engine.zero_blocks([0])
        with pytest.raises(InternalError, match="block 0 "):
            compute(engine, running, 4, 8)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALTIES])
def test_neither_a_batch_nor_a_failover_changes_a_token(params):
    alone = compute(runner(), sequence(9, [0, 1, 2], params), 0, 9)
    engine, other = runner(), sequence(6, [6, 5])
    running = sequence(9, [0, 1, 2, 3, 4], params)
    other.seq_id = "other"
    sampled = engine.run(
        ScheduledStep([ScheduledSequence(other, 0, 6), ScheduledSequence(running, 0, 9)])
    )
    assert sampled["s"].token_ids == (alone,)
    running.tokens.append(alone)
    whole = [alone, *decode(engine, running, 5)]
    rest = sequence(9, [9, 8, 7, 6, 5], params)  # what was delivered is the new prompt
    rest.tokens += whole[:3]
    assert compute(runner(), rest, 0, 12) == whole[3]


def test_tokens_depend_on_settings_and_seeds_and_not_on_the_salt():
    def tokens(params, salt=""):
        return tuple(compute(runner(), sequence(n, [0, 1, 2, 3], params, salt), 0, n)
                     for n in range(1, 13))  # fmt: skip

    greedy, seeded = tokens(GREEDY), tokens(SEEDED)
    assert tokens(GREEDY, "salt") == tokens(dataclasses.replace(GREEDY, seed=6)) == greedy
    assert len({greedy, seeded, tokens(dataclasses.replace(SEEDED, seed=6))}) == 3
    assert set(tokens(dataclasses.replace(GREEDY, logit_bias={3: 99.0}))) == {3}
    # Asking for log-probabilities takes the long way, over logits and the sampler.
    assert tokens(dataclasses.replace(GREEDY, logprobs=0)) == greedy


class TestSimulatedSpeed:
    """A step takes what its prompt tokens and sequences cost."""

    def test_of_a_step(self):
        pace = SimulatedSpeed.parse("1000,10,0.5")
        assert pace.step_s(500, 0) == pytest.approx(0.5)
        assert pace.step_s(0, 4) == pytest.approx(0.012)
        assert pace.step_s(100, 1) == pytest.approx(0.1105)

    def test_of_a_step_with_contexts(self):
        pace = SimulatedSpeed.parse("1000,10,0.5,2,4000,1.1")
        assert pace.step_s(0, 4, 3000) == pytest.approx(0.018)
        assert pace.step_s(100, 0, 0, 100 * 4000) == pytest.approx(0.2)
        assert pace.step_s(100, 4, 3000) == pytest.approx(1.1 * 0.118)

    @pytest.mark.parametrize("text", ["8000,10", "8000,0", "8000,10,0,2", "1,2,3,4,5,1.5"])
    def test_is_written_as_it_is_parsed(self, text):
        assert str(SimulatedSpeed.parse(text)) == text

    def test_is_kept(self):
        engine, of = runner(speed="100,60"), sequence(11, [0, 1, 2])
        begin = time.monotonic()
        compute(engine, of, 0, 10)
        between = time.monotonic()
        compute(engine, of, 10, 1)
        assert between - begin >= 0.1
        assert time.monotonic() - between >= 0.06

    @pytest.mark.parametrize(
        "text", ["8000", "fast,10", "0,10", "8000,-1", "8000,nan", "1,2,3,4,5,6,7"]
    )
    def test_nonsense_is_refused(self, text):
        with pytest.raises(ConfigError, match=r"--simulate '.*': write the prefill rate"):
            EngineConfig(simulate=text)
