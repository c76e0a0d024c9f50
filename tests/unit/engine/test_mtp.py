"""A multi-token prediction layer changes when tokens come, and nothing else."""

import dataclasses
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import EngineConfig
from baton.config.model import DEMO_MODEL
from baton.engine.draft_model import MIN_CATCH_UP
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.tensor_names import _mtp_name
from baton.engine.mtp import MtpProposer
from baton.errors import CheckpointError, ConfigError
from baton.local.model_check import check_model
from baton.local.model_plan import check_plan, weight_bytes
from tests.unit.engine import test_draft_model as draft_model
from tests.unit.engine.bench import Bench, load
from tests.unit.engine.checkpoints import add_predicting_layer, load_reference, make_checkpoint
from tests.unit.engine.model_cases import PREDICTING
from tests.unit.engine.small_models import KERNELS
from tests.unit.engine.test_draft_model import GREEDY, KINDS, KINDS_BY_KERNELS, SEEDED, change, run

LATENT, DENSE_KV, STATES = PREDICTING[:3]


price = draft_model.price


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Directories of checkpoints, by architecture, whose layer is random or often right."""
    directories = {}

    def make(architecture, mixed=None):
        key = architecture, mixed
        if key not in directories:
            directory = directories[key] = tmp_path_factory.mktemp("mtp")
            options = {"num_nextn_predict_layers": 1, "tokenizer": True}
            make_checkpoint(directory, architecture, **options)
            add_predicting_layer(directory, mixed=mixed)
        return directories[key]

    return make


def sequences(directory, params, lengths=(5, 40, 90)):
    prompts = [
        [(7 * i * i + 31 * at + 5) % 250 + 2 for i in range(length)]
        for at, length in enumerate(lengths)
    ]
    return draft_model.begun(directory, 320, params, prompts)


DRAFT = "a draft model, itself"


@pytest.fixture(params=[DRAFT, LATENT])
def proposing(request, made):
    """A model and its sequences, with what proposes for it: itself, or a layer of its own."""
    if request.param == DRAFT:
        return DEMO_MODEL, str(DEMO_MODEL), draft_model.sequences
    directory = made(request.param, 0.3)
    return directory, "mtp", partial(sequences, directory)


class Layer(torch.nn.Module):
    """The layer as DeepSeek-V3's technical report describes it, over the reference's modules."""

    def __init__(self, directory):
        super().__init__()
        self.model = model = load_reference(directory)
        last, size = model.model.layers[-1], model.config.hidden_size
        count = model.config.num_hidden_layers
        self.block = type(last)(model.config, count - 1)
        norm = type(model.model.norm)
        self.enorm, self.hnorm, self.norm = (norm(size, model.config.rms_norm_eps) for _ in "ehn")
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        own, mapped, experts = f"model.layers.{count}.", {}, {}
        stored = load_file(directory / "model.safetensors")
        tensors = {_mtp_name(ModelConfig.load(directory), name): stored[name] for name in stored}
        for name in (one.removeprefix(own) for one in tensors if one.startswith(own)):
            tensor = tensors[own + name]
            if name.startswith(("enorm", "hnorm", "eh_proj")):
                mapped[name] = tensor
            elif name == "shared_head.norm.weight":
                mapped["norm.weight"] = tensor
            elif ".experts." in name:
                experts[name] = tensor
            elif not name.startswith(("embed_tokens", "shared_head.head")):
                mapped[f"block.{name}"] = tensor
        parts = (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
        for part, fields in parts if experts else ():
            each = range(len(experts) // 3)
            mapped[f"block.mlp.experts.{part}"] = torch.stack(
                [
                    torch.cat([experts[f"mlp.experts.{n}.{f}_proj.weight"] for f in fields])
                    for n in each
                ]
            )
        missing, unexpected = self.load_state_dict(mapped, strict=False)
        assert not unexpected and all(name.startswith("model.") for name in missing)
        self.eval()

    @torch.inference_mode()
    def propose(self, tokens, begin, count):
        """Tokens after these, by their rows from `begin` on, and then by those of proposed ones."""
        tokens = torch.tensor([tokens])
        hidden = self.model.model(tokens).last_hidden_state[:, begin - 1 : -1]
        tokens, proposed = tokens[:, begin:], []
        for _ in range(count):
            embedded = self.enorm(self.model.model.embed_tokens(tokens))
            x = self.eh_proj(torch.cat((embedded, self.hnorm(hidden)), dim=-1))
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            own = self.norm(
                self.block(
                    x,
                    attention_mask=mask,
                    position_ids=positions,
                    position_embeddings=self.model.model.rotary_emb(x, positions),
                )
            )
            proposed.append(int(self.model.lm_head(own[0, -1]).argmax()))
            tokens = torch.cat((tokens, torch.tensor([proposed[-1:]])), dim=1)
            hidden = torch.cat((hidden, own[:, -1:]), dim=1)
        return tuple(proposed)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", PREDICTING)
def test_proposals_are_those_of_the_published_layer(architecture, kernels, made, monkeypatch):
    """Also after rejected ones, whose hidden states are the layer's own, are replaced."""
    directory, rounds = made(architecture, 0.3), []
    whole = MtpProposer.propose

    def propose(self, some, limits, rows):
        found = whole(self, some, limits, rows)
        rounds.extend((list(one.tokens), got) for one, got in zip(some, found, strict=True) if got)
        return found

    monkeypatch.setattr(MtpProposer, "propose", propose)
    loaded = load(directory, kernels=kernels, speculative_model="mtp", speculate=3)
    _, proposed, accepted, _ = run(loaded, *sequences(directory, GREEDY, (20,)))
    assert 0 < accepted < proposed
    layer = Layer(directory)
    assert len(rounds) > 8
    for tokens, found in rounds:
        assert layer.propose(tokens, 20, len(found)) == found


