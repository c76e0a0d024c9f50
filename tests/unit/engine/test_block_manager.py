"""The block pool keeps its books under any order of operations."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.block_hash import block_hash, hash_chain, root_hash
from baton.engine.block_manager import BlockManager, CacheChanges

SIZE = 4


def publish_all(pool, blocks, tokens, salt=""):
    parent = root_hash(salt)
    for index, (block, name) in enumerate(
        zip(blocks, hash_chain(tokens, SIZE, salt), strict=False)
    ):
        pool.cache_block(block, name, parent, tokens[index * SIZE : (index + 1) * SIZE])
        parent = name


def filled(pool, tokens, salt=""):
    """Blocks of these tokens, published."""
    blocks = pool.allocate(len(tokens) // SIZE)
    publish_all(pool, blocks, tokens, salt)
    return blocks


def test_a_released_prefix_is_hit_again_but_for_its_last_token():
    pool, tokens = BlockManager(8, SIZE), list(range(12))
    blocks = filled(pool, tokens)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (5, 3, 0)
    assert pool.get_computed_blocks([*tokens, 99], "") == blocks
    assert pool.num_held == 3
    assert pool.get_computed_blocks(tokens, "") == blocks[:2], "one token is left to compute"
    pool.check()


def test_only_the_same_tokens_under_the_same_salt_hit():
    pool, tokens = BlockManager(8, SIZE), list(range(8))
    blocks = filled(pool, tokens, salt="tenant-a")
    assert (
        pool.get_computed_blocks([*tokens, 1], "tenant-b")
        == pool.get_computed_blocks([*tokens, 1], "")
        == []
    )
    assert pool.get_computed_blocks([*tokens, 1], "tenant-a") == blocks
    (other,) = pool.allocate(1)
    forged = block_hash(root_hash(""), [1, 2, 3, 4])  # as if other tokens had this very hash
    pool.cache_block(other, forged, root_hash(""), [5, 6, 7, 8])
    assert pool.get_computed_blocks([1, 2, 3, 4, 9], "") == []


def test_the_deepest_blocks_of_the_oldest_prefix_go_first_and_changes_are_reported_once():
    pool, old, new = BlockManager(4, SIZE), list(range(8)), list(range(100, 108))
    for tokens in (old, new):
        pool.release(filled(pool, tokens))
    assert len(pool.take_changes().stored) == 4
    assert pool.allocate(1) is not None
    assert len(pool.get_computed_blocks([*old, 1], "")) == 1
    assert len(pool.get_computed_blocks([*new, 1], "")) == 2
    changes = pool.take_changes()
    assert (len(changes.stored), len(changes.evicted)) == (0, 1)
    pool.check()


def test_what_came_and_went_between_two_reports_is_in_neither_list():
    pool, tokens = BlockManager(2, SIZE), list(range(4))
    (name,) = hash_chain(tokens, SIZE)
    pool.release(filled(pool, tokens))
    pool.release(pool.allocate(2) or [])
    assert pool.take_changes() == CacheChanges()
    pool.release(filled(pool, tokens))
    assert pool.take_changes() == CacheChanges(stored={name})
    for _ in range(2):
        pool.release(pool.allocate(2) or [])
        pool.release(filled(pool, tokens))
    pool.allocate(2)
    assert pool.take_changes() == CacheChanges(evicted={name})


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, publish, go and are quarantined, in any order."""

    def __init__(self):
        super().__init__()
        self.pool = BlockManager(12, SIZE)
        self.held: list[tuple[list[int], list[int]]] = []
        self.quarantined: list[list[int]] = []
        self.told: set[int] = set()  # hashes that a router takes for cached

    @rule(kind=st.integers(0, 2), length=st.integers(1, 20))
    def admit(self, kind, length):
        tokens = [kind] * length
        matched = self.pool.get_computed_blocks(tokens, "")
        assert len(matched) * SIZE < length
        fresh = self.pool.allocate(-(-length // SIZE) - len(matched))
        if fresh is None:
            self.pool.release(matched)
        else:
            self.held.append((matched + fresh, tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cache_block(self, data):
        publish_all(self.pool, *data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        entry = data.draw(st.sampled_from(self.held))
        self.held.remove(entry)
        self.pool.release(entry[0])

    @rule(count=st.integers(1, 4))
    def quarantine(self, count):
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.pool.quarantine(blocks)
            self.quarantined.append(blocks)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self):
        self.pool.end_quarantine(self.quarantined.pop())

    @rule()
    def tell(self):
        changes = self.pool.take_changes()
        self.told = (self.told - changes.evicted) | changes.stored
        assert self.told == self.pool._by_hash[0].keys()

    @invariant()
    def books_balance(self):
        self.pool.check()
        assert self.pool.num_quarantined == sum(map(len, self.quarantined))
        if not self.held:
            assert self.pool.num_held == 0


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
