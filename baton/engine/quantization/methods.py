"""Makes a weight in the format of a checkpoint, or in the one that `--quantization` asks for."""

from __future__ import annotations

from baton.engine.quantization.awq import read_awq
from baton.engine.quantization.compressed_tensors import read_compressed_tensors
from baton.engine.quantization.config import (
    AwqConfig,
    CompressedTensorsConfig,
    GptqConfig,
    QuantizationConfig,
    ScaledFloatsConfig,
    Shapes,
)
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.gptq import read_gptq
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight, Get, LinearWeight
from baton.engine.quantization.scaled_floats import read_scaled_floats


def read_weight(config: QuantizationConfig, modules: Shapes, get: Get) -> LinearWeight:
    """The weight of a checkpoint's modules, each `[out, in]`, joined along the outputs.

    Raises CheckpointError naming a module that cannot be joined with the others.
    """
    match config:
        case AwqConfig():
            return read_awq(modules, get)
        case GptqConfig():
            return read_gptq(config, modules, get)
        case ScaledFloatsConfig():
            return read_scaled_floats(config, modules, get)
        case CompressedTensorsConfig():
            return read_compressed_tensors(config, modules, get)
    raise TypeError(f"no checkpoint is read by {type(config).__name__}")


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
