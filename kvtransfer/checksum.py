"""Checksums of KV bytes in canonical order.

That is block by block the filled slots in [layer, part, kv_head, token, element] order: exactly
the transferred bytes, in the order of their transfer.
"""

from __future__ import annotations

import torch
import xxhash

_MASK, _WORD = (1 << 64) - 1, (1 << 32) - 1
# Constants of `word_sum`: 2**64 over the golden ratio; the first factor of splitmix64's finalizer
# (Steele, Lea, Flood 2014); and two factors of murmur3's (Appleby 2011), made even.
STEP, FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
KEY_STEP, MULTIPLIER_STEP = 0x85EBCA6A, 0xC2B2AE34
_WORDS_AT_ONCE = 1 << 20  # bounds temporary memory: several 8-byte values for each word


class Checksum:
    """Streamed xxh3-64, for pools in host memory. Both ends must have the same `version`."""

    version = 0

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


class WordChecksum(Checksum):
    """A sum modulo 2**64 over all 32-bit words, each mixed with its position, for pools on a GPU.

    The sum can be computed in any order, so all cores of a GPU take part. A changed word always
    changes it. Two swapped words that differ in one bit are missed with a chance of 2**-31, larger
    changes, like stale rows, with far less. It detects faults and does not protect against forgery.
    """

    version = 2

    def __init__(self) -> None:
        self.num_bytes = self._sum = 0  # xxhash is not used

    @property
    def num_words(self) -> int:
        """Position of the next word."""
        return self.num_bytes // 4

    def update(self, data: torch.Tensor) -> None:
        self.include(int(word_sum(data, self.num_words)), data.numel())

    def add(self, data: memoryview) -> None:
        raise AssertionError("GPU pools are checksummed on the GPU")

    def include(self, part: int, num_bytes: int) -> None:
        """Adds the next `num_bytes`, whose sum from position `num_words` on is `part`."""
        assert num_bytes % 4 == 0, "a sum of words"
        self._sum = (self._sum + part) & _MASK
        self.num_bytes += num_bytes

    @property
    def value(self) -> int:
        return self._sum


def word_sum(data: torch.Tensor, first_word: int) -> torch.Tensor:
    """The sum over contiguous uint8 `data`, whose first word has position `first_word`; int64 `[]`.

    Each group of four words has one t, the hash of its number, from whose halves each word gets a
    key and an odd multiplier: a word w counts as (w ^ key) * multiplier, a 64-bit product that
    differs for every w. Multiples of a number instead of a hash would not detect swapped rows of
    one value. Int64 wraps around as the sum does.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        some, first = words[start : start + _WORDS_AT_ONCE].to(torch.int64), first_word + start
        position = torch.arange(first, first + some.numel(), device=data.device)
        t, which = (position >> 2) * _signed(STEP), position & 3
        t = (t ^ _upper(t)) * _signed(FACTOR)
        key = t ^ _upper(t) ^ which * KEY_STEP
        multiplier = (_upper(t) | 1) ^ (which * MULTIPLIER_STEP & _WORD)
        total += (((some ^ key) & _WORD) * multiplier).sum()
    return total


def _upper(x: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits; torch has no unsigned shift."""
    return x >> 32 & _WORD


def _signed(constant: int) -> int:
    return constant - (1 << 64)
