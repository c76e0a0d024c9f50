"""Chooses a format: that of a checkpoint, or the one that `--quantization` asks for."""

from __future__ import annotations

from baton.config import EngineConfig
from baton.engine.checkpoint.fields import Fields, one_of
from baton.engine.quantization.awq import AwqConfig
from baton.engine.quantization.compressed_tensors import CompressedTensorsConfig
from baton.engine.quantization.config import REMEDY, QuantizationConfig
from baton.engine.quantization.fp8 import Fp8Config, Fp8Weight
from baton.engine.quantization.gptq import GptqConfig
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.errors import ConfigError

METHODS = {
    config.METHOD: config for config in (AwqConfig, GptqConfig, Fp8Config, CompressedTensorsConfig)
}


def parse_quantization_config(fields: Fields) -> QuantizationConfig | None:
    """Reads `quantization_config` of config.json; None where nothing is quantised.

    Raises CheckpointError naming a key whose value is not supported.
    """
    if fields.values.get("quantization_config") is None:
        return None
    inside = fields.inside("quantization_config", REMEDY)
    method: str = inside.read("quant_method", one_of(*METHODS))
    return METHODS[method].parse(inside)


def weight_format(settings: EngineConfig, stored: QuantizationConfig | None) -> str:
    """The format of a model's weights in memory, as `--quantization` names it.

    stored: the checkpoint's. Raises ConfigError where it is quantised and the settings ask for
    another format.
    """
    if stored is None or settings.simulate:
        return settings.quantization
    if settings.quantization != "none":
        raise ConfigError(
            f"--quantization {settings.quantization}: the checkpoint's weights are already "
            f"{stored.weights} ({stored.METHOD}); leave it out"
        )
    if settings.random_weights:
        raise ConfigError(
            f"--random-weights: the model is quantised ({stored.METHOD}), and random weights are "
            f"not; take the config.json of the model that it was made of, and --quantization "
            f"{stored.weights.removesuffix('_block')}"
        )
    return stored.weights


def quantize_weight(
    weight: LinearWeight, quantization: str, is_output: bool = False
) -> LinearWeight:
    """A weight in the format of `--quantization`; one that is quantised already stays as it is.

    A dense weight stays dense in int4 if its inputs are not whole groups. With int4 the model's
    output layer is int8, because the model loses most by it.
    """
    if not isinstance(weight, DenseWeight):
        return weight
    match quantization:
        case "int8" | "int4" if is_output or quantization == "int8":
            return Int8Weight.from_dense(weight.tensor)
        case "fp8":
            return Fp8Weight.from_dense(weight.tensor)
        case "int4" if weight.shape[1] % Int4Weight.GROUP == 0:
            return Int4Weight.from_dense(weight.tensor)
    return weight
