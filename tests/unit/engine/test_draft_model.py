"""A draft model changes when tokens come, and nothing else; its KV follows from the tokens."""

import dataclasses
import inspect
import json
import random
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import EngineConfig
from baton.config.model import DEMO_MODEL
from baton.engine import build
from baton.engine.draft_model import MIN_CATCH_UP, ModelProposer
from baton.engine.sequence import Sequence
from baton.errors import CheckpointError, ConfigError
from baton.generation.sampling_params import SamplingParams, StructuredOutput
from baton.generation.structured_output import GrammarCompiler
from baton.local.model_check import check_model
from baton.text import load_tokenizer
from tests.unit.engine.bench import WAIT_S, Bench, load, tokens_of
from tests.unit.engine.checkpoints import make_checkpoint

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9, seed=11)
PENALTIES = dataclasses.replace(
    SEEDED, frequency_penalty=0.2, repetition_penalty=1.1, presence_penalty=0.1, logprobs=2
)
DIGITS = StructuredOutput(regex="[0-9]{3}(, [0-9]{3}){12}")
STRUCTURED = dataclasses.replace(SEEDED, structured_output=DIGITS, ignore_eos=False)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalties": PENALTIES, "structured": STRUCTURED}
CHEAP = 1e-6  # a price at which everything is proposed


@pytest.fixture(autouse=True)
def price(monkeypatch):
    """What is proposed does not depend on how fast this machine is, nor do chunks."""
    monkeypatch.setattr(build, "CATCH_UP_SHARE", 0.0)
    prices = {"of a row": CHEAP}
    monkeypatch.setattr(ModelProposer, "price", lambda self, sequences, rows: prices["of a row"])
    return prices


@pytest.fixture(scope="module")
def first_layer(tmp_path_factory):
    """A draft model that is sometimes right: the demo model's first layer."""
    directory = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(DEMO_MODEL, directory)
    tensors = load_file(directory / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if ".layers." not in name or ".0." in name}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    change(directory / "config.json", num_hidden_layers=1)
    return directory


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def sequences(params, lengths=(40, 90, 200), output=()):
    source = load_tokenizer(DEMO_MODEL).encode(inspect.getsource(dataclasses))
    prompts = [source[at * 400 : at * 400 + length] for at, length in enumerate(lengths)]
    return begun(DEMO_MODEL, 4096, params, prompts, output)


def begun(directory, vocab_size, params, prompts, output=()):
    """Sequences of prompts and what was delivered behind them, with the grammars of a model."""
    grammars, made = GrammarCompiler(directory, vocab_size, {1}), []
    for at, prompt in enumerate(prompts):
        tokens, length = [*prompt, *output], len(prompt)
        sequence = Sequence(f"s{at}", tokens, length, params)
        if params.structured_output:
            compiled = grammars.compile(params.structured_output, tokens, length, None)
            sequence.grammar = compiled.result(WAIT_S)
        made.append(sequence)
    return made


def run(loaded, *some):
    """(tokens of each sequence, proposed tokens, accepted ones, preemptions), all blocks freed."""
    with Bench(loaded.engine) as bench:
        got = bench.finish(*some)
        proposer = bench.engine._scheduler._proposer
        if proposer is not None:
            bench.engine.submit(lambda: proposer.propose([], [], 0)).result(WAIT_S)
            proposer.blocks.check()
            assert proposer.blocks.num_held == 0
            assert not proposer._drafts
    counts = bench.total("num_proposed"), bench.total("num_accepted")
    preemptions = bench.reports[-1].load.preemptions
    return {name: tokens_of(one) for name, one in got.items()}, *counts, preemptions


# What is sampled does not depend on which kernels computed the scores.
KINDS_BY_KERNELS = [("penalties", "torch"), *((kind, "native") for kind in KINDS)]


@pytest.mark.parametrize(("kind", "kernels"), KINDS_BY_KERNELS)
def test_a_model_that_drafts_for_itself_is_always_right(kind, kernels):
    """Also at a temperature, with penalties and in a grammar: it samples as it is verified."""
    options = {"kernels": kernels, "kv_blocks": 60, "prefix_cache": False}
    plain, *_ = run(load(**options), *sequences(KINDS[kind]))
    drafted = load(**options, speculative_model=str(DEMO_MODEL))
    found, proposed, accepted, _ = run(drafted, *sequences(KINDS[kind]))
    assert found == plain
    assert proposed > 60
    if kernels == "native":  # whose rows have the same bits in every step
        beyond = 4 * len(plain) if kind == "structured" else 0  # the end of the text
        assert proposed - accepted <= beyond
    whole = plain["s0"]
    for delivered in (1, 23):  # where another worker failed: its KV is computed anew
        rest = sequences(KINDS[kind], (40,), whole[:delivered])
        assert run(drafted, *rest)[0]["s0"] == whole[delivered:]


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_proposals_change_no_token(kind, first_layer):
    plain, *_ = run(load(kv_blocks=60), *sequences(KINDS[kind]))
    drafted = load(kv_blocks=60, speculative_model=str(first_layer))
    found, proposed, accepted, _ = run(drafted, *sequences(KINDS[kind]))
    assert found == plain
    assert accepted < proposed


