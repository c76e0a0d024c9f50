"""Structured output on an engine: what a grammar allows, whatever else happens to the sequence."""

import dataclasses
import json

import jsonschema
import numpy as np
import pytest
import torch

from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.engine import Engine
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.generation.sampling_params import Reasoning, SamplingParams, StructuredOutput
from baton.generation.structured_output import GrammarCompiler
from baton.text import load_tokenizer
from tests.unit.engine.bench import WAIT_S, Bench, load, tokens_of

LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"enum": [1, 20]}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}
PERSONS = StructuredOutput(json_schema=json.dumps(LIST))
GREEDY = SamplingParams(max_tokens=300, structured_output=PERSONS)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=7)
EOS = 1


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request):
    return request.param


class Demo:
    """The demo model, its tokenizer and its grammars."""

    def __init__(self):
        self.loaded = load(kv_blocks=200, prefix_cache=False)
        self.tokenizer = load_tokenizer(self.loaded.path)
        vocab_size = self.loaded.model_config.vocab_size
        self._grammars = GrammarCompiler(self.loaded.path, vocab_size, {EOS})

    def bench(self, num_blocks=200, proposer=None, max_batch=8, prefix_cache=False):
        loaded = self.loaded
        blocks = BlockManager(num_blocks, loaded.layout.block_size, prefix_cache)
        scheduler = Scheduler(blocks, ChunkBudget(64), max_batch, proposer)
        eos, most = frozenset({EOS}), loaded.max_context
        return Bench(lambda publish: Engine(loaded.runner, scheduler, eos, most, publish))

    def sequence(self, name, params, prompt="items = ", output=(), **options):
        prompt_ids = self.tokenizer.encode(prompt)
        tokens, grammar = [*prompt_ids, *output], None
        if params.structured_output or params.reasoning:
            compiled = self._grammars.compile(
                params.structured_output, tokens, len(prompt_ids), params.reasoning
            )
            grammar = compiled.result(WAIT_S)
        return Sequence(name, tokens, len(prompt_ids), params, grammar=grammar, **options)


@pytest.fixture(scope="module")
def demo():
    return Demo()


@pytest.fixture(scope="module")
def undisturbed(demo):
    """What greedy and seeded sequences get alone, by their temperature."""
    with demo.bench() as bench:
        return {
            params.temperature: bench.tokens(demo.sequence("a", params))["a"]
            for params in (GREEDY, SEEDED)
        }


def test_the_output_matches_its_schema_and_ends_with_it(demo, undisturbed, params):
    tokens = undisturbed[params.temperature]
    jsonschema.validate(json.loads(demo.tokenizer.decode(tokens)), LIST)
    assert tokens[-1] == EOS


def test_an_output_that_is_cut_says_so(demo, undisturbed):
    cut = dataclasses.replace(GREEDY, max_tokens=9)
    with demo.bench() as bench:
        got = bench.finish(demo.sequence("a", cut))["a"]
    assert (tokens_of(got), got[-1].finish_reason) == (undisturbed[0.0][:9], "length")


def test_others_in_the_batch_change_nothing(demo, undisturbed, params):
    free = dataclasses.replace(params, structured_output=None, max_tokens=40)
    with demo.bench() as bench:
        alone = bench.tokens(demo.sequence("free", free))["free"]
        mixed = bench.tokens(
            demo.sequence("free", free),
            *(demo.sequence(name, params) for name in "ab"),
        )
    assert mixed == {
        "free": alone,
        "a": undisturbed[params.temperature],
        "b": undisturbed[params.temperature],
    }


