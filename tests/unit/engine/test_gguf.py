"""GGUF files give what transformers and llama.cpp's own package make of them."""

import math
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
import transformers

from baton.config import EngineConfig
from baton.engine.checkpoint.tensor_headers import fingerprint, stored_tensors
from baton.engine.kernels.native import library
from baton.engine.kernels.native.packing import PackedWeight
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from baton.engine.quantization.gguf import (
    QUANTIZED,
    GgufTensors,
    common_weight,
    join_weights,
    read_gguf,
)
from baton.engine.quantization.linear_weight import DenseWeight
from baton.errors import CheckpointError
from baton.local.model_check import check_model
from baton.local.model_plan import weight_bytes
from tests.unit.engine import small_models
from tests.unit.engine.checkpoints import assert_greedy
from tests.unit.engine.gguf_files import add_tensor, llama3_factors, quantized, write_gguf
from tests.unit.engine.model_cases import LINEAR_ROPE, LLAMA3, LONG, YARN
from tests.unit.engine.paged import PagedRun

GGML = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
PROMPT = small_models.tokens(40, 7)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 768}  # transformers reads no other
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),  # transformers reads no other
    "qwen3moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 5}),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 64, "sliding_window": 24}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"query_pre_attn_scalar": 64, "sliding_window": 24, "num_hidden_layers": 7},
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}


def reference(file):
    """The file as transformers reads and computes it, dequantised to float32."""
    # It asks for a package that it does not need on a CPU.
    with mock.patch.object(transformers.modeling_utils, "is_accelerate_available", lambda: True):
        return transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def assert_64_greedy(model, expected):
    run = PagedRun(model)
    assert_greedy(expected, run.generate(run.add(PROMPT, room=64), 64), len(PROMPT))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_weights_equal_those_of_gguf(kind, tmp_path):
    values = torch.randn(70, 512, generator=torch.Generator().manual_seed(1)).numpy()
    writer = gguf.GGUFWriter(file := tmp_path / "one.gguf", "llama")
    add_tensor(writer, "token_embd.weight", values, kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    (tensor,) = gguf.GGUFReader(file).tensors
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    stored = stored_tensors(file)
    (name,) = stored
    weight = read_gguf(kind, GgufTensors(file, stored).get_tensor(name))
    assert torch.equal(weight.dequantized(torch.float32), expected)
    rows, columns = torch.tensor([5, 69, 0]), range(256, 512)
    assert torch.equal(weight.take_outputs(rows).dequantized(torch.float32), expected[rows])
    part = weight.take_inputs(columns).dequantized(torch.float32)
    assert torch.equal(part, expected[:, 256:])


@pytest.mark.parametrize("name", MODELS)
def test_64_greedy_tokens_of_a_mixed_file_are_those_of_transformers(name, tmp_path):
    architecture, overrides = MODELS[name]
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture, "Q4_K", MIXED, **{**SIZES, **overrides})
    expected = reference(file)
    for kernels in small_models.KERNELS:
        assert_64_greedy(small_models.load(file, kernels), expected)


