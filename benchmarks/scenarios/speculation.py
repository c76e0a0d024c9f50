"""What n-gram speculation (`--speculate`) gains and costs, on the demo model in float32.

Three kinds of output: a repeated list, ordinary code that goes on, and text sampled at such a
temperature that hardly any proposal is accepted. Each is generated without speculation and with
it, one after the other in each round; a ratio is the median over the rounds of one round's two
rates. Tokens must be the same in both, which is checked.
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
from baton.engine.loop import StepReport
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from baton.text import load_tokenizer
from benchmarks.environment import console

OUTPUTS = {
    "list repeated": SamplingParams(ignore_eos=True),
    "ordinary code": SamplingParams(temperature=0.7, top_p=0.95, seed=3, ignore_eos=True),
    "sampled freely": SamplingParams(temperature=1.3, seed=3, ignore_eos=True),
}


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


def generate(loaded: build.Loaded, output: str, batch: int, tokens: int) -> Run:
    """Runs a batch to its end on a new engine; counted from the step after the last prompt."""
    params = replace(OUTPUTS[output], max_tokens=tokens)
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = loaded.engine(reports.put)
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
    """A row without and one with speculation; AssertionError if it changed a token."""
    by_number = {
        number: replace(loaded, settings=replace(loaded.settings, speculate=number))
        for number in (0, args.speculate)
    }
    rounds = []
    for _ in range(args.rounds + 1):  # the first warms up
        runs = {n: generate(one, output, batch, args.tokens) for n, one in by_number.items()}
        assert runs[0].tokens == runs[args.speculate].tokens, "a token changed"
        rounds.append(runs)
    rows = []
    for number in by_number:
        rate = statistics.median(one[number].rate for one in rounds[1:])
        ratio = statistics.median(one[number].rate / one[0].rate for one in rounds[1:])
        last = rounds[-1][number]
        tokens = sum(map(len, last.tokens))
        accepted = f"{last.accepted / last.proposed:.0%}" if last.proposed else "-"
        figures = (f"{rate:.0f}", f"{ratio:.2f}", f"{last.proposed / tokens:.2f}", accepted)
        name = f"{output}, {batch}, {number}"
        rows.append([name, *figures, f"{tokens / batch / last.steps:.2f}"])
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--speculate", type=int, default=4, help="most proposed tokens in a step")
    parser.add_argument("--tokens", type=int, default=300, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)


def main(args: argparse.Namespace) -> None:
    """Prints a table for each kind of output and batch size."""
    loaded = build.load(
        EngineConfig(
            dtype="float32",
            threads=1,
            kv_blocks=1024,
            max_batch=max(args.batch),
            prefix_cache=False,
        )
    )
    columns = ("tokens/s", "ratio", "proposed a token", "accepted", "tokens a step")
    for output in OUTPUTS:
        for batch in args.batch:
            rows = compare(loaded, output, batch, args)
            console.print(table("output, batch, --speculate", columns, rows))
