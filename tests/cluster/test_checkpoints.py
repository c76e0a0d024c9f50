"""Checkpoints that processes start on: broken ones are refused by name, mixed ones kept apart."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from baton import rpc
from baton.client import AsyncClient, RetryPolicy
from baton.config import EngineConfig
from baton.engine import build
from baton.errors import CheckpointError, Unavailable
from baton.local.cluster import LocalCluster
from baton.local.etcd import EmbeddedEtcd
from baton.local.single import SingleProcess
from baton.sampling import SamplingParams
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.cluster.command import baton
from tests.cluster.conftest import ClusterFactory
from tests.unit.engine.checkpoints import make_checkpoint
from tests.waiting import eventually

WEIGHTS = "model.safetensors"
QUICK_S = 20.0  # a refusal needs no tensor; most of it is importing torch on a busy machine


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with which nothing is wrong."""
    directory = tmp_path_factory.mktemp("checkpoints") / "whole"
    make_checkpoint(directory, tokenizer=True)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def etcd() -> AsyncIterator[str]:
    """Where a worker could register."""
    async with EmbeddedEtcd() as running:
        yield running.address


def damage(directory: Path, what: str) -> None:
    """Breaks a checkpoint in one way."""
    weights, config = directory / WEIGHTS, directory / "config.json"
    tensors = load_file(weights)
    match what:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "lost tensor":
            del tensors["model.layers.1.mlp.down_proj.weight"]
            save_file(tensors, weights)
        case "reshaped tensor":
            name = "model.layers.0.self_attn.k_proj.weight"
            save_file({**tensors, name: tensors[name][:-16].clone()}, weights)
        case "pickle only":
            weights.rename(directory / "pytorch_model.bin")
        case "lost shard":
            weights.unlink()
            index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        case "no config":
            config.unlink()
        case "broken config":
            config.write_text('{"architectures": ["LlamaForCausalLM"]')
        case "unknown architecture":
            changed = {**json.loads(config.read_text()), "architectures": ["MambaForCausalLM"]}
            config.write_text(json.dumps(changed))


BROKEN = {
    "truncated": [WEIGHTS, "truncated", "tensor"],
    "lost tensor": ["lacks tensor model.layers.1.mlp.down_proj.weight", "config.json"],
    "reshaped tensor": [WEIGHTS, "model.layers.0.self_attn.k_proj.weight", "[16, 64]"],
    "pickle only": ["pytorch_model.bin", "never read", "safetensors"],
    "lost shard": ["model-00001-of-00002.safetensors", "missing"],
    "no config": ["config.json", "missing"],
    "broken config": ["config.json", "JSON"],
    "unknown architecture": ["config.json", "MambaForCausalLM"],
}


@pytest.fixture
def copy(tmp_path: Path, whole: Path) -> Path:
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.mark.parametrize("what", BROKEN)
def test_the_loader_refuses_a_broken_checkpoint(copy: Path, what: str) -> None:
    """The error names the file and the tensor."""
    damage(copy, what)
    with pytest.raises(CheckpointError, match=f"^{copy}") as refused:
        build.load(EngineConfig(model=str(copy), device="cpu"))
    for part in BROKEN[what]:
        assert part in str(refused.value)


@pytest.mark.parametrize("what", ["truncated", "lost tensor"])
async def test_a_worker_refuses_a_broken_checkpoint(copy: Path, etcd: str, what: str) -> None:
    """Exit status 1, soon, and the last line of stderr names the file and the tensor."""
    damage(copy, what)
    began = time.monotonic()
    refused = await baton(
        "decode-worker", "--model", str(copy), "--etcd", etcd, "--log-level", "error"
    )
    assert time.monotonic() - began < QUICK_S
    assert refused.status == 1 and refused.out == ""
    assert refused.err.startswith(f"baton: error: {copy}"), refused.err
    assert refused.err.count("\n") == 1
    for part in BROKEN[what]:
        assert part in refused.err


@pytest.mark.parametrize("content", [None, "{}"], ids=["missing", "broken"])
async def test_a_router_refuses_a_model_without_a_tokenizer(
    copy: Path, etcd: str, content: str | None
) -> None:
    tokenizer = copy / "tokenizer.json"
    tokenizer.unlink()
    if content is not None:
        tokenizer.write_text(content)
    refused = await baton("router", "--model", str(copy), "--port", "0", "--etcd", etcd)
    assert refused.status == 1
    assert refused.err.startswith(f"baton: error: {tokenizer}"), refused.err


