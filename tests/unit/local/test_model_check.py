"""What no process could load is refused before any is started, quickly and by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import ClusterConfig, EngineConfig
from baton.errors import CheckpointError
from baton.local.cluster import LocalCluster
from baton.local.model_check import check_model
from tests.unit.engine.checkpoints import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", tokenizer=True)
    return tmp_path / "model"


def config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def header(**entry: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        made = json.dumps({"model.norm.weight": entry}).encode()
        (model / "model.safetensors").write_bytes(len(made).to_bytes(8, "little") + made)

    return change


def endless_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ 10**1000000 }}")


BROKEN = [
    (config(architectures=["MambaForCausalLM"]), ["config.json", "architectures", "Mamba"]),
    (config(num_hidden_layers=3), ["lacks tensor model.layers.2", "config.json"]),
    (pipe("model.safetensors"), ["model.safetensors"]),
    (header(dtype="F32", shape=[1e400], data_offsets=[0, 0]), ["model.safetensors", "tensor"]),
    (header(dtype=[], shape=[], data_offsets=[0, 0]), ["model.safetensors", "tensor"]),
    (endless_template, ["chat_template.jinja", "without bounds"]),
]


@pytest.mark.parametrize(("damage", "named"), BROKEN, ids=range(len(BROKEN)))
async def test_a_cluster_is_not_begun(
    model: Path, damage: Callable[[Path], None], named: list[str]
) -> None:
    damage(model)
    cluster = LocalCluster(ClusterConfig(engine=EngineConfig(model=str(model)), port=0))
    with pytest.raises(CheckpointError) as refused:
        await cluster.__aenter__()
    assert not cluster.processes and cluster.etcd is None
    assert all(part in str(refused.value) for part in named), refused.value


def test_a_worker_needs_no_tokenizer_and_a_simulated_one_no_weights(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_model(EngineConfig(model=str(model)), worker=True)
    (model / "model.safetensors").unlink()
    check_model(EngineConfig(model=str(model), simulate="1000,1"), worker=True)
    with pytest.raises(CheckpointError, match="neither"):
        check_model(EngineConfig(model=str(model)), worker=True)


def test_imports_no_torch(model: Path) -> None:
    code = (
        "import sys; from baton.config import EngineConfig; "
        "from baton.local.model_check import check_model; "
        f"check_model(EngineConfig(model={str(model)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
