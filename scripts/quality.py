"""Measures what fewer bits cost: how well a model predicts text, and how far it moves.

    python scripts/quality.py
    python scripts/quality.py --model ~/models/mine --text notes.txt

The model reads each text in windows, chunk by chunk as a worker computes a prompt: the same model
code and kernels, and the KV of earlier chunks comes out of the pool. It does so in float32 and in
bfloat16, then in bfloat16 with int8 weights (which multiply int8 activations), with int8 KV, and
with both. Per way:

nats/token, bits/byte   how well it predicts, as in baton/demo_model/README.md: lower is better
KL                      of its next-token probabilities from float32's and from bfloat16's, in nats:
                        mean, 99th percentile and largest over all tokens
same                    how often its likeliest token is theirs
KV                      bytes of a token

Without --text it reads Python's standard library as the running interpreter has it: only the files
that the demo model's training left out, chosen by a hash of their paths. All ways are in memory at
once: about ten bytes for each parameter.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.config import KERNELS, EngineConfig, model_path
from baton.engine import build
from baton.engine.batch import StepBatch
from baton.engine.runner import Runner
from baton.text import Tokenizer, load_tokenizer

# The demo model's tools are scripts beside each other, not a package.
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))
from corpus import read_corpus

WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8 both": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
REFERENCES = ("float32", "bfloat16")
WINDOW, CHUNK = 2048, 512


class Way:
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

        What comes before them in the window was read before.
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
class Distance:
    """How far one way is from another, token by token."""

    divergences: list[Tensor] = field(default_factory=list)
    alike: int = 0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Log-probabilities `[tokens, vocab]` of both."""
        terms = wanted.exp() * (wanted - found)
        self.divergences.append(terms.sum(dim=-1, dtype=torch.float64))
        self.alike += int((found.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())

    def __str__(self) -> str:
        every = torch.cat(self.divergences)
        mean, most = float(every.mean()), float(every.max())
        high = float(every.quantile(0.99))
        return f"{mean:9.6f} {high:8.5f} {most:8.4f} {self.alike / len(every):7.2%}"


@dataclass
class Score:
    """What one way made of a text."""

    nats: float = 0.0
    tokens: int = 0
    distances: dict[str, Distance] = field(
        default_factory=lambda: {name: Distance() for name in REFERENCES}
    )

    def add(self, found: Tensor, targets: Tensor) -> None:
        """Log-probabilities `[tokens, vocab]`, and the tokens that came."""
        self.nats += float(F.nll_loss(found, targets, reduction="none").double().sum())
        self.tokens += len(targets)


def chunks(stream: Tensor, window: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(place in its window, tokens, the tokens after each): windows begin without context."""
    for first in range(0, len(stream) - 1, window):
        end = min(first + window, len(stream) - 1)
        for at in range(first, end, CHUNK):
            upto = min(at + CHUNK, end)
            yield at - first, stream[at:upto], stream[at + 1 : upto + 1]


def score(ways: dict[str, Way], stream: Tensor, window: int) -> dict[str, Score]:
    """Every way's score of a text's tokens, int64 `[tokens]`."""
    scores = {name: Score() for name in ways}
    for start, token_ids, targets in chunks(stream, window):
        found = {name: way.read(token_ids, start) for name, way in ways.items()}
        for name, probabilities in found.items():
            scores[name].add(probabilities, targets)
            for reference, distance in scores[name].distances.items():
                distance.add(probabilities, found[reference])
    return scores


def texts(file: Path | None) -> dict[str, list[str]]:
    """Documents by the name of what they are."""
    if file is not None:
        return {file.name: [file.read_text(encoding="utf-8")]}
    held_out = [file for file in read_corpus() if file.is_held_out]
    named = {
        "held-out library": [file.text for file in held_out if not file.is_test],
        "held-out test suites": [file.text for file in held_out if file.is_test],
    }
    return {name: documents for name, documents in named.items() if documents}


def encode(tokenizer: Tokenizer, documents: list[str], tokens_max: int) -> Tensor:
    """The documents' tokens, each ended as the model ends a text: int64 `[tokens]`."""
    end = sorted(tokenizer.eos_token_ids)[:1]
    stream: list[int] = []
    for document in documents:
        stream += tokenizer.encode(document) + end
        if len(stream) > tokens_max:
            break
    return torch.tensor(stream[: tokens_max + 1])


def report(name: str, scores: dict[str, Score], ways: dict[str, Way], num_bytes: int) -> None:
    """Prints a table."""
    print(f"\n{name}: {scores['float32'].tokens} tokens, {num_bytes} bytes")
    headings = "".join(
        f" | {'KL ' + reference:>18} {'p99':>8} {'max':>8} {'same':>7}" for reference in REFERENCES
    )
    print(f"{'':12} nats/token bits/byte   KV{headings}")
    for way, one in scores.items():
        fit = f"{one.nats / one.tokens:10.4f} {one.nats / math.log(2) / num_bytes:9.4f}"
        distances = "".join(f" | {distance!s:>44}" for distance in one.distances.values())
        print(f"{way:12} {fit} {ways[way].token_bytes:5}{distances}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a model directory (default: demo)")
    parser.add_argument("--text", type=Path, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=int, default=65536, help="at most so many of a text")
    parser.add_argument("--kernels", choices=KERNELS, default="auto")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    options = parser.parse_args()
    settings = EngineConfig(
        model=options.model, device="cpu", kernels=options.kernels, threads=options.threads
    )
    loaded_tokenizer = load_tokenizer(model_path(options.model))
    if not isinstance(loaded_tokenizer, Tokenizer):
        raise SystemExit(f"{options.model} has no tokenizer.json: nothing can be read")
    window = min(WINDOW, loaded_tokenizer.max_context or WINDOW)
    settings = dataclasses.replace(settings, kv_blocks=window // settings.block_size + 1)
    ways = {
        name: Way(dataclasses.replace(settings, **changes))  # type: ignore[arg-type]
        for name, changes in WAYS.items()
    }
    for name, documents in texts(options.text).items():
        stream = encode(loaded_tokenizer, documents, options.tokens)
        num_bytes = len(loaded_tokenizer.decode(stream[1:].tolist()).encode())
        report(name, score(ways, stream, window), ways, num_bytes)


if __name__ == "__main__":
    main()
