"""Which device, numbers and context an engine gets from its settings."""

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.build import choose_dtype, device_of
from baton.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint


def with_gpus(monkeypatch, *names):
    """As if torch had CUDA and saw these."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


def device(name):
    return str(device_of(EngineConfig(device=name)))


def test_a_gpu_has_a_number_and_one_that_is_not_there_is_an_error(monkeypatch):
    with_gpus(monkeypatch, "A", "B")
    found = {name: device(name) for name in ("auto", "cuda", "cuda:1", "cpu")}
    assert found == {"auto": "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
    assert device_of(EngineConfig(simulate="1,1")) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device cuda:2: .* only cuda:0 \(A\), cuda:1 \(B\)"):
        device("cuda:2")
    with_gpus(monkeypatch)
    assert device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: torch sees no GPU here.*--device cpu"):
        device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"built without CUDA; .*--device cpu"):
        device("cuda:1")


def test_half_precision_checkpoints_compute_in_bfloat16_on_a_gpu():
    gpu = torch.device("cuda", 0)
    assert choose_dtype("auto", "float16", gpu) == torch.bfloat16
    assert choose_dtype("auto", "float32", gpu) == torch.float32


@pytest.mark.parametrize(
    ("asked", "blocks", "longest"), [(0, 100, 512), (100, 100, 100), (9999, 100, 512),
                                     (0, 4, 63), (60, 4, 60)],
)  # fmt: skip
def test_model_settings_and_pool_limit_a_sequence(tmp_path, asked, blocks, longest):
    make_checkpoint(tmp_path)
    settings = EngineConfig(str(tmp_path), max_context=asked, kv_blocks=blocks, kernels="torch")
    assert build.load(settings).max_context == longest
