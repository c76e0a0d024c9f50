"""Hugging Face transformers: its model, its cache, and the loop that `generate` runs, greedy.

The attention ("eager", "sdpa") and the cache ("dynamic" grows with each token, "static" is
preallocated) that do best are taken for each kind of work: tried at its first call, and told.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks.candidates.answering import Candidate, Setup, Timed, main

_WAYS = tuple(itertools.product(("sdpa", "eager"), ("dynamic", "static")))
_TRIED_STEPS = 3


class TransformersLoop:
    """One model; `options["dtype"]` names its type."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers

        torch.set_num_threads(setup.threads)
        self._torch, self._setup, self._transformers = torch, setup, transformers
        dtype = getattr(torch, setup.options.get("dtype", "bfloat16"))
        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(setup.directory, dtype=dtype).eval()
        self._seeds = itertools.count(1 << 32)
        self._best: dict[tuple[str, int], tuple[str, str]] = {}
        self._prompts: dict[int, tuple[Any, Any]] = {}  # by length: (cache, next token)

    def about(self) -> dict[str, str]:
        """See `Candidate`."""
        return {
            "version": self._transformers.__version__,
            "torch": str(self._torch.__version__),
            "dtype": str(self._model.dtype),
        }

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """See `Candidate`. The sequences' cached keys and values are copies of one prompt's."""
        way = self._way("decode", batch, lambda w: self._decode(w, batch, context, _TRIED_STEPS))
        return Timed(self._decode(way, batch, context, steps), " ".join(way))

    def prefill(self, tokens: int) -> Timed:
        """See `Candidate`."""
        way = self._way("prefill", tokens, lambda w: self._prefill(w, tokens))
        return Timed(self._prefill(way, tokens), " ".join(way))

    def _way(self, kind: str, size: int, seconds: Any) -> tuple[str, str]:
        if (kind, size) not in self._best:
            tried = {}
            for way in _WAYS:
                seconds(way)  # first-time costs
                tried[way] = seconds(way)
            self._best[kind, size] = min(tried, key=tried.__getitem__)
        return self._best[kind, size]

    def _prefill(self, way: tuple[str, str], tokens: int) -> float:
        ids = self._torch.tensor([self._setup.prompt(tokens, next(self._seeds))])
        cache = self._cache(way, 1, tokens + 1)
        began = time.perf_counter()
        with self._torch.inference_mode():
            self._step(ids, cache, 0).tolist()
        return time.perf_counter() - began

    def _decode(self, way: tuple[str, str], batch: int, context: int, steps: int) -> float:
        torch = self._torch
        with torch.inference_mode():
            one, token = self._prompt(context)
            # How long a step takes does not depend on what is cached.
            cache = self._cache(way, batch, context + steps + 1)
            places = torch.arange(context)
            for number, layer in enumerate(one.layers):
                rows = [part.expand(batch, -1, -1, -1) for part in (layer.keys, layer.values)]
                cache.update(*(part.contiguous() for part in rows), number, _at(places))
            tokens = self._step(token.expand(batch, 1), cache, context)
            began = time.perf_counter()
            for at in range(context + 1, context + 1 + steps):
                tokens = self._step(tokens, cache, at)
            tokens.tolist()
            return time.perf_counter() - began

    def _prompt(self, length: int) -> tuple[Any, Any]:
        """A cache with a prompt of that length, and the token after it."""
        if length not in self._prompts:
            ids = self._torch.tensor([self._setup.prompt(length, 0)])
            cache = self._cache(("sdpa", "dynamic"), 1, length)
            self._prompts[length] = cache, self._step(ids, cache, 0)
        return self._prompts[length]

    def _step(self, ids: Any, cache: Any, at: int) -> Any:
        """The next token of each row: `[rows, 1]`."""
        places = self._torch.arange(at, at + ids.shape[1])[None].expand(ids.shape[0], -1)
        logits = self._model(
            input_ids=ids,
            past_key_values=cache,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _cache(self, way: tuple[str, str], batch: int, length: int) -> Any:
        """An empty cache, with the model set to the way's attention."""
        attention, kind = way
        self._model.set_attn_implementation(attention)
        if kind == "dynamic":
            return self._transformers.DynamicCache(config=self._model.config)
        return self._transformers.StaticCache(config=self._model.config, max_cache_len=length)


def _at(places: Any) -> dict[str, Any]:
    """Where a static cache writes; a dynamic one appends, and does not look."""
    return {"cache_position": places}


class TransformersGenerate(TransformersLoop):
    """Through `generate` as it is called by default, with all that it does around a step."""

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """See `Candidate`."""
        way = _WAYS[0]
        one, token = self._prompt(context)
        cache = self._cache(way, batch, context)
        for number, layer in enumerate(one.layers):
            rows = [part.expand(batch, -1, -1, -1) for part in (layer.keys, layer.values)]
            cache.update(*(part.contiguous() for part in rows), number)
        ids = self._torch.tensor([[*self._setup.prompt(context, 0), int(token)]])
        return Timed(self._generate(ids.expand(batch, -1), cache, steps), " ".join(way))

    def prefill(self, tokens: int) -> Timed:
        """See `Candidate`."""
        way = _WAYS[0]
        ids = self._torch.tensor([self._setup.prompt(tokens, next(self._seeds))])
        return Timed(self._generate(ids, self._cache(way, 1, tokens + 1), 1), " ".join(way))

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


def load(setup: Setup) -> Candidate:
    """The model of `setup`; `options["generate"]` asks for the library's own loop."""
    return (TransformersGenerate if setup.options.get("generate") else TransformersLoop)(setup)


if __name__ == "__main__":
    main(load)
