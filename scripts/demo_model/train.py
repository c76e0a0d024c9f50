"""Trains the demo model on the standard library's source, on a CPU, in about an hour.

    python scripts/demo_model/train.py --work /tmp/demo_model --out baton/demo_model

Needs the `dev` extra (the model is transformers' Llama) and a C++ compiler or `--eager`. The
learning rate warms up, stays, and falls to zero over the last steps. While it stays, the text is
everything; while it falls, the test suites are left out, so that the model ends on library code;
the very last steps read windows of the model's full context. The batch of a step depends on the
seed, the schedule and the step's number only: a run that is stopped and started again sees the same
text as one that is not. `python -m benchmarks quality` scores the result on the held-out files.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    Texts,
    fingerprint,
    make_tokenizer,
    read_corpus,
    windows,
)
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
BATCH_TOKENS = 8192
WINDOW, LONG_WINDOW = 512, 2048
LOG_EVERY_STEPS, CHECK_EVERY_STEPS = 20, 250
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
    bos_token_id=BOS_ID,
    eos_token_id=EOS_ID,
)
# The model only continues Python, so a user's message becomes a comment, and the reply is what
# follows it. A longer conversation always begins with the whole text of a shorter one, which a
# prefix cache uses.
CHAT_TEMPLATE = (
    "{#- The reply begins on the line after the comment: add_generation_prompt adds nothing. -#}\n"
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{{- message['content'] + '\\n\\n\\n' -}}\n"
    "{%- else -%}\n"
    "{{- '# ' + message['content'] | replace('\\n', '\\n# ') + '\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Schedule:
    """How long to train, and how fast."""

    steps: int
    decay_steps: int
    long_steps: int
    warmup_steps: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warmed = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * min(warmed, (self.steps - step) / self.decay_steps)

    def rows(self, texts: Texts, step: int) -> Tensor:
        """What a step trains on, `[windows, tokens + 1]`."""
        decay_first, long_first = self.steps - self.decay_steps, self.steps - self.long_steps
        if step < decay_first:
            stream, window, first_step = texts.all, WINDOW, 0
        elif step < long_first:
            stream, window, first_step = texts.library, WINDOW, decay_first
        else:
            stream, window, first_step = texts.library, LONG_WINDOW, long_first
        count = BATCH_TOKENS // window
        return torch.from_numpy(windows(stream, window, (step - first_step) * count, count, SEED))


class Trainer:
    """The model and its optimizers, with the file they are kept in between runs."""

    def __init__(self, schedule: Schedule, compiles: bool) -> None:
        torch.manual_seed(SEED)
        self.schedule = schedule
        self.step = 0
        self.model = LlamaForCausalLM(CONFIG)
        # Projections that write to the residual stream start smaller, so depth adds no variance.
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.div_((2 * CONFIG.num_hidden_layers) ** 0.5)
        self._forward = torch.compile(self.model, dynamic=False) if compiles else self.model
        self._optimizers = list(_optimizers(self.model, schedule.learning_rate))

    def loss(self, rows: Tensor) -> Tensor:
        """Mean nats a token of `[windows, tokens + 1]`, with bfloat16 products."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._forward(rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def train_step(self, rows: Tensor) -> float:
        """Takes one step; returns its loss."""
        loss = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def held_out(self, stream: Tensor) -> float:
        """Mean loss over the whole windows of a stream, each without context before it."""
        rows = stream[: len(stream) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
        batches = [batch for batch in rows.split(BATCH_TOKENS // WINDOW) if len(batch) > 1]
        return sum(self.loss(batch).item() * len(batch) for batch in batches) / len(rows)

    def save(self, path: Path) -> None:
        """Writes everything needed to go on; the file is replaced whole or not at all."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        state = {"step": self.step, "model": self.model.state_dict(), "optimizers": states}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote."""
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)


def _optimizers(model: LlamaForCausalLM, rate: float) -> Iterator[torch.optim.Optimizer]:
    """Muon for the layers' matrices and AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    yield torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    yield torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def train(trainer: Trainer, texts: Texts, checkpoint: Path) -> None:
    """Trains to the schedule's end, with progress lines and a checkpoint at each check."""
    steps, first, started = trainer.schedule.steps, trainer.step, time.monotonic()
    losses = list[float]()
    while trainer.step < steps:
        losses.append(trainer.train_step(trainer.schedule.rows(texts, trainer.step)))
        if trainer.step % LOG_EVERY_STEPS == 0:
            seconds = (time.monotonic() - started) / (trainer.step - first)
            print(
                f"step {trainer.step}/{steps} loss {sum(losses) / len(losses):.4f} "
                f"{BATCH_TOKENS / seconds:.0f} tokens/s "
                f"{(steps - trainer.step) * seconds / 60:.1f} min left",
                flush=True,
            )
            losses.clear()
        if trainer.step % CHECK_EVERY_STEPS == 0 or trainer.step == steps:
            trainer.save(checkpoint)
            for name, stream in texts.held_out.items():
                nats = trainer.held_out(torch.from_numpy(stream))
                print(f"held out, {name}: {nats:.4f} nats/token", flush=True)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a Hugging Face model folder: weights in bfloat16, the tokenizer, its chat template."""
    model.bfloat16().save_pretrained(out)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=LONG_WINDOW,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters written to {out}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps in all")
    parser.add_argument("--decay-steps", type=int, default=500, help="steps with a falling rate")
    parser.add_argument("--long-steps", type=int, default=60, help="last steps, of 2048 tokens")
    parser.add_argument("--warmup-steps", type=int, default=100, help="steps with a rising rate")
    parser.add_argument("--learning-rate", type=float, default=0.006, help="the full rate")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)

    files = read_corpus()
    tokenizer = make_tokenizer(
        (file.text for file in files if not file.is_held_out), CONFIG.vocab_size
    )
    texts = Texts(files, tokenizer)
    print(f"corpus {fingerprint(files)}: {len(texts.all)} tokens", flush=True)
    trainer = Trainer(
        Schedule(
            options.steps,
            options.decay_steps,
            options.long_steps,
            options.warmup_steps,
            options.learning_rate,
        ),
        compiles=not options.eager,
    )
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    train(trainer, texts, checkpoint)
    export(trainer.model, tokenizer, options.out)


if __name__ == "__main__":
    main()
