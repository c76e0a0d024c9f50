"""The tensors that a config implies, and whether a checkpoint has them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.engine.models.config import ModelConfig
from baton.engine.weights.checkpoint import StoredTensor
from baton.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint, and the shape that the config gives it."""

    name: str
    shape: tuple[int, ...]


def embedding(config: ModelConfig) -> Part:
    """A row for each token."""
    return Part("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))


def final_norm(config: ModelConfig) -> Part:
    """Behind the last layer."""
    return Part("model.norm.weight", (config.hidden_size,))


def lm_head(config: ModelConfig) -> Part:
    """Absent where embeddings are tied."""
    return Part("lm_head.weight", (config.vocab_size, config.hidden_size))


def layer_parts(config: ModelConfig, index: int) -> dict[str, Part]:
    """A layer's tensors in the checkpoint, by their name within the layer."""
    hidden, head = config.hidden_size, config.head_size
    q, kv, inner = config.num_heads * head, config.num_kv_heads * head, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    projections = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, biased in projections:
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head,)
    prefix = f"model.layers.{index}."
    return {name: Part(prefix + name, shape) for name, shape in shapes.items()}


def expected(config: ModelConfig) -> Iterator[Part]:
    """Every tensor that the checkpoint must have."""
    yield embedding(config)
    yield final_norm(config)
    if not config.tie_embeddings:
        yield lm_head(config)
    for index in range(config.num_layers):
        yield from layer_parts(config, index).values()


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError unless what is `stored` in `path` is what the config describes."""
    for part in expected(config):
        if part.name not in stored:
            raise CheckpointError(f"{path} lacks tensor {part.name}, which its config.json implies")
        found = stored[part.name]
        if found.shape != part.shape:
            raise CheckpointError(
                f"{found.file}: tensor {part.name} has shape {list(found.shape)}; config.json "
                f"implies {list(part.shape)}"
            )
    unknown = stored.keys() - {part.name for part in expected(config)}
    for name in sorted(unknown):
        # Tables that old exports saved, and a copy of the embedding, carry nothing of their own.
        tied_copy = config.tie_embeddings and name == "lm_head.weight"
        if not tied_copy and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} is not part of {config.architecture} as "
                "config.json describes it"
            )
