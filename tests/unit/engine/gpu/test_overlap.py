"""Overlap and the GPU's runner: the tokens of a CPU's plain loop, and when the host has to wait."""

import functools
import itertools
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from baton.engine import state_cache
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kernels.triton import sampling
from baton.engine.sampling import randomness, top_k_top_p
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.engine.state_cache import StateBlockManager
from baton.generation.sampling_params import SamplingParams, StructuredOutput
from baton.generation.structured_output import GrammarCompiler
from tests.unit.engine.gpu.driving import (
    CONFIG,
    EOS,
    MAX_CONTEXT,
    MODEL,
    SIZE,
    Driven,
    model_of,
    on_cpu,
    on_gpu,
)
from tests.unit.engine.gpu.lazy_stream import LazyStream
from tests.unit.engine.gpu.models import CONFIGS
from tests.waiting import WAIT_S

STRUCTURED = {"structured_output": StructuredOutput(regex="([a-f]{2,3}_)+"), "ignore_eos": False}
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
STATES = replace(CONFIGS["qwen3.5"], max_context=MAX_CONTEXT)  # one of its layers has KV


@pytest.fixture(autouse=True)
def _sample_without_the_interpreter(monkeypatch):
    """It takes 50 ms a row; the kernel has tests of its own."""

    def sample(logits, settings, seeds, positions, tokens):
        numbers = randomness.uniform(seeds.numpy().view(np.uint64), positions)
        known = np.nan_to_num(settings.numpy())  # what padding has are any numbers
        for at, (temperature, top_k, top_p, min_p) in enumerate(known.tolist()):
            params = SamplingParams(
                temperature=temperature if temperature > 1e-6 else 1.0,
                top_k=int(top_k), top_p=top_p, min_p=min_p,
            )  # fmt: skip
            row = logits[at].float().numpy()
            drawn = top_k_top_p.sample(row[None], [params], numbers[at : at + 1])[0]
            finite = drawn < len(row)
            tokens[at] = int(row.argmax()) if finite and not temperature else int(drawn)

    monkeypatch.setattr(sampling, "sample", sample)


@dataclass
class Scenario:
    """Which sequences come and are cancelled before each step; the same however it is computed."""

    coming: dict[int, list[Sequence]]
    leaving: dict[int, list[str]]


def a_scenario(seed, *, calm=False):
    """Calm ones decode for long with few changes; others come, go and ask for everything."""
    dice = random.Random(seed)
    coming: dict[int, list[Sequence]] = {}
    leaving: dict[int, list[str]] = {}
    shared = [dice.randrange(2, CONFIG.vocab_size) for _ in range(13)]
    for number in range(5 if calm else 14):
        at = 0 if calm else dice.randrange(40)
        tail = [dice.randrange(2, CONFIG.vocab_size) for _ in range(dice.randint(1, 9))]
        prompt = shared[: dice.choice((0, 8, 13))] + tail
        if not calm and dice.random() < 0.4:
            prompt = tail[:1]  # in the batch without a chunk
        params = SamplingParams(**_settings(dice, calm))
        name = f"s{number}"
        coming.setdefault(at, []).append(Sequence(name, prompt, len(prompt), params))
        if dice.random() < (0.2 if calm else 0.3):
            leaving.setdefault(at + dice.randrange(1, 20), []).append(name)
    return Scenario(coming, leaving)


