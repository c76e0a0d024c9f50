"""How well a model predicts text at lower precision, and how far its probabilities move.

The model reads each text in windows, chunk by chunk as a worker computes a prompt: the same model
code and kernels, and the KV of earlier chunks comes out of the pool. It does so in float32 and in
bfloat16, then in bfloat16 with int8 weights (which multiply int8 activations), with fp8 weights
(fp8 activations, in torch), with int4 weights as --quantization int4 has them (the output layer in
int8) and with the output layer in int4 too, with int8 KV, and with int8 for both. For each:

nats/token, bits/byte   how well it predicts, as in baton/demo_model/README.md: lower is better
perplexity              e to the power of nats/token
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
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.config import EngineConfig, model_path
from baton.engine import build
from baton.engine.batch import StepBatch, StepModel
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.methods import quantize_weight
from baton.engine.runner import Runner
from baton.tables import align
from baton.text import Tokenizer, load_tokenizer

# The demo model's tools are scripts beside each other, not a package.
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "demo_model"))
import corpus

VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8 weights": {"dtype": "bfloat16"},
    "int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, all": {"dtype": "bfloat16"},
    "int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8 both": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
IN_TORCH = {"fp8 weights": "fp8", "int4, all": "int4"}  # formats that no CPU engine has
REFERENCES = ("float32", "bfloat16")
WINDOW, CHUNK = 2048, 512


class Variant:
    """A model loaded with some settings, and the KV of one window."""

    def __init__(self, settings: EngineConfig, in_torch: str | None = None) -> None:
        loaded = build.load(settings)
        assert isinstance(loaded.runner, Runner)
        self.token_bytes = loaded.layout.bytes_per_token
        self._model: StepModel = loaded.runner.model
        self._pool = loaded.runner.pool
        if in_torch is not None:
            self._model = torch_model(model_path(settings.model), in_torch)
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


def torch_model(path: Path, quantization: str) -> DecoderModel:
    """The model in bfloat16 with all its matrices quantised, computed by torch."""

    def prepare(weight: LinearWeight, is_output: bool) -> LinearWeight:
        return quantize_weight(weight, quantization) if isinstance(weight, DenseWeight) else weight

    config, device = ModelConfig.load(path), torch.device("cpu")
    weights = load_weights(path, config, torch.bfloat16, device, prepare)
    return DecoderModel(config, weights, torch.bfloat16, device)


def chunks(stream: Tensor, window: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(start in its window, tokens, the tokens after each): windows begin without context."""
    for first in range(0, len(stream) - 1, window):
        end = min(first + window, len(stream) - 1)
        for start in range(first, end, CHUNK):
            stop = min(start + CHUNK, end)
            yield start - first, stream[start:stop], stream[start + 1 : stop + 1]


def score(
    variants: dict[str, Variant], stream: Tensor, window: int
) -> dict[str, dict[str, Tensor]]:
    """What each variant makes of a text's tokens, int64 `[tokens]`: a value for each but the first.

    "nats": how unlikely it was; "KL" and a reference's name: the divergence of the probabilities
    from the reference's; "same": whether their likeliest token is.
    """
    values: defaultdict[str, defaultdict[str, list[Tensor]]]
    values = defaultdict(lambda: defaultdict(list))
    for start, token_ids, targets in chunks(stream, window):
        found = {name: variant.read(token_ids, start) for name, variant in variants.items()}
        for name, own in found.items():
            of = values[name]
            of["nats"].append(F.nll_loss(own, targets, reduction="none").double())
            for reference in REFERENCES:
                other = found[reference]
                kl = F.kl_div(own, other, reduction="none", log_target=True)
                of[f"KL {reference}"].append(kl.sum(dim=-1, dtype=torch.float64))
                same = own.argmax(dim=-1) == other.argmax(dim=-1)
                of[f"same {reference}"].append(same.double())
    return {name: {n: torch.cat(parts) for n, parts in of.items()} for name, of in values.items()}


def cells(of: dict[str, Tensor], reference: str) -> list[str]:
    """Mean, 99th percentile and largest divergence, and how often the likeliest is the same."""
    kl, same = of[f"KL {reference}"], of[f"same {reference}"]
    mean, p99, most = float(kl.mean()), float(kl.quantile(0.99)), float(kl.max())
    return [f"{mean:.6f}", f"{p99:.5f}", f"{most:.4f}", f"{float(same.mean()):.2%}"]


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
    parser.add_argument("--tokens", type=int, default=65536, help="most tokens of a text: 65536")
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
        name: Variant(replace(settings, **changes), IN_TORCH.get(name))  # type: ignore[arg-type]
        for name, changes in VARIANTS.items()
    }
    columns = ["nats/token", "perplexity", "bits/byte", "KV"]
    columns += [c for reference in REFERENCES for c in (f"KL {reference}", "p99", "max", "same")]
    for name, documents in texts(args.text).items():
        stream = encode(tokenizer, documents, args.tokens)
        num_bytes = len(tokenizer.decode(stream[1:].tolist()).encode())
        rows = []
        for variant, of in score(variants, stream, window).items():
            nats = float(of["nats"].sum())
            each, bits = nats / len(of["nats"]), nats / math.log(2) / num_bytes
            fit = [f"{value:.4f}" for value in (each, math.exp(each), bits)]
            fit.append(f"{variants[variant].token_bytes}")
            rows.append([variant, *fit, *(cell for name in REFERENCES for cell in cells(of, name))])
        print(f"\n{name}: {len(stream) - 1} tokens, {num_bytes} bytes")
        print(*align([["", *columns], *rows]), sep="\n")
