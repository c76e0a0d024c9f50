"""A look at a model's files before any process is started for it: broken ones are told at once."""

from __future__ import annotations

from baton.config import EngineConfig, model_path
from baton.engine import checkpoint
from baton.errors import CheckpointError, ConfigError


def check_model(settings: EngineConfig) -> None:
    """Raises ConfigError or CheckpointError, naming the file, when no process could load it.

    Reads JSON and safetensors headers only; whether the tensors fit the config is seen by workers.
    """
    path = model_path(settings.model)
    if settings.random_weights:
        return
    if path.is_file():
        raise ConfigError(f"--model {settings.model} is a file: give its directory")
    checkpoint.read_json(path / "config.json")
    checkpoint.stored_tensors(path)
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path / 'tokenizer.json'} is missing: the router needs it")