async def test_up_refuses_a_broken_checkpoint_before_it_starts_anything(copy: Path) -> None:
    damage(copy, "truncated")
    refused = await baton("up", "--port", "0", "--model", str(copy))
    assert (refused.status, refused.out) == (1, "")
    assert f"baton: error: {copy / WEIGHTS} is truncated" in refused.err


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "MistralForCausalLM"])
async def test_a_sharded_checkpoint_serves(
    tmp_path: Path, own_cluster: ClusterFactory, architecture: str
) -> None:
    """A cluster streams what one process and transformers itself generate."""
    directory = tmp_path / "sharded"
    reference = make_checkpoint(
        directory, architecture, seed=5, tokenizer=True, max_shard_size="100KB"
    )
    assert len(list(directory.glob("*.safetensors"))) > 2
    engine = EngineConfig(model=str(directory), dtype="float32", kv_blocks=64)
    prompt = [(7 * i) % 250 + 2 for i in range(50)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with SingleProcess(engine) as process:
        here = process.generate(prompt, params)
    with torch.no_grad():
        greedy = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=16, min_new_tokens=16
        )
    cluster = await own_cluster(engine=engine)
    async with AsyncClient(cluster.address) as client:
        there = await client.generate(prompt, max_tokens=16, ignore_eos=True, timeout=60.0)
        assert [model.name for model in await client.models()] == ["sharded"]
    assert there.route.prefill is not None
    assert there.token_ids == here.token_ids == tuple(greedy[0, 50:].tolist())
    assert there.text == here.text


async def test_random_weights_serve_token_ids(
    tmp_path: Path, whole: Path, own_cluster: ClusterFactory
) -> None:
    """A bare config.json is enough for a benchmark; all workers make the same weights."""
    config = tmp_path / "tiny.json"
    shutil.copy(whole / "config.json", config)
    engine = EngineConfig(model=str(config), random_weights=True, dtype="float32", kv_blocks=64)
    cluster = await own_cluster(engine=engine)
    argv = ("--token-ids", ",".join(map(str, range(2, 42))), "--max-tokens", "8", "--ignore-eos")
    local = ("--local", "--random-weights", str(config), "--dtype", "float32")
    there = await baton("generate", *argv, "--target", cluster.address, "--json")
    here = await baton("generate", *argv, *local, "--json")
    assert (there.status, here.status) == (0, 0), there.err + here.err
    assert json.loads(there.out)["token_ids"] == json.loads(here.out)["token_ids"]
    refused = await baton("generate", "some text", "--target", cluster.address)
    assert refused.err == "baton: error: this model has no tokenizer: send token ids\n"


async def statuses(cluster: LocalCluster) -> list[tuple[str, str]]:
    """(state, reason) of each worker, as the router's status shows it."""
    async with rpc.channel(cluster.address) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        response = await stub.GetStatus(
            fleet_pb2.GetStatusRequest(), timeout=30, wait_for_ready=True
        )
    return [(worker.state, worker.reason) for worker in response.workers]


async def start_on(cluster: LocalCluster, name: str, model: Path) -> None:
    """Ends a process and starts it again on another model."""
    process = cluster.processes[name]
    cluster.kill(name)
    await process.wait()
    process.argv += ["--model", str(model)]
    await cluster.start_again(name)


async def refusal(cluster: LocalCluster) -> str:
    """The error of a request that no pair of workers can serve."""
    async with AsyncClient(cluster.address, retry=RetryPolicy(max_attempts=1)) as client:
        with pytest.raises(Unavailable) as refused:
            await client.generate(list(range(2, 42)), max_tokens=4, timeout=30.0)
    return str(refused.value)


async def test_workers_with_another_tokenizer_than_the_router(
    tmp_path: Path, whole: Path, own_cluster: ClusterFactory
) -> None:
    """They are shown as MISMATCH with the reason, and get no work."""
    engine = EngineConfig(model=str(whole), dtype="float32", kv_blocks=64)
    cluster = await own_cluster(engine=engine, restart=False)
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("</s>", "<|end|>"))
    await start_on(cluster, "router", other)

    seen = await eventually(
        partial(statuses, cluster), lambda workers: len(workers) == 2, "workers", 30.0
    )
    for state, reason in seen:
        assert state == "MISMATCH"
        assert "tokenizer" in reason and "start both with the same model" in reason
    message = await refusal(cluster)
    assert "no prefill worker is ready" in message
    assert f"is MISMATCH: {seen[0][1]}" in message


async def test_workers_with_different_models(
    tmp_path: Path, whole: Path, own_cluster: ClusterFactory
) -> None:
    """Same tokenizer, other weights: they are not paired, and the error names both."""
    engine = EngineConfig(model=str(whole), dtype="float32", kv_blocks=64)
    cluster = await own_cluster(engine=engine, restart=False)
    other = tmp_path / "other"
    make_checkpoint(other, seed=9, tokenizer=True)
    await start_on(cluster, "decode-0", other)
    await cluster.wait_ready()

    both_ready = [("READY", "")] * 2
    await eventually(
        partial(statuses, cluster), lambda workers: workers == both_ready, "workers", 30.0
    )
    message = await refusal(cluster)
    names = {record.pid: name for name, record in cluster.membership.records.items()}
    for role in ("prefill", "decode"):
        name = names[cluster.processes[f"{role}-0"].pid]
        assert f"{role} worker {name} has model_fingerprint=" in message