def test_the_drafts_kv_goes_back_to_before_a_rejected_token():
    """Every third proposal is spoiled, and the two before it are always right."""
    loaded = load(kernels="native", speculative_model=str(DEMO_MODEL))
    sample = loaded.draft.sampler.sample

    class Spoiled:
        def sample(self, logits, rows):
            sampled = sample(logits, rows)
            for at, row in enumerate(rows):
                sampled.token_ids[at] ^= row.proposed == 2
            return sampled

    loaded = dataclasses.replace(loaded, draft=dataclasses.replace(loaded.draft, sampler=Spoiled()))
    with Bench(loaded.engine) as bench:
        got = bench.finish(*sequences(SEEDED))
    for progress in got.values():
        counts = [len(one.token_ids) for one in progress if one.token_ids]
        begun = counts.index(3)
        assert set(counts[:begun]) == {1}
        assert set(counts[begun:-2]) == {3}
        assert len(counts) - begun > 5


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Gemma3ForCausalLM", {"num_hidden_layers": 6, "sliding_window": 40}),
        ("DeepseekV2ForCausalLM", {}),
    ],
    ids=["windows", "latent KV"],
)
def test_a_draft_model_may_have_kv_of_any_kind(tmp_path, architecture, options):
    make_checkpoint(tmp_path, architecture, **options)
    some = [Sequence(f"s{at}", [*range(5 + at, 125 + at)], 120, GREEDY) for at in range(3)]
    again = [Sequence(one.seq_id, list(one.tokens), 120, GREEDY) for one in some]
    plain, *_ = run(load(tmp_path), *some)
    drafted = load(tmp_path, speculative_model=str(tmp_path))
    found, proposed, accepted, _ = run(drafted, *again)
    assert found == plain
    assert 0.9 * proposed < accepted
    assert drafted.draft.layout.windows == drafted.layout.windows


def test_sequences_come_and_go(first_layer):
    """Some are released in the middle; what is left has its tokens, and no block is lost."""
    lengths = random.Random(3).choices(range(20, 150), k=12)
    plain, *_ = run(load(kv_blocks=400, max_batch=4), *sequences(SEEDED, lengths))
    loaded = load(kv_blocks=60, max_batch=4, speculative_model=str(first_layer))
    some = sequences(SEEDED, lengths)
    gone = {sequence.seq_id for sequence in some[::3]}
    with Bench(loaded.engine) as bench:
        for sequence in some:
            bench.engine.add(sequence)
        got, left = {one.seq_id: [] for one in some}, {one.seq_id for one in some} - gone
        while left:
            for progress in bench.next_report().progress:
                got[progress.seq_id] += progress.token_ids
                if progress.finish_reason:
                    left.discard(progress.seq_id)
                if progress.seq_id in gone and len(got[progress.seq_id]) > 5:
                    bench.engine.release(progress.seq_id).result(WAIT_S)
        proposer = bench.engine._scheduler._proposer
        for name in gone:
            bench.engine.release(name).result(WAIT_S)
        bench.engine.submit(lambda: proposer.propose([], [], 0)).result(WAIT_S)
        proposer.blocks.check()
        assert proposer.blocks.num_held == bench.engine._blocks.num_held == 0
    for name, tokens in got.items():
        assert tokens == plain[name][: len(tokens)]
        assert name in gone or len(tokens) == len(plain[name])


class Counted:
    """Counts the rows of each step of a draft model."""

    def __init__(self, model):
        self.model, self.rows = model, []
        self.num_groups = model.num_groups

    def step(self, batch, pool):
        self.rows.append(len(batch.token_ids))
        return self.model.step(batch, pool)


def counted(loaded):
    model = Counted(loaded.draft.model)
    return dataclasses.replace(loaded, draft=dataclasses.replace(loaded.draft, model=model)), model


def test_a_long_text_is_caught_up_with_in_chunks():
    """A sequence that comes from elsewhere does not hold up the batch."""
    loaded, model = counted(load(speculative_model=str(DEMO_MODEL), prefix_cache=False))
    _, proposed, accepted, _ = run(loaded, *sequences(GREEDY, (200, 200, 200)))
    assert proposed == accepted > 0
    assert max(model.rows) <= MIN_CATCH_UP + 2 * 2
    assert model.rows[:5] == [MIN_CATCH_UP] * 5