def _settings(dice, calm):
    settings: dict[str, object] = {
        "max_tokens": dice.randrange(20, 60) if calm else dice.randrange(1, 40),
        "ignore_eos": calm or dice.random() < 0.7,
        "seed": dice.randrange(1 << 40),
        "stop_token_ids": frozenset(dice.sample(range(CONFIG.vocab_size), 0 if calm else 2)),
    }
    if dice.random() < 0.6:
        settings |= {"temperature": dice.uniform(0.3, 1.5), "top_p": dice.choice((1.0, 0.9, 0.4))}
        settings |= {"top_k": dice.choice((0, 0, 5)), "min_p": dice.choice((0.0, 0.0, 0.05))}
    if not calm and dice.random() < 0.25:
        changes: list[dict[str, object]] = [
            {"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"logit_bias": {5: 9.0}},
            {"min_tokens": 1}, {"logprobs": 2}, STRUCTURED, {**STRUCTURED, "logprobs": 1},
            {"allowed_token_ids": frozenset(range(5, 60))}, {"bad_words": ((7,), (8, 9))},
        ]  # fmt: skip
        settings |= dice.choice(changes)
    return settings


@functools.cache
def grammars():
    """Of a vocabulary whose tokens are end-of-sequence and what can be printed."""
    pieces = ["<pad>", "</s>", *map(chr, range(33, 127))]
    library = tokenizers.Tokenizer(BPE({piece: at for at, piece in enumerate(pieces)}, []))
    library.decoder = ByteLevel()
    library.add_special_tokens(pieces[:2])
    with tempfile.TemporaryDirectory() as folder:
        library.save(str(Path(folder) / "tokenizer.json"))
        compiler = GrammarCompiler(Path(folder), CONFIG.vocab_size, EOS)
        compiler.compile(StructuredOutput(regex="a"), (), 0).result(WAIT_S)  # reads it
    return compiler


def fresh(one):
    """A sequence that has not run, with a matcher where its output is restricted."""
    output, tokens = one.params.structured_output, list(one.tokens)
    matcher = output and grammars().compile(output, tokens, one.prompt_tokens).result(WAIT_S)
    return Sequence(
        one.seq_id, tokens, one.prompt_tokens, one.params, pause_after=one.pause_after,
        grammar=matcher,
    )  # fmt: skip


def play(scenario, driven):
    end = max([*scenario.coming, *scenario.leaving]) + 1
    for at in range(end):
        for one in scenario.coming.get(at, ()):
            driven.reserve(fresh(one))
        for name in scenario.leaving.get(at, ()):
            driven.cancel(name)
        if driven.busy:
            driven.step()
            assert_published_steps_have_run(driven)
    while driven.busy:
        driven.step()
        assert_published_steps_have_run(driven)
    assert driven.blocks.num_held == 0
    return driven


def assert_published_steps_have_run(driven):
    stream = getattr(driven.runner, "_stream", None)
    if isinstance(stream, LazyStream):
        in_flight = driven.engine._flight is not None
        copies = isinstance(driven.blocks, StateBlockManager)  # which are not waited for
        assert stream.unwaited >= in_flight and (in_flight or copies or not stream.unwaited)


def assert_same(some, others):
    assert some.tokens.keys() == others.tokens.keys()
    for name, tokens in some.tokens.items():
        expected = others.tokens[name]
        if "cancelled" in (some.ends[name], others.ends[name]):  # maybe a step earlier or later
            shorter = min(len(tokens), len(expected))
            assert tokens[:shorter] == expected[:shorter]
        else:
            assert tokens == expected
            assert some.ends[name] == others.ends[name]
            assert list(map(rounded, some.logprobs[name])) == list(
                map(rounded, others.logprobs[name])
            )
            told = pytest.approx(others.prompts[name], rel=1e-4, abs=1e-4)
            assert some.prompts[name] == told


def rounded(logprobs):
    top = [(token, pytest.approx(score, abs=1e-5)) for token, score in logprobs.top]
    return logprobs.token_id, pytest.approx(logprobs.logprob, abs=1e-5), top


@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize("num_blocks", [17, 200], ids=["tiny pool", "roomy"])
def test_tokens_are_those_of_a_cpu(way, num_blocks):
    scenario = a_scenario(seed := way % 3)
    expected = play(scenario, on_cpu(num_blocks))
    assert (expected.scheduler.preemptions > 0) == (num_blocks == 17)
    stream, options = [
        (Stream(), {"graphs": True}), (LazyStream(), {}), (LazyStream(seed), {"graphs": True}),
        (LazyStream(seed), {"overlap": False}),
    ][way]  # fmt: skip
    assert_same(play(scenario, on_gpu(stream, num_blocks, **options)), expected)


@pytest.mark.parametrize("seed", range(2))
def test_states_are_those_of_a_cpu_and_copied_before_another_step_changes_them(seed, monkeypatch):
    monkeypatch.setattr(state_cache, "MIN_CHECKPOINT", SIZE)
    model, scenario = model_of(STATES), a_scenario(seed)
    expected = play(scenario, on_cpu(150, model=model))
    for at, stream in enumerate((LazyStream(), LazyStream(seed))):
        driven = play(scenario, on_gpu(stream, 150, model=model, graphs=at == 0))
        assert_same(driven, expected)
        assert driven.blocks._checkpoints, "which later prompts resume at"


def test_copies_of_blocks_are_waited_for_before_others_write_and_behind_other_ranks_steps():
    stream = LazyStream()
    runner = on_gpu(stream, 8).runner
    runner.pool.copy_(torch.arange(8.0).view(8, 1, 1, 1, 1, 1).expand_as(runner.pool))
    runner.copy_blocks([1, 2], [4, 5])
    assert runner.pool[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 1, 2, 6, 7]
    assert stream.unwaited
    runner.wait_for_writes([4])
    assert not stream.unwaited
    runner.pools = (runner.pool, runner.pool.clone())
    stream.put(lambda: None)
    runner.copy_blocks([1], [6])
    assert stream.unwaited == 1, "the copy alone"
    assert (runner.pools[1][6] == 1).all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{"speculate": 3}, {"max_batch": 2}], ids=str)
