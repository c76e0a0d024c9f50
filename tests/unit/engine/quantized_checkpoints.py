"""Small quantised checkpoints as each format is defined, and the dense model beside.

Numbers are drawn, not fitted: what a checkpoint means is `(value - zero point) * scale`, whoever
made it. Nothing here is the engine's.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.unit.engine.checkpoints import load_reference, make_checkpoint

# AutoAWQ, awq/modules/linear/gemm.py: a word's nibbles, the lowest first, are these outputs.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FP8 = torch.float8_e4m3fn


def compressed(form, weights, activations=None):
    """The quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def make_quantized(
    directory, config, architecture="LlamaForCausalLM", damage=None, parts=(), **overrides
):
    """Saves a model as `config`, a quantization_config, says; transformers' dense one of the same.

    damage: changes the tensors before they are saved · parts: of a config of several formats,
    texts in modules' names and the config of one format that is theirs.
    """
    make_checkpoint(directory, architecture, **{**SIZES, **overrides})
    tensors = load_file(directory / "model.safetensors")
    dense, held = dict(tensors), dict(tensors)
    generator = np.random.default_rng(3)
    orders = {}
    for name in tensors:
        if name.endswith(("proj.weight", "mqa.weight")) and "vis" not in name:
            module, shape = name.removesuffix(".weight"), tuple(tensors[name].shape)
            # q, k and v have seen the same inputs, and so have gate and up.
            side = (module.rsplit(".", 1)[0], shape[1])
            order = orders.setdefault(side, generator.permutation(shape[1]))
            one = next((part for text, part in parts if text in name), config)
            del held[name]
            stored, dense[name] = write(one, generator, shape, order)
            held |= {f"{module}.{key}": value for key, value in stored.items()}
    return save(directory, config, held, dense, damage)


def make_mxfp4(directory, damage=None, **overrides):
    """Saves gpt-oss with experts in MXFP4; transformers' dense model of the same numbers."""
    make_checkpoint(directory, "GptOssForCausalLM", **{**SIZES, **overrides})
    dense = load_file(directory / "model.safetensors")
    held, generator = dict(dense), torch.Generator().manual_seed(3)
    for name, tensor in dense.items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del held[name]
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return save(directory, config, held, dense, damage)


def save(directory, config, held, dense, damage):
    """Saves the tensors that are held, changed by `damage`; transformers' model of dense ones."""
    if damage:
        damage(held)
    weights, file = directory / "model.safetensors", directory / "config.json"
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, weights)
    reference = load_reference(directory)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, weights)
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return reference


