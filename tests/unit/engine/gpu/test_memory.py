"""The budget of a GPU's memory: sums that add up, and errors that say hints."""

from __future__ import annotations

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu import memory
from baton.engine.backends.gpu.memory import Usage
from baton.engine.kv_cache import KvLayout
from baton.errors import ConfigError
from tests.unit.engine.quantized import qwen_config

MIB, GIB = 1 << 20, 1 << 30
CONFIG = qwen_config()  # 2 layers, 2 KV heads of 32: 512 B a token in bfloat16
BLOCK = 16 * 512
ROOMY = Usage(total=80 * GIB, free=63 * GIB, weights=16 * GIB, activations=2 * GIB, graphs=1 * GIB)


def blocks(usage: Usage, dtype: torch.dtype = torch.bfloat16, **settings: object) -> int:
    return layout(usage, dtype, **settings).num_blocks


def layout(usage: Usage, dtype: torch.dtype = torch.bfloat16, **settings: object) -> KvLayout:
    return memory.kv_layout(usage, EngineConfig(**settings), CONFIG, dtype)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _as_many_blocks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_BLOCKS", 1 << 40)


def test_kv_gets_what_the_share_leaves() -> None:
    assert ROOMY.others == 1 * GIB
    assert blocks(ROOMY) == (int(80 * GIB * 0.9) - 19 * GIB) // BLOCK
    assert blocks(ROOMY, gpu_memory=0.5) == 21 * GIB // BLOCK
    assert blocks(ROOMY, torch.int8) == (int(80 * GIB * 0.9) - 19 * GIB) // (16 * 2 * 2 * 2 * 36)


def test_kv_gets_no_more_than_others_leave() -> None:
    crowded = Usage(80 * GIB, 24 * GIB, 16 * GIB, 2 * GIB, 1 * GIB)
    assert crowded.others == 40 * GIB
    assert blocks(crowded) == (21 * GIB - memory.SPARE_BYTES) // BLOCK
    assert blocks(crowded, gpu_memory=0.25) == 1 * GIB // BLOCK


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.9, 1.0])
@pytest.mark.parametrize("others", [0, 1, 10, 30])
def test_all_of_it_adds_up_to_no_more_than_there_is(share: float, others: int) -> None:
    usage = Usage(80 * GIB, (64 - others) * GIB, 16 * GIB, 2 * GIB, 1 * GIB)
    found = layout(usage, gpu_memory=share)
    assert found.num_bytes + usage.own <= 80 * GIB * share
    assert found.num_bytes + usage.own + usage.others + memory.SPARE_BYTES <= 80 * GIB
    bigger = found.num_bytes + BLOCK
    assert (
        bigger + usage.own > 80 * GIB * share
        or bigger + usage.own + usage.others + memory.SPARE_BYTES > 80 * GIB
    )


def test_more_blocks_than_anybody_can_use_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_BLOCKS", 1000)
    assert blocks(ROOMY) == 1000
    assert blocks(ROOMY, kv_blocks=1001) == 1001


def test_a_size_that_was_asked_for_wins() -> None:
    assert blocks(ROOMY, kv_cache_bytes=3 * BLOCK + 1, gpu_memory=0.01) == 3
    assert blocks(ROOMY, kv_blocks=7, kv_cache_bytes=GIB) == 7
    assert blocks(ROOMY, kv_cache_bytes=60 * GIB, gpu_memory=0.01) == 60 * GIB // BLOCK


def test_a_size_that_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache asks for 61\.00 GiB and .* 60\.00 GiB left"):
        layout(ROOMY, kv_cache_bytes=61 * GIB)
    with pytest.raises(ConfigError, match=r"--kv-blocks asks for .*; try a smaller --kv-bl"):
        layout(ROOMY, kv_blocks=10**9)


@pytest.mark.parametrize(
    ("usage", "settings", "told"),
    [
        # others have it all
        (Usage(80 * GIB, 2 * GIB, 16 * GIB, 2 * GIB, 0), {}, r"try another GPU .* hold 62\.00 GiB"),
        # a share too small
        (ROOMY, {"gpu_memory": 0.2}, r"try a larger --gpu-memory, or --quantization fp8 or int8"),
        # weights too large, in 8 bits already
        (Usage(24 * GIB, 1 * GIB, 22 * GIB, 1 * GIB, 0),
         {"quantization": "fp8", "kv_dtype": "fp8", "gpu_memory": 0.95},
         r"weights take 22\.00 GiB.*; try a larger GPU, because one model is not split"),
        # steps too large
        (Usage(24 * GIB, 9 * GIB, 14 * GIB, 7 * GIB, 2 * GIB), {},
         r"activations 7\.00 GiB, graphs 2\.00 GiB.*smaller --max-batch or --chunk-tokens"),
    ],
)  # fmt: skip
def test_nothing_left_gives_hints(usage: Usage, settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=f"no GPU memory is left for KV: .*{told}"):
        layout(usage, **settings)


def test_what_does_not_fit_at_all_gives_hints() -> None:
    told = str(memory.too_large(EngineConfig()))
    assert "--quantization fp8 or int8" in told
    assert "--chunk-tokens" in told
    assert "--quantization" not in str(memory.too_large(EngineConfig(quantization="int8")))


def test_graphs_keep_the_largest_step_and_something_for_each() -> None:
    assert memory.graphs_reserve(GIB, 0, 32) == 0
    one, two = (memory.graphs_reserve(GIB, graphs, 32) for graphs in (1, 2))
    assert one > GIB
    assert 0 < two - one < 16 * MIB


def test_the_summary_has_every_part() -> None:
    settings = EngineConfig(max_batch=8, chunk_tokens=256, quantization="fp8", kv_blocks=1000)
    found = layout(ROOMY, torch.int8, kv_blocks=1000)
    text = memory.summary("cuda:1 Card", ROOMY, found, settings, 2048, graphs_measured=False)
    assert text.splitlines() == [
        "GPU memory of cuda:1 Card: 80.00 GiB, of which --gpu-memory 0.9 is 72.00 GiB",
        "  weights       16.00 GiB  fp8",
        "  activations    2.00 GiB  up to 256 prompt tokens, 8 sequences a step",
        "  graphs         1.00 GiB  reserved",
        "  KV             0.00 GiB  1000 blocks of 16 tokens, 0.00 MiB each, int8",
        "  others         1.00 GiB  other processes, and CUDA itself",
        "  free          60.00 GiB",
        "  sequences that fit: 15 of 1024 tokens, 7 of 2048 tokens",
    ]
    captured = memory.summary("cuda:1 Card", ROOMY, found, settings, 100_000, graphs_measured=True)
    assert "1.00 GiB  measured" in captured
    assert captured.endswith(
        "fit: 15 of 1024 tokens, 3 of 4096 tokens, 1 of 8192 tokens, 0 of 100000 tokens"
    )
