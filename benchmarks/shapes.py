"""Model shapes that are compared: sizes of public models, so that none must be downloaded.

Weights do not matter to how long a step takes. Needs nothing but Python: candidates read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model; `biased` gives q, k and v a bias.

    `tied`: the embedding is also what gives the scores. `max_context`: tokens. `experts`: each as
    large as `intermediate`, of which a token takes `per_token`, in place of one MLP; 0: none.
    """

    name: str
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
    experts: int = 0
    per_token: int = 0

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """Weights, each counted once."""
        biases = (self.hidden + 2 * self.kv_heads * self.head_size) * self.biased
        head_norms = 2 * self.head_size if self.experts else 0
        layer = self.layer_matrices + biases + 2 * self.hidden + head_norms
        embeddings = self.vocab * (1 if self.tied else 2)
        return self.layers * layer + (embeddings + 1) * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_size)
        router = self.experts * self.hidden
        return attention + router + (self.experts or 1) * self.mlp_matrices

    @property
    def mlp_matrices(self) -> int:
        """Elements of one MLP's matrices, or of one expert's."""
        return 3 * self.hidden * self.intermediate

    def experts_taken(self, tokens: int) -> float:
        """Expected number of a layer's experts that `tokens` tokens take; 0 without experts."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.per_token / self.experts) ** tokens)

    def config(self) -> dict[str, Any]:
        """Its config.json, as Hugging Face transformers writes one."""
        kind, experts = ("Qwen2", "qwen2") if self.biased else ("Llama", "llama"), {}
        if self.experts:
            kind, experts = (
                ("Qwen3Moe", "qwen3_moe"),
                {
                    "num_experts": self.experts,
                    "num_experts_per_tok": self.per_token,
                    "moe_intermediate_size": self.intermediate,
                    "norm_topk_prob": True,
                },
            )
        return {
            "architectures": [f"{kind[0]}ForCausalLM"],
            "model_type": kind[1],
            **experts,
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


SHAPES = {
    "tiny": Shape("tiny", 128, 2, 4, 2, 256, 512),  # for tests
    "M": Shape("M", 576, 30, 9, 3, 1536, 49152),  # SmolLM2-135M
    "L": Shape("L", 896, 24, 14, 2, 4864, 151936, biased=True),  # Qwen2.5-0.5B
    # granite-3.0-1b-a400m, with norms of queries and keys
    "E": Shape("E", 1024, 24, 16, 8, 512, 49152, experts=32, per_token=8),
}

# What `python -m benchmarks gpu` runs: too large for the others' cores. `smoke` is for its dry run.
_LLAMA3: dict[str, Any] = {"rope_theta": 500000.0, "max_context": 65536}
GPU_SHAPES = {
    "1B": Shape("1B", 2048, 16, 32, 8, 8192, 128256, **_LLAMA3),  # Llama-3.2-1B
    "8B": Shape("8B", 4096, 32, 32, 8, 14336, 128256, tied=False, **_LLAMA3),  # Llama-3.1-8B
    # Qwen3-30B-A3B, with 8 of its 48 layers and half as many heads
    "A3B": Shape("A3B", 2048, 8, 16, 4, 768, 151936, tied=False, experts=128, per_token=8),
    "smoke": Shape("smoke", 64, 1, 4, 2, 64, 96, tied=False, max_context=512),
    "smoke experts": Shape(
        "smoke experts", 64, 1, 4, 2, 64, 96, tied=False, max_context=512, experts=4, per_token=2
    ),
}
