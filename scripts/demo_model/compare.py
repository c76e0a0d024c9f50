"""Checks that Hugging Face's Llama computes what our plain torch model does (needs transformers).

python scripts/demo_model/compare.py --model baton/demo_model
"""

import argparse
from pathlib import Path

import torch
from sample import load
from transformers import AutoModelForCausalLM, AutoTokenizer

_TEXT = "import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n        yield name\n"


@torch.no_grad()
def main() -> None:
    """Prints the greatest difference between two sets of float32 logits; fails above 1e-4."""
    parser = argparse.ArgumentParser(description="Compares the model with transformers' Llama.")
    parser.add_argument("--model", type=Path, required=True, help="the exported model folder")
    folder = parser.parse_args().model
    ours, tokenizer = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.encode(_TEXT * 80).ids[:2048]
    assert AutoTokenizer.from_pretrained(folder)(_TEXT * 80).input_ids[:2048] == ids
    tokens = torch.tensor([ids])
    difference = float((ours(tokens) - theirs(tokens).logits).abs().max())
    print(f"{len(ids)} tokens: logits differ by {difference:.1e} at most")
    if difference > 1e-4:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
