"""The GPU's runner gives token for token what the plain one gives, whoever comes and goes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from baton.engine.backends.gpu.device import HostStream, Stream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from tests.unit.engine.gpu.driving import CONFIG, MAX_CONTEXT, Driven, on_gpu, plain
from tests.unit.engine.gpu.lazy_stream import LazyStream


@dataclass
class Scenario:
    """Who comes and who is cancelled before each step; the same however it is computed."""

    coming: dict[int, list[Sequence]]
    leaving: dict[int, list[str]]


def a_scenario(seed: int, *, calm: bool = False) -> Scenario:
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


def _settings(dice: random.Random, calm: bool) -> dict[str, object]:
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
            {"min_tokens": 1}, {"logprobs": 2},
        ]  # fmt: skip
        settings |= dice.choice(changes)
    return settings


def play(scenario: Scenario, driven: Driven) -> Driven:
    end = max([*scenario.coming, *scenario.leaving]) + 1
    for at in range(end):
        for sequence in scenario.coming.get(at, ()):
            tokens, length = list(sequence.tokens), sequence.prompt_tokens
            driven.come(Sequence(sequence.seq_id, tokens, length, sequence.params))
        for name in scenario.leaving.get(at, ()):
            driven.cancel(name)
        if driven.busy:
            driven.step()
            _check(driven)
    while driven.busy:
        driven.step()
        _check(driven)
    assert driven.blocks.num_held == 0
    return driven


def _check(driven: Driven) -> None:
    stream = getattr(driven.runner, "_stream", None)
    if isinstance(stream, LazyStream):
        flying = driven.runner._async_launch is not None  # type: ignore[attr-defined]
        assert stream.unwaited == flying, "what the plan computed is there, for everybody to see"


def assert_same(some: Driven, others: Driven) -> None:
    assert some.tokens.keys() == others.tokens.keys()
    for name, tokens in some.tokens.items():
        expected = others.tokens[name]
        if "cancelled" in (some.ends[name], others.ends[name]):  # maybe a step earlier or later
            shorter = min(len(tokens), len(expected))
            assert tokens[:shorter] == expected[:shorter]
        else:
            assert tokens == expected
            assert some.ends[name] == others.ends[name]
            assert some.logprobs[name] == others.logprobs[name]


def streams(seed: int) -> list[Stream]:
    return [HostStream(), LazyStream(), LazyStream(seed)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [17, 200], ids=["tiny pool", "roomy"])
def test_tokens_are_those_of_the_plain_runner(seed: int, num_blocks: int) -> None:
    scenario = a_scenario(seed)
    expected = play(scenario, plain(num_blocks))
    preempted = expected.planner.preemptions
    assert (preempted > 0) == (num_blocks == 17)
    for at, stream in enumerate(streams(seed)):
        driven = on_gpu(stream, num_blocks, graphs=at % 2 == 0)
        assert_same(play(scenario, driven), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"speculate": 3}, {"max_batch": 2}], ids=str
)
def test_so_they_are_without_overlap_with_drafts_and_in_small_batches(
    seed: int, options: dict[str, int]
) -> None:
    scenario = a_scenario(100 + seed)
    theirs = {name: value for name, value in options.items() if name != "overlap"}
    expected = play(scenario, plain(60, **theirs))
    assert_same(play(scenario, on_gpu(LazyStream(seed), 60, **options)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_steady_decoding_is_ahead_of_its_plans_and_the_same(seed: int) -> None:
    scenario = a_scenario(200 + seed, calm=True)
    driven = play(scenario, on_gpu(LazyStream(seed), 200))
    assert_same(driven, play(scenario, plain(200)))
    assert isinstance(driven.runner, GpuRunner)
    stats = driven.runner.stats
    assert stats.async_launches > 0.6 * stats.launches
    assert stats.wasted_rows < 0.2 * stats.async_rows
    assert (
        play(scenario, on_gpu(LazyStream(seed), 200, overlap=False)).runner.stats.async_launches
        == 0
    )  # type: ignore[attr-defined]


def test_padding_is_counted() -> None:
    driven = on_gpu(HostStream(), 100, max_batch=6)
    for name in "abcde":
        driven.add(Sequence(name, [5, 6], 2, SamplingParams(max_tokens=3, ignore_eos=True)))
    driven.finish()
    stats = driven.runner.stats  # type: ignore[attr-defined]
    assert (stats.rows, stats.padding_rows, stats.launches) == (10, 2, 2)
    assert driven.runner.decode_rows == {"wanted": 10, "padding": 2, "wasted": 0}  # type: ignore[attr-defined]


def test_a_sequence_runs_up_to_the_longest_context() -> None:
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    both = [plain(40), on_gpu(LazyStream(), 40)]
    for driven in both:
        driven.add(Sequence("a", [7, 8, 9], 3, params))
        driven.finish()
    assert len(both[0].tokens["a"]) == MAX_CONTEXT - 3
    assert_same(both[1], both[0])
