"""Settings: every wrong value is refused at the start, in words that name the option."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from baton.config import (
    DEMO_MODEL,
    ClusterConfig,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    RouterLimits,
    WorkerConfig,
    default_model_name,
    host_id,
    join_address,
    model_path,
    service,
    split_address,
)
from baton.config.slo import Slo, parse_all
from baton.errors import ConfigError
from tests.namespaces import OWN_PIDS_AND_NETWORK, needs_namespaces
from tests.processes import PYTHON, run

NAN = float("nan")
WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (RegistryConfig, {"etcd": "a:1,b"}, "--etcd must be HOST:PORT, not 'b'"),
    (RegistryConfig, {"cluster": ""}, "--cluster must be a name without '/'"),
    (RegistryConfig, {"key_file": Path("k")}, "--etcd-cert and --etcd-key go together"),
    (EngineConfig, {"dtype": "float16"}, "--dtype must be one of auto, float32, bfloat16"),
    (EngineConfig, {"device": "tpu"}, "'tpu' is no device: write auto, cpu, cuda or"),
    (EngineConfig, {"device": "cuda:1", "simulate": "1,1"}, "leave --device cuda:1 out"),
    (EngineConfig, {"gpu_memory": NAN}, "--gpu-memory must be between 0.001 and 1, not nan"),
    (EngineConfig, {"block_size": 0}, "--block-size must be at least 1, not 0"),
    (EngineConfig, {"kv_cache_bytes": -1}, "--kv-cache must be at least 0, not -1 (field kv_cache"),
    (RouterLimits, {"default_timeout_s": math.inf}, "--default-timeout must be finite, not inf"),
    (RouterLimits, {"ttft_target_s": 500}, "0 and 60, not 500 (field ttft_target_s): it is in sec"),
    (WorkerConfig, {"role": "decode", "transport": "rdma"}, "--transport must be one of auto"),
    (WorkerConfig, {"role": "decode", "advertise": "h"}, "--advertise must be HOST:PORT, not 'h'"),
    (WorkerConfig, {"role": "decode", "node_rank": 1}, "--node-rank 1 is none of --nnodes 1"),
    (WorkerConfig, {"role": "decode", "nnodes": 2, "name": "a"}, "cannot share --tp 1 ranks"),
    (WorkerConfig, {"role": "decode", "nnodes": 2, "engine": EngineConfig(tp=2)}, "needs --name"),
    (RouterConfig, {"port": -1}, "--port must be between 0 and 65535, not -1"),
    (ClusterConfig, {"prefill": 0, "decode": 0}, "a cluster needs a worker: --mixed 1"),
    (ClusterConfig, {"routers": 3, "port": 65534}, "--port 65534 leaves no ports for 3 routers"),
    (RouterLimits, {"slos": ("x",)}, "--slo 'x'"),
    (ClusterConfig, {"etcd": "x"}, "--etcd must be HOST:PORT, not 'x'"),
    (ClusterConfig, {"etcd_access": RegistryConfig(user="me")}, "need --etcd HOST:PORT"),
]


@pytest.mark.parametrize(("cls", "settings", "message"), WRONG)
def test_wrong_settings_are_refused(cls, settings, message):
    with pytest.raises(ConfigError) as refused:
        cls(**settings)
    assert message in str(refused.value)


def test_each_process_takes_another_incarnation():
    names = {WorkerConfig("decode").incarnation for _ in range(50)}
    names |= {RouterConfig().incarnation for _ in range(50)}
    assert len(names) == 100
    assert all(re.fullmatch("(worker|router)-[0-9a-f]{8}", name) for name in names)


def test_addresses():
    for good in (("h", 1), ("10.0.0.1", 65535), ("[::1]", 80)):
        assert split_address("{}:{}".format(*good)) == good
        assert split_address(join_address(*good)) == good
    assert join_address("::1", 80) == "[::1]:80"
    for bad in ("", "h", ":1", "h:", "h:x", "h:²", "h:-1", "h:65536", "h:1 "):
        with pytest.raises(ConfigError, match="--there must be HOST:PORT"):
            split_address(bad, "--there")
    with pytest.raises(ConfigError, match=r"--there needs brackets .* not '::1:7700'"):
        split_address("::1:7700", "--there")


def test_the_model_is_a_directory_a_config_or_the_demo(tmp_path, monkeypatch):
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").touch()
    (tmp_path / "tiny.json").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_path("demo") == DEMO_MODEL.resolve()
    assert model_path("~/llama") == model_path(str(directory)) == directory.resolve()
    names = {
        "demo": "demo",
        str(directory): "llama",
        f"{directory}/": "llama",
        str(directory / "config.json"): "llama",
        str(tmp_path / "tiny.json"): "tiny",
    }
    for model, name in names.items():
        assert default_model_name(model) == name
        assert [one.name for one in RouterConfig(models=(model,)).sources] == [name]
        assert WorkerConfig("decode", EngineConfig(model=model)).served_name == name
    assert RouterConfig(models=(str(directory),), model_name="mine").sources[0].name == "mine"
    for missing in ("", "/no/such/place", "no-such-model", "./no/model"):
        with pytest.raises(ConfigError, match="not found: give a Hugging Face model directory"):
            model_path(missing)
    on_the_hub = r"hf download org/llama-3\.2 --local-dir llama-3\.2`, th"
    with pytest.raises(ConfigError, match=on_the_hub):
        model_path("org/llama-3.2")


@pytest.mark.parametrize(
    "first", [(), pytest.param(OWN_PIDS_AND_NETWORK, marks=needs_namespaces)], ids=["same", "other"]
)
def test_processes_of_one_user_share_a_host_id_in_any_namespaces(first):
    """If they share a folder."""
    code = "import baton.config; print(baton.config.host_id())"
    assert run([*first, *PYTHON, code]) == (0, f"{host_id()}\n", "")


def test_another_user_or_a_process_without_the_folder_shares_none(monkeypatch, tmp_path):
    """Two that get the same id may open each other's memory, so the user is part of it."""
    own = host_id()
    assert own.endswith(f"/{os.getuid()}")
    for folder in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(service, "SHARED_FOLDER", folder)
        assert host_id() != own


def test_slo_classes_and_that_all_their_targets_must_be_met():
    assert Slo.parse("ttft=0.5,tpot=0.05") == Slo("default", 0.5, 0.05, math.inf)
    assert Slo.parse("batch: ttft=10, e2e=60") == Slo("batch", 10, math.inf, 60)
    assert [slo.name for slo in parse_all(("ttft=1", "fast:ttft=0.1"))] == ["default", "fast"]
    with pytest.raises(ConfigError, match="default twice"):
        parse_all(("ttft=1", "tpot=1"))
    malformed = """
        | ttft | ttft= | ttft=0 | ttft=-1 | ttft=nan | ttft=inf | speed=1 | a: | :ttft=1 |
        a b:ttft=1 | ttft=1,ttft=2 | ttft=1, | a:b:ttft=1"""
    for text in malformed.split("|"):
        with pytest.raises(ConfigError, match="--slo"):
            Slo.parse(text.strip())
    slo = Slo("x", ttft_s=1.0, tpot_s=0.1)
    assert slo.met(1.0, 0.1, 1e9)
    assert not slo.met(1.01, 0.1, 2.0)
    assert not slo.met(1.0, 0.11, 2.0)
    assert not Slo("x", e2e_s=5.0).met(0.1, 0.1, 5.1)