def test_a_prefix_that_is_cached_is_not_computed_again():
    for cached, fewest, most in ((True, 0, 60), (False, 200, 300)):
        loaded, model = counted(load(speculative_model=str(DEMO_MODEL), prefix_cache=cached))
        with Bench(loaded.engine) as bench:
            for number in (0, 1):
                (sequence,) = sequences(GREEDY, (200,))
                sequence.seq_id, model.rows[:] = f"{number}", []
                bench.finish(sequence)
        rows = sum(count for count in model.rows)
        assert fewest <= rows <= most + GREEDY.max_tokens


def test_proposals_that_are_not_worth_it_are_tried_now_and_then(price, first_layer):
    params = dataclasses.replace(SEEDED, max_tokens=400, temperature=1.0, top_p=1.0)
    drafted = load(speculative_model=str(first_layer))
    _, everything, accepted, _ = run(drafted, *sequences(params, (40,)))
    assert accepted < 0.3 * everything
    price["of a row"] = 0.5
    _, some, _, _ = run(drafted, *sequences(params, (40,)))
    assert 4 <= some < 0.2 * everything


def test_a_sequence_begins_with_the_rate_of_earlier_ones(price, first_layer):
    price["of a row"] = 0.15
    params = dataclasses.replace(SEEDED, max_tokens=60, temperature=1.0, top_p=1.0)
    with Bench(load(speculative_model=str(first_layer)).engine) as bench:
        proposed = []
        for number in range(3):
            (sequence,) = sequences(params, (40,))
            sequence.seq_id, before = f"{number}", len(bench.reports)
            bench.finish(sequence)
            proposed.append(sum(one.num_proposed for one in bench.reports[before:]))
    assert proposed[0] > max(proposed[1:])


def test_where_even_right_proposals_do_not_pay_nothing_is_computed(price):
    price["of a row"] = 1.0
    loaded, model = counted(load(speculative_model=str(DEMO_MODEL)))
    run(loaded, *sequences(dataclasses.replace(GREEDY, max_tokens=100)))
    assert not model.rows


def test_nothing_is_proposed_beyond_the_drafts_context(tmp_path, first_layer):
    draft = tmp_path / "short"
    shutil.copytree(first_layer, draft)
    change(draft / "config.json", max_position_embeddings=64)
    plain, *_ = run(load(), *sequences(GREEDY, (40, 90)))
    loaded, model = counted(load(speculative_model=str(draft)))
    found, proposed, _, _ = run(loaded, *sequences(GREEDY, (40, 90)))
    assert found == plain
    assert proposed > 0
    assert sum(model.rows) < 64 + proposed


def other_tokens(directory):
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    first, second, *_ = (text for text, at in content["model"]["vocab"].items() if at > 300)
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))


def other_vocab(directory):
    change(directory / "config.json", vocab_size=4000)


def fewer_layers(directory):
    change(directory / "config.json", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("spoil", "error", "named"),
    [
        (other_tokens, ConfigError, "draft: tokenizer.json has other tokens than that of --model"),
        (other_vocab, ConfigError, "config.json has vocab_size 4000, and that of --model has 4096"),
        (fewer_layers, CheckpointError, "lacks tensor model.layers.1"),
        (shutil.rmtree, ConfigError, "--speculative-model .*draft: model .* not found"),
    ],
)
def test_what_cannot_draft_is_refused_in_one_line(spoil, error, named, tmp_path, first_layer):
    draft = tmp_path / "draft"
    shutil.copytree(first_layer, draft)
    spoil(draft)
    with pytest.raises(error, match=named) as refused:
        check_model(EngineConfig(speculative_model=str(draft)))
    assert "\n" not in str(refused.value)


def test_a_draft_model_with_states_is_refused(tmp_path):
    make_checkpoint(tmp_path, "Qwen3_5ForCausalLM")
    settings = EngineConfig(str(DEMO_MODEL), speculative_model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^--speculative-model .* has linear attention"):
        check_model(settings, worker=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "cuda:1"}, "--speculative-model computes on CPUs only"),
        ({"simulate": "8000,4"}, "--simulate computes nothing"),
    ],
)
def test_neither_a_gpu_nor_a_simulated_engine_has_a_draft_model(settings, named):
    config = EngineConfig(speculative_model=str(DEMO_MODEL), **settings)
    gpu = SimpleNamespace(device=torch.device("cuda", 1), settings=config)
    backend = gpu if "device" in settings else None
    for refuses in (check_model, partial(build.load, backend=backend)):
        with pytest.raises(ConfigError, match=named):
            refuses(config)


def test_a_tokenizer_in_another_file_with_the_same_tokens_is_fine(tmp_path, first_layer):
    draft = tmp_path / "draft"
    shutil.copytree(first_layer, draft)
    file = draft / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    check_model(EngineConfig(speculative_model=str(draft)))
