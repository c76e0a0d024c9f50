"""One stack for all tests of this folder: built, brought up, taken down."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compose.stack import OURS, SERVING, Stack, why_not


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A prefill and a decode worker, two routers, etcd; an OTLP endpoint and Prometheus."""
    if not os.environ.get("BATON_COMPOSE_TEST"):
        pytest.skip("builds images and takes minutes: `make compose-test` runs it")
    if reason := why_not():
        pytest.skip(f"{reason}: the stack needs a container engine")
    stack = Stack()
    try:
        stack.build()
        stack.up(*SERVING, prefill=1, decode=1)
        yield stack
    except BaseException:
        print(stack.compose("logs", "--tail=30", *OURS))
        raise
    finally:
        stack.down()
    assert not stack.containers()
