"""Rows of several LoRA adapters and of none in one step: each as the model merged with its own."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.kernels.native.row_ops import NATIVE_ROW_OPS
from baton.engine.kernels.torch.lora import add_lora
from baton.engine.models.architectures import WRAPPERS
from baton.engine.models.lora import (
    LORA_CONFIG,
    LORA_FILE,
    LoraSlots,
    adapted_tensors,
    identity_of,
    load_lora,
)
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from baton.errors import CheckpointError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.gguf_files import write_gguf
from tests.unit.engine.model_cases import ADAPTED, GEMMA, VARIANTS
from tests.unit.engine.paged import PagedRun
from tests.unit.engine.small_models import KERNELS, feed, make, require, tokens

CPU = torch.device("cpu")
LAYERS = ("model.layers.0.", "model.layers.1.")
ALL = tuple(
    layer + module
    for layer in LAYERS
    for module in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
Q, DOWN = ALL[0], ALL[-1]
PREFIX = "base_model.model."
MULTIMODAL = {name: case for name, case in VARIANTS.items() if case[0] in WRAPPERS}


def make_adapter(
    directory,
    model,
    *,
    tensors=None,
    modules=(Q, DOWN),
    rank=4,
    seed=0,
    spelling=("", ""),
    **config,
):
    """An adapter in PEFT's format, as it saves one, and the updates `B @ A` of its modules.

    spelling: the start of the modules' names in this model, and in that which was adapted.
    """
    generator = torch.Generator().manual_seed(100 * seed + rank)
    updates, stored = {}, {}
    for module in modules:
        outputs, inputs = model.get_submodule(module).weight.shape
        a = 0.3 * torch.randn(rank, inputs, generator=generator)
        b = 0.3 * torch.randn(outputs, rank, generator=generator)
        name = PREFIX + spelling[1] + module.removeprefix(spelling[0])
        stored |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        updates[module] = b @ a
    directory.mkdir()
    save_file(tensors if tensors is not None else stored, directory / LORA_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "bias": "none", **config}
    (directory / LORA_CONFIG).write_text(json.dumps(fields))
    return updates


def adaptable(directory, model):
    """The modules of a transformers model that adapters may change, as PEFT names them."""
    places, text = adapted_tensors(ModelConfig.load(directory)), text_module(model)
    modules = [text + name.removeprefix("model.").removesuffix(".weight") for name in places]
    assert {name for name, _ in model.named_modules()} >= {*modules}
    return modules


def text_module(model):
    """The start of the names of a transformers model's text layers, before `layers.`."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "model", decoder).layers  # Llama 4's has an output layer
    (name,) = (name for name, module in model.named_modules() if module is layers)
    return name.removesuffix("layers")


def load(tmp_path, kernels, *adapters, dtype=torch.float32):
    """The model with these adapters in its slots, and one slot more."""
    config = ModelConfig.load(tmp_path / "base")
    weights = load_weights(tmp_path / "base", config, dtype, CPU)
    slots = LoraSlots(config, len(adapters) + 1, 8, dtype, CPU)
    model = make(kernels, config, replace(weights, lora=slots), dtype)
    for slot, name in enumerate(adapters):
        model.write_lora(slot, load_lora(tmp_path / name, config, 8))
    return model


