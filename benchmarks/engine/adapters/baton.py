"""Baton's engine in this process, as a worker builds one."""

from __future__ import annotations

import importlib.metadata

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.kernels.triton.attention_specs import random_pool
from benchmarks.engine.adapters.protocol import Adapter, Setup, Timed, main
from benchmarks.engine.driver import Driver

_WARM_UP = 2  # steps


class Baton(Adapter):
    """`setup.options` are `EngineConfig`'s."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        tokens = setup.max_batch * setup.max_context + setup.max_prefill
        settings = EngineConfig(
            model=setup.directory,
            device="cpu",
            threads=setup.threads,
            kv_blocks=-(-tokens // EngineConfig.block_size) + 2 * setup.max_batch,
            **setup.options,
        )
        self._loaded = loaded = build.load(settings)
        build.warm_up(loaded)
        # Memory that was never written is a single page of zeros, which stays in the cache.
        size, pool = loaded.layout, loaded.runner.pool
        sizes = (size.num_blocks, size.num_layers, size.num_kv_heads, size.head_size)
        pool.copy_(random_pool(*sizes, size.dtype, pool.device, size.block_size))
        self._driver = Driver(loaded)

    def about(self) -> dict[str, str]:
        return {
            "version": importlib.metadata.version("baton-serving"),
            "model": type(self._loaded.runner.model).__name__,  # type: ignore[attr-defined]
            "chunk_tokens": str(self._loaded.settings.chunk_tokens),
        }

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        return steps * self._driver.decode([context] * batch, _WARM_UP, steps), ""

    def prefill(self, tokens: int) -> Timed:
        return self._driver.prefill(tokens), ""


if __name__ == "__main__":
    main(Baton)
