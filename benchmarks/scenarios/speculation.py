"""What n-gram speculation (`--speculate`) gains and costs, on the demo model in float32.

Three kinds of output: a repeated list, ordinary code that goes on, and text sampled at such a
temperature that hardly any proposal is accepted. Each is generated without speculation, with
adaptive speculation, and with proposals at every step (the cost of a row taken as zero), one after
the other in each round; a ratio is the median over the rounds of one round's two rates. Tokens
must be the same in all three, which is checked.
"""

from __future__ import annotations

import argparse
import inspect
import queue
import statistics
import textwrap
import time
from dataclasses import dataclass, replace

from baton.bench.terminal import table
from baton.config import EngineConfig
from baton.engine import build
from baton.engine.blocks import BlockPool
from baton.engine.loop import Engine, StepReport
from baton.engine.planner import Planner
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import RowCost, SpeculativeConfig
from baton.sampling import SamplingParams
from baton.text import load_tokenizer
from benchmarks.environment import console

MODES = ("none", "adaptive", "always")
OUTPUTS = {
    "list repeated": SamplingParams(ignore_eos=True),
    "ordinary code": SamplingParams(temperature=0.7, top_p=0.95, seed=3, ignore_eos=True),
    "sampled freely": SamplingParams(temperature=1.3, seed=3, ignore_eos=True),
}


class NoCost(RowCost):
    """A further row costs nothing."""

    def price(self, rows: int) -> float:
        return 0.0


@dataclass
class Run:
    """One generation of a batch."""

    seconds: float = 0.0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def rate(self) -> float:
        """Tokens a second, over the batch."""
        return sum(map(len, self.tokens)) / self.seconds


def prompts(loaded: build.Loaded, output: str, batch: int) -> list[list[int]]:
    """One prompt for each sequence, no two alike."""
    encode = load_tokenizer(loaded.path).encode
    if output == "list repeated":
        names = [f"item_{7 * i}" for i in range(10 * batch)]
        lists = (names[i::batch] for i in range(batch))
        return [encode(("[" + ", ".join(each) + "]\n") * 3 + "[") for each in lists]
    source = encode(textwrap.dedent(inspect.getsource(argparse)))
    return [source[i * 211 : i * 211 + 160] for i in range(batch)]


def generate(
    loaded: build.Loaded, output: str, mode: str, batch: int, args: argparse.Namespace
) -> Run:
    """Runs a batch to its end on a new engine; counted from the step after the last prompt."""
    params = replace(OUTPUTS[output], max_tokens=args.tokens)
    costs = NoCost() if mode == "always" else RowCost()
    speculative = SpeculativeConfig(args.speculate, loaded.max_context, costs)
    blocks = BlockPool(loaded.layout.num_blocks, loaded.layout.block_size, prefix_cache=False)
    planner = Planner(
        blocks, loaded.settings.chunk_tokens, batch, None if mode == "none" else speculative
    )
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = Engine(loaded.runner, planner, frozenset(), loaded.max_context, reports.put)
    sequences = [
        Sequence(f"s{i}", list(prompt), len(prompt), params)
        for i, prompt in enumerate(prompts(loaded, output, batch))
    ]
    engine.start()
    for sequence in sequences:
        engine.add(sequence).result()
    run, running, prompts_left, start = Run(), batch, batch, 0.0
    while running:
        report = reports.get()
        if not prompts_left:
            run.steps += bool(report.progress)
            run.proposed += report.num_proposed
            run.accepted += report.num_accepted
        elif report.progress:
            prompts_left = batch - sum(bool(one.token_ids) for one in report.progress)
            start = time.perf_counter()
        running -= sum(one.finish_reason is not None for one in report.progress)
    run.seconds = time.perf_counter() - start
    engine.stop()
    run.tokens = tuple(tuple(one.tokens[one.prompt_tokens :]) for one in sequences)
    return run


def compare(
    loaded: build.Loaded, output: str, batch: int, args: argparse.Namespace
) -> list[list[str]]:
    """A row for each mode; AssertionError if speculation changed a token."""
    rounds = []
    for _ in range(args.rounds + 1):  # the first warms up
        rounds.append({mode: generate(loaded, output, mode, batch, args) for mode in MODES})
        plain = rounds[-1]["none"].tokens
        assert all(run.tokens == plain for run in rounds[-1].values()), "a token changed"
    rows = []
    for mode in MODES:
        rate = statistics.median(one[mode].rate for one in rounds[1:])
        ratio = statistics.median(one[mode].rate / one["none"].rate for one in rounds[1:])
        last = rounds[-1][mode]
        tokens = sum(map(len, last.tokens))
        accepted = f"{last.accepted / last.proposed:.0%}" if last.proposed else "-"
        figures = (f"{rate:.0f}", f"{ratio:.2f}", f"{last.proposed / tokens:.2f}", accepted)
        rows.append([f"{output}, {batch}, {mode}", *figures, f"{tokens / batch / last.steps:.2f}"])
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--speculate", type=int, default=4, help="most proposed tokens in a step")
    parser.add_argument("--tokens", type=int, default=300, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)


def main(args: argparse.Namespace) -> None:
    """Prints a table for each kind of output and batch size."""
    loaded = build.load(EngineConfig(dtype="float32", threads=1, kv_blocks=1024))
    columns = ("tokens/s", "ratio", "proposed a token", "accepted", "tokens a step")
    for output in OUTPUTS:
        for batch in args.batch:
            rows = compare(loaded, output, batch, args)
            console.print(table("output, batch, speculation", columns, rows))