def merged(tmp_path, model, updates, scale):
    """transformers' model with an adapter merged."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for module, update in updates.items():
        model.get_submodule(module).weight.data += scale * update
    with torch.inference_mode():
        yield model
    model.load_state_dict(before)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", ADAPTED)
def test_rows_of_two_adapters_and_of_none_share_a_step(tmp_path, kernels, architecture):
    reference = make_checkpoint(tmp_path / "base", architecture, **ADAPTED[architecture])
    modules = adaptable(tmp_path / "base", reference)
    everything = make_adapter(tmp_path / "a", reference, modules=modules)
    few = make_adapter(tmp_path / "b", reference, modules=modules[1::3], rank=8, seed=1)
    model = load(tmp_path, kernels, "a", "b")
    run = PagedRun(model)
    prompts = [tokens(length, seed) for seed, length in enumerate((9, 21, 14))]
    sequences = [run.add(prompt) for prompt in prompts]
    sequences[0].lora_slot, sequences[1].lora_slot = 0, 1
    parts = [[] for _ in sequences]
    for counts in ((5, 7, 6), (4, 14, 8)):
        logits = run.step(*zip(sequences, counts, strict=True))
        for part, rows in zip(parts, logits, strict=True):
            part.append(rows)
    for number, (updates, scale) in enumerate(((everything, 3), (few, 1.5), ({}, 0))):
        for changed in merged(tmp_path, reference, updates, scale):
            expected = changed(torch.tensor([prompts[number]])).logits[0]
            found = torch.cat(parts[number])
            torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "options"), MULTIMODAL.values(), ids=MULTIMODAL)
def test_adapters_of_multimodal_models_change_their_text(tmp_path, architecture, options):
    reference = make_checkpoint(tmp_path / "base", architecture, **options)
    modules = adaptable(tmp_path / "base", reference)
    assert not modules[0].startswith("model.layers.")
    updates = make_adapter(tmp_path / "a", reference, modules=modules)
    run = PagedRun(load(tmp_path, "torch", "a"))
    prompt = tokens(15, 3)
    sequence = run.add(prompt)
    sequence.lora_slot = 0
    (found,) = run.step((sequence, len(prompt)))
    for changed in merged(tmp_path, reference, updates, 3):
        expected = changed(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "text", "older"),
    [
        ("Gemma3ForConditionalGeneration", "model.language_model.", "language_model.model."),
        ("LlavaForConditionalGeneration", "model.language_model.", "language_model.model."),
        ("Idefics3ForConditionalGeneration", "model.text_model.", "text_model."),
        ("Qwen2VLForConditionalGeneration", "model.language_model.", "model."),
        ("Llama4ForConditionalGeneration", "language_model.model.", "model."),  # text alone
    ],
)
def test_older_spellings_name_the_same_matrices(tmp_path, architecture, text, older):
    reference = make_checkpoint(tmp_path / "base", architecture)
    modules = adaptable(tmp_path / "base", reference)
    for name, spelling in (("now", (text, text)), ("older", (text, older))):
        make_adapter(tmp_path / name, reference, modules=modules, spelling=spelling)
    assert_same_updates(tmp_path, tmp_path / "base")


def test_a_multimodal_model_s_adapter_fits_the_gguf_file_of_its_text(tmp_path):
    reference = write_gguf(tmp_path / "base.gguf", "Gemma3ForCausalLM", **GEMMA)
    for name, text in (("now", "model."), ("older", "model.language_model.")):
        make_adapter(tmp_path / name, reference, modules=ALL, spelling=("model.", text))
    assert_same_updates(tmp_path, tmp_path / "base.gguf")


def assert_same_updates(tmp_path, base):
    now, older = (
        load_lora(tmp_path / name, ModelConfig.load(base), 8).updates for name in ("now", "older")
    )
    assert now.keys() == older.keys() and len(now) > 1
    for key, update in now.items():
        assert all(map(torch.equal, update, older[key])) and update[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_has_the_same_bits_in_any_batch(tmp_path, kernels, dtype):
    if kernels == "torch" and dtype == torch.bfloat16:
        pytest.skip("torch's products of bfloat16 depend on the batch")
    reference = make_checkpoint(tmp_path / "base")
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, reference, modules=ALL, seed=seed)
    run = PagedRun(load(tmp_path, kernels, "a", "b", dtype=dtype))
    prompts = [tokens(12, seed) for seed in range(3)]

    def outputs(chunk, *slots):
        sequences = [run.add(prompt) for prompt in prompts]
        for sequence, slot in zip(sequences, slots, strict=True):
            sequence.lora_slot = slot
        found = [[] for _ in sequences]
        for _ in range(12 // chunk):
            for part, rows in zip(
                found, run.step(*((one, chunk) for one in sequences)), strict=True
            ):
                part.append(rows)
        return [torch.cat(part) for part in found]

    together = outputs(12, 0, 1, -1)
    assert torch.equal(outputs(3, 0, 0, 1)[0], together[0])
    assert torch.equal(outputs(1, -1, 1, 0)[1], together[1])
    assert torch.equal(outputs(4, 1, -1, -1)[2], together[2])
    assert not torch.equal(outputs(12, -1, -1, -1)[0], together[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_products_equal_the_reference(tmp_path, dtype):
    require("native")
    reference = make_checkpoint(tmp_path / "base", hidden_size=72)
    make_adapter(tmp_path / "a", reference, modules=ALL, rank=13)
    config = ModelConfig.load(tmp_path / "base")
    slots = LoraSlots(config, 2, 24, dtype, CPU)
    slots.write(1, load_lora(tmp_path / "a", config, 24))
    of_rows = torch.tensor([1, -1, 0, 1, 1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for field, lora in slots.layers[1].items():
        x, y = (
            torch.randn(5, size, generator=generator).to(dtype)
            for size in (lora.a.shape[2], lora.b.shape[2])
        )
        expected, found = y.clone(), y.clone()
        add_lora(expected, x, of_rows, lora)
        NATIVE_ROW_OPS.add_lora(found, x, of_rows, lora)
        torch.testing.assert_close(found, expected, msg=field)
        assert torch.equal(found[1:3], y[1:3]) and not torch.equal(found[3], y[3])


def test_a_slot_that_is_written_again_keeps_nothing(tmp_path):
    reference = make_checkpoint(tmp_path / "base")
    make_adapter(tmp_path / "large", reference, modules=ALL, rank=8)
    make_adapter(tmp_path / "small", reference, rank=2, seed=1)
    fresh, used = load(tmp_path, "torch", "small"), load(tmp_path, "torch", "large")
    used.write_lora(0, load_lora(tmp_path / "small", used.config, 8))
    found = []
    for model in (fresh, used):
        run = PagedRun(model)
        sequence = run.add(tokens(10, 1))
        sequence.lora_slot = 0
        found.append(feed(run, sequence, 10))
    assert torch.equal(*found)


OF_TEXT = {r"model\.layers\..*": 1, r"language_model\.layers\.1\..*": 20}
VISION_MODEL = "Qwen2_5_VLForConditionalGeneration"


@pytest.mark.parametrize(
    ("architecture", "options", "scales"),
    [
        ("Qwen2ForCausalLM", {}, (3, 3)),
        (
            "Qwen2ForCausalLM",
            {"use_rslora": True, "modules_to_save": None, "use_dora": False},
            (6, 6),
        ),
        (
            "Qwen2ForCausalLM",
            {"alpha_pattern": {r"layers\.1\..*": 20, "_proj": 1}},
            (3, 5),
        ),
        (VISION_MODEL, {"alpha_pattern": OF_TEXT}, (3, 5)),
    ],
    ids=["alpha by rank", "stabilized", "patterns", "patterns of names in the adapted model"],
)
def test_scales(tmp_path, architecture, options, scales):
    reference = make_checkpoint(tmp_path / "base", architecture)
    text = text_module(reference)
    modules = [name.replace("model.", text) for name in (Q, DOWN)]
    updates = make_adapter(tmp_path / "adapter", reference, modules=modules, **options)
    found = load_lora(tmp_path / "adapter", ModelConfig.load(tmp_path / "base"), 8).updates
    assert found.keys() == {(0, "qkv"), (1, "down")}
    for (a, b), update, scale in zip(found.values(), updates.values(), scales, strict=True):
        torch.testing.assert_close(b[:, : len(update)].T @ a[0], scale * update)


def test_an_identity_is_that_of_the_content(tmp_path):
    model = make_checkpoint(tmp_path / "base")
    for name, rank, alpha in (("a", 4, 1), ("b", 4, 2), ("c", 8, 1), ("d", 4, 1)):
        make_adapter(tmp_path / name, model, rank=rank, lora_alpha=alpha)
    found = {name: identity_of(tmp_path / name) for name in "abcd"}
    assert found["a"] == found["d"] and len(set(found.values())) == 3
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        identity_of(tmp_path)


def one(module, half, *shape):
    return {f"{PREFIX}{module}.lora_{half}.weight": torch.zeros(shape)}


def whole(module):
    return one(module, "A", 4, 64) | one(module, "B", 64, 4)


WRONG = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
    "more than sums": ({"use_dora": True}, "use_dora is True; supported: False; merge it with"),
    "another base": (
        {"init_lora_weights": "pissa_niter_16"},
        "init_lora_weights is 'pissa_niter_16'",
    ),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "no alpha": ({"lora_alpha": "x"}, "lora_alpha is"),
    "a pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern is"),
    "nothing": ({"tensors": {}}, "has no tensors"),
    "a large rank": ({"rank": 9}, "has rank 9, and this worker holds adapters up to rank 8"),
    "half": ({"tensors": one(Q, "A", 4, 64)}, "lacks tensor base_model.model.model.layers.0.self"),
    "an embedding": (
        {"tensors": {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(1)}},
        "is no half of a LoRA update; merge it",
    ),
    "the output layer": (
        {"tensors": one("lm_head", "A", 4, 64)},
        "adapts lm_head.weight, which is no projection of attention or of a dense MLP",
    ),
    "another layer": (
        {"tensors": one("model.layers.7.mlp.up_proj", "A", 4, 64)},
        "adapts model.layers.7.mlp.up_proj.weight, which is no projection",
    ),
    "another size": (
        {"tensors": one(Q, "A", 4, 32) | one(Q, "B", 64, 4)},
        "is [64, 64], and its update [64, 4] by [4, 32]: the adapter was made for another model",
    ),
}


VISION = "model.visual.blocks.0.attn.proj"
Q_OF_TEXT = Q.replace("model.", "model.language_model.")
WRONG_FOR_TEXT = {
    "images": (
        one(VISION, "A", 4, 32) | one(VISION, "B", 32, 4),
        f"adapts {VISION}.weight, which is no projection of attention or of a dense MLP of "
        "this model's text layers",
    ),
    "another size of text": (
        one(Q_OF_TEXT, "A", 4, 32) | one(Q_OF_TEXT, "B", 64, 4),
        f"{Q_OF_TEXT}.weight is [64, 64], and its update [64, 4] by [4, 32]",
    ),
    "half of text": (
        one(Q_OF_TEXT, "A", 4, 64),
        f"lacks tensor {PREFIX}{Q_OF_TEXT}.lora_B.weight",
    ),
    "twice": (
        whole(Q_OF_TEXT) | whole(Q),
        f"adapts {Q_OF_TEXT}.weight and {Q}.weight, which are one matrix",
    ),
}
REFUSED = [("LlamaForCausalLM", *case) for case in WRONG.values()] + [
    (VISION_MODEL, {"modules": (), "tensors": tensors}, message)
    for tensors, message in WRONG_FOR_TEXT.values()
]


@pytest.mark.parametrize(
    ("architecture", "options", "message"), REFUSED, ids=[*WRONG, *WRONG_FOR_TEXT]
)
def test_what_is_no_plain_adapter_of_this_model_is_refused_by_name(
    tmp_path, architecture, options, message
):
    """By the names of the adapted model."""
    model = make_checkpoint(tmp_path / "base", architecture)
    make_adapter(tmp_path / "adapter", model, **options)
    with pytest.raises(CheckpointError) as caught:
        load_lora(tmp_path / "adapter", ModelConfig.load(tmp_path / "base"), 8)
    assert message in str(caught.value)


def test_a_directory_without_an_adapter_is_refused(tmp_path):
    make_checkpoint(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        load_lora(tmp_path, ModelConfig.load(tmp_path / "base"), 8)