def test_tokens_with_speculation_and_in_small_batches(seed, options):
    scenario = a_scenario(100 + seed)
    expected = play(scenario, on_cpu(60, **options))
    assert_same(play(scenario, on_gpu(LazyStream(seed), 60, **options)), expected)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_told_of_prompts_is_that_of_a_cpu(seed):
    """With tokens behind them and without, in the batch with and without a chunk."""
    scenario = a_scenario(300 + seed)
    changes: list[dict[str, object]] = [
        {"prompt_logprobs": 2, "structured_output": None}, {"prompt_logprobs": 1, "max_tokens": 0},
        {"embedding": True, "max_tokens": 0}, {"max_tokens": 0}, {},
    ]  # fmt: skip
    for number, one in enumerate(itertools.chain.from_iterable(scenario.coming.values())):
        one.params = replace(one.params, **changes[number % len(changes)])
    expected = play(scenario, on_cpu(60))
    assert sum(map(bool, expected.prompts.values())) > 4
    for overlap in (True, False):
        assert_same(play(scenario, on_gpu(LazyStream(seed), 60, overlap=overlap)), expected)


def prompt(number, dice):
    """One that a prefill worker computes, often behind tokens that others begin with, too."""
    tokens = [7] * dice.choice((0, 9, 17)) + dice.choices(range(2, 90), k=dice.randint(1, 40))
    params = SamplingParams(max_tokens=9, seed=number, temperature=0.7, ignore_eos=True)
    return Sequence(f"{number}", tokens, len(tokens), params, pause_after=1)


