"""Names of prefixes: equal exactly for equal prefixes of equal tenants, on any machine."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from baton.block_hash import adapted_salt, block_hash, hash_chain, root_hash, token_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_hashes_are_the_same_everywhere():
    """Router and workers of different versions must agree: a change here is a change of format."""
    assert root_hash("") == 0xB4B2797457A0A6E4
    assert root_hash("tenant") == 0xAF20B309BD126329
    assert hash_chain([1, 2, 3, 4, 5], 2) == [0xC7036499877909A9, 0xC6A6133863D4BF83]


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_a_chain_has_one_hash_per_full_block_and_can_be_continued(prompt, more, block_size):
    chain, longer = hash_chain(prompt, block_size, "s"), hash_chain(prompt + more, block_size, "s")
    assert len(chain) == len(prompt) // block_size and longer[: len(chain)] == chain
    assert all(0 <= name < 2**64 for name in chain)
    for number, (parent, name) in enumerate(itertools.pairwise([root_hash("s"), *chain])):
        block = prompt[number * block_size : (number + 1) * block_size]
        assert block_hash(parent, block) == name


def test_equal_blocks_at_other_places_and_tenants_have_other_hashes():
    names = [*hash_chain([7] * 64, 16), *hash_chain([7] * 64, 16, salt="tenant")]
    names += [root_hash(""), root_hash("tenant")]
    assert len(set(names)) == len(names)


def test_a_digest_covers_all_tokens_their_order_and_the_tenant():
    same = token_digest([1, 2, 3], "a")
    assert len(same) == 16 and same == token_digest([1, 2, 3], "a")
    others = {token_digest(ids, "a") for ids in ([1, 2, 4], [1, 3, 2], [1, 2], [1, 2, 3, 0])}
    assert same not in others | {token_digest([1, 2, 3], "")}


def test_prompts_of_adapters_share_no_block():
    salts = {adapted_salt(salt, adapter) for salt in ("", "t") for adapter in ("", "a", "b")}
    assert len({root_hash(salt) for salt in salts}) == 6
    assert adapted_salt("t", "") == "t"
