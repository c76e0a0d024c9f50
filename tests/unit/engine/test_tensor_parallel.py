"""Tensor parallelism on a CPU: the tokens of one process, and a worker that ends as one."""

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from baton import rendezvous
from baton.config import EngineConfig
from baton.cuda import NCCL_ENVIRONMENT, CudaArea
from baton.engine import collectives, rank_executor, rank_process, tensor_parallel
from baton.engine.backends.cpu.backend import CpuBackend
from baton.engine.collectives import GlooCollectives
from baton.engine.kv_cache import KvLayout
from baton.engine.models.lora import load_lora
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight
from baton.engine.rank_executor import MESSAGES, JoinGroup
from baton.engine.runner import RunnerFailed
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import CheckpointError, ConfigError, InternalError
from baton.generation.sampling_params import SamplingParams
from baton.net.object_connection import ObjectConnection
from baton.rendezvous import Rendezvous
from tests.contract.kvtransfer_driver import DRIVER, StandIn
from tests.unit.engine import bench as engines
from tests.unit.engine.bench import WAIT_S, Bench
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.test_lora import adaptable, make_adapter

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)  # into a further block
PROMPTS = [[(n * i) % 250 + 2 for i in range(20 * n)] for n in (1, 2, 3)]
load = partial(engines.load, kv_blocks=32, chunk_tokens=32, threads=2, device="cpu")


def connections():
    """Both ends of a rank's connection."""
    return [ObjectConnection(end, MESSAGES) for end in socket.socketpair()]


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        *(("Qwen2ForCausalLM", "shm"), ("Qwen2ForCausalLM", "gloo")),
        *(("Qwen3_5ForCausalLM", "gloo"), ("Gemma4ForCausalLM", "gloo")),
    ],
)
def test_each_rank_has_its_part_of_an_adapter(tmp_path, architecture, backend):
    """The tokens of one process: of two adapters and of none, in the same steps."""
    model = make_checkpoint(tmp_path / "base", architecture, num_key_value_heads=2)
    modules = adaptable(tmp_path / "base", model)
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, model, modules=modules, seed=seed)
    config = ModelConfig.load(tmp_path / "base")
    adapters = [load_lora(tmp_path / name, config, 16) for name in "ab"]
    one, ranks = (
        load(tmp_path / "base", max_loras=2, **settings)
        for settings in ({}, {"tp": 2, "tp_backend": backend})
    )
    assert generated(ranks, adapters) == generated(one, adapters)


def generated(loaded, adapters=()):
    """Prompts of several chunks beside each other, the last with these adapters: what each got."""
    with Bench(loaded.engine) as bench:
        for one in adapters:
            bench.engine.load_adapter(one).result(WAIT_S)
        names = [""] * (len(PROMPTS) - len(adapters)) + [one.identity for one in adapters]
        return bench.tokens(
            *(
                Sequence(f"{n}", list(p), len(p), GREEDY, name, adapter=name)
                for n, (p, name) in enumerate(zip(PROMPTS, names, strict=True))
            )
        )


