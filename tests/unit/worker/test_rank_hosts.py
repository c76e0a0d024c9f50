"""What ranks on several hosts are told and checked for; whole workers are in tests/cluster."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.config import DEMO_MODEL, EngineConfig, WorkerConfig
from baton.engine.backends.cpu.backend import CpuBackend
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.rank_executor import RankWork
from baton.errors import ConfigError
from baton.rendezvous import Place
from baton.v1.common_pb2 import RankHost
from baton.worker import rank_hosts
from baton.worker.remote_rank import rank_work

CONFIG = WorkerConfig(
    "decode", EngineConfig(tp=4, tp_backend="gloo", cpus=(0, 1), device="cpu", model="demo"),
    nnodes=2, node_rank=1, name="big", host="127.0.0.1",
)  # fmt: skip


def test_a_rank_takes_its_hosts_settings_and_all_others_from_the_first_process():
    first = EngineConfig(tp=4, tp_backend="gloo", model="/elsewhere", threads=7, block_size=32)
    config = replace(ModelConfig.load(DEMO_MODEL), max_context=99)
    place = Place("127.0.0.1", 5, b"secret")
    shard = Shard(3, 4, expert_parallel=True)
    work = RankWork(
        CpuBackend(first), Path("/elsewhere"), config, torch.bfloat16, shard, place, "10.0.0.1",
        2.5, 10,
    )  # fmt: skip
    found = rank_work(work.on_another_host(shard), CONFIG, 1)
    assert (found.config, found.dtype, found.shard) == (
        config,
        torch.bfloat16,
        Shard(3, 4, expert_parallel=True),
    )
    assert (found.exchange, found.timeout_s) == (place, 2.5)
    assert (found.host, found.path) == ("127.0.0.1", DEMO_MODEL)
    settings = found.backend.settings
    assert (settings.block_size, settings.model) == (32, "demo")
    assert (settings.cpus, settings.threads) == ((1,), 1), "its share of this host's"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "cannot reach 0.0.0.0: give --advertise"),
        ({"advertise": "192.0.2.1:7700", "insecure": True}, "no address of this machine"),
        ({"kv_host": "192.0.2.1"}, "without TLS everybody"),
    ],
)
def test_addresses_that_other_hosts_cannot_or_must_not_reach_are_refused(
    monkeypatch, settings, message
):
    monkeypatch.setattr(rank_hosts.tls.current(), "insecure", settings.pop("insecure", False))
    with pytest.raises(ConfigError, match=message):
        rank_hosts.check_address(replace(CONFIG, **settings))


async def test_hosts_that_were_told_of_other_ranks_are_refused():
    class Registry:
        async def rank_hosts(self, worker):
            assert worker == "big"
            return {1: RankHost(node_rank=1, addresses=["127.0.0.1:5"], secret=b"s")}

    config = replace(CONFIG, node_rank=0)
    with pytest.raises(ConfigError, match="--node-rank 1 of big has 1 ranks, not 2"):
        await rank_hosts.find(config, Registry())
    config = replace(config, engine=replace(config.engine, tp=2))
    (address,) = await rank_hosts.find(config, Registry())
    assert (address.host, address.port, address.secret) == ("127.0.0.1", 5, b"s")
