"""The model that is served: where its files are, and the name requests use for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.config.options import option
from baton.errors import ConfigError

DEMO_MODEL = Path(__file__).parent.parent / "demo_model"


@dataclass(frozen=True)
class ServedModel:
    """Which model, with its own or with random weights."""

    GROUP: ClassVar[str] = "model"
    model: str = option(
        "demo", "--model DIR", "Hugging Face model directory, or 'demo' for the built-in model"
    )
    random_weights: bool = option(
        False,
        "--random-weights CONFIG",
        "serve random weights for this config.json or directory, for benchmarks; without a "
        "tokenizer beside it prompts must be token ids",
        str,
        sets="model",
    )


def model_path(model: str) -> Path:
    """The directory (or, for random weights, the config file) that `--model` names.

    Raises ConfigError if it does not exist; for a name on the Hub, with the command to download it.
    """
    path = DEMO_MODEL if model == "demo" else Path(model).expanduser()
    if model and path.exists():
        return path.resolve()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        directory = model.partition("/")[2]
        raise ConfigError(
            f"model {model!r} not found: it is no directory here. If it is a name on the Hugging "
            f"Face Hub: `hf download {model} --local-dir {directory}`, then --model {directory}"
        )
    raise ConfigError(
        f"model {model!r} not found: give a Hugging Face model directory (config.json, "
        "*.safetensors, tokenizer.json) or 'demo'"
    )


def default_model_name(model: str) -> str:
    """The served name without `--model-name`: that of the directory or the config file."""
    if model == "demo":
        return "demo"
    path = model_path(model)
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
