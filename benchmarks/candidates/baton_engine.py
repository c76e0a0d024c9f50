"""Baton's engine in this process: planner, runner, sampler and reports; no worker, no gRPC."""

from __future__ import annotations

import importlib.metadata
import itertools
import queue
import time

from benchmarks.candidates.answering import Candidate, Setup, Timed, main

_STEP_S = 120.0  # longer than any step takes
_SPARE_TOKENS = 512  # beyond what is measured: those who are ready first go on meanwhile


class BatonEngine:
    """An `Engine` as a worker builds one."""

    def __init__(self, setup: Setup) -> None:
        from baton.config import EngineConfig
        from baton.engine import build
        from baton.engine.loop import StepReport
        from baton.engine.sequence import Sequence
        from baton.sampling import SamplingParams

        self._setup, self._sequence, self._params = setup, Sequence, SamplingParams
        self._names = map(str, itertools.count())
        self._seeds = itertools.count(1 << 32)  # of prompts that nobody has seen
        self._filled: set[tuple[int, int]] = set()  # (batch, context) whose prompts are cached
        loaded = build.load(
            EngineConfig(
                model=setup.directory,
                device="cpu",
                threads=setup.threads,
                kv_blocks=-(-setup.cache_tokens // EngineConfig.block_size),
                **setup.options,
            )
        )
        build.warm_up(loaded)
        self._about = {
            "version": importlib.metadata.version("baton-serving"),
            "model": type(loaded.runner.model).__name__,  # type: ignore[attr-defined]
            "chunk_tokens": str(loaded.settings.chunk_tokens),
        }
        self._steps: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = loaded.engine(lambda report: self._steps.put((time.perf_counter(), report)))
        self._engine.start()

    def about(self) -> dict[str, str]:
        """See `Candidate`."""
        return self._about

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """See `Candidate`. The prompts stay in the prefix cache from one call to the next."""
        if (batch, context) not in self._filled:
            self._run(batch, context, 1)
            self._filled.add((batch, context))
        return Timed(self._run(batch, context, steps))

    def prefill(self, tokens: int) -> Timed:
        """See `Candidate`."""
        prompt = self._setup.prompt(tokens, next(self._seeds))
        began = time.perf_counter()
        name = self._add(prompt, 1)
        return Timed(self._until_together({name}) - began)

    def _run(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps in which all sequences got a token."""
        prompts = [self._setup.prompt(context, seed) for seed in range(batch)]
        names = {self._add(prompt, steps + _SPARE_TOKENS) for prompt in prompts}
        began = ended = self._until_together(names)
        for _ in range(steps):
            ended, who = self._step()
            assert who == names, "a sequence missed a step"
        for name in names:
            self._engine.release(name).result()
        self._engine.load().result()  # the step that ran meanwhile has been reported
        while not self._steps.empty():
            self._steps.get()
        return ended - began

    def _add(self, prompt: list[int], new_tokens: int) -> str:
        name = next(self._names)
        params = self._params(max_tokens=new_tokens, ignore_eos=True)
        self._engine.add(self._sequence(name, prompt, len(prompt), params))
        return name

    def _until_together(self, names: set[str]) -> float:
        """When a step had a token for each of `names`."""
        while True:
            ended, who = self._step()
            if who == names:
                return ended

    def _step(self) -> tuple[float, set[str]]:
        """(when the next step ended, who got a token)."""
        ended, report = self._steps.get(timeout=_STEP_S)
        failed = [one.abort_reason for one in report.progress if one.abort_reason]
        if failed:
            raise RuntimeError(failed[0])
        return ended, {one.seq_id for one in report.progress if one.token_ids}


def load(setup: Setup) -> Candidate:
    """The engine with the settings in `setup.options`, which are `EngineConfig`'s."""
    return BatonEngine(setup)


if __name__ == "__main__":
    main(load)
