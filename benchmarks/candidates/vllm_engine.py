"""vLLM's engine in this process, on the CPU, as its offline API drives it."""

from __future__ import annotations

import itertools
import os
import time

from benchmarks.candidates.answering import Candidate, Setup, Timed, main

_SPARE_TOKENS = 512  # beyond what is measured: those who are ready first go on meanwhile


class VllmEngine:
    """An `LLMEngine`; settings are vLLM's defaults where nothing is said here."""

    def __init__(self, setup: Setup) -> None:
        # Read when the package is imported.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, setup.cpus[: setup.threads])),
            VLLM_CPU_KVCACHE_SPACE=str(setup.options["kv_gib"]),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        import vllm

        self._vllm, self._setup = vllm, setup
        self._names = map(str, itertools.count())
        self._seeds = itertools.count(1 << 32)
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=setup.directory,
                dtype="bfloat16",
                max_model_len=max(setup.max_context, setup.max_prefill) + _SPARE_TOKENS,
                max_num_seqs=max(64, setup.max_batch),
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
            )
        )
        self._filled: set[tuple[int, int]] = set()

    def about(self) -> dict[str, str]:
        """See `Candidate`."""
        scheduler = self._engine.vllm_config.scheduler_config
        return {
            "version": self._vllm.__version__,
            "chunk_tokens": str(scheduler.max_num_batched_tokens),
        }

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """See `Candidate`. The prompts stay in the prefix cache from one call to the next."""
        if (batch, context) not in self._filled:
            self._run(batch, context, 1)
            self._filled.add((batch, context))
        return Timed(self._run(batch, context, steps))

    def prefill(self, tokens: int) -> Timed:
        """See `Candidate`."""
        prompt = self._setup.prompt(tokens, next(self._seeds))
        began = time.perf_counter()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return Timed(time.perf_counter() - began)

    def _run(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` steps in which all sequences got a token."""
        names = {
            self._add(self._setup.prompt(context, seed), steps + _SPARE_TOKENS)
            for seed in range(batch)
        }
        while self._step() != names:
            pass
        began = time.perf_counter()
        for _ in range(steps):
            assert self._step() == names, "a sequence missed a step"
        seconds = time.perf_counter() - began
        self._engine.abort_request(sorted(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return seconds

    def _add(self, prompt: list[int], new_tokens: int) -> str:
        name = next(self._names)
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self) -> set[str]:
        """Who got a token."""
        return {output.request_id for output in self._engine.step()}


def load(setup: Setup) -> Candidate:
    """The engine for `setup`; `options["kv_gib"]` is the size of its cache."""
    return VllmEngine(setup)


if __name__ == "__main__":
    main(load)
