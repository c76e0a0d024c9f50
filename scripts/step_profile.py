"""Where the time of a decode step goes, at several batch sizes.

    python scripts/step_profile.py --shape M --threads 2
    python scripts/step_profile.py --shape L --kernels torch --temperature 0.8 --top-p 0.95
    python scripts/step_profile.py --shape M --instant

Drives a real engine: its thread, planner, batches, sampler and reports, over random weights. No
prompt is computed: each sequence begins as if its KV had come from elsewhere. With --instant a
model that takes no time stands where the real one does, so that what is left is the engine.
Milliseconds are medians over the steps. Where the kernels are native, the model's part is split by
what it computes.
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

SHAPES: dict[str, dict[str, Any]] = {
    "M": {  # SmolLM2-135M's
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "L": {  # Qwen2.5-0.5B's
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PARTS = ("plan", "build", "model", "sample", "publish")
WARM_UP = 8  # steps that are not counted


class Clock:
    """Seconds that each part of a step took. Engine thread only, until the engine has stopped."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()

    def watch(self, owner: object, method: str, part: str) -> None:
        """From now on the time of an object's method counts as a part's."""
        call = getattr(owner, method)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._parts[part] += time.perf_counter() - began

        setattr(owner, method, timed)

    def watch_end(self, owner: object, method: str) -> None:
        """When this method of an object, which is given the plan, returns, a step has ended."""
        call = getattr(owner, method)

        def ending(plan: Plan, *args: Any) -> Any:
            call(plan, *args)
            now = time.perf_counter()
            if plan.work:  # else the engine did what it was asked, and computed nothing
                step = now - self._began
                rest = step - sum(self._parts.values())
                self.steps.append({**self._parts, "rest": rest, "step": step})
            self._parts = dict.fromkeys(PARTS, 0.0)
            self._began = now

        setattr(owner, method, ending)


class Watched:
    """A model whose time can be taken without changing it."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def step(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """What the model says."""
        return self._model.step(batch, pool)


class Instant:
    """A model that takes no time: the same scores at every step."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        self._logits = torch.randn(rows, vocab_size)

    def step(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """Random numbers."""
        return self._logits[: len(batch.logit_rows)]


@dataclass(frozen=True)
class Profile:
    """Seconds of a step's parts and of it all, and of the model's phases if it tells them."""

    parts: dict[str, float]
    phases: dict[str, float]


def profile(
    loaded: build.Loaded, model: StepModel, params: SamplingParams, context: int, batch: int
) -> Profile:
    """Decodes `batch` sequences, each `context` tokens long at first, until they end."""
    clock, ended = Clock(), threading.Event()

    def publish(report: StepReport) -> None:
        if any(progress.finish_reason for progress in report.progress):
            ended.set()

    sampler = Sampler(frozenset(), loaded.model_config.vocab_size)
    runner = Runner(Watched(model), loaded.runner.pool, sampler)
    settings = replace(loaded.settings, max_batch=batch)
    engine = replace(loaded, runner=runner, settings=settings).engine(publish)
    watch(engine, runner, clock)
    if isinstance(model, NativeModel):
        model.measure()
    engine.start()
    begin(engine, params, context, batch)
    ended.wait()
    engine.stop()
    phases = model.measure() if isinstance(model, NativeModel) else {}
    counted = clock.steps[WARM_UP:-1]  # the last one frees everything
    parts = {part: statistics.median(step[part] for step in counted) for part in counted[0]}
    return Profile(parts, {name: each / len(clock.steps) for name, each in phases.items()})


def watch(engine: Engine, runner: Runner, clock: Clock) -> None:
    """Takes the times of an engine's parts."""
    clock.watch(engine._planner, "plan", "plan")
    clock.watch(runner._batches, "build", "build")
    clock.watch(runner.model, "step", "model")
    clock.watch(runner.sampler, "sample", "sample")
    clock.watch(engine, "_publish", "publish")
    clock.watch_end(engine, "_publish")


def begin(engine: Engine, params: SamplingParams, context: int, batch: int) -> None:
    """Starts all sequences at once, as if their KV had been handed over."""
    dice = random.Random(0)
    sequences = [
        Sequence(f"s{at}", [dice.randrange(1000) for _ in range(context)], context, params)
        for at in range(batch)
    ]
    for sequence in sequences:
        engine.reserve(sequence).result()

    def start() -> None:
        for sequence in sequences:
            engine._sequences.resume(sequence.seq_id, context, 7)

    engine.submit(start).result()


def show(batch: int, found: Profile) -> None:
    """One batch size's table."""
    step = found.parts["step"]
    print(f"\nbatch {batch}: {step * 1e3:.3f} ms a step, {batch / step:.0f} tokens/s")
    for part in (*PARTS, "rest"):
        line(part, found.parts[part], step)
        if part == "model":
            for phase, share in found.phases.items():
                line(f"  {phase}", share, step)


def line(name: str, seconds: float, step: float) -> None:
    """A part's time and its share of the step."""
    print(f"  {name:12}{seconds * 1e3:10.3f} ms {seconds / step:7.1%}")


def config_of(shape: str, folder: Path) -> Path:
    """Writes a shape's config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    return path


def settings_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    """An engine that has room for the largest batch."""
    tokens = args.context + WARM_UP + args.steps + 2
    return EngineConfig(
        model=args.model or str(config_of(args.shape, folder)),
        random_weights=not args.weights,
        dtype=args.dtype,
        threads=args.threads,
        kernels=args.kernels,
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        kv_blocks=max(args.batch) * (-(-tokens // 16) + 1),
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    return parser.parse_args()


def main() -> None:
    """Prints a table for each batch size."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        loaded = build.load(settings_of(args, Path(folder)))
    assert isinstance(loaded.runner, Runner)
    vocab_size = loaded.model_config.vocab_size
    model: StepModel = loaded.runner.model
    kernels = "native" if isinstance(model, NativeModel) else "torch"
    if args.instant:
        model, kernels = Instant(vocab_size, max(args.batch)), "no"
    params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=1,
        max_tokens=WARM_UP + args.steps + 2, ignore_eos=True,
    )  # fmt: skip
    print(
        f"{args.model or args.shape}, {args.dtype}, {kernels} kernels, "
        f"{torch.get_num_threads()} threads, context {args.context}"
    )
    settle()  # as workers do
    for batch in args.batch:
        show(batch, profile(loaded, model, params, args.context, batch))


if __name__ == "__main__":
    main()
