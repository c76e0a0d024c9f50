"""Part "worker": an engine loaded and warmed up as in a worker, then requests of many kinds.

A new process: kernels compiled by other parts would hide what a worker's warm-up misses."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import triton

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.backends.gpu.backend import GpuBackend
from baton.engine.build import Loaded
from benchmarks.engine.driver import Driver
from benchmarks.gpu.engine import BF16, SAMPLING, title_of
from benchmarks.gpu.part import Cells, Part

_REQUESTS = ((1, 17), (3, 100), (8, 1000), (40, 33), (1, 3000), (13, 512))  # (number, tokens)
_OTHER_KINDS: tuple[dict[str, Any], ...] = (
    {
        "temperature": 1.0, "top_k": 20, "min_p": 0.05, "logit_bias": {1: 1.0}, "min_tokens": 2,
        "prompt_logprobs": 3,
    },
    {"bad_words": ((1,), (2, 3)), "allowed_token_ids": frozenset(range(50))},
)  # fmt: skip


@contextmanager
def new_kernels() -> Iterator[list[tuple[str, bool]]]:
    """Names of kernels that Triton compiles within, and whether its disk cache had them."""
    found: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        found.append((src.name, cache_hit))

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield found


def run(part: Part) -> None:
    """Measures the last of the models, in bf16."""
    title = title_of(part.models[-1], BF16)
    part.measure("worker", [(title, partial(start, part, title))])


def start(part: Part, title: str) -> None:
    """Starts an engine as a worker does, with KV in all free memory, then sends requests."""
    max_batch, chunk, context = part.sized((64, 2048, 8192), (1, 8, 32))
    with tempfile.TemporaryDirectory() as folder, new_kernels() as compiled:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(part.models[-1].config()), encoding="utf-8")
        settings = EngineConfig(
            model=str(file), random_weights=True, device=part.device_name, dtype="bfloat16",
            max_batch=max_batch, chunk_tokens=chunk, max_context=context,
            gpu_memory=part.sized(0.9, 0.02), graphs=not part.smoke,
        )  # fmt: skip
        backend = None
        if not part.cuda:
            fake = importlib.import_module("tests.unit.engine.gpu.fake_gpu")
            backend = GpuBackend(settings, fake.FakeGpu(peak=0))
        began = time.perf_counter()
        loaded = build.load(settings, backend=backend)
        load_s = time.perf_counter() - began
        build.warm_up(loaded)
        warm_up_s, on_disk = time.perf_counter() - began - load_s, [hit for _, hit in compiled]
        cells: Cells = {
            "load s": load_s, "warm-up s": warm_up_s, "KV blocks": loaded.layout.num_blocks,
            "kernels": len(on_disk), "found on disk": sum(on_disk), "graphs": num_graphs(loaded),
        }  # fmt: skip
        part.row("worker", title, cells)
        compiled.clear()
        with closing(Driver(loaded)) as driver:
            case = partial(requests, part, loaded, driver, compiled)
            part.measure("worker", [(f"{title}, requests", case)])


def requests(part: Part, loaded: Loaded, driver: Driver, compiled: list[tuple[str, bool]]) -> Cells:
    """Runs requests of each kind. Raises AssertionError if one compiled a kernel or captured a
    graph."""
    began, graphs, total = time.perf_counter(), num_graphs(loaded), 0
    kinds = [{}, *({**each, **first} for each, first in SAMPLING.values()), *_OTHER_KINDS]
    for count, length in part.sized(_REQUESTS, ((1, 5),)):
        for settings in kinds:
            prompts = [driver.prompt(length) for _ in range(count)]
            driver.generate(prompts, part.sized(8, 2), **settings)
            total += count
        driver.decode([length] * count, 1, 2)  # sequences as after a handoff
        total += count
    captured = num_graphs(loaded) - graphs
    assert not compiled, f"compiled after the warm-up: {sorted({name for name, _ in compiled})}"
    assert not captured, f"{captured} graphs were captured after the warm-up"
    took_s = time.perf_counter() - began
    return {"requests": total, "s": took_s, "kernels": 0, "graphs": 0}


def num_graphs(loaded: Loaded) -> int:
    """Number of captured CUDA graphs."""
    runner: Any = loaded.runner
    return len(runner._graphs._captured)
