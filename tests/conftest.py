"""For every test: interpreted kernels, few examples of property tests, one thread a worker."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes inherit it
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core
    os.environ["OMP_NUM_THREADS"] = "1"

import tests.interpreted  # noqa: F401
from tests.preloaded import RANKS, Preloaded

gc.disable()  # until all tests are imported, of which nothing becomes garbage

# Other examples in each run; no deadline: machines are busy.
hypothesis.settings.register_profile("suite", max_examples=50, deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks at what was imported
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> Iterator[Preloaded]:
    """Ranks and peers, dozens of processes, do not import torch each for themselves."""
    with Preloaded({*RANKS, "tests.contract.kvtransfer_peer"}) as preloaded:
        yield preloaded
