"""Chaos runs after the unit tests and before the tests on shared clusters, when no other runs."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Chaos needs the machine to itself and shares the loop of the cluster tests."""

    def turn(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return 2 if folder == "cluster" else int(item.path.name == "test_chaos.py")

    for item in items:
        if turn(item) == 1:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
    items.sort(key=turn)
