"""Who is compared: how each is started, and whose ratio to whom is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = "docs/comparison.md"


@dataclass(frozen=True)
class Entry:
    """One candidate: its program, the settings it gets, and whose interpreter runs it."""

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = True  # the project's own interpreter; else that of the rivals
    needs_gguf: bool = False


_DECODE = "benchmarks.candidates."
ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("baton-bf16", f"{_DECODE}baton_engine", {"dtype": "bfloat16"}),
        Entry(
            "baton-int8",
            f"{_DECODE}baton_engine",
            {"dtype": "bfloat16", "quantization": "int8"},
        ),
        Entry(
            "baton-int8-kv8",
            f"{_DECODE}baton_engine",
            {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
        ),
        Entry("baton-float32", f"{_DECODE}baton_engine", {"dtype": "float32"}),
        Entry("transformers-bf16", f"{_DECODE}transformers_loop"),
        Entry("transformers-generate", f"{_DECODE}transformers_loop", {"generate": True}),
        Entry("vllm-bf16", f"{_DECODE}vllm_engine", {"kv_gib": 2}, is_ours=False),
        Entry("llama.cpp-bf16", f"{_DECODE}llama_cpp_decode", {"type": "bf16"}, is_ours=False),
        Entry("llama.cpp-q8_0", f"{_DECODE}llama_cpp_decode", {"type": "q8_0"}, is_ours=False),
    )
}
DEFAULT = tuple(name for name in ENTRIES if name != "baton-int8-kv8")

# Ours, and whom it is held against: the same precision on both sides.
PAIRS = (
    ("baton-bf16", "transformers-bf16"),
    ("baton-bf16", "transformers-generate"),
    ("baton-bf16", "vllm-bf16"),
    ("baton-bf16", "llama.cpp-bf16"),
    ("baton-int8", "llama.cpp-q8_0"),
    ("baton-int8-kv8", "llama.cpp-q8_0"),
    ("baton-int8", "baton-bf16"),
)


@dataclass(frozen=True)
class Rivals:
    """A virtual environment with the others' packages, and a build of llama.cpp if there is one."""

    venv: Path | None = None
    llama_cpp: Path | None = None  # the directory with libllama.so and llama-server

    @property
    def python(self) -> str:
        """Its interpreter; ours where there is no such environment, which then tells what lacks."""
        return str(self.venv / "bin" / "python") if self.venv else sys.executable

    @property
    def preload(self) -> list[str]:
        """What vLLM's manual wants in LD_PRELOAD on a CPU, as far as it lies there."""
        found = [*self.venv.glob("lib/libiomp5.so")] if self.venv else []
        for folder in (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib")):
            found += sorted(folder.glob("libtcmalloc_minimal.so.4"))[:1]
        return [str(path) for path in found]

    def environment(self) -> dict[str, str]:
        """Variables for their processes."""
        return {"LLAMA_CPP_LIB_PATH": str(self.llama_cpp)} if self.llama_cpp else {}