@pytest.mark.parametrize(("kind", "kernels"), KINDS_BY_KERNELS)
@pytest.mark.parametrize("architecture", [LATENT, DENSE_KV, STATES])
def test_tokens_are_those_without(architecture, kind, kernels, made):
    directory = made(architecture, 0.3)
    options = {"kernels": kernels, "kv_blocks": 60}
    plain, *_ = run(load(directory, **options), *sequences(directory, KINDS[kind]))
    loaded = load(directory, **options, speculative_model="mtp")
    found, proposed, accepted, _ = run(loaded, *sequences(directory, KINDS[kind]))
    assert found == plain
    assert 0.1 * proposed < accepted < proposed


@pytest.mark.parametrize(
    ("proposing", "options"),
    [
        (DRAFT, {"tp": 2, "threads": 2}),
        (DRAFT, {"quantization": "int4", "kv_dtype": "int8"}),
        (LATENT, {"tp": 2, "tp_backend": "gloo", "threads": 2}),
        (DENSE_KV, {"tp": 2, "threads": 2}),
        (DENSE_KV, {"dtype": "bfloat16"}),
        (LATENT, {"quantization": "int8"}),
        (DENSE_KV, {"quantization": "int4", "kv_dtype": "int8"}),
    ],
    ids=str,
    indirect=["proposing"],
)
def test_ranks_and_formats_change_nothing(proposing, options):
    """What proposes is whole on the first rank, in the formats of the other model."""
    (directory, proposer, begin), options = proposing, {"kernels": "native", **options}
    plain, *_ = run(load(directory, **options), *begin(SEEDED))
    loaded = load(directory, **options, speculative_model=proposer)
    found, proposed, accepted, _ = run(loaded, *begin(SEEDED))
    assert found == plain
    assert accepted >= (0.1 if proposer == "mtp" else 1) * proposed > 0


def test_embedding_and_output_layer_are_the_models(made):
    loaded = load(made(LATENT), speculative_model="mtp")
    own, model = loaded.draft.model._weights, loaded.runner.model._weights
    assert own.embedding is model.embedding
    assert own.lm_head is model.lm_head
    assert loaded.draft.layout.num_layers == 1
    assert loaded.draft.layout.num_tokens == loaded.layout.num_tokens
    settings = EngineConfig(str(made(LATENT)), dtype="float32", speculative_model="mtp")
    config = loaded.model_config.draft(settings)
    planned = weight_bytes(settings.of_draft(False), config, torch.float32, False, shares=True)
    assert planned == pytest.approx(own.num_bytes - own.lm_head.num_bytes, rel=0.03)
    (found,) = (one for one in check_plan(settings) if one.subject == "draft model")
    assert found.text.startswith("multi-token prediction layer, 0.1 M parameters")


@pytest.mark.parametrize("options", [{"kv_blocks": 22}, {"kv_blocks": 26, "block_size": 8}])
def test_pools_too_small_for_all_change_no_token(options, proposing):
    """Sequences are preempted, drafts lose their blocks, and a layer what it knew of them."""
    (directory, proposer, begin), lengths = proposing, (90, 100, 110, 120)
    plain, *_ = run(load(directory, kv_blocks=200), *begin(SEEDED, lengths))
    loaded = load(directory, **options, speculative_model=proposer)
    found, _, accepted, preemptions = run(loaded, *begin(SEEDED, lengths))
    assert found == plain
    assert accepted > 0
    assert preemptions > 0


