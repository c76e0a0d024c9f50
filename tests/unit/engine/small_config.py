"""The small model that tests vary: a Llama with nothing added."""

from dataclasses import replace

from baton.engine.models.config import ModelConfig, Rope

_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=100,
    rms_eps=1e-6,
    rope=Rope(10000.0),
    windows=(None, None),
    tie_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    max_context=2048,
    eos_token_ids=(),
    dtype="float32",
)


def small_config(window=None, **changes):
    """A model of two layers, the second with a window if one is given."""
    return replace(_LLAMA, windows=(None, window), **changes)