@pytest.mark.parametrize(
    ("architecture", "options", "settings"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True}, {"tp": 4}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "vocab_size": 321}, {"tp": 2}),
        ("Qwen2MoeForCausalLM", {"num_experts": 4, "shared_expert_intermediate_size": 64},
         {"tp": 2, "kv_dtype": "int8"}),
        ("Qwen2MoeForCausalLM", {"num_experts": 5, "shared_expert_intermediate_size": 64},
         {"tp": 2, "expert_parallel": True}),
        ("GptOssForCausalLM", {"num_local_experts": 4, "intermediate_size": 49},
         {"tp": 4, "expert_parallel": True, "tp_backend": "gloo"}),
        ("Olmo2ForCausalLM", {"num_key_value_heads": 2}, {"tp": 4}),
        ("Olmo2ForCausalLM", {"num_key_value_heads": 2}, {"tp": 2, "tp_backend": "gloo"}),
        ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2},
         {"tp": 2, "expert_parallel": True, "tp_backend": "gloo", "kernels": "torch"}),
        ("Gemma2ForCausalLM", {"intermediate_size": 128}, {"tp": 2, "quantization": "int8"}),
        ("LlamaForCausalLM", {"num_key_value_heads": 2, "attention_bias": True, "vocab_size": 321},
         {"tp": 4, "tp_backend": "gloo"}),
        ("Qwen2MoeForCausalLM", {"num_experts": 4, "shared_expert_intermediate_size": 64},
         {"tp": 2, "tp_backend": "gloo", "kernels": "torch"}),
        ("Qwen3NextForCausalLM", {}, {"tp": 2, "tp_backend": "gloo"}),
        ("Qwen3_5ForCausalLM", {}, {"tp": 2, "tp_backend": "gloo", "kernels": "torch"}),
        ("DeepseekV3ForCausalLM", {}, {"tp": 2, "tp_backend": "gloo"}),
        ("DeepseekV2ForCausalLM", {"q_lora_rank": None},
         {"tp": 4, "expert_parallel": True, "tp_backend": "gloo", "kernels": "torch"}),
        ("Ernie4_5_MoeForCausalLM", {}, {"tp": 2}),
    ],
    ids=[
        "shared KV head, biases", "tied, odd vocabulary", "experts", "whole experts, not as many",
        "whole experts, of an odd size", "rows normed", "rows normed, gloo",
        "rows normed, whole experts", "int8", "gloo", "gloo torch",
        "states", "states torch",
        "latent KV", "latent KV, whole experts", "shared expert without gate",
    ],
)  # fmt: skip
def test_ranks_give_the_tokens_of_one_process(tmp_path, architecture, options, settings):
    make_checkpoint(tmp_path, architecture, **options)
    one, several = load(tmp_path, **{**settings, "tp": 1}), load(tmp_path, **settings)
    pools = [len(loaded.runner.pools) for loaded in (one, several)]
    assert pools == [1, settings["tp"] if "tp_backend" in settings else 1]
    assert one.descriptor == several.descriptor, "they may be paired"
    expected, found = generated(one), generated(several)
    assert 0 < several.runner.ranks.collective_s < WAIT_S
    if "quantization" in settings:  # whose scales are each shard's own
        pairs = [
            (a, b) for name in expected for a, b in zip(expected[name], found[name], strict=True)
        ]
        assert sum(a == b for a, b in pairs) / len(pairs) > 0.5
    else:
        assert found == expected


def fp8_of(dense):
    return Fp8BlockWeight(dense.to(torch.float8_e4m3fn), torch.linspace(1, 2, 192).view(96, 2))


def asymmetric_int4_of(dense):
    int4 = Int4Weight.from_dense(dense)
    zeros = torch.arange(96 * 4, dtype=torch.uint8).view(96, 4) % 17
    return replace(int4, zeros=zeros)


@pytest.mark.parametrize(
    "make", [DenseWeight, Int8Weight.from_dense, Int4Weight.from_dense, asymmetric_int4_of, fp8_of]
)
def test_parts_of_a_weight_give_its_outputs_or_add_up_to_them(make):
    generator = torch.Generator().manual_seed(1)
    weight = make(torch.randn(96, 256, generator=generator))
    x = torch.randn(5, 256, generator=generator)
    whole, rows = weight.apply(x), torch.tensor([3, 90, 4])
    close = {"atol": 0.3 if isinstance(weight, Int8Weight) else 1e-4, "rtol": 0.02}
    torch.testing.assert_close(weight.take_outputs(rows).apply(x), whole[:, rows], **close)
    parts = (range(128), range(128, 256))
    sums = sum(weight.take_inputs(one).apply(x[:, one.start : one.stop]) for one in parts)
    torch.testing.assert_close(sums, whole, **close)


