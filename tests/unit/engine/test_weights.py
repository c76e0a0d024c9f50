"""Weights arrive whole, fused and quantised, or the error names the file and the tensor."""

import itertools
import json
import logging
import re
import shutil
import weakref
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import EngineConfig
from baton.engine.checkpoint.tensor_headers import INDEX_FILE, SINGLE_FILE
from baton.engine.models import weight_loader as loading
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.tensor_names import num_parameters
from baton.engine.models.weight_loader import load_weights, random_seed, random_weights
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight
from baton.errors import CheckpointError
from baton.local.model_check import check_model
from tests.unit.engine.checkpoints import load_reference, make_checkpoint

CPU = torch.device("cpu")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def load(directory, dtype=torch.float32):
    return load_weights(directory, ModelConfig.load(directory), dtype, CPU)


def rewrite(directory, change):
    file = directory / SINGLE_FILE
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    return file


def tensors_of(weights):
    layers = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
    found = [weights.embedding, weights.final_norm, weights.lm_head, *layers]
    plain = (one.tensor if isinstance(one, DenseWeight) else one for one in found)
    return [tensor for tensor in plain if tensor is not None]


def test_parts_are_fused_in_order_and_outlive_the_files(tmp_path):
    model = make_checkpoint(tmp_path, "Qwen2ForCausalLM", dtype=torch.float16)
    weights = load(tmp_path, torch.bfloat16)
    shutil.rmtree(tmp_path)
    layer, reference = weights.layers[1], model.bfloat16().model.layers[1]
    attention, mlp = reference.self_attn, reference.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(layer.qkv.tensor, torch.cat([p.weight for p in projections]))
    assert torch.equal(layer.qkv_bias, torch.cat([p.bias for p in projections]))
    assert torch.equal(layer.gate_up.tensor, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.equal(layer.down.tensor, mlp.down_proj.weight)
    assert torch.equal(weights.lm_head.tensor, model.lm_head.weight)
    assert layer.o_bias is None
    assert {tensor.dtype for tensor in tensors_of(weights)} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_give_the_same_and_progress_in_bytes_is_logged_every_second(
    tmp_path, dtype, monkeypatch, caplog
):
    make_checkpoint(tmp_path / "one", dtype=dtype)
    make_checkpoint(tmp_path / "many", max_shard_size="50KB", dtype=dtype)
    one = load(tmp_path / "one")
    clock = itertools.count(10.0, 0.4)  # from one tensor to the next
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(loading, "_GIB", 1.0)
    caplog.set_level(logging.INFO)
    many = load(tmp_path / "many")
    for a, b in zip(tensors_of(one), tensors_of(many), strict=True):
        assert torch.equal(a, b)
    config = ModelConfig.load(tmp_path / "many")
    total = dtype.itemsize * num_parameters(config)
    told = [re.findall(r"[0-9.]+", text) for text in caplog.messages]
    assert len(told) == (3 + 7 * config.num_layers) // 3  # tensors are joined
    for seconds, (done, of_all, rate, left) in zip(itertools.count(1.2, 1.2), told, strict=False):
        assert (float(of_all), float(rate)) == (total, pytest.approx(float(done) / seconds, abs=1))
        assert float(left) == pytest.approx((total - float(done)) / float(rate), abs=1)


def test_tied_copies_and_old_rotary_tables_are_ignored(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(
        tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(3), rotary: torch.zeros(8)})
    )
    weights = load(tmp_path)
    assert weights.lm_head.tensor is weights.embedding


def test_layers_that_predict_further_tokens_are_skipped_and_corrections_stay_float32(tmp_path):
    reference = make_checkpoint(tmp_path, "DeepseekV3ForCausalLM", num_nextn_predict_layers=1)
    corrections = [
        layer.mlp.gate.e_score_correction_bias.clone() for layer in reference.model.layers[1:]
    ]

    def add_layer(tensors):
        for name, tensor in list(tensors.items()):
            if "layers.1." in name:
                tensors[name.replace("layers.1.", "layers.2.")] = tensor.clone()
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)

    file = rewrite(tmp_path, add_layer)
    layers = load(tmp_path, torch.bfloat16).layers
    found = [layer.experts.correction for layer in layers if layer.experts]
    assert len(layers) == 2
    assert all(map(torch.equal, found, corrections)) and found[0].dtype == torch.float32
    rewrite(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}))
    with pytest.raises(CheckpointError, match=rf"{file}: tensor model\.layers\.3\.eh_proj"):
        load(tmp_path)


def test_a_tied_model_may_be_stored_with_its_output_layer_alone(tmp_path):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    matrix = load_reference(tmp_path).lm_head.weight
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(load_reference(tmp_path).model.embed_tokens.weight, matrix)
    check_model(EngineConfig(model=str(tmp_path)), worker=True)
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, matrix)
    assert weights.lm_head.tensor is weights.embedding


