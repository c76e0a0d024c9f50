"""The models that are served: where their files are, and the names requests use for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from baton.config.options import option
from baton.errors import ConfigError

# Settings of a canary, by the fields of the message `Canary`.
CANARY_DEFAULTS: Mapping[str, Any] = {
    "steps": (10.0, 50.0, 100.0),
    "step_s": 60.0,
    "min_requests": 50,
    "max_slowdown": 1.2,
}
DEMO_MODEL = Path(__file__).parent.parent / "demo_model"


@dataclass(frozen=True)
class ServedModel:
    """Which model, with its own or with random weights."""

    GROUP: ClassVar[str] = "model"
    model: str = option(
        "demo",
        "--model DIR",
        "Hugging Face model directory, GGUF file, or 'demo' for the built-in model",
    )
    random_weights: bool = option(
        False,
        "--random-weights CONFIG",
        "serve random weights for this config.json or directory, for benchmarks; without a "
        "tokenizer beside it prompts must be token ids",
        str,
        sets="model",
    )


@dataclass(frozen=True)
class ModelSource:
    """A value of `--model` that may be repeated: [NAME[@VERSION]=]DIR."""

    path: str  # as for `model_path`
    name: str = ""  # empty: that of the directory
    version: str | None = None  # None: any

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Raises ConfigError for a name or version that requests could not use."""
        named, equals, path = text.partition("=")
        if not equals or text.startswith(("/", ".", "~")):
            return cls(text)
        name, at, version = named.partition("@")
        check_model_name(name, "--model")
        if at:
            check_model_version(version, "--model")
        return cls(path, name, version if at else None)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        at = "" if self.version is None else f"@{self.version}"
        return f"{self.name}{at}={self.path}" if self.name else self.path

    @property
    def served_name(self) -> str:
        return self.name or default_model_name(self.path)


def check_model_name(name: str, flag: str) -> None:
    """Raises ConfigError unless requests, routes and etcd can hold the name."""
    if not re.fullmatch(r"[\w.:/+-]{1,128}", name):
        raise ConfigError(f"{flag}: {name!r} is no name: use letters, digits and . _ - : / +")


def check_model_version(version: str, flag: str) -> None:
    """Raises ConfigError unless the version can stand in a name, as in chat@v1."""
    if not re.fullmatch(r"[\w.-]{1,63}", version):
        raise ConfigError(f"{flag}: {version!r} is no version: use letters, digits and . _ -")


def full_name(name: str, version: str) -> str:
    """The name of one version of a model, which requests may use, too: "chat@v1".

    A model without versions is "chat@".
    """
    return f"{name}@{version}"


def shown_name(name: str, version: str) -> str:
    """`full_name` for people: a model without versions is "chat"."""
    return full_name(name, version).removesuffix("@")


def shares_text(shares: Mapping[str, float]) -> str:
    """Targets with their percents: "chat@v1 90 %, chat@v2 10 %"."""
    return ", ".join(f"{name} {share:.3g} %" for name, share in shares.items())


def model_path(model: str) -> Path:
    """The directory or GGUF file (or, for random weights, the config file) that `--model` names.

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
        "*.safetensors, tokenizer.json), a GGUF file or 'demo'"
    )


def default_model_name(model: str) -> str:
    """The served name without `--model-name`: that of the directory or the config file."""
    if model == "demo":
        return "demo"
    path = model_path(model)
    if path.name == "config.json":
        return path.parent.name
    return path.stem if path.suffix in (".json", ".gguf") else path.name
