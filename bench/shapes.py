"""Model shapes that are compared: sizes of public models, so that nobody must download one.

Weights do not matter to how long a step takes. Needs nothing but Python: candidates read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model with tied embeddings; `biased` gives q, k and v a bias."""

    name: str
    like: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    biased: bool = False

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """Weights, each counted once."""
        kv = self.kv_heads * self.head_size
        biases = (self.hidden + 2 * kv) * self.biased
        attention = 2 * self.hidden * (self.hidden + kv) + biases
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + (self.vocab + 1) * self.hidden

    def config(self) -> dict[str, Any]:
        """Its config.json, as Hugging Face transformers writes one."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen2" if self.biased else "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": self.biased,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


_LLAMA, _QWEN = "LlamaForCausalLM", "Qwen2ForCausalLM"
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", "nothing real: for tests", _LLAMA, 128, 2, 4, 2, 256, 512),
        Shape("M", "SmolLM2-135M", _LLAMA, 576, 30, 9, 3, 1536, 49152),
        Shape("L", "Qwen2.5-0.5B", _QWEN, 896, 24, 14, 2, 4864, 151936, biased=True),
    )
}
