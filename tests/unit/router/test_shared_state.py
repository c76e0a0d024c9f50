"""The memory that the processes of one router share: tenants' limits hold over all of them."""

import contextlib
import signal
import time

import pytest

from baton.errors import ConfigError
from baton.v1 import fleet_pb2
from router import shared_state
from router.shared_state import SharedState
from tests.processes import PYTHON, running

LIMITS = """
[default]
requests_per_minute = 600
tokens_per_minute = 60000
max_running = 3
"""
# Enters as often as it may, with up to two requests at a time, and says how often that was.
CALLER = """
import sys
from pathlib import Path
from baton.errors import Overloaded
from router.admission.tenants import Tenants
from router.shared_state import SharedState

shared = SharedState(sys.argv[1], 2, int(sys.argv[2]))
tenant = Tenants(Path(sys.argv[3]), lambda: 1000.0, shared=shared).tenant_for(())
print("ready", flush=True)
sys.stdin.readline()
entered, most, leases, over = 0, 0, [], False
while not over:
    try:
        leases.append(tenant.enter(10, 10, 0.0))
        entered += 1
        over = entered == 400  # of 600 for both, so that each has some, whichever is first
        most = max(most, tenant._usage.running)
    except Overloaded as error:
        over = "requests a minute" in str(error)
    while leases and (len(leases) == 2 or entered % 2 or over):
        with leases.pop() as lease:
            lease.delivered(10)
tenant._usage.add_running(1)
print(entered, most, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def shared():
    state = SharedState("", 2)
    yield state
    state.close()


@contextlib.asynccontextmanager
async def callers(shared, tmp_path):
    """Two processes that share it, about to begin."""
    (tmp_path / "tenants.toml").write_text(LIMITS)
    arguments = [(str(number), str(tmp_path / "tenants.toml")) for number in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(running(*PYTHON, CALLER, shared.path, *more))
            for more in arguments
        ]
        for process in processes:
            assert await process.line() == "ready"
        yield processes


async def test_two_processes_together_keep_a_tenants_limits_exactly(shared, tmp_path):
    """And what a killed one ran counts no more, once its parent has seen its end."""
    usage = SharedState(shared.path, 2).usage("default")
    async with callers(shared, tmp_path) as processes:
        for process in processes:
            process.write("go\n")
        said = [(await process.line()).split() for process in processes]
        entered, most = ([int(one[i]) for one in said] for i in range(2))
        assert sum(entered) == 600 and min(entered) >= 200
        assert max(most) <= 3
        assert (usage.requests[0], usage.tokens[0], usage.running) == (600, 600 * 20, 2)
        await processes[1].end(signal.SIGKILL)
        shared.forget(1)
        assert usage.running == 1


async def test_a_process_that_is_stopped_within_a_lock_delays_the_others_now_and_then_only(
    shared, monkeypatch
):
    """Once for all accesses of some seconds, whichever tenant's limits they are for."""
    code = (
        "import sys; from router.shared_state import SharedState\n"
        "with SharedState(sys.argv[1], 2, 1).usage('a').lock: print('held', flush=True), input()"
    )
    async with running(*PYTHON, code, shared.path) as holder:
        assert await holder.line() == "held"
        ours, began = SharedState(shared.path, 2), time.monotonic()
        usage, slept = ours.usage("a"), []
        with usage.lock:
            assert time.monotonic() - began >= shared_state.LOCK_S
        monkeypatch.setattr(shared_state.time, "sleep", slept.append)
        monkeypatch.setattr(shared_state, "STUCK_S", 1000.0)
        for _ in range(100):
            with usage.lock, ours.usage("a").lock, ours.usage("b").lock:
                pass
        ours._stuck.skip_until = 0.0
        with usage.lock:
            assert slept


def test_tenants_are_told_apart_and_one_too_many_is_refused(shared, monkeypatch):
    monkeypatch.setattr(shared_state, "MAX_TENANTS", 3)
    ours, theirs = SharedState(shared.path, 2, 0), SharedState(shared.path, 2, 1)
    for number, name in enumerate("abc"):
        ours.usage(name).requests[0] = number + 1
    assert [theirs.usage(name).requests[0] for name in "abc"] == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 tenants at most"):
        theirs.usage("d")


def test_a_tenant_that_no_process_knows_any_more_makes_room_for_others(shared, monkeypatch):
    """Names come and go over a router's life, and those that stay keep what they use."""
    monkeypatch.setattr(shared_state, "MAX_TENANTS", 3)
    ours, theirs = SharedState(shared.path, 2, 0), SharedState(shared.path, 2, 1)
    ours.usage("stays").requests[0] = 7.0
    for number in range(10):
        name = f"t{number}"
        for one in (ours, theirs):
            usage = one.usage(name)
            usage.requests[0] += 1.0
            usage.add_running(1)
        assert (usage.requests[0], usage.running) == (2.0, 2), "none of an earlier tenant's"
        ours.release(name)
        theirs.usage("other")
        with pytest.raises(ConfigError):  # another process knows it
            theirs.usage("one more")
        theirs.release("other")
        if number % 2:
            theirs.release(name)
        else:
            shared.forget(1)  # it has died
            theirs.usage("stays")
    assert theirs.usage("stays").requests[0] == 7.0


def test_each_process_sees_the_status_of_its_siblings_until_they_end(shared):
    ours, theirs = SharedState(shared.path, 2, 0), SharedState(shared.path, 2, 1)
    assert ours.siblings() == [] and shared.status(1) is None
    router = fleet_pb2.RouterStatus(incarnation="router-1-3a2589c2")
    theirs.publish(fleet_pb2.GetStatusResponse(router=router))
    assert ours.siblings() == [router] and theirs.siblings() == []
    shared._memory[shared_state._ROW + 8] = 0xFF  # as half of another one, behind its length
    assert ours.siblings() == [] and shared.status(1) is None
    shared.forget(1)
    assert ours.siblings() == []