def test_a_pool_of_the_layer_too_small_for_all_changes_no_token(made):
    """Sequences without blocks there have no proposals, and begin anew with the next ones."""
    directory = made(LATENT, 0.3)
    plain, *_ = run(load(directory), *sequences(directory, SEEDED))
    loaded = load(directory, speculative_model="mtp")
    layout = dataclasses.replace(loaded.draft.layout, num_blocks=4)
    small = dataclasses.replace(loaded.draft, layout=layout)
    found, proposed, _, _ = run(
        dataclasses.replace(loaded, draft=small), *sequences(directory, SEEDED)
    )
    assert found == plain
    assert proposed > 0


def test_what_is_not_worth_it_is_computed_in_groups(price, made):
    """Hidden states are kept until then; the next proposals have all of the context."""
    directory = made(LATENT, 0.3)
    params = dataclasses.replace(GREEDY, max_tokens=200)
    loaded, rows = load(directory, speculative_model="mtp"), []
    model, price["of a row"] = loaded.draft.model, 0.99
    whole = model.step

    def step(batch, pool):
        rows.append((int(batch.context_lens[0]), len(batch.token_ids)))
        return whole(batch, pool)

    model.step = step
    (sequence,) = sequences(directory, params, (20,))
    with Bench(loaded.engine) as bench:
        bench.engine.add(sequence)
        while sum(len(one.token_ids) for r in bench.reports for one in r.progress) < 150:
            bench.next_report()
        price["of a row"] = draft_model.CHEAP
        bench.until("s0", "finish_reason")
    assert sum(count for _, count in rows[:4]) >= 4 * (MIN_CATCH_UP - 2)
    begun = 0
    for context, count in rows:  # nothing is left out, and only proposed tokens are computed anew
        assert begun - 4 <= context <= begun
        begun = context + count
    assert begun > 150


def test_what_is_broken_disturbs_no_sequence(proposing, caplog):
    directory, proposer, begin = proposing
    plain, *_ = run(load(directory), *begin(GREEDY))
    loaded = load(directory, speculative_model=proposer)
    whole = loaded.draft.model.step
    loaded.draft.model.step = lambda batch, pool: whole(batch, pool).fill_(torch.nan)
    loaded.draft.pool.fill_(torch.nan)
    found, proposed, _, _ = run(loaded, *begin(GREEDY))
    assert (found, proposed) == (plain, 0)
    used = 0 if proposer == "mtp" else -(-200 // loaded.layout.block_size)
    assert loaded.draft.pool.isfinite().flatten(1).all(1).sum() >= used  # zeroed for the next

    def fails(batch, pool):
        raise RuntimeError("no memory")

    loaded.draft.model.step = fails
    found, proposed, _, _ = run(loaded, *begin(GREEDY))
    assert (found, proposed) == (plain, 0)
    assert "the draft model failed" in caplog.text


def test_models_without_such_a_layer_are_refused_in_one_line(tmp_path, made):
    def refused(model, error, named, **settings):
        config = EngineConfig(model=str(model), speculative_model="mtp", **settings)
        with pytest.raises(error, match=named) as found:
            check_model(config, worker=True)
        assert "\n" not in str(found.value)

    named = "^--speculative-model mtp: config.json of LlamaForCausalLM names no layer"
    refused(DEMO_MODEL, ConfigError, named)
    make_checkpoint(tmp_path / "states", "Qwen3_5ForCausalLM")
    refused(tmp_path / "states", CheckpointError, "lacks tensor model.layers.4.input_layernorm")
    refused(made(LATENT), ConfigError, "computes on CPUs only", device="cuda:1")
    refused(made(LATENT), ConfigError, "--simulate computes nothing", simulate="8000,4")
    make_checkpoint(tmp_path / "less", LATENT, num_nextn_predict_layers=1)
    refused(tmp_path / "less", CheckpointError, "lacks tensor model.layers.2.input_layernorm")
    tensors = load_file(made(LATENT) / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    refused(tmp_path / "less", CheckpointError, r"layers.2.eh_proj.weight has shape \[64, 64\]")


def test_transformers_own_key_names_the_layer(tmp_path, made):
    shutil.copytree(made(DENSE_KV), model := tmp_path / "model")
    change(model / "config.json", num_nextn_predict_layers=0, num_mtp_layers=1)
    check_model(EngineConfig(model=str(model), speculative_model="mtp"), worker=True)
