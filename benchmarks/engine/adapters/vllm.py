"""vLLM's engine in this process, on the CPU, through its offline API."""

from __future__ import annotations

import itertools
import os
import time

from benchmarks.engine.adapters.protocol import Adapter, Setup, Timed, main

SPARE_TOKENS = 512  # beyond measured ones: sequences prefilled first already decode


class Vllm(Adapter):
    """An `LLMEngine` with vLLM's defaults, except for the settings here.

    Prompts of decoding sequences stay in its prefix cache between calls."""

    def __init__(self, setup: Setup) -> None:
        # Read when the package is imported.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, setup.cpus[: setup.threads])),
            VLLM_CPU_KVCACHE_SPACE=str(setup.options["kv_gib"]),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        import vllm

        super().__init__(setup)
        self._vllm = vllm
        self._names = map(str, itertools.count())
        self._cached: set[tuple[int, int]] = set()  # (batch, context) whose prompts are cached
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=setup.directory,
                dtype="bfloat16",
                max_model_len=max(setup.max_context, setup.max_prefill) + SPARE_TOKENS,
                max_num_seqs=max(64, setup.max_batch),
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
            )
        )

    def about(self) -> dict[str, str]:
        scheduler = self._engine.vllm_config.scheduler_config
        return {
            "version": self._vllm.__version__,
            "chunk_tokens": str(scheduler.max_num_batched_tokens),
        }

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        if (batch, context) not in self._cached:
            self._run(batch, context, 1)
            self._cached.add((batch, context))
        return self._run(batch, context, steps), ""

    def prefill(self, tokens: int) -> Timed:
        prompt = self.new_prompt(tokens)
        began = time.perf_counter()
        return self._until({self._add(prompt, 1)}) - began, ""

    def _run(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps, in each of which all sequences get a token."""
        prompts = [self.setup.prompt(context, seed) for seed in range(batch)]
        names = {self._add(prompt, steps + SPARE_TOKENS) for prompt in prompts}
        began = ended = self._until(names)
        for _ in range(steps):
            ended, got = self._step()
            assert got == names, "a sequence missed a step"
        self._engine.abort_request(sorted(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return ended - began

    def _add(self, prompt: list[int], new_tokens: int) -> str:
        name = next(self._names)
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self) -> tuple[float, set[str]]:
        """Runs a step: its end time, and the sequences that got a token."""
        outputs = self._engine.step()
        return time.perf_counter(), {output.request_id for output in outputs}

    def _until(self, names: set[str]) -> float:
        """Runs steps until one has a token for each of `names`: its end time."""
        while True:
            ended, got = self._step()
            if got == names:
                return ended


if __name__ == "__main__":
    main(Vllm)