TEXT, HEAD, VISION = "language_model.model.", "language_model.lm_head.", "vision_tower."


@pytest.mark.parametrize(
    "prefixes",
    [
        {},
        {TEXT: "model.language_model.", HEAD: "lm_head.", VISION: "model.vision_tower."},
        {TEXT: "model.text_model.", HEAD: "lm_head.", VISION: "model.visual."},
    ],
    ids=("old", "new", "Idefics"),
)
def test_a_multimodal_checkpoint_s_text_model_is_loaded_in_all_spellings(
    tmp_path, caplog, prefixes
):
    make_checkpoint(tmp_path, "Mistral3ForConditionalGeneration")
    expected = tensors_of(load(tmp_path))

    def rename(tensors):
        for name in list(tensors):
            old = next((old for old in prefixes if name.startswith(old)), "")
            tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensors.pop(name)

    names = load_file(tmp_path / SINGLE_FILE)
    others = sum(not name.startswith("language_model.") for name in names)
    rewrite(tmp_path, rename)
    with caplog.at_level(logging.INFO):
        got = tensors_of(load(tmp_path))
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert f"{others} tensors (0.00 GiB) of images, video or audio are not loaded" in caplog.text
    rewrite(tmp_path, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight is not part of Mistral"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_is_read_as_transformers_does(tmp_path, dtype):
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: one.double() / 3 for name, one in t.items()}))
    weights, reference = load(tmp_path, dtype), load_reference(tmp_path, dtype)
    assert torch.equal(weights.embedding, reference.model.embed_tokens.weight)
    assert torch.equal(
        weights.layers[1].o.tensor, reference.model.layers[1].self_attn.o_proj.weight
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_model_with_another_output_layer_has_the_logits_of_transformers(
    tmp_path, caplog, dtype
):
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    head = torch.randn(320, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    assert torch.equal(load_reference(tmp_path).lm_head.weight, head.float())
    assert torch.equal(load(tmp_path).lm_head.tensor, head.float())
    assert "has an lm_head.weight of its own" in caplog.text
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    weights = load(tmp_path)
    assert weights.lm_head.tensor is weights.embedding


def tensors(change):
    return lambda directory: rewrite(directory, change)


def content(change):
    def write(directory):
        file = directory / SINGLE_FILE
        file.write_bytes(change(file.read_bytes()))

    return write


def header(text, data=b""):
    return content(lambda _: len(text).to_bytes(8, "little") + text + data)


def index(text):
    return lambda directory: (directory / INDEX_FILE).write_text(text)


def drop_from_shard(directory):
    shard = json.loads((directory / INDEX_FILE).read_text())["weight_map"][K_PROJ]
    tensors = load_file(directory / shard)
    tensors.pop(K_PROJ)
    save_file(tensors or {"model.norm.weight": torch.zeros(64)}, directory / shard)


Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
LIE = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
BROKEN = {
    "missing": (tensors(lambda t: t.pop(K_PROJ)), "{directory} lacks tensor {k_proj}"),
    "lm_head": (tensors(lambda t: t.pop("lm_head.weight")), "lacks tensor lm_head.weight"),
    "shape": (
        tensors(lambda t: t.update({K_PROJ: torch.zeros(31, 64)})),
        "{file}: tensor {k_proj} has shape [31, 64]; config.json implies [32, 64]",
    ),
    "unknown": (
        tensors(lambda t: t.update({Q_BIAS: torch.zeros(64)})), "{file}: tensor " + Q_BIAS,
    ),
    "dtype": (
        tensors(lambda t: t.update({K_PROJ: torch.zeros(32, 64, dtype=torch.int8)})),
        "{file}: tensor {k_proj} has dtype I8",
    ),
    **{
        f"cut at {keep}": (
            content(lambda data, keep=keep: data[:keep]),
            "{file} is truncated or not a safetensors file",
        )
        for keep in (0, 5, 100, -10)
    },
    **{
        f"header {text.decode()}": (header(text), "{file}")
        for text in (b"{nonsense", b"[]", b'{"x": {"dtype": "F32"}}', b'{"x": 3}')
    },
    "huge header": (content(lambda _: (1 << 60).to_bytes(8, "little") + b"{}"), "{file}"),
    "sizes": (header(LIE, bytes(8)), "{file} is truncated or not a safetensors file: "),
    "pickle": (
        lambda path: (path / SINGLE_FILE).rename(path / "pytorch_model.bin"),
        "only pytorch_model.bin: pickle files can run code and are never read; convert the model",
    ),
    "nothing": (lambda path: (path / SINGLE_FILE).unlink(), "{directory} has neither {single}"),
}  # fmt: skip
BROKEN_SHARDS = {
    "missing": (lambda path: sorted(path.glob("*.safetensors"))[1].unlink(), ".safetensors is mi"),
    "promised": (drop_from_shard, ".safetensors lacks tensor {k_proj}, promised by {index}"),
    **{text: (index(text), "{index}") for text in ("{", "[]", "{}", '{"weight_map": []}')},
    **{
        f"to {shard}": (index(json.dumps({"weight_map": {K_PROJ: shard}})), "{index} names ")
        for shard in ("../elsewhere.safetensors", "/etc/hostname", "", "..", "x.bin")
    },
}


@pytest.mark.parametrize(
    ("size", "damage", "message"),
    [("1GB", *broken) for broken in BROKEN.values()]
    + [("100KB", *broken) for broken in BROKEN_SHARDS.values()],
    ids=[*BROKEN, *(f"shard {kind}" for kind in BROKEN_SHARDS)],
)
def test_what_is_broken_is_an_error_that_names_it(tmp_path, size, damage, message):
    make_checkpoint(tmp_path, max_shard_size=size)
    damage(tmp_path)
    names = {"directory": tmp_path, "file": tmp_path / SINGLE_FILE, "index": tmp_path / INDEX_FILE}
    expected = message.format(**names, k_proj=K_PROJ, single=SINGLE_FILE)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert expected in str(caught.value)


def test_a_bare_config_has_no_weights_but_random_ones_that_follow_the_seed(tmp_path):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    config = ModelConfig.load(tmp_path)
    with pytest.raises(CheckpointError, match="not a model directory"):
        load_weights(tmp_path / "config.json", config, torch.float32, CPU)
    first, same, other = (random_weights(config, torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    for a, b in zip(tensors_of(first), tensors_of(same), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.layers[0].qkv.tensor, other.layers[0].qkv.tensor)
    whole = random_weights(config, torch.float32, CPU, 1)
    for rounded, full in zip(tensors_of(first), tensors_of(whole), strict=True):
        assert torch.equal(rounded, full.bfloat16()), "the same numbers in every type"
    # Another device's never lie on the host: tried with one that keeps shapes only.
    meta = torch.device("meta")
    for weights in (
        random_weights(config, torch.bfloat16, meta, 1),
        load_weights(tmp_path, config, torch.bfloat16, meta),
    ):
        assert {(t.device, t.dtype) for t in tensors_of(weights)} == {(meta, torch.bfloat16)}
        assert sum(t.numel() for t in tensors_of(weights)) == num_parameters(config)


def source(kind, directory, dtype, **options):
    """Weights of a checkpoint, or random ones for its config."""
    config = ModelConfig.load(directory)
    if kind == "random":
        return random_weights(config, dtype, CPU, 5, **options)
    return load_weights(directory, config, dtype, CPU, **options)


@pytest.mark.parametrize("kind", ["stored", "random"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_and_lm_head_are_int8_and_nothing_else(tmp_path, dtype, tied, kind):
    make_checkpoint(tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=tied)
    full = source(kind, tmp_path, dtype)
    before = []

    def prepare(weight, is_output):
        assert all(one() is None for one in before), "one at a time is there in full"
        if not (tied and len(before) == 8):  # the embedding, which stays
            before.append(weakref.ref(weight.tensor))
        return Int8Weight.from_dense(weight.tensor)

    small = source(kind, tmp_path, dtype, prepare=prepare)
    pairs = [(small, full), *zip(small.layers, full.layers, strict=True)]
    for name, found, wanted in (
        (field.name, getattr(some, field.name), getattr(whole, field.name))
        for some, whole in pairs
        for field in fields(whole)
        if field.name != "layers"
    ):
        assert isinstance(found, Int8Weight) == (name in ("qkv", "o", "gate_up", "down", "lm_head"))
        if isinstance(found, Int8Weight):
            expected = Int8Weight.from_dense(wanted.tensor)
            assert torch.equal(found.values, expected.values)
            assert torch.equal(found.scales, expected.scales)
        else:
            assert found is wanted is None or torch.equal(found, wanted)


def test_weights_that_differ_have_different_seeds(directory):
    gpu = torch.device("cuda", 0)
    stored, made_up = EngineConfig(), EngineConfig(random_weights=True)
    simulated = EngineConfig(random_weights=True, simulate="1,1")
    assert random_seed(stored, CPU) is random_seed(stored, gpu) is None
    seeds = [random_seed(made_up, CPU), random_seed(made_up, gpu), random_seed(simulated, CPU)]
    assert len(set(seeds)) == 3
    assert random_seed(made_up, torch.device("cuda", 3)) == seeds[1]
    # A CPU's never change: workers of other versions hold the same ones.
    weights = random_weights(ModelConfig.load(directory), torch.float32, CPU, seeds[0])
    first = torch.empty(320, 64).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weights.embedding, first)
