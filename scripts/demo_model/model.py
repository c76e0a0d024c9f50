"""The demo model: a small decoder with the Llama architecture, in plain torch.

Modules carry the names Hugging Face gives them, so the state dict is the exported file. Rotary
embedding uses the same convention: the two halves of a head are rotated, not even and odd channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    vocab_size: int = 4096
    hidden_size: int = 256
    ffn_size: int = 768
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    positions_max: int = 2048


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves `heads / kv_heads` query heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `[batch, tokens, hidden]` to the same shape."""
        batch, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(batch, tokens, -1, self.shape.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.shape.heads // self.shape.kv_heads
        k, v = (kv.repeat_interleave(repeats, dim=1) for kv in (k, v))
        mixed = causal_attention(q, k, v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """The gated feed-forward block (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[batch, tokens, hidden]` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `[batch, tokens, hidden]` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)


class LlamaModel(nn.Module):
    """The whole model. The output matrix is the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        # Projections that write to the residual stream start smaller, so depth adds no variance.
        residual_std = 0.02 / (2 * shape.layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=residual_std if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids `[batch, tokens]` to logits `[batch, tokens, vocab]`."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends from each token to itself and those before; all are `[batch, heads, tokens, head]`.

    Queries go in four blocks, and a block skips the keys after its last query. Compiled for a CPU,
    this trains twice as fast as `scaled_dot_product_attention` at 512 tokens.
    """
    tokens = q.shape[2]
    block = -(-tokens // 4)
    rows = []
    for first in range(0, tokens, block):
        end = min(first + block, tokens)
        scores = q[:, :, first:end] @ k[:, :, :end].transpose(-1, -2)
        seen = torch.ones(end - first, end, dtype=torch.bool, device=q.device).tril(first)
        scaled = scores.float() * q.shape[-1] ** -0.5
        weights = scaled.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        rows.append(weights @ v[:, :, :end])
    return torch.cat(rows, dim=2)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each `[positions, head_size]`."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(
        torch.arange(shape.positions_max, dtype=torch.float32), shape.rope_theta**-exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to `[batch, heads, tokens, head_size]` (arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
