"""A cached prefix and proposed tokens change no token, whatever kind of KV a model has."""

from dataclasses import replace

import pytest

from baton.engine.draft_model import DraftProposer
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import Bench, load
from tests.unit.engine.checkpoints import assert_greedy, make_checkpoint
from tests.unit.engine.model_cases import KINDS

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
# Two tokens that are likely anyway, so that texts repeat.
BIAS = {5: 13.0, 6: 12.8}
BIASED = replace(GREEDY, logit_bias=BIAS)


@pytest.fixture(autouse=True)
def price(monkeypatch):
    """What is proposed does not depend on how fast this machine is."""
    monkeypatch.setattr(NgramProposer, "record_step", lambda *args: None)
    monkeypatch.setattr(DraftProposer, "price", lambda *args: 1e-6)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    architecture, options = KINDS[request.param]
    directory = tmp_path_factory.mktemp("kind")
    return directory, make_checkpoint(directory, architecture, tokenizer=True, **options)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft")
    make_checkpoint(directory, seed=1, tokenizer=True)
    return directory


def prompt(length, seed=0):
    return [(7 * i * i + 31 * seed + 5) % 250 + 2 for i in range(length)]


def test_a_cached_prefix(made):
    directory, reference = made
    tokens = prompt(330)
    with Bench(load(directory, kv_blocks=400, chunk_tokens=128).engine) as bench:
        texts = tokens, tokens, [*tokens[:320], *prompt(30, seed=1)]
        sequences = [Sequence("a", list(text), len(text), GREEDY) for text in texts]
        for sequence in sequences:
            bench.tokens(sequence)
            assert_greedy(reference, sequence.tokens, sequence.prompt_tokens)
    cold, *warm = (sequence.num_cached for sequence in sequences)
    assert not cold and min(warm) >= 256


def test_proposed_tokens_beside_a_prompt_that_takes_all_rows_of_a_step(made):
    directory, reference = made
    certain = replace(GREEDY, logit_bias={5: 99.0}, max_tokens=80)
    texts = {"a": [5, 6, 7, 8, 9] * 6, "b": [6, 5, 9] * 5, "c": prompt(330)}
    params = {"c": GREEDY}
    sequences = [Sequence(n, list(t), len(t), params.get(n, certain)) for n, t in texts.items()]
    with Bench(load(directory, kv_blocks=400, chunk_tokens=32, speculate=4).engine) as bench:
        bench.tokens(*sequences)
    for sequence in sequences:
        bias = sequence.params.logit_bias
        assert_greedy(reference, sequence.tokens, sequence.prompt_tokens, bias)
    prompts = [one for one in bench.reports if one.num_tokens >= 32]
    assert len(prompts) > 330 // 32 and max(one.num_proposed for one in bench.reports) > 1


@pytest.mark.parametrize("proposer", ["n-grams", "draft model"])
def test_proposed_tokens(proposer, made, draft):
    (directory, reference), options = made, {"speculate": 4}
    if proposer == "draft model":
        options = {"speculative_model": str(draft)}
    texts = [[5, 6, 7, 8, 9] * 6, prompt(40), prompt(75, seed=1)]
    sequences = [Sequence(f"{n}", text, len(text), BIASED) for n, text in enumerate(texts)]
    with Bench(load(directory, kv_blocks=400, **options).engine) as bench:
        bench.tokens(*sequences)
    for sequence in sequences:
        assert_greedy(reference, sequence.tokens, sequence.prompt_tokens, BIAS)
    proposed, accepted = bench.total("num_proposed"), bench.total("num_accepted")
    # What repeats is often right, and what another model says often wrong.
    assert accepted > 0 if proposer == "n-grams" else accepted < proposed
