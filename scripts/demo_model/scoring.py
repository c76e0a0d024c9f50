"""How well a model predicts text it was not trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from texts import Tokens
from torch import Tensor
from torch.nn import functional as F

_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Loss:
    """A mean over every scored token, and over every byte those tokens stand for."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.nats_per_token:.4f} nats/token {self.bits_per_byte:.4f} bits/byte "
            f"over {self.tokens} tokens"
        )


@torch.no_grad()
def held_out_loss(
    forward: Callable[[Tensor], Tensor], stream: Tokens, token_sizes: Tokens, window: int
) -> Loss:
    """Scores `stream` (`[tokens]`) in windows; the tail that fills no batch is left out.

    Each window starts with no context, so a longer one scores better.
    """
    rows = _BATCH_TOKENS // window
    batches = (len(stream) - 1) // _BATCH_TOKENS
    nats, size = 0.0, 0
    for first in range(0, batches * _BATCH_TOKENS, _BATCH_TOKENS):
        inputs = torch.from_numpy(stream[first : first + _BATCH_TOKENS]).view(rows, window)
        targets = torch.from_numpy(stream[first + 1 : first + _BATCH_TOKENS + 1])
        logits = forward(inputs).float().flatten(0, 1)
        nats += F.cross_entropy(logits, targets, reduction="none").double().sum().item()
        size += int(token_sizes[targets.numpy()].sum())
    tokens = batches * _BATCH_TOKENS
    return Loss(nats / tokens, nats / math.log(2) / size, tokens)
