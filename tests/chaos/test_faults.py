"""What the injector remembers of whom it hurt, by which endings are judged; what is a leak."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.checks import SLACK, leaks
from tests.chaos.faults import Hurt, Injector

ROLES = {
    "router-0": "router",
    "router-1": "router",
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}


@pytest.fixture
def injector() -> Injector:
    """An injector that has done nothing yet."""
    named = {name: SimpleNamespace(name=name, role=role) for name, role in ROLES.items()}
    cluster: Any = SimpleNamespace(processes=named)
    return Injector(cluster, {}, Path(), lambda name: "", lambda line: None)


def test_a_role_is_down_only_when_all_of_it_are_hurt_at_one_moment(injector: Injector) -> None:
    injector.hurts += [Hurt("decode-0", "kill", 10.0, 20.0), Hurt("decode-1", "stop", 25.0, 30.0)]
    injector.hurts += [Hurt("prefill-0", "kill", 12.0)]
    assert not injector.role_down(0.0, 100.0)
    injector.hurts.append(Hurt("decode-1", "hole", 19.0, 21.0))
    assert injector.role_down(0.0, 100.0)
    assert injector.role_down(19.5, 19.6)
    assert not injector.role_down(0.0, 18.0)
    assert not injector.role_down(20.5, 100.0)


def test_a_fault_that_is_not_over_still_counts(injector: Injector) -> None:
    injector.hurts += [Hurt("prefill-0", "kill", 1.0), Hurt("prefill-1", "kill", 2.0)]
    assert injector.role_down(50.0, 60.0)
    assert not injector.role_down(0.0, 1.5)


def test_one_router_hurt_is_not_every_router_hurt(injector: Injector) -> None:
    injector.hurts.append(Hurt("router-0", "kill", 10.0, 20.0))
    assert injector.routers_hurt(15.0, 16.0)
    assert not injector.routers_hurt(15.0, 16.0, every=True)
    assert not injector.routers_hurt(21.0, 22.0)
    injector.hurts.append(Hurt("router-1", "drain", 18.0, 30.0))
    assert injector.routers_hurt(15.0, 19.0, every=True)


def test_a_stream_over_http_depends_on_its_own_router(injector: Injector) -> None:
    injector.hurts += [Hurt("router-0", "kill", 10.0, 20.0), Hurt("router-1", "drain", 30.0, 40.0)]
    assert injector.router_hurt("router-0", 15.0, 16.0, killed=True)
    assert not injector.router_hurt("router-1", 15.0, 16.0)
    assert injector.router_hurt("router-1", 35.0, 36.0)
    assert not injector.router_hurt("router-1", 35.0, 36.0, killed=True)


def test_only_a_kill_takes_spans_with_it(injector: Injector) -> None:
    injector.hurts += [Hurt("decode-0", "stop", 10.0, 20.0), Hurt("decode-1", "kill", 30.0, 40.0)]
    assert not injector.killed(0.0, 29.0)
    assert injector.killed(29.0, 31.0)
    assert not injector.killed(31.0, 39.0)


def test_leaks_are_what_grew_beyond_the_slack_in_processes_that_lived() -> None:
    def held(extra: int) -> dict[str, dict[str, int]]:
        return {"tasks": {"a": 3}, "threads": {"main": 1}, "files": {"socket": 10 + extra}}

    slack = SLACK["files"]
    assert leaks({1: held(0)}, {1: held(slack)}) == []
    assert leaks({1: held(0)}, {2: held(1000)}) == []
    (found,) = leaks({1: held(0)}, {1: held(slack + 1)})
    assert "socket" in found
