"""Hugging Face transformers on the same GPU: its model, its cache, and the loop of `generate`.

Greedy, bfloat16, SDPA, without what `generate` does around a step. Of its static and its dynamic
cache the one that is faster is taken for each size. Nothing is compiled by torch.compile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock
from benchmarks.shapes import Shape

CACHES = ("static", "dynamic")


class Rival:
    """One model with made-up weights."""

    def __init__(self, shape: Shape, device: torch.device, clock: Clock) -> None:
        """Raises ImportError where transformers is not installed."""
        import transformers  # noqa: PLC0415 - it may not be there

        self.version = str(transformers.__version__)
        self._transformers, self._device, self._clock = transformers, device, clock
        self._vocab = shape.vocab
        config = transformers.AutoConfig.for_model(**shape.config())
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                made: Any = transformers.AutoModelForCausalLM
                model = made.from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(default)
        self._model = model.to(torch.bfloat16).eval()
        self._best: dict[tuple[str, int], str] = {}

    def decode(self, batch: int, context: int, steps: int) -> tuple[float, str]:
        """Seconds of a step, and which cache it used."""
        kind = self._kind("decode", batch, lambda kind: self._decode(kind, batch, context, 2))
        return self._decode(kind, batch, context, steps), kind

    def prefill(self, tokens: int) -> tuple[float, str]:
        """Seconds of a prompt to its first token, and which cache it used."""
        kind = self._kind("prefill", tokens, lambda kind: self._prefill(kind, tokens))
        return self._prefill(kind, tokens), kind

    def _kind(self, what: str, size: int, seconds: Any) -> str:
        if (what, size) not in self._best:
            tried = {}
            for kind in CACHES:
                seconds(kind)  # first-time costs
                tried[kind] = seconds(kind)
            self._best[what, size] = min(tried, key=tried.__getitem__)
        return self._best[what, size]

    @torch.inference_mode()
    def _decode(self, kind: str, batch: int, context: int, steps: int) -> float:
        cache = self._cache(kind, context + steps + 2)
        tokens = self._step(self._ids(batch, context), cache, 0)
        tokens = self._step(tokens, cache, context)
        self._clock.synchronize()
        began = time.perf_counter()
        for at in range(context + 1, context + 1 + steps):
            tokens = self._step(tokens, cache, at)
        tokens.tolist()
        return (time.perf_counter() - began) / steps

    @torch.inference_mode()
    def _prefill(self, kind: str, tokens: int) -> float:
        cache, ids = self._cache(kind, tokens + 1), self._ids(1, tokens)
        self._clock.synchronize()
        began = time.perf_counter()
        self._step(ids, cache, 0).tolist()
        return time.perf_counter() - began

    def _step(self, ids: Tensor, cache: Any, at: int) -> Tensor:
        """The next token of each row: `[rows, 1]`."""
        places = torch.arange(at, at + ids.shape[1], device=self._device)[None]
        logits: Tensor = self._model(
            input_ids=ids,
            past_key_values=cache,
            position_ids=places.expand(ids.shape[0], -1),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _cache(self, kind: str, length: int) -> Any:
        config = self._model.config
        if kind == "dynamic":
            return self._transformers.DynamicCache(config=config)
        return self._transformers.StaticCache(config=config, max_cache_len=length)

    def _ids(self, batch: int, length: int) -> Tensor:
        return torch.randint(self._vocab, (batch, length), device=self._device)
