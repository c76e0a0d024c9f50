"""What `--device` comes to, with what torch sees told; how long a sequence may get."""

from __future__ import annotations

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.kv_cache import plan_layout
from baton.engine.settings import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    device_of,
    max_context,
)
from baton.errors import ConfigError
from tests.unit.engine.quantized import qwen_config


def with_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if torch had CUDA and saw these."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


def test_a_gpu_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, "A", "B")
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    assert device_of(EngineConfig(simulate="1,1")) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, "A", "B")
    with pytest.raises(ConfigError, match=r"--device cuda:2: .* only cuda:0 \(A\), cuda:1 \(B\)"):
        choose_device("cuda:2")
    with_gpus(monkeypatch)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device cuda: torch sees no GPU here.*--device cpu"):
        choose_device("cuda")


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"built without CUDA; .*--device cpu"):
        choose_device("cuda:1")


def test_the_compute_type_is_a_pools_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert choose_dtype("auto", "float16", gpu) == torch.bfloat16
    assert choose_dtype("auto", "float32", gpu) == torch.float32
    assert choose_kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert choose_kv_dtype("int8", torch.bfloat16) == torch.int8
    assert choose_kv_dtype("fp8", torch.bfloat16) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("asked", "blocks", "longest"), [(0, 1000, 2048), (100, 1000, 100), (9999, 1000, 2048),
                                     (0, 4, 63), (60, 4, 60)],
)  # fmt: skip
def test_model_settings_and_pool_limit_a_sequence(asked: int, blocks: int, longest: int) -> None:
    config = qwen_config()
    layout = plan_layout(config, torch.float32, 16, blocks, 0)
    settings = EngineConfig(max_context=asked)
    assert max_context(settings, config, layout) == longest
