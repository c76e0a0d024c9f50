"""Where the time of a decode step goes, at several batch sizes.

Runs a real engine: its thread, planner, batches, sampler and reports, over random weights. No
prompt is computed: each sequence starts as if its KV had been handed over. Milliseconds are medians
over the steps. With native kernels the model's time is split by what it computes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from baton.bench.terminal import table
from baton.config import DTYPES, KERNELS, KV_DTYPES, QUANTIZATIONS, EngineConfig
from baton.engine import build
from baton.engine.loop import StepReport
from baton.engine.ops.native.model import NativeModel
from baton.engine.planner import Plan
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from baton.server import settle
from benchmarks.environment import console
from benchmarks.shapes import SHAPES

PARTS = ("plan", "build", "model", "sample", "publish")
WARM_UP = 8  # steps that are not counted


def profile(
    loaded: build.Loaded, batch: int, context: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Decodes `batch` sequences, each `context` tokens long at first, for so many steps.

    Median seconds of a step's parts, of the "rest" and of the whole "step"; and mean seconds of the
    model's phases, if it reports them.
    """
    assert isinstance(loaded.runner, Runner)
    model, ended = loaded.runner.model, threading.Event()
    parts, measured = dict.fromkeys(PARTS, 0.0), list[dict[str, float]]()
    began = time.perf_counter()

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                parts[part] += time.perf_counter() - start

        return wrapper

    def end_when_one_ends(report: StepReport) -> None:
        if any(progress.finish_reason for progress in report.progress):
            ended.set()

    def end_step(plan: Plan, *args: Any) -> None:
        nonlocal began
        publish(plan, *args)
        now = time.perf_counter()
        if plan.work:  # else the engine ran commands only
            step = now - began
            measured.append({**parts, "rest": step - sum(parts.values()), "step": step})
        parts.update(dict.fromkeys(PARTS, 0.0))
        began = now

    timed_model: Any = SimpleNamespace(step=timed("model", model.step))
    sampler = Sampler(frozenset(), loaded.model_config.vocab_size)
    runner = Runner(timed_model, loaded.runner.pool, sampler)
    settings = replace(loaded.settings, max_batch=batch)
    engine = replace(loaded, runner=runner, settings=settings).engine(end_when_one_ends)
    publish = timed("publish", engine._publish)
    for owner, method, wrapper in (
        (engine._planner, "plan", timed("plan", engine._planner.plan)),
        (runner._batches, "build", timed("build", runner._batches.build)),
        (sampler, "sample", timed("sample", sampler.sample)),
        (engine, "_advance", timed("publish", engine._advance)),
        (engine, "_publish", end_step),
    ):
        setattr(owner, method, wrapper)
    if isinstance(model, NativeModel):
        model.measure()
    engine.start()
    dice = random.Random(0)
    params = SamplingParams(max_tokens=WARM_UP + steps + 2, ignore_eos=True)
    sequences = [
        Sequence(f"s{i}", [dice.randrange(1000) for _ in range(context)], context, params)
        for i in range(batch)
    ]
    for sequence in sequences:
        engine.reserve(sequence).result()

    def start_all() -> None:
        for sequence in sequences:
            engine.resume(sequence.seq_id, context, 7)

    engine.submit(start_all).result()
    ended.wait()
    engine.stop()
    phases = model.measure() if isinstance(model, NativeModel) else {}
    counted = measured[WARM_UP:-1]  # the last one frees everything
    medians = {part: statistics.median(step[part] for step in counted) for part in counted[0]}
    return medians, {name: seconds / len(measured) for name, seconds in phases.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="M", help="a model's shape")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens of each at first")
    parser.add_argument("--steps", type=int, default=40, help="steps that are counted")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES)


def main(args: argparse.Namespace) -> None:
    """Prints a table for each batch size: ms of each part and its share of the step."""
    tokens = args.context + WARM_UP + args.steps + 2
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(SHAPES[args.shape].config()))
        settings = EngineConfig(
            model=str(config),
            random_weights=True,
            dtype=args.dtype,
            threads=args.threads,
            kernels=args.kernels,
            quantization=args.quantization,
            kv_dtype=args.kv_dtype,
            kv_blocks=max(args.batch) * (-(-tokens // EngineConfig.block_size) + 1),
        )
        loaded = build.load(settings)
    assert isinstance(loaded.runner, Runner)
    kernels = "native" if isinstance(loaded.runner.model, NativeModel) else "torch"
    console.print(
        f"{args.shape}, {args.dtype}, {kernels} kernels, {torch.get_num_threads()} threads, "
        f"context {args.context}"
    )
    settle()  # as workers do
    for batch in args.batch:
        parts, phases = profile(loaded, batch, args.context, args.steps)
        step, rows = parts["step"], []
        for part in (*PARTS, "rest"):
            rows.append((f"  {part}", parts[part]))
            rows += [(f"    {n}", s) for n, s in phases.items()] if part == "model" else []
        title = f"batch {batch}: {step * 1e3:.3f} ms a step, {batch / step:.0f} tokens/s"
        cells = [(name, f"{s * 1e3:.3f}", f"{s / step:.1%}") for name, s in rows]
        console.print("\n", table(title, ("ms", "share"), cells), sep="")
