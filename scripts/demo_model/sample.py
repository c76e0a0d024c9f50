"""Continues a prompt with the exported demo model, or scores it on the held-out files.

python scripts/demo_model/sample.py --model baton/demo_model --prompt 'def fibonacci(n):'
python scripts/demo_model/sample.py --model baton/demo_model --held-out
"""

import argparse
from pathlib import Path

import torch
from corpus import read_corpus
from model import LlamaModel, Shape
from safetensors.torch import load_file
from scoring import held_out_loss
from texts import Texts
from tokenizer import EOS_ID
from tokenizers import Tokenizer


def load(folder: Path) -> tuple[LlamaModel, Tokenizer]:
    """Returns the exported model, in float32, and its tokenizer."""
    model = LlamaModel(Shape())
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def continue_text(
    model: LlamaModel, tokenizer: Tokenizer, prompt: str, tokens_max: int, temperature: float
) -> str:
    """Returns what follows `prompt`; a temperature of zero takes the likeliest token.

    The whole text is computed again for each token: slow, and too simple to be wrong.
    """
    ids = tokenizer.encode(prompt).ids
    first = len(ids)
    while len(ids) - first < tokens_max:
        logits = model(torch.tensor([ids[-Shape().positions_max :]]))[0, -1]
        if temperature > 0:
            following = int(torch.multinomial((logits / temperature).softmax(-1), 1))
        else:
            following = int(logits.argmax())
        if following == EOS_ID:
            break
        ids.append(following)
    return str(tokenizer.decode(ids[first:]))


def main() -> None:
    """Reads the command line, then samples or scores."""
    parser = argparse.ArgumentParser(description="Samples from the exported demo model.")
    parser.add_argument("--model", type=Path, required=True, help="the exported model folder")
    parser.add_argument("--prompt", default="", help="the text to continue; \\n is a newline")
    parser.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="at most this many tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--held-out", action="store_true", help="print the held-out loss instead")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, tokenizer = load(options.model)
    if options.held_out:
        texts = Texts(read_corpus(), tokenizer)
        for name, stream in texts.held_out.items():
            print(f"held out, {name}: {held_out_loss(model, stream, texts.token_sizes, 2048)}")
        return
    prompt = (
        options.prompt_file.read_text()
        if options.prompt_file
        else options.prompt.replace("\\n", "\n")
    )
    continuation = continue_text(model, tokenizer, prompt, options.tokens, options.temperature)
    print(f"{prompt}\033[1m{continuation}\033[0m")


if __name__ == "__main__":
    main()