def test_what_cannot_be_cut_is_refused_by_name(tmp_path):
    make_checkpoint(tmp_path / "a", num_key_value_heads=2)
    make_checkpoint(
        tmp_path / "c",
        "Qwen3MoeForCausalLM",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=49,
    )
    whole = {"expert_parallel": True}
    for path, settings, message in (
        ("a", {"tp": 3}, "--tp 3 does not divide the model's num_attention_heads, 4"),
        ("a", {"tp": 2, "kernels": "torch"}, "--tp on a CPU needs native kernels"),
        ("a", {"tp": 2, **whole}, "--expert-parallel: the model has no experts"),
        ("c", {"tp": 2}, "moe_intermediate_size, 49: add --expert-parallel"),
        ("c", {"tp": 4, **whole}, "--tp 4 is more than the model's 3 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / path, **settings)
    int4 = Int4Weight.from_dense(torch.ones(8, 128))
    for weight, message in (
        (int4, "int4 matrix of 128 inputs is not cut at 0 and 96: .* whole groups of 64"),
        (replace(int4, order=torch.arange(128)), "act-order"),
        (fp8_of(torch.ones(96, 256)), "block-fp8 matrix of 256 .* whole groups of 128"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weight.take_inputs(range(96))


def test_a_rank_that_cannot_load_says_why_and_none_is_left(tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    start, started = rank_process.subprocess.Popen, []

    def without_weights(*args, **options):
        (tmp_path / "model.safetensors").rename(tmp_path / f"gone-{len(started)}")
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(rank_process.subprocess, "Popen", without_weights)
    with pytest.raises(ConfigError, match="has neither model"):
        load(tmp_path, tp=2)
    assert started[0].poll() is not None


def test_a_rank_whose_end_takes_for_ever_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rank_process, "_STOP_S", 0.1)
    ours, theirs = connections()
    theirs.close()
    with rank_process.subprocess.Popen(["sleep", f"{WAIT_S}"]) as process:
        with pytest.raises(ConfigError, match="its connection ended, but it did not"):
            rank_process.RankProcess(1, ours, process).answer(WAIT_S)
        process.kill()
    with pytest.raises(ConfigError, match="it ended with status -9"):
        rank_process.RankProcess(1, ours, process).answer(WAIT_S)
    ours.close()


def test_pools_of_ranks_hold_what_was_asked_for_and_are_zeroed_together(tmp_path):
    make_checkpoint(tmp_path, num_key_value_heads=2)
    budget = {"kv_blocks": 0, "kv_cache_bytes": 1 << 20}
    for backend, copies in (("shm", 1), ("gloo", 2)):
        loaded = load(tmp_path, tp=4, tp_backend=backend, **budget)
        pools = loaded.runner.pools
        assert 0.9 * (1 << 20) < sum(pool.nbytes for pool in pools) <= 1 << 20
        assert sum(pool.shape[3] for pool in pools) == 2 * copies
        for pool in pools:
            pool.fill_(float("nan"))
        loaded.runner.zero_blocks([3, 5])
        assert all(not pool[[3, 5]].any() and pool[4].isnan().all() for pool in pools)
        loaded.runner.close()


def gpu_descriptors():
    """This process's descriptors of the fake GPU's memory."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it listed the folder, or has been closed
            if descriptor.readlink().name.startswith("memfd:gpu"):
                found.add(descriptor.name)
    return found


def test_a_rank_maps_the_gpu_memory_that_the_first_one_allocated(monkeypatch):
    """By its descriptor, which it keeps no longer than that."""
    before = gpu_descriptors()
    monkeypatch.setattr(rank_executor, "CudaDriver", StandIn)
    layout, areas = KvLayout(4, 1, 2, 4, 2, torch.float32), []
    config = SimpleNamespace(num_kv_heads=2, num_attention_heads=2)
    ours, theirs = connections()
    rank = rank_executor.RankExecutor(torch.device("cuda", 1), None, theirs)
    first = SimpleNamespace(
        _shared=None, _shards=[Shard(0, 2), Shard(1, 2)], _config=config, _backends=[rank, rank],
        _ranks=[rank_process.RankProcess(1, ours, SimpleNamespace())],
    )  # fmt: skip

    def allocate(num_bytes, device):
        areas.append(CudaArea(num_bytes, device, DRIVER))
        return areas[-1]

    def obey():
        rank.execute(theirs.recv())

    obeying = threading.Thread(target=obey)
    obeying.start()
    _, pool = tensor_parallel.TensorParallelModel.pools(first, layout, allocate)
    obeying.join(WAIT_S)
    rank.pool[3] = 7
    assert rank.pool.shape == pool.shape == (4, 1, 2, 1, 4, 2)
    assert torch.equal(rank.pool, pool) and pool.count_nonzero() == pool[3].numel()
    for area in areas:
        area.close()
    for end in (ours, theirs):
        end.close()
    assert gpu_descriptors() == before


def test_a_step_without_logits_ends_when_every_rank_has_written_its_keys(tmp_path):
    """Else blocks could be handed over without some of their heads."""
    make_checkpoint(tmp_path)
    loaded = load(tmp_path, tp=2)
    model, rounds = loaded.runner.model, 1  # of the exchange's header
    chunk = Sequence("a", [1] * 8, 8, GREEDY, block_ids=[0])
    loaded.runner.run(ScheduledStep([ScheduledSequence(chunk, 0, 4)]))
    # The embedding, two sums of each layer but the last, and one more meeting.
    assert int(model._words[rounds]) == 1 + 2 * (loaded.model_config.num_layers - 1) + 1
    loaded.runner.close()


def test_ranks_that_fill_the_cores_keep_to_a_part_each(tmp_path):
    """One woken beside another that computes would wait for a core while a core is idle."""
    make_checkpoint(tmp_path)
    cores = os.sched_getaffinity(0)
    loaded = load(tmp_path, tp=2, threads=len(cores))
    with Bench(loaded.engine) as bench:
        place = bench.engine.submit(lambda: os.sched_getaffinity(0)).result(WAIT_S)
        other = os.sched_getaffinity(loaded.runner.ranks._ranks[0].process.pid)
    assert place | other == cores
    assert len(cores) == 1 or not place & other
    assert os.sched_getaffinity(0) == cores, "none but computing threads is pinned"


def test_shares_of_threads_and_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    for settings, shares in (
        ({"threads": 4}, [(4, 5), (6, 7)]),
        ({"threads": 2}, [(), ()]),  # others may have the rest
        ({"threads": 4, "simulate": "1,1"}, [(), ()]),
        ({"threads": 2, "cpus": (6, 4)}, [(6,), (4,)]),
        ({"threads": 2, "cpus": (6,)}, [(6,), (6,)]),
    ):
        backend = CpuBackend(EngineConfig(tp=2, **settings))
        found = [backend.for_rank(Shard(number, 2)).settings for number in range(2)]
        assert [one.cpus for one in found] == shares, settings
        assert [one.threads for one in found] == [settings["threads"] // 2] * 2


def test_a_rank_that_reads_another_checkpoint_is_refused(tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    monkeypatch.setattr(rank_executor, "fingerprint", lambda *_: "replaced meanwhile")
    with pytest.raises(
        ConfigError,
        match=r"rank 1 has loaded another checkpoint: .*, not model repl",
    ):
        load(tmp_path, tp=2)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_fails_the_engine_in_time(tmp_path, monkeypatch, number, backend):
    monkeypatch.setattr(tensor_parallel, "RANK_TIMEOUT_S", 1.0)
    make_checkpoint(tmp_path)
    loaded = load(tmp_path, tp=4, tp_backend=backend)
    others = [rank.process for rank in loaded.runner.model._ranks]
    with (
        pytest.raises(Exception, match="rank of this worker has ended"),
        Bench(loaded.engine) as bench,
    ):
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        bench.engine.add(Sequence("a", [1, 2, 3], 3, long)).result(WAIT_S)
        bench.next_report()
        os.kill(others[1].pid, number)
        began = time.monotonic()
        try:
            bench.engine.ended.result(WAIT_S)
        finally:
            took = time.monotonic() - began
            monkeypatch.setattr(rank_process, "_STOP_S", 0.5)
    assert took < WAIT_S
    assert all(process.wait(WAIT_S) is not None for process in others)


def test_an_idle_worker_ends_with_a_rank(tmp_path):
    make_checkpoint(tmp_path)
    loaded = load(tmp_path, tp=2)
    with (
        pytest.raises(InternalError, match="a rank of this worker has ended, number 1"),
        Bench(loaded.engine) as bench,
    ):
        loaded.runner.ranks._ranks[0].process.kill()
        bench.engine.ended.result(WAIT_S)


@pytest.mark.parametrize(("number", "reason"), [(None, "hangs"), (signal.SIGKILL, "has ended")])
def test_a_wait_for_a_gpu_ends_when_a_rank_ends_or_hangs(tmp_path, monkeypatch, number, reason):
    """A kernel that waits for others ends when its group is closed: a wait for that stands here."""
    closed = threading.Event()

    class Nccl(GlooCollectives):
        def close(self):
            closed.set()
            super().close()

    monkeypatch.setattr(rank_executor, "GlooCollectives", Nccl)
    for module in (rank_executor, tensor_parallel):
        monkeypatch.setattr(module, "NcclCollectives", Nccl)
    make_checkpoint(tmp_path)
    loaded = load(tmp_path, tp=2, tp_backend="gloo")
    model = loaded.runner.model
    with model.waiting():
        assert not closed.is_set(), "nothing failed so far"
    model.limit_steps(1 if number is None else WAIT_S)
    with pytest.raises(RunnerFailed, match=f"a rank of this worker {reason}"), model.waiting():
        with model.waiting():
            pass  # the outer one is bounded still
        if number is not None:
            os.kill(model._ranks[0].process.pid, number)
        assert closed.wait(WAIT_S)
    with pytest.raises(RunnerFailed, match=reason), model.on_all_ranks(JoinGroup()):
        raise AssertionError("no further step begins")
    loaded.runner.close()


class ProcessGroupNCCL:
    """What NCCL would be asked for; of two ranks, of which both have the same."""

    @staticmethod
    def Options(is_high_priority_stream):
        return SimpleNamespace(config=SimpleNamespace())

    def __init__(self, store, rank, size, options):
        self.store, self.options, self.ordered = store, options, []

    def broadcast(self, tensors, options):
        self.ordered.append(not options.asyncOp)
        tensors[0].copy_(self.store.hello(options.rootRank))

    def allreduce(self, tensors, options):
        self.ordered.append(not options.asyncOp)
        tensors[0].mul_(2)

    def gather(self, parts, tensors, options):
        self.ordered.append(not options.asyncOp)
        for part in parts[0]:
            part.copy_(tensors[0])


def test_nccl_is_asked_for_what_graphs_can_hold(monkeypatch):
    """All calls go to the current stream; none is waited for on the host."""
    fake = SimpleNamespace(ProcessGroupNCCL=ProcessGroupNCCL)
    monkeypatch.setattr(rendezvous, "distributed", fake)
    for name in NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    store = Rendezvous(distributed.HashStore(), b"secret")
    group = collectives.NcclCollectives(Shard(0, 2), store, "127.0.0.1", 1.0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "a lost rank ends no process"
    group.join(torch.device("cpu"))
    x = torch.arange(6.0).view(2, 3)
    assert group.all_reduce(x.clone()).equal(2 * x)
    # Of seven columns the first rank has three, and the second four.
    gathered = group.gather(x, 7)
    assert gathered[:, :6].equal(torch.cat([x, x], dim=1)) and gathered.shape == (2, 7)
    assert group._group.ordered == [True] * 4
    aborted = threading.Event()
    group._group.abort = aborted.set
    group.close()
    assert aborted.is_set()
    assert group.seconds == 0
