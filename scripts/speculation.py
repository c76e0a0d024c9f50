"""What drafts from a sequence's own text bring and cost (`--speculate`), on the demo model.

    python scripts/speculation.py
    python scripts/speculation.py --batch 1 8 --threads 2 --rounds 5 --speculate 6

Three kinds of output: one that repeats a list, one that is ordinary (code that goes on), and one
drawn so freely that hardly any guess is right. Each is generated without drafts, with drafts as
they adapt themselves, and with drafts at every chance (the price of a row taken as nothing), one
after the other in each round; a ratio is the median over the rounds of one round's two figures.
Tokens must be the same in all three, and are compared.
"""

from __future__ import annotations

import argparse
import inspect
import queue
import statistics
import textwrap
import time
from dataclasses import dataclass

from baton.config import DTYPES, KERNELS, EngineConfig
from baton.engine import build
from baton.engine.blocks import BlockPool
from baton.engine.loop import Engine, StepReport
from baton.engine.planner import Planner
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import RowCost, SpeculativeConfig
from baton.sampling import SamplingParams
from baton.text import load_tokenizer

MODES = ("none", "adaptive", "always")
KINDS = {
    "list repeated": SamplingParams(ignore_eos=True),
    "ordinary code": SamplingParams(temperature=0.7, top_p=0.95, seed=3, ignore_eos=True),
    "drawn freely": SamplingParams(temperature=1.3, seed=3, ignore_eos=True),
}


class NoCost(RowCost):
    """Takes a further row for free."""

    def price(self, rows: int) -> float:
        """Nothing."""
        return 0.0


@dataclass
class Run:
    """One generation of a batch."""

    seconds: float = 0.0
    steps: int = 0
    drafts: int = 0
    right: int = 0
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def rate(self) -> float:
        """Tokens a second, over the batch."""
        return sum(map(len, self.tokens)) / self.seconds


def prompts(loaded: build.Loaded, kind: str, batch: int) -> list[list[int]]:
    """One prompt for each sequence, no two alike."""
    encode = load_tokenizer(loaded.path).encode
    if kind == "list repeated":
        names = [f"item_{7 * at}" for at in range(10 * batch)]
        lists = (names[at::batch] for at in range(batch))
        return [encode(("[" + ", ".join(each) + "]\n") * 3 + "[") for each in lists]
    source = encode(textwrap.dedent(inspect.getsource(argparse)))
    return [source[at * 211 : at * 211 + 160] for at in range(batch)]


def generate(
    loaded: build.Loaded, kind: str, mode: str, batch: int, args: argparse.Namespace
) -> Run:
    """Runs a batch to its end on an engine of its own."""
    params = KINDS[kind].__class__(**{**vars(KINDS[kind]), "max_tokens": args.tokens})
    costs = NoCost() if mode == "always" else RowCost()
    drafting = (
        None if mode == "none" else SpeculativeConfig(args.speculate, loaded.max_context, costs)
    )
    blocks = BlockPool(loaded.layout.num_blocks, loaded.layout.block_size, prefix_cache=False)
    planner = Planner(blocks, loaded.settings.chunk_tokens, batch, drafting)
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = Engine(loaded.runner, planner, frozenset(), loaded.max_context, reports.put)
    sequences = [
        Sequence(f"s{at}", list(prompt), len(prompt), params)
        for at, prompt in enumerate(prompts(loaded, kind, batch))
    ]
    engine.start()
    for sequence in sequences:
        engine.add(sequence).result()
    run = collect(reports, batch)
    engine.stop()
    run.tokens = tuple(tuple(one.tokens[one.prompt_tokens :]) for one in sequences)
    return run


def collect(reports: queue.SimpleQueue[StepReport], batch: int) -> Run:
    """Counts from the step after the last prompt on until all have ended."""
    run, running, prompts_left, began = Run(), batch, batch, 0.0
    while running:
        report = reports.get()
        if not prompts_left:
            run.steps += bool(report.progress)
            run.drafts += report.num_proposed
            run.right += report.num_accepted
        elif report.progress:
            prompts_left = batch - sum(bool(one.token_ids) for one in report.progress)
            began = time.perf_counter()
        running -= sum(one.finish_reason is not None for one in report.progress)
    run.seconds = time.perf_counter() - began
    return run


def compare(loaded: build.Loaded, kind: str, batch: int, args: argparse.Namespace) -> None:
    """Prints one kind of output at one batch size."""
    rounds = []
    for _ in range(args.rounds + 1):  # the first warms up
        rounds.append({mode: generate(loaded, kind, mode, batch, args) for mode in MODES})
        plain = rounds[-1]["none"].tokens
        assert all(run.tokens == plain for run in rounds[-1].values()), "drafts changed a token"
    for mode in MODES:
        runs = [one[mode] for one in rounds[1:]]
        ratio = statistics.median(one[mode].rate / one["none"].rate for one in rounds[1:])
        last = runs[-1]
        tokens = sum(map(len, last.tokens))
        a_step = tokens / batch / last.steps
        right = f"{last.right / last.drafts:4.0%}" if last.drafts else "-"
        print(
            f"{kind:14} {batch:5}  {mode:9} {statistics.median(run.rate for run in runs):8.0f} "
            f"{ratio:6.2f} {last.drafts / tokens:8.2f} {right:>6} {a_step:6.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--speculate", type=int, default=4, help="the most drafts in a step")
    parser.add_argument("--tokens", type=int, default=300, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--kernels", choices=KERNELS, default="auto")
    args = parser.parse_args()
    settings = EngineConfig(
        dtype=args.dtype, threads=args.threads, kernels=args.kernels, kv_blocks=1024
    )
    loaded = build.load(settings)
    print(f"{'output':14} batch  drafts    tokens/s  ratio drafted  right  tokens/step")
    for kind in KINDS:
        for batch in args.batch:
            compare(loaded, kind, batch, args)


if __name__ == "__main__":
    main()
