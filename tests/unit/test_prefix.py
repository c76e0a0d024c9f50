"""Names of prefixes: equal exactly for equal prefixes of equal tenants, on any machine."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.prefix import block_hash, hash_chain, root_hash, token_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_hashes_are_the_same_everywhere():
    """Router and workers of different versions must agree: a change here is a change of format."""
    assert root_hash("") == 0xB4B2797457A0A6E4
    assert root_hash("tenant") == 0xAF20B309BD126329
    assert hash_chain([1, 2, 3, 4, 5], 2) == [0xC7036499877909A9, 0xC6A6133863D4BF83]


@settings(deadline=None)  # machines are busy
@given(TOKENS, st.integers(1, 7))
def test_there_is_one_hash_for_each_full_block(tokens, block_size):
    chain = hash_chain(tokens, block_size)
    assert len(chain) == len(tokens) // block_size
    assert all(0 <= name < 2**64 for name in chain)


@settings(deadline=None)  # machines are busy
@given(TOKENS, TOKENS, st.integers(1, 7))
def test_a_longer_prompt_begins_with_the_same_names(prompt, more, block_size):
    short, long = hash_chain(prompt, block_size), hash_chain(prompt + more, block_size)
    assert long[: len(short)] == short


@settings(deadline=None)  # machines are busy
@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.data())
def test_names_differ_from_the_first_changed_block_on(tokens, data):
    where = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:where], tokens[where] + 1, *tokens[where + 1 :]]
    for before, (mine, theirs) in enumerate(
        zip(hash_chain(tokens, 2), hash_chain(changed, 2), strict=True)
    ):
        assert (mine == theirs) is (before < where // 2)


def test_equal_blocks_at_other_places_and_tenants_have_other_names():
    names = [*hash_chain([7] * 64, 16), *hash_chain([7] * 64, 16, salt="tenant")]
    names += [root_hash(""), root_hash("tenant")]
    assert len(set(names)) == len(names)


def test_a_chain_can_be_continued_block_by_block():
    tokens = list(range(40))
    parents = [root_hash("s"), *hash_chain(tokens, 8, "s")]
    blocks = [tokens[start : start + 8] for start in range(0, 40, 8)]
    for (parent, name), block in zip(itertools.pairwise(parents), blocks, strict=True):
        assert block_hash(parent, block) == name


def test_a_digest_names_all_tokens_their_order_and_the_tenant():
    same = token_digest([1, 2, 3], "a")
    assert len(same) == 16
    assert same == token_digest([1, 2, 3], "a")
    others = [
        ([1, 2, 4], "a"),
        ([1, 3, 2], "a"),
        ([1, 2], "a"),
        ([1, 2, 3, 0], "a"),
        ([1, 2, 3], ""),
    ]
    assert same not in {token_digest(tokens, salt) for tokens, salt in others}
