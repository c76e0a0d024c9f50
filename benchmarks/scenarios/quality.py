"""How well a model predicts text at lower precision, and how far its probabilities move.

The model reads each text in windows, chunk by chunk as a worker computes a prompt: the same model
code and kernels, and the KV of earlier chunks comes out of the pool. It does so in float32 and in
bfloat16, then in bfloat16 with int8 weights (which multiply int8 activations), with int8 KV, and
with both. For each:

nats/token, bits/byte   how well it predicts, as in baton/demo_model/README.md: lower is better
KL                      of its next-token probabilities from float32's and from bfloat16's, in nats:
                        mean, 99th percentile and largest over all tokens
same                    how often its likeliest token is theirs
KV                      bytes of a token

Without --text it reads Python's standard library as the running interpreter has it: only the files
that the demo model's training left out, chosen by a hash of their paths. All variants are in memory
at once: about ten bytes for each parameter.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.bench.terminal import table
from baton.config import EngineConfig, model_path
from baton.engine import build
from baton.engine.batch import StepBatch
from baton.engine.runner import Runner
from baton.text import Tokenizer, load_tokenizer
from benchmarks.environment import console

# The demo model's tools are scripts beside each other, not a package.
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "demo_model"))
import corpus

VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8 both": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
REFERENCES = ("float32", "bfloat16")
WINDOW, CHUNK = 2048, 512


class Variant:
    """A model loaded with some settings, and the KV of one window."""

    def __init__(self, settings: EngineConfig) -> None:
        loaded = build.load(settings)
        assert isinstance(loaded.runner, Runner)
        self.token_bytes = loaded.layout.bytes_per_token
        self._model, self._pool = loaded.runner.model, loaded.runner.pool
        self._blocks = torch.arange(loaded.layout.num_blocks, dtype=torch.int32)

    @torch.inference_mode()
    def read(self, token_ids: Tensor, start: int) -> Tensor:
        """Log-probabilities after each of the tokens at `start` of the window: `[tokens, vocab]`.

        The tokens before them in the window must have been read already.
        """
        count = len(token_ids)
        batch = StepBatch(
            token_ids=token_ids.int(),
            context_lens=torch.tensor([start], dtype=torch.int32),
            query_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=self._blocks[None],
            logit_rows=torch.arange(count, dtype=torch.int32),
            num_decodes=int(count == 1),
        )
        return self._model.step(batch, self._pool).log_softmax(dim=-1)


@dataclass
class Score:
    """What one variant made of a text, and how far it was from each reference at each token."""

    nats: float = 0.0
    tokens: int = 0
    divergences: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    same: Counter[str] = field(default_factory=Counter)

    def compare(self, reference: str, found: Tensor, expected: Tensor) -> None:
        """Log-probabilities `[tokens, vocab]` of the variant and of the reference."""
        terms = expected.exp() * (expected - found)
        self.divergences[reference].append(terms.sum(dim=-1, dtype=torch.float64))
        self.same[reference] += int((found.argmax(dim=-1) == expected.argmax(dim=-1)).sum())

    def cells(self, reference: str) -> list[str]:
        """Mean, 99th percentile and largest divergence, and how often the likeliest is the same."""
        kl = torch.cat(self.divergences[reference])
        mean, p99, most = float(kl.mean()), float(kl.quantile(0.99)), float(kl.max())
        same = self.same[reference] / len(kl)
        return [f"{mean:.6f}", f"{p99:.5f}", f"{most:.4f}", f"{same:.2%}"]


def chunks(stream: Tensor, window: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(start in its window, tokens, the tokens after each): windows begin without context."""
    for first in range(0, len(stream) - 1, window):
        end = min(first + window, len(stream) - 1)
        for start in range(first, end, CHUNK):
            stop = min(start + CHUNK, end)
            yield start - first, stream[start:stop], stream[start + 1 : stop + 1]


def score(variants: dict[str, Variant], stream: Tensor, window: int) -> dict[str, Score]:
    """Every variant's score of a text's tokens, int64 `[tokens]`."""
    scores = {name: Score() for name in variants}
    for start, token_ids, targets in chunks(stream, window):
        found = {name: variant.read(token_ids, start) for name, variant in variants.items()}
        for name, log_probs in found.items():
            loss = F.nll_loss(log_probs, targets, reduction="none")
            scores[name].nats += float(loss.double().sum())
            scores[name].tokens += len(targets)
            for reference in REFERENCES:
                scores[name].compare(reference, log_probs, found[reference])
    return scores


def texts(file: Path | None) -> dict[str, list[str]]:
    """Documents by the name of what they are."""
    if file is not None:
        return {file.name: [file.read_text(encoding="utf-8")]}
    named: dict[str, list[str]] = {}
    for one in corpus.read_corpus():
        if one.is_held_out:
            name = "held-out test suites" if one.is_test else "held-out library"
            named.setdefault(name, []).append(one.text)
    return dict(sorted(named.items()))


def encode(tokenizer: Tokenizer, documents: list[str], tokens_max: int) -> Tensor:
    """The documents' tokens, each ended as the model ends a text: int64 `[tokens]`."""
    end = sorted(tokenizer.eos_token_ids)[:1]
    stream: list[int] = []
    for document in documents:
        stream += tokenizer.encode(document) + end
        if len(stream) > tokens_max:
            break
    return torch.tensor(stream[: tokens_max + 1])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="a model directory (default: demo)")
    parser.add_argument("--text", type=Path, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=int, default=65536, help="at most so many of a text")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")


def main(args: argparse.Namespace) -> None:
    """Prints a table for each text."""
    tokenizer = load_tokenizer(model_path(args.model))
    if not isinstance(tokenizer, Tokenizer):
        raise SystemExit(f"{args.model} has no tokenizer.json: nothing can be read")
    window = min(WINDOW, tokenizer.max_context or WINDOW)
    settings = EngineConfig(
        model=args.model,
        device="cpu",
        threads=args.threads,
        kv_blocks=window // EngineConfig.block_size + 1,
    )
    variants = {
        name: Variant(replace(settings, **changes))  # type: ignore[arg-type]
        for name, changes in VARIANTS.items()
    }
    columns = ["nats/token", "bits/byte", "KV"]
    columns += [c for reference in REFERENCES for c in (f"KL {reference}", "p99", "max", "same")]
    for name, documents in texts(args.text).items():
        stream = encode(tokenizer, documents, args.tokens)
        num_bytes = len(tokenizer.decode(stream[1:].tolist()).encode())
        rows = []
        for variant, one in score(variants, stream, window).items():
            bits = one.nats / math.log(2) / num_bytes
            fit = f"{one.nats / one.tokens:.4f}", f"{bits:.4f}", f"{variants[variant].token_bytes}"
            rows.append([variant, *fit, *chain(*map(one.cells, REFERENCES))])
        console.print(f"\n{name}: {len(stream) - 1} tokens, {num_bytes} bytes")
        console.print(table("", columns, rows))