OTHER_YARN = {**YARN, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 2.0}
SCALING = "llama.rope.scaling"
GGUF_YARN = {
    f"{SCALING}.type": "yarn",
    f"{SCALING}.factor": 4.0,
    f"{SCALING}.original_context_length": 32,
}
PLAIN = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}, {}, {}),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
        {},
        {},
    ),
    "qwen3 of small heads": ("Qwen3ForCausalLM", {}, {}, {}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True}, {}, {}),
    "llama linear": (
        "LlamaForCausalLM",
        {"rope_parameters": LINEAR_ROPE},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {},
    ),
    "llama3 factors": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3},
        {},
        {"rope_freqs.weight": llama3_factors(LLAMA3, 16)},
    ),
    "llama yarn": (
        "LlamaForCausalLM",
        {"rope_parameters": OTHER_YARN},
        {
            **GGUF_YARN,
            f"{SCALING}.yarn_ext_factor": 1.0,
            f"{SCALING}.yarn_attn_factor": 1.5,
            f"{SCALING}.yarn_beta_fast": 4.0,
            f"{SCALING}.yarn_beta_slow": 2.0,
        },
        {},
    ),
    "llama merged of several files": ("LlamaForCausalLM", {}, {"split.count": 0}, {}),
    "phi3 without windows": (
        "Phi3ForCausalLM",
        {"sliding_window": None},
        {"phi3.attention.sliding_window": 0},
        {},
    ),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 32,
            "sliding_window": None,
        },
        {
            "phi3.rope.scaling.original_context_length": 32,
            "phi3.rope.scaling.attn_factor": (1 + math.log(512 / 32) / math.log(32)) ** 0.5,
        },
        {
            "rope_factors_long.weight": np.float32(LONG["long_factor"]),
            "rope_factors_short.weight": np.float32(LONG["short_factor"]),
        },
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_unquantised_files_equal_the_model_that_they_were_made_of(name, tmp_path):
    architecture, overrides, metadata, tensors = PLAIN[name]
    file = tmp_path / "model.gguf"
    expected = write_gguf(file, architecture, metadata=metadata, tensors=tensors, **overrides)
    assert_64_greedy(small_models.load(file, "torch"), expected.eval())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_files_of_one_type_equal_transformers(kind, tmp_path):
    write_gguf(file := tmp_path / "model.gguf", "LlamaForCausalLM", kind, **SIZES)
    assert_64_greedy(small_models.load(file, "torch"), reference(file))
    assert ModelConfig.load(file).dtype == "bfloat16"


def test_a_model_may_be_split_into_several_files(tmp_path):
    whole, parts = tmp_path / "whole.gguf", tmp_path / "model.gguf"
    for file, split in ((whole, 0), (parts, 7)):
        write_gguf(file, "LlamaForCausalLM", "Q8_0", split=split, **SIZES)
    first, *others = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert others
    tensors, expected = stored_tensors(first), stored_tensors(whole)
    assert tensors.keys() == expected.keys()
    models = (small_models.load(file, "torch") for file in (first, whole))
    assert torch.equal(*(PagedRun(model).logits(PROMPT) for model in models))
    with pytest.raises(CheckpointError, match=r"is one of 3 files of a model: give the first one"):
        ModelConfig.load(others[0])
    others[-1].unlink()
    with pytest.raises(CheckpointError, match=rf"{others[-1].name} is missing"):
        ModelConfig.load(first)