def write(config, generator, shape, order):
    """A matrix `[out, in]`: the tensors that stand for it, and itself in float32."""
    outputs, inputs = shape
    form = config.get("format", config["quant_method"])
    if form == "int-quantized" or (form == "float-quantized" and quantizes_rows(config)):
        return write_8_bits(config, generator, shape, form)
    if form not in ("awq", "gptq", "pack-quantized"):
        return write_floats(config, generator, shape, form)
    held = config if form in ("awq", "gptq") else config["config_groups"]["group_0"]["weights"]
    size = held["group_size"]
    symmetric = held.get("sym", held.get("symmetric", False))
    act_order = held.get("desc_act", False) or held.get("actorder") == "group"
    values = generator.integers(0, 16, (outputs, inputs))
    # AutoGPTQ stores a zero point less one: of 1 to 16.
    offset = int(form == "gptq" and config.get("checkpoint_format") != "gptq_v2")
    zeros = generator.integers(6, 11, (outputs, inputs // size))
    zeros[:2, 0] = offset, 15 + offset
    if symmetric:
        zeros[:] = 8
    scales = generator.uniform(0.5, 1.5, zeros.shape) / (6 * inputs**0.5)
    scales = torch.tensor(scales, dtype=torch.float16)
    place = np.argsort(order) if act_order else np.arange(inputs)
    group = place // size
    full = (values - zeros[:, group]) * scales.numpy().astype(np.float64)[:, group]
    full = torch.tensor(full, dtype=torch.float32)
    g_idx = torch.tensor(group, dtype=torch.int32)
    if form == "awq":
        stored = {
            "qweight": words(values.T, AWQ_ORDER),
            "qzeros": words(zeros.T, AWQ_ORDER),
            "scales": scales.T,
        }
    elif form == "gptq":
        stored = {
            "qweight": words(values).T,
            "qzeros": words((zeros - offset).T),
            "scales": scales.T,
            "g_idx": g_idx,
        }
    else:
        stored = {
            "weight_packed": words(values),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(shape),
        }
        full = (values - zeros[:, group]) * scales.bfloat16().double().numpy()[:, group]
        full = torch.tensor(full, dtype=torch.float32)
        if not symmetric:
            stored["weight_zero_point"] = words(zeros.T).T
        if act_order:
            stored["weight_g_idx"] = g_idx
    return stored, full


def words(values, order=range(8)):
    """`[rows, n]` → int32 `[rows, n / 8]`: nibble i of a word is its element order[i]."""
    eights = values.reshape(len(values), -1, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:2], np.uint32)
    for nibble, at in enumerate(order):
        packed |= eights[:, :, at] << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def write_8_bits(config, generator, shape, form):
    """Values and their scales, of each output or of all."""
    per_output = config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    scales = generator.uniform(0.5, 1.5, (shape[0], 1) if per_output else (1,))
    scales = torch.tensor(scales / (70 * shape[1] ** 0.5), dtype=torch.bfloat16)
    values = torch.tensor(generator.integers(-127, 128, shape))
    values = values.to(torch.int8) if form == "int-quantized" else values.float().to(FP8)
    full = values.double() * scales.double()
    return {"weight": values, "weight_scale": scales}, full.float()


def quantizes_rows(config):
    """Whether a compressed-tensors config has a scale for each row of activations."""
    inputs = config["config_groups"]["group_0"]["input_activations"]
    return inputs is not None and inputs.get("strategy") == "token"


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_floats(config, generator, shape, form):
    """fp8 or E2M1 numbers with scales of a matrix, of outputs, of blocks or of groups."""
    kind = config.get("quant_algo") or form
    if form == "float-quantized":
        kind = config["config_groups"]["group_0"]["weights"]["strategy"]
    elif form == "fp8":
        kind = "block" if config.get("weight_block_size") else "FP8"
    groups = {"NVFP4": 16, "nvfp4-pack-quantized": 16}.get(kind, 32)
    unit = 1 / (40 * shape[1] ** 0.5)
    if "fp4" in kind.lower():
        nibbles = torch.tensor(generator.integers(0, 16, shape))
        packed = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
        full = torch.where(nibbles >= 8, -1.0, 1.0) * E2M1[nibbles & 7].double()
        unit *= 10
    else:
        packed = generator.normal(size=shape) * 2.0 ** generator.integers(-12, 8, shape)
        packed = torch.tensor(packed).float().clamp(-448, 448).to(FP8)  # torch 2.11: NaN beyond
        full = packed.double()
    stored = {"weight_packed" if "pack" in form else "weight": packed}
    size = (shape[0], shape[1] // groups)
    if kind in ("block", "tensor", "FP8", "channel", "FP8_PER_CHANNEL_PER_TOKEN"):
        by_row = dict.fromkeys(("channel", "FP8_PER_CHANNEL_PER_TOKEN"), (1, shape[1]))
        rows, columns = {"block": (128, 128), **by_row}.get(kind, shape)
        blocks = [-(-shape[0] // rows), -(-shape[1] // columns)]
        scales = torch.tensor(generator.uniform(0.5, 1.5, blocks) * unit).float()
        for i, j in np.ndindex(*blocks):
            at = slice(rows * i, rows * (i + 1)), slice(columns * j, columns * (j + 1))
            full[at] *= scales[i, j].item()
        if kind == "FP8":  # a scalar
            scales = scales[0, 0]
        elif kind == "tensor":
            scales = scales[0]
        elif kind == "FP8_PER_CHANNEL_PER_TOKEN":
            scales = scales[:, 0]
        stored["weight_scale_inv" if form == "fp8" else "weight_scale"] = scales
        if kind in ("tensor", "FP8"):
            name = "activation_scale" if form == "fp8" else "input_scale"
            stored[name] = torch.ones_like(scales)
    elif kind in ("NVFP4", "nvfp4-pack-quantized"):
        scales = torch.tensor(generator.uniform(64, 448, size)).float().to(FP8)
        unit /= 256
        full *= scales.double().repeat_interleave(groups, 1)
        if kind == "NVFP4":
            stored |= {"weight_scale": scales, "weight_scale_2": torch.tensor(unit).float()}
            full *= stored["weight_scale_2"].double()
            stored["input_scale"] = torch.tensor(1.0)
        else:
            stored |= {"weight_scale": scales, "weight_global_scale": torch.tensor([1 / unit])}
            stored["weight_global_scale"] = stored["weight_global_scale"].float()
            full /= stored["weight_global_scale"].double()
    else:  # microscaling formats
        exponents = torch.tensor(generator.integers(-1, 2, size) + int(np.log2(unit)))
        full *= (2.0 ** exponents.double()).repeat_interleave(groups, 1)
        stored["weight_scale"] = (exponents + 127).to(torch.uint8)
    return stored, full.float()


def quantize_inputs(reference, kind):
    """Every projection of a transformers model rounds its inputs to `kind`, token by token."""
    peak = 127 if kind == torch.int8 else 448

    def rounded(module, args):
        x = args[0].double()
        scale = x.abs().amax(-1, keepdim=True) / peak
        units = x / scale
        units = units.round() if kind == torch.int8 else units.float().to(FP8).double()
        return ((units * scale).to(args[0].dtype),)

    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    return reference
