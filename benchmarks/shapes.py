"""Model shapes that are compared: sizes of public models, so that nobody must download one.

Weights do not matter to how long a step takes. Needs nothing but Python: candidates read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model; `biased` gives q, k and v a bias.

    `tied`: the embedding is also what gives the scores. `max_context`: tokens.
    """

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
    tied: bool = True
    rope_theta: float = 100000.0
    max_context: int = 8192

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """Weights, each counted once."""
        biases = (self.hidden + 2 * self.kv_heads * self.head_size) * self.biased
        layer = self.layer_matrices + biases + 2 * self.hidden
        embeddings = self.vocab * (1 if self.tied else 2)
        return self.layers * layer + (embeddings + 1) * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_size)
        return attention + 3 * self.hidden * self.intermediate

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
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
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

# What `python -m benchmarks gpu` runs: too large for the others' cores. `smoke` is for its dry run.
GPU_SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "1B", "Llama-3.2-1B", _LLAMA, 2048, 16, 32, 8, 8192, 128256,
            rope_theta=500000.0, max_context=16384,
        ),
        Shape(
            "8B", "Llama-3.1-8B", _LLAMA, 4096, 32, 32, 8, 14336, 128256,
            tied=False, rope_theta=500000.0, max_context=16384,
        ),
        Shape(
            "smoke", "nothing real: for dry runs", _LLAMA, 64, 1, 4, 2, 64, 96,
            tied=False, max_context=512,
        ),
    )
}  # fmt: skip
