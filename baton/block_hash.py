"""Names of prompt prefixes: the hash chain that prefix caches are keyed by.

A block's hash covers its tokens, its predecessor's hash and the salt, so equal hashes mean equal
prefixes of equal tenants. Every process computes the same chain, so that the hashes in
workers' cache events can be compared with a prompt's anywhere; code that relies on a hash for a
stream's content compares the tokens as well.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache


def adapted_salt(salt: str, adapter: str) -> str:
    """The salt of a prompt's KV with a LoRA adapter, by its identity; the same without one.

    No caller's own salt has a NUL, so that KV is never shared between adapters or with none.
    """
    return f"{salt}\0{adapter}" if adapter else salt


@lru_cache(maxsize=1024)
def root_hash(salt: str) -> int:
    """The hash before the first block: one for each salt."""
    return _hash64(salt.encode())


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash of a full block that follows the block with hash `parent` (64 bits)."""
    return _hash64(parent.to_bytes(8, "little") + array("I", token_ids).tobytes())


def hash_chain(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Hashes of all full blocks of a prompt, in order."""
    hashes: list[int] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def token_digest(token_ids: Sequence[int], salt: str = "") -> bytes:
    """What a handoff is bound to: all tokens of a sequence, and the salt of its prefix cache."""
    digest = hashlib.blake2b(root_hash(salt).to_bytes(8, "little"), digest_size=16)
    digest.update(array("I", token_ids).tobytes())
    return digest.digest()


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