def test_a_preempted_sequence_goes_on_within_its_grammar(demo, undisturbed, params):
    longest = -(-max(map(len, undisturbed.values())) // demo.loaded.layout.block_size) + 2
    with demo.bench(num_blocks=longest + 1) as bench:
        names = "abc"
        got = bench.tokens(*(demo.sequence(n, params) for n in names))
    assert bench.reports[-1].load.preemptions > 0
    assert got == dict.fromkeys(names, undisturbed[params.temperature])


@pytest.mark.parametrize("delivered", [1, 7, 30])
def test_another_worker_goes_on_behind_what_was_delivered(demo, undisturbed, params, delivered):
    """Failover, a resumed stream, and a handoff's decode worker alike know the tokens alone."""
    tokens = undisturbed[params.temperature]
    with demo.bench() as bench:
        rest = demo.sequence("a", params, output=tokens[:delivered])
        assert tokens[:delivered] + bench.tokens(rest)["a"] == tokens


def test_a_handoff_takes_its_grammar_to_the_decode_worker(demo, undisturbed, params):
    with demo.bench() as bench:
        first = demo.sequence("prefill", params, pause_after=1)
        bench.engine.add(first).result(WAIT_S)
        (token,) = bench.until("prefill", "token_ids").token_ids
        parked = demo.sequence("decode", params)
        reserved = bench.engine.reserve(parked).result(WAIT_S)
        for source, target in zip(first.block_ids, reserved.block_ids, strict=False):
            demo.loaded.runner.pool[target] = demo.loaded.runner.pool[source]
        bench.engine.resume("decode", parked.num_tokens, token).result(WAIT_S)
        rest = []
        while not (progress := bench.until("decode", "token_ids")).finish_reason:
            rest += progress.token_ids
        bench.engine.release("prefill").result(WAIT_S)
    assert [token, *rest, *progress.token_ids] == undisturbed[params.temperature]


@pytest.fixture
def proposes_much(monkeypatch):
    monkeypatch.setattr("baton.engine.speculative.ngram.worthwhile", lambda chance, price, most: 8)
    monkeypatch.setattr("baton.engine.speculative.ngram.LENGTHS", (2, 1))


def test_speculation_changes_no_token(demo, params, proposes_much):
    """Proposed tokens that the grammar forbids are not computed; the others are kept if right."""
    # The prompt repeats what the grammar forbids: names that are too long, and other keys.
    prompt = '[{"name": "aaaaaaaaaaaaaaaaaaaaaaaaaa", "size": 1}, ' * 4
    with demo.bench() as bench:
        plain = bench.tokens(demo.sequence("a", params, prompt))["a"]
    proposer = NgramProposer(8, demo.loaded.max_context)
    with demo.bench(proposer=proposer) as bench:
        sequence = demo.sequence("a", params, prompt)
        accepts, cut = sequence.grammar.accepts, []

        def watched(guesses):
            cut.append(len(guesses) - accepts(guesses))
            return accepts(guesses)

        sequence.grammar.accepts = watched
        assert bench.tokens(sequence)["a"] == plain
    assert bench.total("num_accepted") > 0
    assert max(cut) > 0


@pytest.mark.parametrize("structured", [None, PERSONS])
def test_reasoning_ends_at_its_limit_and_what_follows_matches(
    demo, params, structured, proposes_much
):
    """Whoever goes on with it, and with proposed tokens: 4094 ends it here, after six tokens."""
    reasoning = Reasoning(4093, 4094, begun=True, max_tokens=6)
    most = params.max_tokens if structured else 20
    params = dataclasses.replace(
        params, reasoning=reasoning, structured_output=structured, max_tokens=most
    )
    prompt = "a = b\na = b\na = b\na = b\n"
    with demo.bench() as bench:
        tokens = bench.tokens(demo.sequence("a", params, prompt))["a"]
    assert tokens.index(4094) <= 6 and len(tokens) > 10
    if structured:
        jsonschema.validate(
            json.loads(demo.tokenizer.decode(tokens[tokens.index(4094) + 1 :])), LIST
        )
    with demo.bench(proposer=NgramProposer(8, demo.loaded.max_context)) as bench:
        for delivered in (0, 3, 6, 7, 9):
            output = tokens[:delivered]
            rest = demo.sequence(f"{delivered}", params, prompt, output)
            assert output + bench.tokens(rest)[f"{delivered}"] == tokens
    assert bench.total("num_accepted") > 0


def test_a_prefix_from_the_cache_changes_no_token(demo):
    with demo.bench(prefix_cache=True) as bench:
        prompt = "def f(x): return x\n" * 9
        cold, warm = (demo.sequence(name, SEEDED, prompt) for name in "ab")
        assert bench.tokens(cold)["a"] == bench.tokens(warm)["b"]
    assert (cold.num_cached, warm.num_cached > 0) == (0, True)


def test_min_tokens_does_not_keep_an_output_from_its_only_end(demo):
    choice = StructuredOutput(choice=("yes",))
    params = SamplingParams(max_tokens=30, min_tokens=20, structured_output=choice)
    digits = StructuredOutput(regex="[0-9]*")
    with demo.bench() as bench:
        got = bench.finish(
            demo.sequence("yes", params),
            demo.sequence("digits", dataclasses.replace(params, structured_output=digits)),
        )
    assert demo.tokenizer.decode(tokens_of(got["yes"])) == "yes"
    assert got["yes"][-1].finish_reason == "stop"
    assert len(tokens_of(got["digits"])) >= 20
    assert demo.tokenizer.decode(tokens_of(got["digits"])).isdecimal()


def test_bias_and_penalties_choose_among_what_is_allowed(demo):
    choice = StructuredOutput(choice=("no", "yes"))
    for wanted in ("yes", "no"):
        (first, *_) = demo.tokenizer.encode(wanted)[-1:]
        params = SamplingParams(
            max_tokens=9,
            structured_output=choice,
            logit_bias={first: 90.0, 300: 100.0},
            presence_penalty=0.5,
            logprobs=20,
        )
        with demo.bench() as bench:
            got = bench.finish(demo.sequence("a", params))["a"]
        assert demo.tokenizer.decode(tokens_of(got)) == wanted


def test_log_probabilities_are_of_the_allowed_tokens(demo):
    params = SamplingParams(
        max_tokens=9, structured_output=StructuredOutput(regex="[ab]"), logprobs=20
    )
    with demo.bench() as bench:
        got = bench.finish(demo.sequence("x", params))["x"]
    first, end = (one for progress in got for one in progress.logprobs)
    assert {demo.tokenizer.decode([token]) for token, _ in first.top} == {"a", "b"}
    assert sum(np.exp(value) for _, value in first.top) == pytest.approx(1, abs=1e-5)
    assert end.top == ((EOS, 0.0),)


def test_a_grammar_that_becomes_too_complex_ends_its_sequence_alone(demo, undisturbed):
    """Not the step, which others share: three failed steps would end the worker."""
    explodes = StructuredOutput(regex="a{1,1000}{1,1000}{1,1000}")
    params = SamplingParams(max_tokens=300, min_tokens=300, structured_output=explodes)
    with demo.bench() as bench:
        other = demo.sequence("other", GREEDY)
        bad = demo.sequence("bad", params)
        for added in [bench.engine.add(one) for one in (other, bad)]:
            added.result(WAIT_S)
        ends = {}
        tokens = []
        while len(ends) < 2:
            for progress in bench.next_report().progress:
                tokens += progress.token_ids if progress.seq_id == "other" else ()
                if progress.finish_reason or progress.abort_reason:
                    ends[progress.seq_id] = progress
    assert tokens == undisturbed[0.0]
    assert ends["bad"].invalid
    assert "structured output: behind" in ends["bad"].abort_reason


def test_rows_without_a_grammar_are_not_masked(demo):
    params = SamplingParams(structured_output=StructuredOutput(regex="[ab]"))
    bound = demo.sequence("x", params)
    logits = torch.randn(2, 4096)
    masked = Sampler(frozenset({EOS}), 4096)._masked(
        logits,
        [
            SampleRow(SamplingParams(), [5], 1),
            SampleRow(params, bound.tokens, bound.prompt_tokens, grammar=bound.grammar),
        ],
    )
    assert torch.equal(masked[0], logits[0])
    left = masked[1].isfinite().nonzero()[:, 0]
    assert {demo.tokenizer.decode([token]) for token in left.tolist()} == {"a", "b"}
    assert torch.equal(masked[1, left], logits[1, left])
