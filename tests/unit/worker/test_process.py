"""Before a worker serves: what is loaded and compiled, and where its KV pool lies; and its end."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from baton.config import EngineConfig, WorkerConfig
from baton.engine import build
from baton.errors import ConfigError
from baton.shared_memory import SharedMemoryArea
from baton.worker import node
from baton.worker.node import shareable_memory
from kvtransfer import copier
from tests.waiting import WAIT_S

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_loading_touches_memory_and_compiles_before_the_warm_up(monkeypatch, role):
    """Decode steps are captured whatever the role, which may change."""
    calls = []

    def load(config, allocate, remote_ranks):
        calls.append((config.graphs, config.overlap))
        pool = (
            allocate(2 * 64, torch.device("cpu")).tensor.view(torch.float32).view(2, 1, 2, 1, 4, 2)
        )
        return SimpleNamespace(runner=SimpleNamespace(pools=(pool,)))

    def prepare(pool):
        assert pool.area.touched
        calls.append("prepare")

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(build, "warm_up", lambda loaded: calls.append("warm up"))
    monkeypatch.setattr(copier, "prepare", prepare)
    _, (pool,) = node._load(WorkerConfig(role, EngineConfig(device="cpu")))
    assert calls == [(True, True), "prepare", "warm up"]
    assert isinstance(pool.area, SharedMemoryArea)
    assert pool.tensor.data_ptr() == pool.area.tensor.data_ptr()
    pool.area.close()


@pytest.mark.parametrize(
    ("transport", "driver", "shared"),
    [
        ("auto", True, True),
        ("cuda_ipc", True, True),
        ("nccl", True, False),
        ("gloo", True, False),
        ("auto", False, False),
        ("cuda_ipc", False, None),
    ],
)
def test_a_gpus_memory_is_shared_where_that_is_wanted_and_can_be(
    monkeypatch, caplog, transport, driver, shared
):
    def area(num_bytes, device):
        if not driver:
            raise OSError("no driver")
        assert device == GPU
        return "area"

    monkeypatch.setattr(node, "CudaArea", area)
    if shared is None:
        with pytest.raises(ConfigError, match="--transport cuda_ipc: no driver"):
            shareable_memory(GPU, 64, transport)
        return
    assert shareable_memory(GPU, 64, transport) == ("area" if shared else None)
    assert ("cannot write into this GPU's KV: no driver" in caplog.text) == (not driver)


HANGING = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from baton.config import WorkerConfig
from baton.errors import InternalError
from baton.worker import node

async def run(self, load):
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    self.left_work = True
    if sys.argv[1] == "1":
        raise InternalError("broken")

node.Node.run = run
flushed = SimpleNamespace(tracer=None, close=lambda: print("flushed", flush=True))
node.tracing.setup = lambda *_: flushed
node.run(WorkerConfig("decode"), ())
"""


@pytest.mark.parametrize("status", [0, 1])
def test_a_worker_that_leaves_without_a_thread_does_not_wait_for_it(status):
    command = [sys.executable, "-c", HANGING, str(status)]
    ended = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (status, "flushed\n"), ended.stderr
    assert ("InternalError: broken" in ended.stderr) == bool(status)
