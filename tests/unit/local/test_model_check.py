"""What no process could load is refused before any is started, without torch, and by name."""

import json
import os

import pytest

from baton.config import ClusterConfig, EngineConfig
from baton.errors import CheckpointError, ConfigError
from baton.local.cluster import LocalCluster
from baton.local.model_check import check_model
from tests.processes import PYTHON, run
from tests.unit.engine.checkpoints import make_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path):
    make_checkpoint(tmp_path / "model", tokenizer=True)
    return tmp_path / "model"


def header(**entry):
    made = json.dumps({"model.norm.weight": entry}).encode()
    return len(made).to_bytes(8, "little") + made


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", {"architectures": ["MambaForCausalLM"]}, ["architectures", "Mamba"]),
        ("config.json", {"num_hidden_layers": 3}, ["lacks tensor model.layers.2"]),
        (WEIGHTS, None, []),
        (WEIGHTS, header(dtype="F32", shape=[1e400], data_offsets=[0, 0]), ["tensor"]),
        (WEIGHTS, header(dtype=[], shape=[], data_offsets=[0, 0]), ["tensor"]),
        ("chat_template.jinja", b"{{ 10**1000000 }}", ["without bounds"]),
    ],
)
async def test_a_cluster_is_not_begun(model, name, content, named):
    file = model / name
    if content is None:
        file.unlink()
        os.mkfifo(file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    cluster = LocalCluster(ClusterConfig(engine=EngineConfig(model=str(model)), port=0))
    with pytest.raises(CheckpointError) as refused:
        await cluster.__aenter__()
    assert not cluster.processes and cluster.etcd is None
    assert all(part in str(refused.value) for part in (name, *named)), refused.value


@pytest.mark.parametrize(
    ("engine", "of_roles", "why"),
    [
        ({"tp": 3}, {}, "--tp 3 does not divide the model's num_attention_heads, 4"),
        ({}, {"decode_tp": 3}, "--tp 3 does not divide the model's num_attention_heads, 4"),
        ({"max_context": 5000}, {}, "--max-context 5000 is more than the model's own 512"),
    ],
)
async def test_options_that_the_model_cannot_have_are_said_once(model, engine, of_roles, why):
    settings = EngineConfig(model=str(model), **engine)
    cluster = LocalCluster(ClusterConfig(engine=settings, port=0, **of_roles))
    with pytest.raises(ConfigError, match=why):
        await cluster.__aenter__()
    assert not cluster.processes and cluster.etcd is None


def test_a_worker_needs_no_tokenizer_and_a_simulated_one_no_weights(model):
    code = (
        "import sys; from baton.config import EngineConfig; "
        "from baton.local.model_check import check_model; "
        f"check_model(EngineConfig(model={str(model)!r})); assert 'torch' not in sys.modules"
    )
    assert run([*PYTHON, code]) == (0, "", "")
    (model / "tokenizer.json").unlink()
    check_model(EngineConfig(model=str(model)), worker=True)
    (model / WEIGHTS).unlink()
    check_model(EngineConfig(model=str(model), simulate="1000,1"), worker=True)
    with pytest.raises(CheckpointError, match="neither"):
        check_model(EngineConfig(model=str(model)), worker=True)
