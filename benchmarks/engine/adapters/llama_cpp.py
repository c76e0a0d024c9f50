"""llama.cpp through the C API of llama-cpp-python: batched decode.

Each sequence has a KV stream, as in `llama-batched-bench`, and flash attention is left at its
default. Tokens are sampled by numpy's argmax, which is faster than its greedy sampler.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engine.adapters.gguf_file import gguf_of
from benchmarks.engine.adapters.protocol import Adapter, Setup, Timed, main


class LlamaCpp(Adapter):
    """A model with two contexts: one for decoding sequences, one for prompts.

    `setup.options` name the shape and the type of its weights.
    """

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        super().__init__(setup)
        self._api = llama_cpp
        self._say = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept alive
        llama_cpp.llama_log_set(self._say, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        file = gguf_of(
            sys.executable, setup.directory, setup.options["shape"], setup.options["type"]
        )
        self._model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self._decoding = self._context(setup.max_batch, setup.max_context)
        self._prompting = self._context(1, setup.max_prefill)
        self._filled = (0, 0)  # (sequences, tokens of each) that are in the decoding context

    def about(self) -> dict[str, str]:
        api = self._api
        info = api.llama_print_system_info().decode()
        return {
            "version": f"llama-cpp-python {api.__version__}",
            "type": str(self.setup.options["type"]),
            "cpu": ", ".join(p.partition(" = ")[0].split(" ")[-1] for p in info.split("|")[-6:-1]),
        }

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """Decodes after prompts that stay in the KV cache; decoded tokens are removed."""
        self._fill(batch, context)
        tokens = [1 + i for i in range(batch)]
        tokens = self._step(tokens, context)
        began = time.perf_counter()
        for at in range(context + 1, context + 1 + steps):
            tokens = self._step(tokens, at)
        seconds = time.perf_counter() - began
        memory = self._api.llama_get_memory(self._decoding)
        for sequence in range(batch):
            self._api.llama_memory_seq_rm(memory, sequence, context, -1)
        return seconds, ""

    def prefill(self, tokens: int) -> Timed:
        prompt = self.new_prompt(tokens)
        memory = self._api.llama_get_memory(self._prompting)
        began = time.perf_counter()
        self._compute(self._prompting, [(token, at, 0) for at, token in enumerate(prompt)])
        self._sample(self._prompting, 1)
        seconds = time.perf_counter() - began
        self._api.llama_memory_clear(memory, False)
        return seconds, ""

    def _fill(self, batch: int, context: int) -> None:
        """Computes prompts that are not in the KV cache."""
        there, length = self._filled
        if length != context:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._decoding), False)
            there = 0
        for sequence in range(there, batch):
            prompt = self.setup.prompt(context, sequence)
            self._compute(self._decoding, [(t, at, sequence) for at, t in enumerate(prompt)])
        self._filled = (max(there, batch), context)

    def _step(self, tokens: Sequence[int], at: int) -> list[int]:
        rows = [(token, at, i) for i, token in enumerate(tokens)]
        self._compute(self._decoding, rows, every=True)
        return self._sample(self._decoding, len(tokens))

    def _compute(
        self, context: Any, rows: Sequence[tuple[int, int, int]], every: bool = False
    ) -> None:
        """Runs rows of (token, position, sequence), with logits of the last or of `every` row."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, at, sequence) in enumerate(rows):
                batch.token[i], batch.pos[i] = token, at
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = every or i == len(rows) - 1
            if status := self._api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
        finally:
            self._api.llama_batch_free(batch)

    def _sample(self, context: Any, rows: int) -> list[int]:
        """The most likely token of each row of logits."""
        scores = ctypes.cast(self._api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        sampled: list[int] = (
            np.ctypeslib.as_array(scores, (rows, self.setup.vocab)).argmax(1).tolist()
        )
        return sampled

    def _context(self, sequences: int, length: int) -> Any:
        params = self._api.llama_context_default_params()
        length = -(-length // 256) * 256  # as llama.cpp rounds it
        params.n_ctx, params.n_seq_max = sequences * length, sequences
        params.n_batch, params.kv_unified = max(2048, length), False
        params.n_threads = params.n_threads_batch = self.setup.threads
        params.no_perf = True
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp makes no context of that size")
        return context


if __name__ == "__main__":
    main(LlamaCpp)
