"""The quality benchmark's figures: perplexity, KL divergence and the texts that are read."""

import math
from types import SimpleNamespace

import pytest
import torch

from baton.config import EngineConfig
from benchmarks.__main__ import parser
from benchmarks.scenarios import quality
from tests.unit.engine.checkpoints import make_checkpoint


def stream(length):
    return torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(0))


def test_distance_is_the_kl_divergence():
    """Of a text of two tokens and the one before, by a variant that differs at the first."""
    expected = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]).log()
    read = dict.fromkeys(quality.REFERENCES, expected) | {"it": other}
    variants = {
        name: SimpleNamespace(read=lambda *_, log_probs=log_probs: log_probs)
        for name, log_probs in read.items()
    }
    found = quality.score(variants, torch.tensor([0, 1, 2]), 9)["it"]
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["KL float32"].tolist() == pytest.approx([first, 0.0])
    assert found["nats"].tolist() == pytest.approx([math.log(2), -math.log(0.7)])
    expected_cells = [f"{first / 2:.6f}", f"{first * 0.99:.5f}", f"{first:.4f}", "50.00%"]
    assert quality.cells(found, "float32") == expected_cells


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_scores_are_transformers_own(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "CHUNK", 32)
    reference = make_checkpoint(tmp_path)
    base = {"model": str(tmp_path), "kv_blocks": 6, "kernels": kernels}
    variants = {
        name: quality.Variant(EngineConfig(**{**base, **changes}), quality.IN_TORCH.get(name))
        for name, changes in quality.VARIANTS.items()
    }
    tokens = stream(250)
    scores = quality.score(variants, tokens, 96)
    nats = 0.0
    for first in range(0, 249, 96):
        inputs, targets = tokens[:-1][first : first + 96], tokens[1:][first : first + 96]
        with torch.inference_mode():
            logits = reference(inputs[None]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert {len(one["nats"]) for one in scores.values()} == {249}
    assert float(scores["float32"]["nats"].sum()) == pytest.approx(nats, rel=1e-5)
    means = {}
    for name, one in scores.items():
        means[name] = [float(one[f"KL {reference}"].mean()) for reference in quality.REFERENCES]
        assert float(one["nats"].sum()) == pytest.approx(nats, rel=0.02)
    assert means["float32"][0] == means["bfloat16"][1] == 0
    for name in ("int8 weights", "int8 KV", "int8 both"):
        assert 0 < means[name][0] < 0.05
    assert len({tuple(pair) for pair in means.values()}) == len(means)


def test_only_held_out_files_are_read(monkeypatch):
    names = [f"{folder}{i}.py" for folder in ("", "test/") for i in range(300)]
    files = [quality.corpus.SourceFile(name, f"text of {name}") for name in names]
    monkeypatch.setattr(quality.corpus, "read_corpus", lambda: files)
    found = quality.texts(None)
    assert list(found) == ["held-out library", "held-out test suites"]
    held_out = [file.text for file in files if file.is_held_out]
    assert [text for part in found.values() for text in part] == held_out != []
    assert all("test/" in text for text in found["held-out test suites"])
    monkeypatch.setattr(quality.corpus, "read_corpus", lambda: files[:300])
    assert list(quality.texts(None)) == ["held-out library"]


def test_a_given_text_is_read_and_a_table_printed(tmp_path, capsys):
    make_checkpoint(tmp_path / "model", tokenizer=True)
    text = tmp_path / "mine.txt"
    text.write_text("What is mine is yours.\n" * 20)
    options = ["--model", str(tmp_path / "model"), "--text", str(text), "--tokens", "300"]
    args = parser("quality").parse_args(["quality", *options])
    args.main(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "mine.txt: 300 tokens, 300 bytes"
    assert [line[:12].strip() for line in lines[3:]] == list(quality.VARIANTS)
