"""From the order of a checkpoint's outputs, channels and norms to that of the decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.delta_rule import DeltaRuleShape
from baton.engine.models.model_config import ModelConfig


def arranged(config: ModelConfig, field: str, tensor: Tensor) -> Tensor:
    """Converts a checkpoint's tensor to the order and type that the decoder expects."""
    if field.endswith("norm"):
        if config.arch.norm_rounds_once:
            tensor = tensor.float()
        if config.norm_plus_one:
            tensor = tensor + 1
    if field == "sinks":
        return tensor.float()
    if field == "router_norm":
        scaled: Tensor = tensor * float(config.hidden_size**-0.5)
        return scaled
    outputs = (config.num_heads + config.num_kv_heads) * config.head_size
    if config.layer_heads and field.startswith("qkv") and len(tensor) == outputs:
        tensor = torch.cat((tensor, tensor[config.num_heads * config.head_size :]))  # as values
    if config.delta_rule is not None and field in _DELTA_RULE_FIELDS:
        return _by_key_head(config, config.delta_rule.shape, field, tensor)
    if config.arch.gated_attention and field in ("qkv", "qkv_bias"):
        heads = tensor.view(-1, config.head_size, *tensor.shape[1:])
        gated = heads[: 2 * config.num_heads]
        tensor = torch.cat([gated[::2], heads[2 * config.num_heads :], gated[1::2]]).flatten(0, 1)
    order = config.head_order
    if order is not None and field in ("qkv", "qkv_bias", "q_norm", "k_norm"):
        heads = tensor.view(-1, config.head_size, *tensor.shape[1:])
        rotated = heads[: config.num_heads + config.num_kv_heads]  # values follow
        rotated.copy_(rotated[:, order])
    return tensor


_DELTA_RULE_FIELDS = ("delta_in", "delta_gates", "conv", "log_decay", "decay_bias", "head_scale")


def _by_key_head(config: ModelConfig, delta: DeltaRuleShape, field: str, tensor: Tensor) -> Tensor:
    """Orders outputs or channels by key head, whose parts follow each other. Vectors are float32.

    A checkpoint has them by part, each of which has all key heads; but Qwen3-Next's projections are
    by key head already.
    """
    if field == "conv":
        tensor = tensor.flatten(1)
    elif tensor.dim() == 1:
        return tensor.float()
    elif len(config.arch.delta_rule) == 2:
        return tensor
    keys, values = delta.key_size, delta.values_per_key * delta.value_size
    sizes = {
        "delta_in": (keys, keys, values, values),
        "conv": (keys, keys, values),
        "delta_gates": (delta.values_per_key,) * 2,
    }[field]
    parts = tensor.split([delta.key_heads * size for size in sizes])
    by_head = [part.unflatten(0, (delta.key_heads, -1)) for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def latent_order(config: ModelConfig, field: str, outputs: int) -> Tensor | None:
    """The checkpoint's index of each output, in the decoder's order of rotated pairs (see
    `ModelConfig.head_order`); None: the same."""
    if (latent := config.latent) is None or field not in ("qkv", "q_b"):
        return None
    order, size = torch.arange(outputs), latent.rope_size
    rows = 0 if field == "q_b" else config.head_size
    if field == "q_b" or not latent.q_rank:
        for end in range(latent.query_size, outputs - rows + 1, latent.query_size):
            order[end - size : end] = _halves(order[end - size : end])
    if rows:
        order[-size:] = _halves(order[-size:])
    return order


def _halves(pairs: Tensor) -> Tensor:
    """Neighbours that are rotated together, half the length apart."""
    return torch.cat((pairs[::2], pairs[1::2]))
