"""Trains the demo model on the standard library's source, on a CPU, in about an hour.

    python scripts/demo_model/train.py --out /tmp/demo_model

The learning rate warms up, stays, and falls to zero over the last steps. While it stays, the text
is everything; while it falls, the test suites are left out, so that the model ends on library
code; the very last steps read windows of the model's full context. The batch of a step depends on
nothing but the seed, the schedule and the step's number: a run that is stopped and started again
sees the same text as one that is not.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import fingerprint, read_corpus
from model import LlamaModel, Shape
from scoring import held_out_loss
from texts import Texts, windows
from tokenizer import make_tokenizer
from torch import Tensor
from torch.nn import functional as F

SEED = 1
BATCH_TOKENS = 8192
WINDOW, LONG_WINDOW = 512, 2048
LOG_EVERY_STEPS, CHECK_EVERY_STEPS = 20, 250


@dataclass(frozen=True)
class Schedule:
    """How long to train, and how fast."""

    steps: int
    decay_steps: int
    long_steps: int
    warmup_steps: int
    learning_rate: float

    def scale(self, step: int) -> float:
        """Returns the share of the full learning rate that `step` uses."""
        warmed = min(1.0, (step + 1) / self.warmup_steps)
        return min(warmed, (self.steps - step) / self.decay_steps)


def step_windows(texts: Texts, schedule: Schedule, step: int) -> Tensor:
    """Returns what `step` trains on, `[windows, tokens + 1]`."""
    decay_first = schedule.steps - schedule.decay_steps
    long_first = schedule.steps - schedule.long_steps
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
        self.model = LlamaModel(Shape())
        self._forward = torch.compile(self.model, dynamic=False) if compiles else self.model
        self._optimizers = list(_make_optimizers(self.model, schedule.learning_rate))

    def train_step(self, rows: Tensor) -> float:
        """Takes one step on `[windows, tokens + 1]`; returns its loss in nats a token."""
        logits = self.forward(rows[:, :-1]).float().flatten(0, 1)
        loss = F.cross_entropy(logits, rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.learning_rate * self.schedule.scale(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

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

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `[batch, tokens]` to logits, with bfloat16 products."""
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self._forward(tokens)
        return logits


def _make_optimizers(model: LlamaModel, learning_rate: float) -> Iterator[torch.optim.Optimizer]:
    """Yields Muon for the layers' matrices and AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    yield torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    yield torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def train(trainer: Trainer, texts: Texts, checkpoint: Path) -> None:
    """Trains to the schedule's end, with progress lines and a checkpoint at each check."""
    steps = trainer.schedule.steps
    started, losses, first = time.monotonic(), list[float](), trainer.step
    while trainer.step < steps:
        losses.append(trainer.train_step(step_windows(texts, trainer.schedule, trainer.step)))
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
                loss = held_out_loss(trainer.forward, stream, texts.token_sizes, WINDOW)
                print(f"held out, {name}: {loss}", flush=True)


def main() -> None:
    """Reads the command line, makes the tokenizer and trains."""
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps in all")
    parser.add_argument("--decay-steps", type=int, default=500, help="steps with a falling rate")
    parser.add_argument("--long-steps", type=int, default=60, help="last steps, of 2048 tokens")
    parser.add_argument("--warmup-steps", type=int, default=100, help="steps with a rising rate")
    parser.add_argument("--learning-rate", type=float, default=0.006, help="the full rate")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    files = read_corpus()
    tokenizer = make_tokenizer(
        (file.text for file in files if not file.is_held_out), Shape().vocab_size
    )
    tokenizer.save(str(options.out / "tokenizer.json"))
    texts = Texts(files, tokenizer)
    print(
        f"corpus {fingerprint(files)}: {len(texts.all)} tokens, {len(texts.library)} without tests",
        flush=True,
    )
    schedule = Schedule(
        options.steps,
        options.decay_steps,
        options.long_steps,
        options.warmup_steps,
        options.learning_rate,
    )
    trainer = Trainer(schedule, compiles=not options.eager)
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    train(trainer, texts, checkpoint)


if __name__ == "__main__":
    main()
