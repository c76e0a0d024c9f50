"""GGUF files give what transformers and llama.cpp's own package make of them."""

import gguf
import pytest
import torch
import transformers

from baton.engine.checkpoint.tensors import stored_tensors
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from baton.engine.quantization.gguf import QUANTIZED, GgufTensors, read_gguf
from tests.unit.engine import small_models
from tests.unit.engine.gguf_files import add_tensor, write_gguf
from tests.unit.engine.paged import PagedRun

CPU = torch.device("cpu")
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


def load(file, kernels, dtype=torch.float32):
    config = ModelConfig.load(file)
    return small_models.make(kernels, config, load_weights(file, config, dtype, CPU), dtype)


def reference(file):
    """The file as transformers reads and computes it, dequantised to float32."""
    # It asks for a package that it does not need on a CPU.
    transformers.modeling_utils.is_accelerate_available = lambda: True
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompt(length=40):
    return torch.randint(2, 300, (length,), generator=torch.Generator().manual_seed(7)).tolist()


@torch.inference_mode()
def assert_greedy_tokens_equal(model, expected, count=64):
    """Greedy tokens of a model are those of a transformers model."""
    run = PagedRun(model)
    sequence, step = run.add(prompt(), room=count), 40
    for _ in range(count):
        scores, step = run.step((sequence, step))[0][-1], 1
        sequence.tokens.append(int(scores.argmax()))
    logits = expected(torch.tensor([sequence.tokens])).logits[0]
    assert sequence.tokens[40:] == logits.argmax(dim=1)[39:-1].tolist()


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


@pytest.mark.parametrize("kernels", small_models.KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_64_greedy_tokens_of_a_mixed_file_are_those_of_transformers(name, kernels, tmp_path):
    architecture, overrides = MODELS[name]
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture, "Q4_K", MIXED, **{**SIZES, **overrides})
    assert_greedy_tokens_equal(load(file, kernels), reference(file))
