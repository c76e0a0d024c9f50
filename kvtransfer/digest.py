"""Checksums of KV bytes in canonical order.

For each block in order its filled slots, in [layer, K or V, kv_head, token, element] order: exactly
the bytes that travel, in the order in which they travel.
"""

from __future__ import annotations

import torch
import xxhash

_MASK = (1 << 64) - 1
# Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014), the finalizer.
STEP, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORDS_AT_ONCE = 1 << 20  # a mixed word takes 8 bytes, and the formula a few of them


class Digest:
    """xxh3-64, streamed: for pools in the host's memory."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.num_bytes = 0

    def update(self, data: torch.Tensor) -> None:
        self.add(data.cpu().numpy().data)

    def add(self, data: memoryview) -> None:
        self._hash.update(data)
        self.num_bytes += data.nbytes

    @property
    def value(self) -> int:
        """The checksum so far, 64 bits."""
        return int(self._hash.intdigest())


class WordDigest(Digest):
    """A sum, modulo 2**64, over all 32-bit words, each mixed with its place: for pools on a GPU.

    The sum can be taken in any order, so that every core of a GPU takes a part of it. Another word
    at a place always changes it, and so do, but for one chance in 2**64, words that changed places.
    """

    def __init__(self) -> None:
        self.num_bytes = self._sum = 0  # it needs no xxhash

    @property
    def num_words(self) -> int:
        """The place of the next word."""
        return self.num_bytes // 4

    def update(self, data: torch.Tensor) -> None:
        self.include(int(word_sum(data, self.num_words)), data.numel())

    def add(self, data: memoryview) -> None:
        raise AssertionError("bytes on a GPU are not digested on the host")

    def include(self, part: int, num_bytes: int) -> None:
        """Adds the next `num_bytes`, whose sum from place `num_words` on is `part`."""
        assert num_bytes % 4 == 0, "a sum of words"
        self._sum = (self._sum + part) & _MASK
        self.num_bytes += num_bytes

    @property
    def value(self) -> int:
        return self._sum


def word_sum(data: torch.Tensor, first_word: int) -> torch.Tensor:
    """The sum over contiguous uint8 `data`, which begins at place `first_word`; int64 `[]`.

    A word w at place i counts as mix(w + i * STEP); all is modulo 2**64, which is how int64 wraps.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        x = words[start : start + _WORDS_AT_ONCE].to(torch.int64) & 0xFFFFFFFF
        first = first_word + start
        x += torch.arange(first, first + x.numel(), device=data.device) * _signed(STEP)
        x = (x ^ _shifted(x, 30)) * _signed(MIX_1)
        x = (x ^ _shifted(x, 27)) * _signed(MIX_2)
        total += (x ^ _shifted(x, 31)).sum()
    return total


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Zeroes come in from the left: torch has no unsigned shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
