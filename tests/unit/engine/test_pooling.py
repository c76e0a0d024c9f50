"""Embeddings: transformers' hidden states, pooled as the checkpoint says."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from baton.engine.models.weight_loader import load_classification_head
from baton.engine.pooling import Pooling
from baton.engine.sequence import Sequence
from baton.errors import CheckpointError
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import Bench, load
from tests.unit.engine.checkpoints import load_reference, make_checkpoint

PROMPT = [(11 * i + i // 7) % 250 + 3 for i in range(150)]
EMBEDDED = SamplingParams(max_tokens=0, embedding=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=16)
    return path


def hidden_states(directory, tokens):
    with torch.no_grad():
        found = load_reference(directory)(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


def summed(progress):
    return sum(one.pooled for one in progress if one.pooled is not None)


by_engine = pytest.mark.parametrize(
    "settings",
    [{"kernels": "torch"}, {"kernels": "native"}, {"kernels": "native", "tp": 2, "threads": 2}],
    ids=["torch", "native", "ranks"],
)


@pytest.mark.parametrize("mean", [False, True])
@by_engine
def test_embeddings_are_pooled_hidden_states(directory, settings, mean):
    loaded = load(directory, chunk_tokens=64, **settings)
    other = Sequence("other", PROMPT[:61], 61, SamplingParams(max_tokens=9, ignore_eos=True))
    scored = Sequence("scored", list(PROMPT), 150, SamplingParams(max_tokens=2, prompt_logprobs=0))
    with Bench(loaded.engine) as bench:
        for name, tokens in (("first", PROMPT), ("cached", PROMPT), ("single", PROMPT[:1])):
            sequence = Sequence(name, list(tokens), len(tokens), EMBEDDED)
            sequence.num_scored = 0 if mean else None
            got = bench.finish(sequence, *([other, scored] if name == "first" else []))
            states = hidden_states(directory, tokens)
            expected = states.sum(0) if mean else states[-1]
            np.testing.assert_allclose(summed(got[name]), expected, rtol=1e-4, atol=1e-3)
            assert bool(sequence.num_cached) is (name == "cached" and not mean)
    assert all(one.pooled is None for one in bench.reports[0].progress if one.seq_id == "other")


@by_engine
def test_label_tokens_have_the_logits_after_the_prompt(directory, settings):
    labels = (7, 200)
    params = SamplingParams(max_tokens=0, classification=True, label_token_ids=labels)
    other = Sequence("other", PROMPT[:61], 61, SamplingParams(max_tokens=9, ignore_eos=True))
    embedded = Sequence("embedded", PROMPT[:40], 40, EMBEDDED)
    with torch.no_grad():
        logits = load_reference(directory)(torch.tensor([PROMPT])).logits[0, -1]
    with Bench(load(directory, chunk_tokens=64, **settings).engine) as bench:
        for name in ("first", "cached"):
            sequence = Sequence(name, list(PROMPT), 150, params)
            got = bench.finish(sequence, *([other, embedded] if name == "first" else []))
            np.testing.assert_allclose(
                summed(got[name]), logits[list(labels)].numpy(), rtol=1e-4, atol=1e-3
            )
            assert bool(sequence.num_cached) is (name == "cached")


CLASSIFIERS = {
    "Qwen3ForSequenceClassification": 1,
    "LlamaForSequenceClassification": 3,
    "Gemma2ForSequenceClassification": 2,
}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_classification_heads_logits_are_those_of_transformers(tmp_path, architecture, kernels):
    reference = make_checkpoint(tmp_path, architecture, num_labels=CLASSIFIERS[architecture])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].numpy()
    loaded = load(tmp_path, kernels=kernels, chunk_tokens=64)
    assert loaded.model_config.num_labels == len(expected)
    head = load_classification_head(tmp_path, loaded.model_config)
    params = SamplingParams(max_tokens=0, classification=True)
    with Bench(loaded.engine) as bench:
        got = bench.finish(Sequence("a", list(PROMPT), len(PROMPT), params))
    np.testing.assert_allclose(head.numpy() @ summed(got["a"]), expected, rtol=1e-4, atol=1e-3)


def test_a_classification_head_is_checked(tmp_path):
    make_checkpoint(tmp_path, "Qwen3ForSequenceClassification", num_labels=3)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(CheckpointError, match=r"score\.weight has shape \[3, .*implies \[2"):
        load(tmp_path)
    file.write_text(json.dumps({**config, "id2label": {"1": "a", "2": "b"}}))
    with pytest.raises(CheckpointError, match="id2label must name labels 0, 1"):
        load(tmp_path)
    file.write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"score\.weight is not part of|lacks tensor"):
        load(tmp_path)


def write(path, pooling=None, *modules):
    types = [{"type": f"sentence_transformers.models.{name}", "path": at} for name, at in modules]
    (path / "modules.json").write_text(json.dumps(types))
    (path / "1_Pooling").mkdir(exist_ok=True)
    if pooling is not None:
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_checkpoint_says_how_it_is_pooled(tmp_path):
    assert Pooling.read(tmp_path) == Pooling(mean=False, normalized=True)
    base, normalize = ("Transformer", ""), ("Normalize", "2_Normalize")
    pool = ("Pooling", "1_Pooling")
    write(tmp_path, {"pooling_mode_lasttoken": True}, base, pool, normalize)
    assert Pooling.read(tmp_path) == Pooling(mean=False, normalized=True)
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    write(tmp_path, mean, base, pool)
    assert Pooling.read(tmp_path) == Pooling(mean=True, normalized=False)
    vector = np.array([3.0, 4.0], np.float32)
    assert Pooling.read(tmp_path).finish(vector, 2).tolist() == [1.5, 2.0]
    assert Pooling(mean=True).finish(vector, 2) == pytest.approx([0.6, 0.8])
    for named, is_mean in (("mean", True), (["mean"], True), ("lasttoken", False)):
        write(tmp_path, {"embedding_dimension": 64, "pooling_mode": named}, base, pool)
        assert Pooling.read(tmp_path) == Pooling(mean=is_mean, normalized=False)
    for nothing in ({}, {"pooling_mode_mean_tokens": False}):  # sentence-transformers' default
        write(tmp_path, nothing, base, pool)
        assert Pooling.read(tmp_path).mean
    write(tmp_path, None, base)
    assert not Pooling.read(tmp_path).mean
    for pooling, *modules in (
        ({"pooling_mode": "weightedmean"}, base, pool),
        ({"pooling_mode": ["mean", "max"]}, base, pool),
        ({"pooling_mode_cls_token": True}, base, pool),
        ({**mean, "pooling_mode_lasttoken": True}, base, pool),
        (mean, base, pool, ("Dense", "2_Dense")),
        ([], base, pool),
    ):
        write(tmp_path, pooling, *modules)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            Pooling.read(tmp_path)


def test_a_checkpoint_of_an_embedding_model_has_no_prefix_in_its_names(tmp_path, directory):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    named.pop("lm_head.weight", None)
    safetensors.torch.save_file(named, file)
    with Bench(load(tmp_path).engine) as bench:
        got = bench.finish(Sequence("a", PROMPT[:30], 30, EMBEDDED))
    expected = hidden_states(directory, PROMPT[:30])[-1]
    np.testing.assert_allclose(summed(got["a"]), expected, rtol=1e-4, atol=1e-3)
