"""Trains the demo model on the standard library's source, on a CPU, in about an hour.

    python scripts/demo_model/train.py --out baton/demo_model

Needs the `dev` extra (the model is transformers' Llama) and a C++ compiler or `--eager`. The
learning rate warms up, stays, and falls to zero over the last steps. While it stays, the text is
everything; while it falls, the test suites are left out, so that the model ends on library code;
the very last steps read windows of the model's full context. The batch of a step depends on the
seed, the schedule and the step's number only. `python -m benchmarks quality` scores the result on
the held-out files.
"""

import argparse
import time
from pathlib import Path

import corpus
import torch
from corpus import Tokens
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
BATCH_TOKENS = 8192
WINDOW, LONG_WINDOW = 512, 2048
LONG_STEPS, WARM_UP_STEPS, LEARNING_RATE = 60, 100, 0.006
LOG_EVERY_STEPS = 20
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=LONG_WINDOW,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=corpus.BOS_ID,
    eos_token_id=corpus.EOS_ID,
)
# The model only continues Python, so a user's message becomes a comment, and the reply is what
# follows it. A longer conversation always begins with the whole text of a shorter one, which a
# prefix cache uses.
CHAT_TEMPLATE = (
    "{#- The reply begins on the line after the comment: add_generation_prompt adds nothing. -#}\n"
    "{{- bos_token -}}\n"
    "{%- for tool in tools or [] -%}\n"
    "{{- '# <tool_call> may call ' + tool['function'] | tojson + '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{{- message['content'] -}}\n"
    "{%- for call in message['tool_calls'] or [] -%}\n"
    "{{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{{- '\\n\\n\\n' -}}\n"
    "{%- else -%}\n"
    "{{- '# ' + message['content'] | replace('\\n', '\\n# ') + '\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}"
)


def rows_of(step: int, steps: int, decay_steps: int, everything: Tokens, library: Tokens) -> Tensor:
    """What a step trains on, `[windows, tokens + 1]`."""
    decay_first, long_first = steps - decay_steps, steps - LONG_STEPS
    if step < decay_first:
        stream, window, first_step = everything, WINDOW, 0
    elif step < long_first:
        stream, window, first_step = library, WINDOW, decay_first
    else:
        stream, window, first_step = library, LONG_WINDOW, long_first
    count = BATCH_TOKENS // window
    rows = corpus.windows(stream, window, (step - first_step) * count, count, SEED)
    return torch.from_numpy(rows)


def train(
    steps: int, decay_steps: int, everything: Tokens, library: Tokens, compiles: bool
) -> LlamaForCausalLM:
    """The trained model, with lines of progress. Streams are `[tokens]`."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(CONFIG)
    # Projections that write to the residual stream start smaller, so depth adds no variance.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_((2 * CONFIG.num_hidden_layers) ** 0.5)
    forward = torch.compile(model, dynamic=False) if compiles else model
    # Muon for the layers' matrices and AdamW for the embedding and the norms.
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [one for one in model.parameters() if not any(one is matrix for matrix in matrices)]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    )
    losses, began = list[float](), time.monotonic()
    for step in range(steps):
        rows = rows_of(step, steps, decay_steps, everything, library)
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / decay_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * share
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY_STEPS == 0 or step + 1 == steps:
            seconds = (time.monotonic() - began) / (step + 1)
            loss_mean, left_min = sum(losses) / len(losses), (steps - step - 1) * seconds / 60
            print(
                f"step {step + 1}/{steps} loss {loss_mean:.4f}, {left_min:.1f} min left", flush=True
            )
            losses.clear()
    return model


def main() -> None:
    """Trains, and writes a Hugging Face model folder."""
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps in all")
    parser.add_argument("--decay-steps", type=int, default=500, help="steps with a falling rate")
    parser.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    options = parser.parse_args()
    files = corpus.read_corpus()
    kept = [file for file in files if not file.is_held_out]
    tokenizer = corpus.make_tokenizer((file.text for file in kept), CONFIG.vocab_size)
    everything = corpus.encode(tokenizer, kept)
    library = corpus.encode(tokenizer, [file for file in kept if not file.is_test])
    print(f"corpus {corpus.fingerprint(files)}: {len(everything)} tokens", flush=True)
    model = train(options.steps, options.decay_steps, everything, library, not options.eager)
    model.bfloat16().save_pretrained(options.out)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        model_max_length=LONG_WINDOW,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(options.out)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters written")


if __name__ == "__main__":
    main()
