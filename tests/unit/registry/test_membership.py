"""One writer, many readers: the newest snapshot reaches all, and no more than that."""

import asyncio

from baton.registry.membership import Membership

from .conftest import record


async def test_a_slow_reader_gets_the_newest_snapshot_and_only_a_changed_one():
    membership = Membership()
    changes = membership.changes()
    assert dict(await anext(changes)) == {}
    for pid in range(100):
        membership.publish({"a": record("a", pid)}, connected=True)
    assert await anext(changes) == {"a": record("a", 99)}
    before = membership.records
    waiting = asyncio.create_task(anext(changes))
    membership.publish({"a": record("a", 99)}, connected=True)  # equal
    await asyncio.sleep(0)
    assert not waiting.done()
    assert membership.records is before
    membership.publish({"a": record("a", 99)}, connected=False)
    assert await waiting is before
    assert not membership.connected


async def test_a_member_is_found_also_one_that_comes_a_moment_later():
    membership = Membership()
    finding = asyncio.create_task(membership.find("d1", 10.0))
    await asyncio.sleep(0)
    found = record("d1", 5)
    membership.publish({"d1": found}, connected=True)
    assert await finding == found
    membership.publish({"d1": found}, connected=False)  # the last known ones count in an outage
    assert await membership.find("d1", 0.0) == found
    assert await membership.find("d2", 0.01) is None
    membership.close()
    assert await membership.find("d2", 10.0) is None
    assert [snapshot async for snapshot in membership.changes()] == []
