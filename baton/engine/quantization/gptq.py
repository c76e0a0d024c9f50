"""Reads GPTQ checkpoints of 4 bits, also with act-order (https://github.com/AutoGPTQ/AutoGPTQ)."""

from __future__ import annotations

from baton.engine.quantization.config import GptqConfig, Shapes
from baton.engine.quantization.int4 import Int4Part, Int4Weight, group_order, unpack_words
from baton.engine.quantization.linear_weight import Get, require


def read_gptq(config: GptqConfig, modules: Shapes, get: Get) -> Int4Weight:
    """The weight of modules, each `[out, in]`, joined along the outputs.

    Raises CheckpointError naming a module whose inputs are in another order than the first's.
    """
    return Int4Weight.from_parts(
        [
            Int4Part(
                module,
                unpack_words(require(get, f"{module}.qweight").T),
                require(get, f"{module}.scales").T.float(),
                unpack_words(require(get, f"{module}.qzeros")).T + config.zero_offset,
                group_order(get, f"{module}.g_idx", shape[1], config.group_size),
            )
            for module, shape in modules.items()
        ]
    )