def test_parts_of_several_types_are_cut_as_the_whole_is():
    values = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    parts = [read_gguf(kind, torch.from_numpy(quantized(values, GGML[kind]).copy()))
             for kind in ("Q4_K", "Q6_K")]  # fmt: skip
    joined, x = join_weights([*parts, DenseWeight(torch.ones(3, 512))]), torch.randn(3, 512)
    exact = joined.apply(x)
    if library.load() is not None:
        natively = PackedWeight.from_weight(joined).apply(x)
        torch.testing.assert_close(natively, exact, rtol=1e-4, atol=1e-4)
    rows = torch.tensor([1, 3, 63, 64, 100, 129])
    dense = common_weight(joined, torch.float32)
    cut = common_weight(joined.take_outputs(rows), torch.float32)
    assert torch.equal(cut.tensor, dense.tensor[rows])
    halves = [joined.take_inputs(range(at, at + 256)).apply(x[:, at : at + 256]) for at in (0, 256)]
    torch.testing.assert_close(halves[0] + halves[1], exact, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match="whole blocks of 256"):
        joined.take_inputs(range(128))
    torch.testing.assert_close(dense.apply(x), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_split", [False, True])
def test_fingerprints_differ_where_contents_do(is_split, tmp_path):
    """Also where the first of several files has no tensors."""
    options = {"split": 7, "has_empty_first": True} if is_split else {}
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        file = tmp_path / name / "model.gguf"
        file.parent.mkdir()
        write_gguf(file, "LlamaForCausalLM", "Q8_0", seed=seed, **options)
    one, same, other = (
        fingerprint(min((tmp_path / name).iterdir())) for name in ("one", "same", "other")
    )
    assert one == same != other


def test_the_plan_counts_what_a_worker_holds(tmp_path):
    write_gguf(file := tmp_path / "model.gguf", "LlamaForCausalLM", "Q4_K", MIXED, **SIZES)
    settings, config = EngineConfig(model=str(file)), ModelConfig.load(file)
    planned = weight_bytes(settings, config, torch.bfloat16, on_gpu=False)
    pack = lambda weight, is_output: PackedWeight.from_weight(weight)  # noqa: E731
    weights = load_weights(file, config, torch.bfloat16, CPU, pack)
    held = weights.num_bytes + weights.embedding.nbytes
    assert abs(planned - held) < 0.1 * held


def edited(edit):
    """A good file with some bytes changed."""

    def make(file):
        write_gguf(file, "LlamaForCausalLM", "Q8_0", **SIZES)
        file.write_bytes(edit(file.read_bytes()))

    return make


def written(architecture="LlamaForCausalLM", **options):
    return lambda file: write_gguf(file, architecture, **SIZES, **options)


BROKEN = {
    "empty": (lambda file: file.write_bytes(b""), "model.gguf is empty"),
    "magic": (edited(lambda data: b"GGML" + data[4:]), "is not a GGUF file: it begins with b'GG"),
    "version": (edited(lambda data: data[:4] + b"\7" + data[5:]), "its version is 7; supported"),
    "header": (edited(lambda data: data[:200]), r"model.gguf is truncated: it has 200 bytes, and"),
    "data": (edited(lambda data: data[:-99]), r"is truncated: .* and tensor '.*' ends at"),
    "tensors": (
        edited(lambda data: data[:8] + b"\xff" * 8 + data[16:]),
        "the number of tensors is .*; supported: up to",
    ),
    "architecture": (
        written(metadata={"general.architecture": "rwkv6"}),
        "general.architecture is 'rwkv6'; supported: llama, qwen2",
    ),
    "type": (written(kind="Q2_K"), "has type Q2_K; supported: F32, F16"),
    "key": (
        written(metadata={"llama.block_count": None}),
        "llama.block_count is missing; supported: a whole number",
    ),
    "value": (
        written(metadata={"llama.embedding_length": 7.5}),
        "llama.embedding_length is 7.5; supported: a whole number",
    ),
    "layers": (
        written(metadata={"llama.block_count": 3}),
        r"lacks tensor model.layers.2.input_layernorm.weight, which its metadata implies",
    ),
    "yarn": (
        written(metadata={**GGUF_YARN, f"{SCALING}.yarn_ext_factor": 0.5}),
        "llama.rope.scaling.yarn_ext_factor is 0.5; supported: 1",
    ),
    "yarn of another magnitude": (
        written(metadata={**GGUF_YARN, f"{SCALING}.attn_factor": 1.2}),
        r"llama.rope.scaling.attn_factor is 1.2\d*; supported: 1",
    ),
    "tokenizer": (
        written(metadata={"tokenizer.ggml.model": None}),
        "tokenizer.ggml.model is missing; supported: a text",
    ),
    "tokens": (
        written(metadata={"tokenizer.ggml.tokens": None}),
        "tokenizer.ggml.tokens is missing; supported: the texts of all tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line(name, tmp_path):
    make, message = BROKEN[name]
    make(file := tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=message) as caught:
        check_model(EngineConfig(model=str(file)))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_with_only_gguf_files_names_one(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give one of its GGUF files, .*model.gguf"):
        check_model(EngineConfig(model=str(tmp_path)))
