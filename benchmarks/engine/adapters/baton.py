"""Baton's engine in this process: planner, runner, sampler and reports; no worker, no gRPC."""

from __future__ import annotations

import importlib.metadata
import queue
import time

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.loop import StepReport
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from benchmarks.engine.adapters.protocol import Setup, SteppedAdapter, main

_STEP_S = 120.0  # longer than any step takes


class Baton(SteppedAdapter):
    """An `Engine` as a worker builds one; `setup.options` are `EngineConfig`'s."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        settings = EngineConfig(
            model=setup.directory,
            device="cpu",
            threads=setup.threads,
            kv_blocks=-(-setup.cache_tokens // EngineConfig.block_size),
            **setup.options,
        )
        self._loaded = build.load(settings)
        build.warm_up(self._loaded)
        self._steps: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = self._loaded.engine(
            lambda report: self._steps.put((time.perf_counter(), report))
        )
        self._engine.start()

    def about(self) -> dict[str, str]:
        return {
            "version": importlib.metadata.version("baton-serving"),
            "model": type(self._loaded.runner.model).__name__,  # type: ignore[attr-defined]
            "chunk_tokens": str(self._loaded.settings.chunk_tokens),
        }

    def add(self, prompt: list[int], new_tokens: int) -> str:
        name = next(self.names)
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._engine.add(Sequence(name, prompt, len(prompt), params))
        return name

    def step(self) -> tuple[float, set[str]]:
        ended, report = self._steps.get(timeout=_STEP_S)
        failed = [one.abort_reason for one in report.progress if one.abort_reason]
        if failed:
            raise RuntimeError(failed[0])
        return ended, {one.seq_id for one in report.progress if one.token_ids}

    def release(self, names: set[str]) -> None:
        for name in names:
            self._engine.release(name).result()
        self._engine.load().result()  # the step that ran meanwhile has been reported
        while not self._steps.empty():
            self._steps.get()


if __name__ == "__main__":
    main(Baton)
