"""Settings of an engine: KV cache, batch, device, parallelism, quantisation."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.config import options
from baton.config.model import ServedModel
from baton.config.options import numbers, option
from baton.config.simulated_speed import SimulatedSpeed
from baton.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")  # or one GPU by its number: cuda:1
QUANTIZATIONS = ("none", "int8", "fp8", "int4")
KV_DTYPES = ("auto", "int8", "fp8")
KERNELS = ("auto", "native", "torch", "triton")
CPU_KV_CACHE_BYTES = 512 << 20  # on a CPU, without --kv-cache or --kv-blocks
MAX_TP = 64
DRAFT_TOKENS = 4  # most proposed by a draft model in a step, without --speculate
MTP = "mtp"  # in place of a draft model: the model's own layer that predicts further tokens
MAX_LORAS, MAX_LORA_RANK = 1024, 512


def device_name(text: str) -> str:
    """One of `DEVICES`, or a GPU by its number, as cuda:1. Raises ConfigError."""
    if text not in DEVICES and not re.fullmatch(r"cuda:\d+", text):
        raise ConfigError(f"{text!r} is no device: write {', '.join(DEVICES)} or cuda:1")
    return text


def named_directory(text: str) -> str:
    """NAME=DIR, checked. Raises ConfigError."""
    name, separator, directory = text.partition("=")
    if not (separator and name and directory):
        raise ConfigError(f"{text!r}: write NAME=DIR, as sql=/models/sql-lora")
    return text


def kv_heads_of(rank: int, ranks: int, num_kv_heads: int) -> range:
    """The KV heads that a rank holds. With fewer heads than ranks, several ranks hold one."""
    if ranks <= num_kv_heads:
        return range(num_kv_heads * rank // ranks, num_kv_heads * (rank + 1) // ranks)
    first = rank * num_kv_heads // ranks
    return range(first, first + 1)


@dataclass(frozen=True)
class CacheConfig(ServedModel):
    """The KV cache and the batch of an engine. Counts are tokens unless the name says otherwise."""

    GROUP: ClassVar[str] = "KV cache and batch"
    block_size: int = option(16, "--block-size TOKENS", "size of a KV block", least=1)
    kv_blocks: int = option(
        0, "--kv-blocks BLOCKS", "size of the KV cache in blocks (default: what fits --kv-cache)"
    )
    kv_cache_bytes: int = option(
        0,
        "--kv-cache SIZE",
        "size of the KV cache, as 2GiB (default: 512MiB on a CPU, by --gpu-memory on a GPU)",
    )
    kv_dtype: str = option(
        "auto",
        "--kv-dtype",
        "number format of KV: int8 and fp8 (GPUs only) halve memory and transfers and are slightly "
        "less accurate (default: --dtype)",
        choices=KV_DTYPES,
    )
    max_context: int = option(
        0,
        "--max-context TOKENS",
        "longest prompt and output of a request together (default: the model's limit)",
    )
    max_batch: int = option(
        64, "--max-batch SEQUENCES", "most sequences in one engine step", least=1
    )
    chunk_ms: float = option(
        0.0,
        "--chunk-ms MS",
        "target time of a prompt chunk: about how long a short prompt waits behind a long one; "
        "chunks have at least 64 tokens, 256 on a GPU (default: 60 on a CPU; on a GPU 25, and 100 "
        "while no sequence runs)",
    )
    chunk_tokens: int = option(
        2048, "--chunk-tokens TOKENS", "most prompt and draft tokens in one engine step", least=1
    )
    prefix_cache: bool = option(True, "--prefix-cache", "reuse the KV of earlier prompts")


@dataclass(frozen=True)
class EngineConfig(CacheConfig):
    """How one engine runs a model."""

    GROUP: ClassVar[str] = "engine"
    dtype: str = option("auto", "--dtype", "number format of weights and KV", choices=DTYPES)
    device: str = option(
        "auto",
        "--device auto|cpu|cuda|cuda:N",
        "device to compute on: auto is a GPU if torch finds one, cuda is the first GPU, cuda:N is "
        "GPU N, counted from 0; `baton up` spreads its workers over all GPUs unless N is given",
        device_name,
    )
    threads: int = option(
        0, "--threads N", "CPU threads (default: one for each core of --cpus, else torch's choice)"
    )
    cpus: tuple[int, ...] = option(
        (),
        "--cpus 0,1",
        "cores to pin compute threads to (default: not pinned, except --tp ranks on CPUs whose "
        "--threads fill all cores)",
        numbers,
    )
    tp: int = option(
        1,
        "--tp RANKS",
        "tensor parallelism: number of processes that compute each step together, on this host's "
        "CPUs or on one GPU each, from --device on; they share --threads and --cpus",
        least=1,
        most=MAX_TP,
    )
    expert_parallel: bool = option(
        False,
        "--expert-parallel",
        "for mixture-of-experts models: give each --tp rank some experts entirely instead of a "
        "slice of every expert; needed if experts cannot be sliced evenly",
    )
    tp_backend: str = option(
        "shm",
        "--tp-backend",
        "how --tp ranks on CPUs exchange data: shm is shared memory with one KV pool and native "
        "kernels; gloo is torch.distributed with one KV pool a rank, as ranks on GPUs have with "
        "NCCL",
        choices=("shm", "gloo"),
    )
    nice: int = option(0, "--nice N", "niceness of compute threads, up to 19", most=19)
    simulate: str = option(
        "",
        "--simulate TOKENS_PER_S,STEP_MS",
        "compute nothing, but take the time of a model with this prefill rate and decode step (a "
        "third number: additional ms per sequence), to test routing and failures; blocks, caches "
        "and transfers are real, tokens are meaningless",
    )
    quantization: str = option(
        "none",
        "--quantization",
        "quantise weights when they are loaded: int8 and fp8 (GPUs only) with 8-bit activations, "
        "faster and slightly less accurate; int4 weights only, smallest and least accurate",
        choices=QUANTIZATIONS,
    )
    lora: tuple[str, ...] = option(
        (),
        "--lora NAME=DIR",
        "LoRA adapter in PEFT's format, which requests choose by naming it as their model; may be "
        "repeated; `baton adapter load` loads others later",
        named_directory,
        many=True,
    )
    max_loras: int = option(
        0,
        "--max-loras N",
        "LoRA adapters for which memory is reserved when the worker starts (default: as many as "
        "--lora names)",
        most=MAX_LORAS,
    )
    max_lora_rank: int = option(
        16, "--max-lora-rank RANK", "largest rank of a LoRA adapter", least=1, most=MAX_LORA_RANK
    )
    kernels: str = option(
        "auto",
        "--kernels",
        "native on CPUs (compiled by g++ on first use), triton on GPUs; torch needs nothing "
        "installed and is slow on GPUs (default: the fastest available)",
        choices=KERNELS,
    )
    speculate: int = option(
        0,
        "--speculate TOKENS",
        "speculative decoding: most tokens to propose a step from n-grams of the text so far; the "
        "output is the same, sooner if the text repeats itself (default: 0, off; with "
        "--speculative-model 4)",
    )
    speculative_model: str = option(
        "",
        "--speculative-model DIR|mtp",
        "small model with the same vocabulary that proposes tokens instead of n-grams, for "
        "decode and mixed workers on CPUs: a Hugging Face model directory or GGUF file, or mtp for "
        "the multi-token prediction layer of --model's own checkpoint, as those of DeepSeek-V3, "
        "GLM-4.5 to 4.7, Qwen3-Next and Qwen3.5 have (default: none)",
    )
    gpu_memory: float = option(
        0.9,
        "--gpu-memory SHARE",
        "share of a GPU's memory for weights, activations, CUDA graphs and KV; `baton up` divides "
        "it among workers",
        least=0.001,
        most=1,
    )
    graphs: bool = option(True, "--graphs", "run decode steps as CUDA graphs (GPUs)")
    overlap: bool = option(
        True, "--overlap", "prepare the next step while one runs (asynchronous scheduling, GPUs)"
    )

    def __post_init__(self) -> None:
        options.check(self)
        if self.max_context == 1:
            raise ConfigError("--max-context must be at least 2: a prompt token and an output one")
        if self.simulate:
            SimulatedSpeed.parse(self.simulate)
            if self.device.startswith("cuda"):
                raise ConfigError(f"--simulate computes nothing: leave --device {self.device} out")

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters of --lora, by name."""
        pairs = (text.partition("=") for text in self.lora)
        return {name: Path(directory).absolute() for name, _, directory in pairs}

    @property
    def most_proposed(self) -> int:
        """Most tokens that are proposed for a sequence in a step; 0 without speculation."""
        return self.speculate or (DRAFT_TOKENS if self.speculative_model else 0)

    @property
    def is_mtp(self) -> bool:
        """Whether the model's own layer for further tokens proposes them."""
        return self.speculative_model == MTP

    def check_draft_device(self, device: str) -> None:
        """Raises ConfigError if a draft model is asked for on a GPU. device: as of --device."""
        if self.speculative_model and device.startswith("cuda"):
            raise ConfigError(
                "--speculative-model computes on CPUs only, as its steps are not among the CUDA "
                "graphs and the measured memory of a GPU: use --speculate instead, or add "
                "--device cpu"
            )

    def of_draft(self, is_quantized: bool) -> EngineConfig:
        """The settings of the draft model itself, which the first rank has as a whole.

        is_quantized: whether its checkpoint is; else `--quantization` applies to it, too.
        """
        quantization = "none" if is_quantized else self.quantization
        return dataclasses.replace(
            self, model=self.model if self.is_mtp else self.speculative_model,
            random_weights=self.is_mtp and self.random_weights, speculative_model="",
            speculate=0, tp=1, expert_parallel=False, lora=(), max_loras=0, max_context=0,
            quantization=quantization,
        )  # fmt: skip

    @property
    def lora_slots(self) -> int:
        """Number of adapters for which there is memory."""
        return max(self.max_loras, len(self.adapters))
