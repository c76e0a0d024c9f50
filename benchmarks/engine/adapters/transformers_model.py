"""Hugging Face transformers, greedy: a loop over its model, or its own `generate`.

The loop uses the attention ("eager", "sdpa") and the cache ("dynamic" grows with each token,
"static" is preallocated) that are fastest for each kind of work, which its first call finds.
`generate` has its defaults: sdpa, dynamic. Nothing is compiled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine.adapters.protocol import Adapter, Setup, Timed, main

Variant = tuple[str, str]  # attention and cache
_DEFAULT: Variant = ("sdpa", "dynamic")
_TRIED_STEPS = 3


class Transformers(Adapter):
    """A model in bfloat16; `options["generate"]` selects the library's `generate`.

    Without a directory it is a model of `options["config"]` with random weights on
    `options["device"]`.
    """

    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers

        if setup.threads:
            torch.set_num_threads(setup.threads)
        super().__init__(setup)
        self._torch, self._transformers, options = torch, transformers, setup.options
        self._device = torch.device(options.get("device", "cpu"))
        loader: Any = transformers.AutoModelForCausalLM
        if setup.directory:
            model = loader.from_pretrained(setup.directory, dtype=torch.bfloat16)
        else:
            config = transformers.AutoConfig.for_model(**options["config"])
            with self._device:
                model = loader.from_config(config, dtype=torch.bfloat16)
        self._model = model.eval()
        self._best: dict[tuple[str, int], Variant] = {}
        self._prompts: dict[int, tuple[Any, Any]] = {}  # by length: (cache, next token)
        self._generates = bool(options.get("generate"))
        attentions = options.get("attention", ("sdpa", "eager"))
        self._variants = [*itertools.product(attentions, ("dynamic", "static"))]
        if self._generates:
            self._variants = [_DEFAULT]

    def about(self) -> dict[str, str]:
        return {"version": self._transformers.__version__, "torch": str(self._torch.__version__)}

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """Decodes sequences whose cached keys and values are copies of one prompt's."""
        return self._timed("decode", batch, lambda v, n: self._decode(v, batch, context, n), steps)

    def prefill(self, tokens: int) -> Timed:
        return self._timed("prefill", tokens, lambda v, _: self._prefill(v, tokens), 1)

    def _timed(
        self, kind: str, size: int, run: Callable[[Variant, int], float], steps: int
    ) -> Timed:
        """Runs the fastest variant for this kind of work, which the first call finds."""
        if (kind, size) not in self._best:
            tried = {}
            for variant in self._variants:
                run(variant, _TRIED_STEPS)  # first-time costs
                tried[variant] = run(variant, _TRIED_STEPS)
            self._best[kind, size] = min(tried, key=tried.__getitem__)
        best = self._best[kind, size]
        return run(best, steps), " ".join(best)

    def _prefill(self, variant: Variant, tokens: int) -> float:
        ids = self._ids(self.new_prompt(tokens))
        cache = self._cache(variant, 1, tokens + 1)
        if self._generates:
            return self._generate(ids, cache, 1)
        began = time.perf_counter()
        with self._torch.inference_mode():
            self._step(ids, cache, 0).tolist()
        return time.perf_counter() - began

    def _decode(self, variant: Variant, batch: int, context: int, steps: int) -> float:
        torch = self._torch
        with torch.inference_mode():
            one, token = self._prompt(context)
            # The time of a step does not depend on cached values.
            cache = self._cache(variant, batch, context + steps + 1)
            where = {
                "cache_position": torch.arange(context, device=self._device)
            }  # a dynamic cache ignores it
            for number, layer in enumerate(one.layers):
                rows = [part.expand(batch, -1, -1, -1) for part in (layer.keys, layer.values)]
                cache.update(*(part.contiguous() for part in rows), number, where)
            if self._generates:
                ids = self._ids([*self.setup.prompt(context, 0), int(token)])
                return self._generate(ids.expand(batch, -1), cache, steps)
            tokens = self._step(token.expand(batch, 1), cache, context)
            tokens.tolist()  # a GPU has computed it
            began = time.perf_counter()
            for at in range(context + 1, context + 1 + steps):
                tokens = self._step(tokens, cache, at)
            tokens.tolist()
            return time.perf_counter() - began

    def _prompt(self, length: int) -> tuple[Any, Any]:
        """A cache with a prompt of this length, and the next token."""
        if length not in self._prompts:
            ids = self._ids(self.setup.prompt(length, 0))
            cache = self._cache(_DEFAULT, 1, length)
            self._prompts[length] = cache, self._step(ids, cache, 0)
        return self._prompts[length]

    def _ids(self, prompt: list[int]) -> Any:
        return self._torch.tensor([prompt], device=self._device)

    def _step(self, ids: Any, cache: Any, at: int) -> Any:
        """The next token of each row: `[rows, 1]`."""
        places = self._torch.arange(at, at + ids.shape[1], device=self._device)
        logits = self._model(
            input_ids=ids,
            past_key_values=cache,
            position_ids=places[None].expand(ids.shape[0], -1),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _generate(self, ids: Any, cache: Any, steps: int) -> float:
        began = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
        ).tolist()
        return time.perf_counter() - began

    def _cache(self, variant: Variant, batch: int, length: int) -> Any:
        """An empty cache, with the model set to the variant's attention."""
        attention, kind = variant
        self._model.set_attn_implementation(attention)
        config = self._model.config
        if kind == "dynamic":
            return self._transformers.DynamicCache(config=config)
        return self._transformers.StaticCache(config=config, max_cache_len=length)


if __name__ == "__main__":
    main(Transformers)