def handed_over(driven, dice, coming):
    """Has prompts come, and some go, at random: the first token of each that stays and, when it is
    told, the KV. Then how many steps there were, and how many were in flight behind another."""
    found, steps, in_flight = dict[str, tuple[int, torch.Tensor]](), 0, 0
    while coming or driven.busy:
        while coming and dice.random() < 0.5:
            driven.add(coming.pop())
        driven.progress = []
        driven.step()
        steps, in_flight = steps + 1, in_flight + bool(driven.in_flight)
        held = driven.engine._sequences
        for one in driven.progress:
            if one.token_ids:
                count = held[one.seq_id].num_computed
                blocks = driven.runner.pool[held[one.seq_id].block_ids[: -(-count // SIZE)]]
                by_token = blocks.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:count]
                found[one.seq_id] = one.token_ids[0], by_token.clone()
                driven.cancel(one.seq_id)
        if held and dice.random() < 0.1:
            driven.cancel(dice.choice(list(held)))
    assert driven.blocks.num_held == 0
    return found, steps, in_flight


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_blocks", [24, 200], ids=["tiny pool", "roomy"])
def test_what_a_prefill_worker_hands_over_is_what_a_cpu_computes(seed, num_blocks):
    dice = random.Random(seed)
    prompts = [prompt(number, dice) for number in range(16)]
    driven = on_gpu(LazyStream(seed), num_blocks)
    found, steps, in_flight = handed_over(driven, dice, [*map(fresh, prompts)])
    assert len(found) > 8 and in_flight > steps / 2
    for one in prompts:
        if one.seq_id in found:
            alone, _, _ = handed_over(on_cpu(40), random.Random(3), [fresh(one)])
            token_id, kv = alone[one.seq_id]
            assert found[one.seq_id][0] == token_id
            torch.testing.assert_close(found[one.seq_id][1], kv, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_steady_decoding_always_has_a_step_in_flight(seed):
    scenario = a_scenario(200 + seed, calm=True)
    driven = play(scenario, on_gpu(LazyStream(seed), 200))
    assert_same(driven, play(scenario, on_cpu(200)))
    rows = driven.runner.decode_rows
    assert rows["wasted"] <= 2 < 0.05 * rows["wanted"]


def test_padding_is_counted_and_sequences_run_up_to_the_longest_context():
    driven = on_gpu(Stream(), 100)
    for name in "abcde":
        driven.add(Sequence(name, [5, 6], 2, SamplingParams(max_tokens=3, ignore_eos=True)))
    driven.finish()
    assert driven.runner.decode_rows == {"wanted": 10, "padding": 2, "wasted": 0}
    both = [on_cpu(40), on_gpu(LazyStream(), 40)]
    for driven in both:
        driven.add(sequence("a", 3, SamplingParams(max_tokens=1000, ignore_eos=True)))
        driven.finish()
    assert len(both[0].tokens["a"]) == MAX_CONTEXT - 3
    assert_same(both[1], both[0])


def sequence(name, length=6, params=LONG):
    tokens = [(7 * i + sum(name.encode())) % 90 + 2 for i in range(length)]
    return Sequence(name, tokens, length, params)


def decoding(stream, names="ab", num_blocks=40, **options):
    """Some sequences, and a step of theirs in flight."""
    driven = on_gpu(stream, num_blocks, **options)
    for name in names:
        driven.add(sequence(name))
    driven.step(4)
    assert driven.in_flight == list(names)
    return driven


def tokens_alone(name, params=LONG):
    driven = on_cpu(40)
    driven.add(fresh(sequence(name, params=params)))
    driven.finish()
    return driven.tokens[name]


def runner_of(driven):
    assert isinstance(driven.runner, GpuRunner)
    return driven.runner


class TestBlocksThatOthersWriteInto:
    """A prefill worker writes into reserved blocks without this engine's stream."""

    CONTENT = 5.0

    def reserve_all_and_write(self, driven, stream):
        """Whether a reservation of all free blocks keeps what is written once all has run."""
        free = driven.blocks.num_available
        late = sequence("late", free * SIZE - 1)
        pool, blocks = driven.runner.pool, list(driven.do(driven.engine.reserve(late)).block_ids)
        assert len(blocks) == free
        pool[blocks] = self.CONTENT
        stream.run(stream.pending)
        return bool((pool[blocks] == self.CONTENT).all())

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_row_of_a_cancelled_sequence_has_ended_by_then(self, waits, monkeypatch):
        stream = LazyStream()
        driven = decoding(stream)
        if not waits:
            monkeypatch.setattr(driven.runner, "wait_for_writes", lambda blocks: None)
        driven.cancel("a")
        assert self.reserve_all_and_write(driven, stream) == waits

    def test_zeroes_are_written_by_then(self):
        stream = LazyStream()
        driven = decoding(stream, "a")
        driven.do(driven.engine.reserve(sequence("gone")))
        driven.cancel("gone")  # its blocks may hold anything, and are zeroed
        assert self.reserve_all_and_write(driven, stream)

    def test_nothing_is_waited_for_while_every_sequence_keeps_its_blocks(self):
        stream = LazyStream()
        driven = decoding(stream)
        driven.do(driven.engine.reserve(sequence("late")))
        assert stream.pending == 1
        driven.cancel("late")
        driven.finish()
        assert driven.tokens == {name: tokens_alone(name) for name in "ab"}
        decoding(stream).runner.wait_for_writes()  # all of the pool can be waited for
        assert stream.pending == 0


def test_a_steps_report_tells_how_long_the_host_waited_for_the_device():
    class Slow(LazyStream):
        def record_event(self):
            event = super().record_event()
            wait = event.synchronize
            event.synchronize = lambda: time.sleep(0.02) or wait()
            return event

    driven, reports = on_gpu(Slow(), 40), []
    driven.engine._publish_report = reports.append
    driven.add(sequence("a"))
    driven.step(5)
    assert len(reports) == 4
    assert all(report.waited_s >= 0.02 for report in reports)
    assert sum(report.waited_s for report in reports) == pytest.approx(runner_of(driven).waited_s)


@pytest.mark.parametrize("one_a_step", [False, True])
def test_a_preempted_sequence_gets_the_token_in_flight_and_computes_its_own_again(one_a_step):
    driven = decoding(LazyStream(), graphs=one_a_step)
    driven.scheduler._preempt(driven.scheduler.running.last)
    if one_a_step:
        driven.scheduler.chunk.max_tokens = 1
    driven.finish()
    assert driven.tokens == {name: tokens_alone(name) for name in "ab"}


class TestFailures:
    def test_a_step_that_fails_on_the_device_fails_with_what_was_launched_behind_it(self):
        stream = LazyStream()
        driven = decoding(stream)
        stream.fails_in = 1
        driven.step()  # the one before it is published
        assert all(one.token_ids and not one.abort_reason for one in driven.progress)
        known = {name: list(driven.tokens[name]) for name in "ab"}
        driven.step()
        assert {one.abort_reason for one in driven.progress} == {
            "engine step failed: RuntimeError: the device failed"
        }
        assert len(driven.progress) == 2
        assert driven.tokens == known
        assert stream.pending == 0
        driven.add(sequence("c"))
        driven.finish()
        assert driven.tokens["c"] == tokens_alone("c")

    def test_it_is_not_raised_by_a_reservation_nor_for_sequences_that_left(self):
        stream = LazyStream()
        driven = decoding(stream)
        stream.fails_in = 0
        for name in "ab":
            driven.cancel(name)
        driven.reserve(sequence("c"))
        driven.finish()
        assert driven.tokens["c"] == tokens_alone("c")
        assert driven.ends["c"] == "length"

    def test_a_step_that_cannot_be_launched_is_launched_behind_the_one_in_flight(
        self, monkeypatch, caplog
    ):
        driven = decoding(Stream())
        decode, calls = MODEL.decode, list[int]()

        def failing(*arguments):
            calls.append(len(calls))
            if len(calls) == 1:
                raise RuntimeError("out of memory")
            return decode(*arguments)

        monkeypatch.setattr(MODEL, "decode", failing)
        driven.step()
        assert "a launch failed" in caplog.text
        assert len(calls) == 2
        driven.finish()
        assert driven.tokens == {name: tokens_alone(name) for name in "ab"}

    @pytest.mark.parametrize("logprobs", [None, 1])
    def test_logits_that_are_not_finite_end_their_sequence_alone_and_are_no_index(
        self, monkeypatch, logprobs
    ):
        driven = on_gpu(LazyStream(), 40)
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=logprobs)
        driven.add(sequence("a", params=params))
        driven.add(sequence("b"))
        driven.step(4)
        decode, fed = MODEL.decode, list[list[int]]()

        def broken(token_ids, *arguments):
            fed.append(token_ids.tolist())
            logits = decode(token_ids, *arguments)
            logits[:1] *= torch.nan if len(fed) <= 2 else 1
            return logits

        monkeypatch.setattr(MODEL, "decode", broken)
        driven.step()
        driven.step()
        assert "not finite" in driven.ends["a"]
        assert len(fed) == 2, "one was launched behind it"
        assert max(map(max, fed)) < MODEL.config.vocab_size
        driven.finish()
        assert driven.tokens["b"] == tokens_alone("b")


class TestLaunches:
    @pytest.mark.parametrize(
        ("settings", "in_flight"),
        [
            ({}, ["a", "b"]),
            ({"max_tokens": 3}, ["a"]),  # it surely ends with the token that is being sampled
            ({"logprobs": 1}, ["a", "b"]),
            ({"repetition_penalty": 1.2}, ["a", "b"]),
            ({"logit_bias": {3: 1.0}}, ["a", "b"]),
            ({"min_tokens": 30}, ["a", "b"]),
            ({"bad_words": ((7,), (8, 9))}, ["a", "b"]),
            (STRUCTURED, ["a", "b"]),
        ],
        ids=str,
    )
    def test_steps_are_in_flight_whatever_their_rows_ask_for(self, settings, in_flight):
        driven = on_gpu(LazyStream(), 40)
        driven.add(sequence("a"))
        params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **settings})
        driven.add(fresh(sequence("b", params=params)))
        driven.step(4)
        assert driven.in_flight == in_flight
        driven.finish()
        assert driven.tokens["a"] == tokens_alone("a")
        assert driven.tokens["b"] == tokens_alone("b", params)

    @pytest.mark.parametrize(("seconds", "chunks"), [(0.001, 2), (1.0, 1)])
    def test_a_short_prompt_waits_for_one_chunk_that_takes_long(self, seconds, chunks):
        driven = on_gpu(LazyStream(), 40)
        long, short = sequence("long", 60), sequence("short", 3)
        driven.scheduler.chunk.record_step(ScheduledStep([ScheduledSequence(long, 0, 40)]), seconds)
        driven.add(long)
        driven.step()
        assert driven.in_flight == ["long"]
        driven.step()
        assert (long.num_computed, driven.in_flight == ["long"]) == (16 * chunks, chunks == 2)
        short.priority = -1.0
        driven.add(short)
        driven.step()
        assert "short" in driven.in_flight
        driven.finish()
        for name in ("long", "short"):
            one = sequence(name, 60 if name == "long" else 3)
            alone = on_cpu(40)
            alone.add(one)
            alone.finish()
            assert driven.tokens[name] == alone.tokens[name]

    def test_masks_are_made_while_the_forward_pass_runs(self, monkeypatch):
        stream, runs = LazyStream(), list[int]()
        driven = on_gpu(stream, 40)
        driven.add(sequence("a"))
        params = SamplingParams(max_tokens=40, **STRUCTURED)
        driven.add(fresh(sequence("b", params=params)))
        driven.step()
        masks = Sampler.masks

        def watched(sampler, rows):
            runs.append(stream.pending)
            return masks(sampler, rows)

        monkeypatch.setattr(Sampler, "masks", watched)
        driven.step(4)
        assert runs == [1] * 4

    def test_a_sequence_parks_with_its_last_token(self):
        driven, parking = on_gpu(LazyStream(), 40), sequence("a")
        parking.pause_after = 4
        driven.add(parking)
        driven.finish()
        assert driven.tokens["a"] == tokens_alone("a")[:4]
        assert (parking.num_tokens, parking.num_computed) == (10, 9)
        assert len(parking.block_ids) == -(-9 // SIZE)
        driven.cancel("a")

    def test_a_newcomer_with_one_token_to_compute_costs_no_launch_of_its_own(self):
        driven = decoding(LazyStream(), "a")
        runner, launches = runner_of(driven), []
        launch = runner.launch
        runner.launch = lambda plan: launches.append(len(plan.sequences)) or launch(plan)
        few = SamplingParams(max_tokens=4, ignore_eos=True)
        for step in range(20):
            driven.reserve(sequence(f"n{step}", 1, few))
            driven.step()
        assert launches == [2, 3, 4, *[5] * 17]
        driven.cancel("n19")
        driven.finish()
        assert runner.decode_rows["wasted"] == 1
        assert driven.tokens["a"] == tokens_alone("a")
        assert all(len(driven.tokens[f"n{step}"]) == 4 for step in range(19))

    def test_another_engine_uses_nothing_of_the_last_one(self):
        stream = LazyStream()
        runner = decoding(stream).runner
        assert stream.pending == 1
        second = Driven(runner, 40, overlap=True)
        for name in "ab":
            second.add(sequence(name))
        second.finish()
        assert second.tokens == {name: tokens_alone(name) for name in "ab"}
