"""Where the time of a decode step goes, at several batch sizes.

Runs a real engine: its thread, planner, batches, sampler and reports, over random weights. No
prompt is computed: each sequence starts as if its KV had been handed over. With --instant a model
that takes no time replaces the real one, so that only the engine's own time is left. Milliseconds
are medians over the steps. With native kernels the model's time is split by what it computes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.bench.terminal import table
from baton.config import DTYPES, KERNELS, KV_DTYPES, QUANTIZATIONS, EngineConfig
from baton.engine import build
from baton.engine.batch import StepBatch, StepModel
from baton.engine.loop import Engine, StepReport
from baton.engine.ops.native.model import NativeModel
from baton.engine.planner import Plan
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from baton.server import settle
from benchmarks.scenarios.common import console
from benchmarks.shapes import SHAPES

PARTS = ("plan", "build", "model", "sample", "publish")
WARM_UP = 8  # steps that are not counted


class StepTimer:
    """Seconds of each part of a step. Engine thread only, until the engine has stopped."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._start = time.perf_counter()
        self._time(engine._planner, "plan", "plan")
        self._time(runner._batches, "build", "build")
        self._time(runner.model, "step", "model")
        self._time(runner.sampler, "sample", "sample")
        self._time(engine, "_advance", "publish")
        self._time(engine, "_publish", "publish")
        publish = engine._publish

        def end_step(plan: Plan, *args: Any) -> Any:
            publish(plan, *args)
            now = time.perf_counter()
            if plan.work:  # else the engine ran commands only
                step = now - self._start
                rest = step - sum(self._parts.values())
                self.steps.append({**self._parts, "rest": rest, "step": step})
            self._parts = dict.fromkeys(PARTS, 0.0)
            self._start = now

        setattr(engine, "_publish", end_step)  # noqa: B010

    def _time(self, owner: object, method: str, part: str) -> None:
        """Adds the time of each call of a method to a part."""
        call = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._parts[part] += time.perf_counter() - start

        setattr(owner, method, timed)


class Wrapped:
    """A model whose `step` can be replaced without changing the model itself."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def step(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        return self._model.step(batch, pool)


class Instant:
    """A model that takes no time: the same random logits at every step."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        self._logits = torch.randn(rows, vocab_size)

    def step(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(batch.logit_rows)]


@dataclass(frozen=True)
class Profile:
    """Seconds of a step's parts and of the whole, and of the model's phases if it reports them."""

    parts: dict[str, float]
    phases: dict[str, float]


def profile(
    loaded: build.Loaded, model: StepModel, params: SamplingParams, context: int, batch: int
) -> Profile:
    """Decodes `batch` sequences, each `context` tokens long at first, until they end."""
    ended = threading.Event()

    def publish(report: StepReport) -> None:
        if any(progress.finish_reason for progress in report.progress):
            ended.set()

    sampler = Sampler(frozenset(), loaded.model_config.vocab_size)
    runner = Runner(Wrapped(model), loaded.runner.pool, sampler)
    settings = replace(loaded.settings, max_batch=batch)
    engine = replace(loaded, runner=runner, settings=settings).engine(publish)
    timer = StepTimer(engine, runner)
    if isinstance(model, NativeModel):
        model.measure()
    engine.start()
    dice = random.Random(0)
    sequences = [
        Sequence(f"s{i}", [dice.randrange(1000) for _ in range(context)], context, params)
        for i in range(batch)
    ]
    for sequence in sequences:
        engine.reserve(sequence).result()

    def start_all() -> None:
        for sequence in sequences:
            engine._sequences.resume(sequence.seq_id, context, 7)

    engine.submit(start_all).result()
    ended.wait()
    engine.stop()
    phases = model.measure() if isinstance(model, NativeModel) else {}
    counted = timer.steps[WARM_UP:-1]  # the last one frees everything
    parts = {part: statistics.median(step[part] for step in counted) for part in counted[0]}
    return Profile(parts, {name: each / len(timer.steps) for name, each in phases.items()})


def show(batch: int, found: Profile) -> None:
    """Prints one batch size's table: ms of each part and its share of the step."""
    step = found.parts["step"]
    parts = []
    for part in (*PARTS, "rest"):
        parts.append((f"  {part}", found.parts[part]))
        if part == "model":
            parts += [(f"    {phase}", seconds) for phase, seconds in found.phases.items()]
    rows = [(name, f"{seconds * 1e3:.3f}", f"{seconds / step:.1%}") for name, seconds in parts]
    title = f"batch {batch}: {step * 1e3:.3f} ms a step, {batch / step:.0f} tokens/s"
    console.print("\n", table(title, ("ms", "share"), rows), sep="")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="M", help="a model's shape")
    parser.add_argument("--model", help="a model's folder or config file, instead of a shape")
    parser.add_argument("--weights", action="store_true", help="load the model's own weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens of each at first")
    parser.add_argument("--steps", type=int, default=40, help="steps that are counted")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument("--instant", action="store_true", help="a model that takes no time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)


def main(args: argparse.Namespace) -> int:
    """Prints a table for each batch size."""
    tokens = args.context + WARM_UP + args.steps + 2
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(SHAPES[args.shape].config()))
        settings = EngineConfig(
            model=args.model or str(config),
            random_weights=not args.weights,
            dtype=args.dtype,
            threads=args.threads,
            kernels=args.kernels,
            quantization=args.quantization,
            kv_dtype=args.kv_dtype,
            kv_blocks=max(args.batch) * (-(-tokens // 16) + 1),
        )
        loaded = build.load(settings)
    assert isinstance(loaded.runner, Runner)
    model: StepModel = loaded.runner.model
    kernels = "native" if isinstance(model, NativeModel) else "torch"
    if args.instant:
        model, kernels = Instant(loaded.model_config.vocab_size, max(args.batch)), "no"
    params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=1,
        max_tokens=WARM_UP + args.steps + 2, ignore_eos=True,
    )  # fmt: skip
    console.print(
        f"{args.model or args.shape}, {args.dtype}, {kernels} kernels, "
        f"{torch.get_num_threads()} threads, context {args.context}"
    )
    settle()  # as workers do
    for batch in args.batch:
        show(batch, profile(loaded, model, params, args.context, batch))
    return 0
