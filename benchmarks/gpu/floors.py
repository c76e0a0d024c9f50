"""The least a step can take: the bytes and the arithmetic that no engine gets around. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.job import Ceilings
from benchmarks.shapes import Shape

BF16_BYTES = 2
FP8_SCALE_BYTES = 4  # of a KV row


@dataclass(frozen=True)
class Storage:
    """Bytes that numbers take."""

    weight: int = BF16_BYTES
    kv: int = BF16_BYTES

    @property
    def kv_row_extra(self) -> int:
        """Bytes behind each K or V row of a head."""
        return FP8_SCALE_BYTES if self.kv == 1 else 0


BF16 = Storage()


def weight_bytes(shape: Shape, storage: Storage = BF16) -> int:
    """What a decode step reads of the weights: every matrix once, of the embedding a few rows."""
    matrices = shape.layers * shape.layer_matrices + shape.vocab * shape.hidden
    return matrices * storage.weight


def kv_bytes(shape: Shape, storage: Storage = BF16) -> int:
    """KV of one token over all layers."""
    row = shape.head_size * storage.kv + storage.kv_row_extra
    return 2 * shape.layers * shape.kv_heads * row


def decode_step_s(
    shape: Shape, batch: int, context: int, ceilings: Ceilings, storage: Storage = BF16
) -> float:
    """Seconds in which weights and all sequences' KV are read at the copy's rate."""
    moved = weight_bytes(shape, storage) + batch * context * kv_bytes(shape, storage)
    return moved / ceilings.copy_bytes_per_s


def attention_flops(shape: Shape, rows: int, prefix: int = 0) -> float:
    """One layer's causal attention of `rows` tokens behind `prefix` others: scores and values."""
    pairs = rows * prefix + rows * (rows + 1) / 2
    return 4.0 * shape.heads * shape.head_size * pairs


def prefill_flops(shape: Shape, tokens: int) -> float:
    """A whole prompt: matrices, attention, and the scores of the last token alone."""
    matrices = 2.0 * tokens * shape.layers * shape.layer_matrices
    attention = shape.layers * attention_flops(shape, tokens)
    return matrices + attention + 2.0 * shape.vocab * shape.hidden


def prefill_s(shape: Shape, tokens: int, ceilings: Ceilings) -> float:
    """Seconds at the matrix product's rate."""
    return prefill_flops(shape, tokens) / ceilings.matmul_flops
