"""Log-probabilities of prompts: transformers' numbers, however the prompt is computed."""

import dataclasses

import numpy as np
import pytest
import torch

from baton.engine import scheduler
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import Bench, load, tokens_of
from tests.unit.engine.checkpoints import load_reference

PROMPT = [(11 * i + i // 7) % 250 + 3 for i in range(150)]
SCORED = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def expected(directory):
    """Log-probabilities of every token at each position."""
    with torch.no_grad():
        return load_reference(directory)(torch.tensor([PROMPT])).logits[0].log_softmax(1).numpy()


def scored(name="scored", params=SCORED):
    return Sequence(name, list(PROMPT), len(PROMPT), params)


def columns(progress):
    """All that came, in order: logprobs, ranks, ids and log-probabilities of the likeliest."""
    parts = [one.prompt_logprobs for one in progress if one.prompt_logprobs is not None]
    names = [field.name for field in dataclasses.fields(parts[0])]
    return [np.concatenate([getattr(part, name) for part in parts]) for name in names]


def assert_equal(found, expected):
    logprobs, ranks, ids, best = found
    rows = expected[: len(PROMPT) - 1]
    own = np.take_along_axis(rows, np.array(PROMPT[1:])[:, None], 1)
    np.testing.assert_allclose(logprobs, own[:, 0], atol=1e-4)
    assert ranks.tolist() == (1 + (rows > own).sum(1)).tolist()
    likeliest = np.argsort(-rows, axis=1)[:, :3]
    assert ids.tolist() == likeliest.tolist()
    np.testing.assert_allclose(best, np.take_along_axis(rows, likeliest, 1), atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": "torch"},
        {"kernels": "native"},
        {"kernels": "native", "block_size": 12},  # whose attention is torch's
        {"kernels": "native", "chunk_tokens": 7},
        {"kernels": "native", "tp": 2, "threads": 2},
    ],
    ids=["torch", "native", "operations", "chunks", "ranks"],
)
def test_log_probabilities_are_those_of_transformers(directory, expected, settings):
    plain = Sequence("plain", PROMPT[:61], 61, dataclasses.replace(SCORED, prompt_logprobs=None))
    resumed = Sequence("resumed", PROMPT[:61], 60, SCORED)
    with Bench(load(directory, **settings).engine) as bench:
        got = bench.finish(plain, scored(), resumed, scored("beside"))
    for name in ("scored", "beside"):
        assert_equal(columns(got[name]), expected)
    others = (*got["plain"], *got["resumed"])
    assert all(one.prompt_logprobs is None for one in others), "the resumed one's were told before"
    steps = [report.num_tokens for report in bench.reports]
    assert max(steps) <= scheduler.SCORED_ROWS + 61 + 61


def test_no_cached_prefix_and_no_preemption_leaves_one_out_or_tells_it_twice(directory, expected):
    loaded = load(directory, kv_blocks=14, chunk_tokens=64)
    with Bench(loaded.engine) as bench:
        cached = bench.finish(Sequence("warm", list(PROMPT), len(PROMPT), SamplingParams()))
        params = dataclasses.replace(SCORED, max_tokens=60)
        urgent = Sequence("urgent", PROMPT[:50], 50, params, priority=-1.0)
        again = scored("again", params)
        got = bench.finish(urgent, again)
    assert again.preemptions and not again.num_cached and cached
    assert_equal(columns(got["again"]), expected)


def test_a_prompt_alone_ends_without_a_token(directory, expected):
    with Bench(load(directory, speculate=4).engine) as bench:
        only = dataclasses.replace(SCORED, max_tokens=0)
        got = bench.finish(scored(params=only), Sequence("plain", PROMPT[:1], 1, only))
    assert tokens_of(got["scored"]) == tokens_of(got["plain"]) == []
    assert {one.finish_reason for one in got["plain"]} == {"length"}
    assert_equal(columns(got["scored"]), expected)
