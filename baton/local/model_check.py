"""Checks a model's files before processes are started, so that errors show at once."""

from __future__ import annotations

from baton.config import EngineConfig, model_path
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.tensor_names import as_stored, check_tensors, text_tensors
from baton.engine.quantization.config import weight_format
from baton.errors import CheckpointError, ConfigError
from baton.gguf.reader import SUFFIX
from baton.text import load_tokenizer, text_fingerprint
from baton.text.model_files import TOKENIZER_FILE, has_same_tokens


def check_model(settings: EngineConfig, *, worker: bool = False) -> None:
    """Raises ConfigError or CheckpointError, naming the file, if the model cannot be loaded.

    Reads no tensors and does not import torch. Workers need only the tokenizer's fingerprint.
    """
    path = model_path(settings.model)
    if path.is_file() and path.suffix != SUFFIX and not settings.random_weights:
        raise ConfigError(
            f"--model {settings.model} is a file: give its directory, or a file *{SUFFIX}"
        )
    config = ModelConfig.load(path)
    config.check_settings(settings)
    if settings.tp > 1 and not settings.simulate:
        config.check_ranks(settings)
    config.longest_context(settings)
    config.check_device(settings, settings.device)
    weight_format(settings, config.quantization)
    if not (settings.random_weights or settings.simulate):
        _check_stored(settings, config)
    if settings.speculative_model:
        _check_draft(settings, config)
    if worker:
        text_fingerprint(path)
        return
    has_file = path.suffix == SUFFIX or (path / TOKENIZER_FILE).exists()
    if not settings.random_weights and not has_file:
        raise CheckpointError(f"{path / TOKENIZER_FILE} is missing: the router needs it")
    load_tokenizer(path)


def _check_stored(settings: EngineConfig, config: ModelConfig) -> None:
    """Checks that the checkpoint has the tensors that a config implies."""
    path = model_path(settings.model)
    stored = text_tensors(path, config)[0]
    check_tensors(path, as_stored(config, stored), stored)


def _check_draft(settings: EngineConfig, config: ModelConfig) -> None:
    """Checks the draft model's files, and that its token ids mean the same texts."""
    draft = config.draft(settings)
    if settings.is_mtp:
        if not settings.random_weights:
            _check_stored(settings, draft)
        return
    check_model(settings.of_draft(draft.quantization is not None), worker=True)
    if not has_same_tokens(model_path(settings.speculative_model), model_path(settings.model)):
        raise ConfigError(
            f"--speculative-model {settings.speculative_model}: {TOKENIZER_FILE} has other tokens "
            "than that of --model: choose a draft model with the same tokenizer"
        )
