"""Every architecture on a GPU beside plain torch on the CPU, which other tests compare with
transformers: greedy tokens in float32 with CUDA graphs, a cached prefix, proposed tokens and
adapters; and in bfloat16, how many tokens are the likeliest in float32.

`python -m tests.gpu.models` prints a line for each model; its status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # here and in child processes

import torch

from baton.engine.models.architectures import ARCHITECTURES
from baton.engine.models.lora import load_lora
from baton.engine.models.model_config import ModelConfig
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.bench import Bench, load
from tests.unit.engine.model_cases import ADAPTED, KINDS

PLAIN = {"device": "cpu", "kernels": "torch"}
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
BIAS = {5: 13.0, 6: 12.8}  # makes texts repeat, so that some proposals are right
FEW_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LEAST_SHARE = 0.9  # of tokens in bfloat16; random weights have near ties


class Case(NamedTuple):
    """A checkpoint of random weights; kind: of its KV if it stands for the kind, or empty."""

    architecture: str
    options: dict[str, Any]
    kind: str = ""

    @property
    def name(self) -> str:
        """Of its line and its folder."""
        return f"{self.architecture} {self.kind}".strip().replace(" ", "-")


def cases() -> list[Case]:
    """Kinds of KV with all features, then all architectures."""
    kinds = [Case(one.architecture, one.options, kind) for kind, one in KINDS.items()]
    stand_ins = {one.architecture for one in KINDS.values()}
    others = [Case(one, {"sliding_window": 24}) for one in ARCHITECTURES if one not in stand_ins]
    return [*kinds, *others]


def prepare(case: Case, folder: Path) -> None:
    """Writes the checkpoint, and two adapters of models that tests adapt; needs transformers."""
    from tests.unit.engine.checkpoints import SIZES, make_checkpoint  # noqa: PLC0415
    from tests.unit.engine.test_lora import adaptable, make_adapter  # noqa: PLC0415

    options = {**({} if case.architecture in SIZES else FEW_EXPERTS), **case.options}
    model = make_checkpoint(folder / "base", case.architecture, tokenizer=True, **options)
    if case.architecture in ADAPTED:
        for seed, name in enumerate("ab"):
            modules = adaptable(folder / "base", model)[seed::2]
            make_adapter(folder / name, model, modules=modules, seed=seed)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that differ by seed."""
    return [(7 * i * i + 31 * seed + 5) % 250 + 2 for i in range(length)]


def tokens(
    base: Path, texts: list[list[int]], settings: dict[str, Any], *,
    params: SamplingParams = GREEDY, adapters: tuple[Path, ...] = (), in_turn: bool = False,
) -> list[list[int]]:  # fmt: skip
    """New tokens for each text, of one engine; in_turn: one text after the other.

    adapters: of the texts in order; texts behind them have none.
    """
    limits = {"kv_blocks": 400, "max_batch": 8, "chunk_tokens": 128, "max_loras": len(adapters)}
    loaded = load(base, **limits, **settings)
    loaded.prepare()
    sequences = [Sequence(f"{n}", [*text], len(text), params) for n, text in enumerate(texts)]
    with Bench(loaded.engine) as bench:
        for path, sequence in zip(adapters, sequences, strict=False):
            adapter = load_lora(path, ModelConfig.load(base), 16)
            bench.engine.load_adapter(adapter).result()
            sequence.adapter = sequence.cache_salt = adapter.identity
        for batch in [[one] for one in sequences] if in_turn else [sequences]:
            bench.tokens(*batch)
    if in_turn:
        assert min(one.num_cached for one in sequences[1:]) >= 256, "no prefix was cached"
    return [one.tokens[one.prompt_tokens :] for one in sequences]


def compare(case: Case, folder: Path, device: str) -> str:
    """What was found of a case, in a line. Raises AssertionError for other tokens."""
    base, done = folder / "base", []
    gpu = {"device": device, "kernels": "triton" if device != "cpu" else "native"}

    def equal(what: str, texts: list[list[int]], more: dict[str, Any], **settings: Any) -> None:
        wanted = tokens(base, texts, PLAIN, **settings)
        found = tokens(base, texts, {**gpu, **more}, **settings)
        for text, got, right in zip(texts, found, wanted, strict=True):
            same = next((n for n, pair in enumerate(zip(got, right, strict=True))
                         if pair[0] != pair[1]), len(right))  # fmt: skip
            assert got == right, f"{what}: prompt of {len(text)} differs at new token {same}"
        done.append(f"{what} {sum(map(len, found))}")

    several = [prompt(length, length) for length in (5, 17, 40, 130)]
    equal("batch", several, {})
    long = prompt(330)
    equal("cached prefix", [long, long, [*long[:320], *prompt(30, 1)]], {}, in_turn=True)
    # No kernel for GPUs keeps a state before proposed tokens: a config with states refuses them.
    if case.kind and ModelConfig.load(base).delta_rule is None:
        biased = replace(GREEDY, logit_bias=BIAS)
        equal("n-grams", [[5, 6, 7, 8, 9] * 6, *several], {"speculate": 4}, params=biased)
    if case.architecture in ADAPTED:
        equal("adapters", several, {}, adapters=(folder / "a", folder / "b"))
    found = tokens(base, several, {**gpu, "dtype": "bfloat16"})
    # What the float32 model says behind the same tokens.
    texts = [[*text, *got[:n]] for text, got in zip(several, found, strict=True)
             for n in range(len(got))]  # fmt: skip
    likeliest = tokens(base, texts, PLAIN, params=replace(GREEDY, max_tokens=1))
    pairs = zip(itertools.chain.from_iterable(found), likeliest, strict=True)
    share = sum(token == right for token, (right,) in pairs) / len(texts)
    assert share >= LEAST_SHARE, f"bfloat16: {share:.2f} of the tokens are float32's likeliest"
    return f"{', '.join(done)}; bfloat16 {share:.2f}"


def attempt(work: tuple[Case, Path, str, bool]) -> tuple[str, bool, str]:
    """Name, success and text of a case."""
    case, folder, device, only_prepare = work
    began = time.monotonic()
    torch.set_num_threads(1)
    try:
        if not (folder / "base").exists():
            prepare(case, folder)
        text = "prepared" if only_prepare else compare(case, folder, device)
    except Exception as error:
        lines = traceback.format_exception(error)[-3:]
        return case.name, False, " | ".join("".join(lines).split("\n"))[-700:]
    return case.name, True, f"{text} ({time.monotonic() - began:.0f} s)"


def main() -> int:
    """Runs the cases in several processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, help="of checkpoints; those missing are written")
    parser.add_argument("--prepare", action="store_true", help="only write checkpoints")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        work = [(one, root / one.name, args.device, args.prepare)
                for one in cases() if args.only in one.name]  # fmt: skip
        failed = 0
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            for name, right, text in pool.imap_unordered(attempt, work, chunksize=1):
                failed += not right
                print("ok    " if right else "FAILED", name, text, flush=True)
    print(f"{len(work)} models, {failed} failed")
    return int(failed > 0 or not work)


if __name__ == "__main__":
    sys.exit(main())
