"""Checkpoints that processes start on: broken ones are refused by name, mixed ones kept apart."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.client import AsyncClient, RetryPolicy
from baton.config import EngineConfig, RouterLimits
from baton.errors import Unavailable
from baton.generation.sampling_params import SamplingParams
from baton.local.etcd_process import EmbeddedEtcd
from baton.local.single import SingleProcess
from tests.cluster.oracle import all_blocks_free, start_again
from tests.processes import as_json, baton
from tests.unit.engine.checkpoints import make_checkpoint
from tests.waiting import WAIT_S, eventually

WEIGHTS = "model.safetensors"
LOST = "model.layers.1.mlp.down_proj.weight"
PROMPT = [(7 * i) % 250 + 2 for i in range(50)]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small checkpoint with which nothing is wrong."""
    directory = tmp_path_factory.mktemp("checkpoints") / "whole"
    make_checkpoint(directory, tokenizer=True)
    return directory


async def test_processes_refuse_a_broken_checkpoint(tmp_path, whole):
    """Exit status 1 and one line that names the file and the tensor; `up` starts nothing."""

    lost, truncated, unreadable = (
        Path(shutil.copytree(whole, tmp_path / name)) for name in ("lost", "cut", "unreadable")
    )
    tensors = load_file(lost / WEIGHTS)
    del tensors[LOST]
    save_file(tensors, lost / WEIGHTS)
    (truncated / WEIGHTS).write_bytes((truncated / WEIGHTS).read_bytes()[:-1000])
    (unreadable / "tokenizer.json").write_text("{}")
    async with EmbeddedEtcd() as etcd:
        worker, router, up = await asyncio.gather(
            baton("decode-worker", "--model", str(lost), "--etcd", etcd.address,
                  "--log-level", "error"),
            baton("router", "--model", str(unreadable), "--port", "0", "--etcd", etcd.address),
            baton("up", "--port", "0", "--model", str(truncated)),
        )  # fmt: skip
    for done, start in (
        (worker, f"{lost} lacks tensor {LOST}"),
        (router, f"{unreadable / 'tokenizer.json'}"),
        (up, f"{truncated / WEIGHTS} is truncated"),
    ):
        assert (done.status, done.out) == (1, "")
        assert done.err.splitlines()[-1].startswith(f"baton: error: {start}"), done.err
    assert worker.err.count("\n") == 1


def generated_by_one_process(engine):
    """What a cluster must generate."""
    with SingleProcess(engine) as process:
        return process.generate(PROMPT, SamplingParams(**GREEDY))


async def test_random_weights_serve_token_ids(tmp_path, whole, clusters):
    """A bare config.json is enough for a benchmark; all workers make the same weights."""
    config = tmp_path / "tiny.json"
    shutil.copy(whole / "config.json", config)
    engine = EngineConfig(model=str(config), random_weights=True, dtype="float32", kv_blocks=64)
    cluster, _ = await clusters(alone=True, engine=engine)
    here = generated_by_one_process(engine)
    prompt, greedy = ",".join(map(str, PROMPT)), ("--temperature", "0")
    argv = ("--token-ids", prompt, "--max-tokens", "16", "--ignore-eos", *greedy)
    there = await as_json("generate", *argv, "--target", cluster.address)
    assert tuple(there["token_ids"]) == here.token_ids
    refused = await baton("generate", "some text", "--target", cluster.address)
    assert refused.err == "baton: error: this model has no tokenizer: send token ids\n"


async def refusal(client):
    """The error of a request that no pair of workers can serve."""
    with pytest.raises(Unavailable) as refused:
        await client.generate(PROMPT, max_tokens=4, timeout=WAIT_S)
    return str(refused.value)


async def test_workers_that_do_not_match_are_not_paired(tmp_path, clusters):
    """Other blocks, other weights, another tokenizer than the router's: each is named.

    The others serve a sharded checkpoint: tokens are those of one process and of transformers.
    """
    model, other = tmp_path / "sharded", tmp_path / "other"
    reference = make_checkpoint(
        model,
        "Gemma2ForCausalLM",
        seed=5,
        tokenizer=True,
        max_shard_size="100KB",
        sliding_window=24,
    )
    assert len(list(model.glob("*.safetensors"))) > 2
    with torch.no_grad():
        greedy = reference.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=16, min_new_tokens=16
        )
    engine = EngineConfig(model=str(model), dtype="float32", kv_blocks=64)
    cluster, _ = await clusters(
        alone=True,
        engine=engine,
        decode=2,
        extra_args={"decode-1": ["--block-size", "32"]},
        limits=RouterLimits(recovery_s=1.0),
    )
    no_retry = RetryPolicy(max_attempts=1)
    async with AsyncClient(cluster.address, retry=no_retry) as client:
        here = generated_by_one_process(engine)
        done = await asyncio.gather(
            *(
                client.generate(PROMPT, cache_salt=f"{i}", timeout=WAIT_S, **GREEDY)
                for i in range(8)
            )
        )
        assert here.token_ids == tuple(greedy[0, len(PROMPT) :].tolist())
        assert {(one.token_ids, one.text) for one in done} == {(here.token_ids, here.text)}
        assert [model.name for model in await client.models()] == ["sharded"]
        odd = cluster.processes["decode-1"].pid
        names = {w["pid"]: w["incarnation"] for w in (await client.status())["workers"]}
        assert names[odd] not in {one.route.decode for one in done if one.route.prefill}
        await all_blocks_free(client)

        make_checkpoint(other, "Qwen3ForCausalLM", seed=9, tokenizer=True)
        same_name = ("--model", str(other), "--model-name", "sharded")
        await start_again(cluster, "decode-0", *same_name)
        await cluster.wait_ready()
        pids = {process.pid for name, process in cluster.processes.items() if name != "router"}
        ready = lambda s: pids == {w["pid"] for w in s["workers"] if w["state"] == "READY"}  # noqa: E731
        status = await eventually(client.status, ready, "workers are missing")
        names = {w["pid"]: w["incarnation"] for w in status["workers"]}
        message = await refusal(client)
        for role in ("prefill", "decode"):
            name = names[cluster.processes[f"{role}-0"].pid]
            assert f"{role} worker {name}" in message
        assert "differ in model_fingerprint: " in message

    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("</s>", "<|end|>"))
    await start_again(cluster, "router", *same_name)
    async with AsyncClient(cluster.address, retry=no_retry) as client:
        patience = RetryPolicy(max_attempts=sys.maxsize)  # the router is still starting
        async with AsyncClient(cluster.address, retry=patience) as patient:
            complete = lambda s: len(pids & {w["pid"] for w in s["workers"]}) == 3  # noqa: E731
            status = await eventually(patient.status, complete, "workers are missing")
        for worker in status["workers"]:
            if worker["pid"] in pids:
                assert worker["state"] == "MISMATCH"
                assert "tokenizer" in worker["reason"]
                assert "start both with the same model" in worker["reason"]
        message = await refusal(client)
        assert "no prefill worker is ready" in message
        assert "is MISMATCH: " in message
