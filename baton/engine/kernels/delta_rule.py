"""Sizes of the gated delta rule, and where its states lie in blocks of the KV pool. Torch-free.

A sequence's state takes a number of blocks that does not depend on its length. A block is made of
chunks, one for each KV head, KV layer, and K or V; each chunk holds whole rows of float32. The key
heads that belong to a KV head keep their rows in that head's chunks, so that whatever divides or
moves KV by its heads does the same with states.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4  # bytes
MAX_PROPOSED = 64  # tokens of a sequence in a step that its state does not keep


@dataclass(frozen=True)
class DeltaRuleShape:
    """Heads and their sizes, in elements.

    key_heads: heads of queries and keys, each of which `value_heads / key_heads` consecutive value
    heads share · kernel: tokens that the convolution of queries, keys and values covers.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def head_channels(self) -> int:
        """Channels of the convolution of a key head: its query, its key and its values."""
        return 2 * self.key_size + self.values_per_key * self.value_size

    @property
    def matrix_rows(self) -> int:
        """Rows of the matrices of a key head's value heads, each `[key_size, value_size]`."""
        return self.values_per_key * self.key_size

    @property
    def head_rows(self) -> int:
        """Rows of `value_size` floats of a key head's state in a layer: its matrices, then the last
        `kernel - 1` inputs of its channels."""
        tail = (self.kernel - 1) * self.head_channels
        return self.matrix_rows + -(-tail // self.value_size)


@dataclass(frozen=True)
class StateLayout:
    """Where the rows of a state lie in its blocks.

    layers: that have a state · kv_heads: of a block · chunk_bytes: of one KV head, KV layer, and K
    or V · block_chunks: chunks of a block that belong to one KV head.
    """

    shape: DeltaRuleShape
    layers: int
    kv_heads: int
    chunk_bytes: int
    block_chunks: int

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk; 0 if none fits."""
        return self.chunk_bytes // (self.shape.value_size * FLOAT)

    @property
    def num_rows(self) -> int:
        """Rows of a state that belong to one KV head."""
        return self.layers * self.shape.key_heads // self.kv_heads * self.shape.head_rows

    @property
    def num_blocks(self) -> int:
        """Blocks of a state. A chunk has to hold a row."""
        return -(-self.num_rows // (self.chunk_rows * self.block_chunks))
