"""vLLM's engine in this process, on the CPU, as its offline API drives it."""

from __future__ import annotations

import os
import time

from benchmarks.engine.adapters.protocol import SPARE_TOKENS, Setup, SteppedAdapter, main


class Vllm(SteppedAdapter):
    """An `LLMEngine`, with vLLM's defaults but for what is set here."""

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

    def add(self, prompt: list[int], new_tokens: int) -> str:
        name = next(self.names)
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> tuple[float, set[str]]:
        outputs = self._engine.step()
        return time.perf_counter(), {output.request_id for output in outputs}

    def release(self, names: set[str]) -> None:
        self._engine.abort_request(sorted(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    main(Vllm)
