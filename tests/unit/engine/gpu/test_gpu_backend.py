"""An engine for a GPU, built and run on a CPU: all but the GPU's own figures is real."""

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from threading import current_thread
from types import SimpleNamespace

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build, state_cache
from baton.engine.backends.cpu.backend import CpuBackend
from baton.engine.backends.gpu import backend as gpu_backend
from baton.engine.backends.gpu import device_sampling, memory
from baton.engine.backends.gpu.backend import GpuBackend, choose_kernels, refused
from baton.engine.backends.gpu.memory import MemoryProfile
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kv_cache import plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.runner import Runner
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.errors import ConfigError
from baton.generation.sampling_params import SamplingParams
from baton.local import model_plan
from tests.unit.engine.bench import Bench
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.gpu.fake_gpu import GIB, FakeGpu, FewRowsGpu, UnmeasuredGpu
from tests.unit.engine.gpu.models import FEW_STATES
from tests.unit.engine.small_models import qwen_config
from tests.waiting import WAIT_S

MIB = 1 << 20
SETTINGS = {
    "dtype": "float32", "kv_blocks": 8, "max_context": 32, "max_batch": 2, "chunk_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "Qwen3ForCausalLM")
    return path


def on_gpu(checkpoint, gpu=None, allocate=None, **settings):
    config = EngineConfig(str(checkpoint), **{**SETTINGS, **settings})
    return build.load(config, allocate, GpuBackend(config, gpu or FakeGpu()))


def assert_same(gpu, cpu, *batches):
    """Both give the same tokens, batch by batch; how many of each prompt's were cached."""
    assert gpu.descriptor == cpu.descriptor, "they may be paired"
    found = []
    for loaded in (gpu, cpu):
        with Bench(loaded.engine) as bench:
            tokens, cached = [], []
            for batch in batches:
                some = [Sequence(f"{n}", list(p), len(p), of) for n, (p, of) in enumerate(batch)]
                tokens.append(bench.tokens(*some))
                cached += [one.num_cached for one in some]
        found.append((tokens, cached))
    assert found[0] == found[1]
    return cached


@pytest.mark.parametrize(
    "options", [{}, {"graphs": False, "overlap": False}, {"tp": 2}],
    ids=["graphs", "no graphs", "ranks"],
)  # fmt: skip
def test_tokens_and_descriptor_are_those_of_a_cpu(checkpoint, options, few_rows):
    """All of the GPU's path over its interpreted kernels.

    Ranks are processes, in step from the profile run on; Gloo stands for NCCL.
    """
    seeded = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.8, top_p=0.9, seed=7)
    wanted = (replace(seeded, temperature=0.0), seeded, replace(seeded, logprobs=1, max_tokens=2))
    cpu = build.load(EngineConfig(str(checkpoint), **{**SETTINGS, "kernels": "torch"}))
    gpu = on_gpu(checkpoint, FewRowsGpu(), chunk_tokens=4, **options)
    if "tp" in options:
        assert [pool.shape[0] for pool in gpu.runner.pools] == [8, 8]
        assert [pool.shape[3] for pool in gpu.runner.pools] == [1, 1], "each has its heads"
        gpu.runner.capture()
    else:
        build.warm_up(gpu)
    prompts = zip((list(range(10, 22)), [3, 5], [6]), wanted, strict=True)
    assert_same(gpu, cpu, [*prompts])
    assert gpu.max_context == cpu.max_context == 32


@pytest.mark.parametrize(
    "options", [{}, {"graphs": False, "overlap": False}, {"tp": 2, "graphs": False}],
    ids=["graphs", "no graphs", "ranks"],
)  # fmt: skip
def test_states_give_a_cpus_tokens_with_and_without_checkpoints(
    tmp_path, options, few_rows, monkeypatch
):
    monkeypatch.setattr(state_cache, "MIN_CHECKPOINT", 16)
    make_checkpoint(tmp_path, "Qwen3_5ForCausalLM", **FEW_STATES)
    greedy = SamplingParams(max_tokens=3, ignore_eos=True)
    settings = {"kv_blocks": 64, "max_context": 32, "chunk_tokens": 12}
    cpu = build.load(EngineConfig(str(tmp_path), **{**SETTINGS, **settings, "kernels": "torch"}))
    # Without a warm-up: the interpreter takes seconds for a step.
    gpu = on_gpu(tmp_path, UnmeasuredGpu(), **settings, **options)
    if options.get("graphs", True):
        gpu.runner.capture()
    one_by_one = [[(list(range(10, end)), greedy)] for end in (29, 29, 31)]
    assert assert_same(gpu, cpu, *one_by_one) == [0, 16, 16]


@pytest.mark.parametrize("options", [{}, {"graphs": False, "overlap": False}], ids=str)
def test_a_warm_up_takes_log_probabilities_of_each_type_of_logits(
    checkpoint, options, few_rows, monkeypatch
):
    score, types = device_sampling.score, set[torch.dtype]()

    def watched(logits, *rest):
        types.add(logits.dtype)
        return score(logits, *rest)

    monkeypatch.setattr(device_sampling, "score", watched)
    small = {"dtype": "bfloat16", "max_batch": 1, "chunk_tokens": 4, "max_context": 16}
    build.warm_up(on_gpu(checkpoint, **small, **options))
    assert types == {torch.float32, torch.bfloat16}


def test_the_pool_of_ranks_is_what_the_least_gpu_has_left(checkpoint, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "MOST_BLOCKS", 1000)
    one_block = plan_layout(ModelConfig.load(checkpoint), torch.float32, 16, 1, 0).num_bytes // 2
    # The second has 6 GiB free, of which the profile run took all but 256 MiB and 10 blocks.
    gpu = FakeGpu(peak=6 * GIB - memory.SPARE_BYTES - 10 * one_block)
    loaded = on_gpu(checkpoint, gpu, tp=2, kv_blocks=0, graphs=False, gpu_memory=1.0)
    assert [len(pool) for pool in loaded.runner.pools] == [10, 10]
    assert re.findall(r"others +(\S+) GiB", caplog.text) == ["1.00", "2.00"]
    loaded.runner.close()


@pytest.mark.parametrize("speculate", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_settings_build(checkpoint, overlap, speculate):
    loaded = on_gpu(
        checkpoint, UnmeasuredGpu(), overlap=overlap, speculate=speculate, quantization="int8",
        kv_dtype="fp8",
    )  # fmt: skip
    engine = loaded.engine(lambda report: None)
    assert engine._overlap == (overlap and not speculate)
    runner = loaded.runner
    assert isinstance(runner, GpuRunner)
    assert runner.model._tables[0].shape[1] == 32  # not the checkpoint's own context
    assert isinstance(runner.model._weights.layers[0].qkv, Int8Weight)
    assert runner.pool.dtype == torch.float8_e4m3fn
    assert runner.pool.shape[-1] == 16 + 4


def test_the_pool_is_what_the_budget_leaves(checkpoint, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    # Of 7.2 GiB, so that the rest is no burden for a test; another engine here holds 5 bytes.
    gpu, given, load = UnmeasuredGpu(peak=int(2.98 * GIB)), [], gpu_backend.load_or_make_weights
    gpu.held = 5

    def allocate(num_bytes, device):
        given.append(num_bytes)

    def watched(*args):
        gpu.held += 3 * GIB
        return load(*args)

    monkeypatch.setattr(gpu_backend, "load_or_make_weights", watched)
    loaded = on_gpu(checkpoint, gpu, allocate, graphs=False, gpu_memory=0.75, kv_blocks=0)
    block_bytes = loaded.layout.num_bytes // loaded.layout.num_blocks
    left = int(8 * GIB * 0.75) - gpu.peak() - 3 * GIB
    assert loaded.layout.num_blocks == left // block_bytes
    assert given == [loaded.layout.num_bytes]
    assert gpu.used == 1
    loaded.prepare()
    (text,) = (text for text in caplog.messages if text.startswith("GPU memory of"))
    assert "weights        3.00 GiB" in text
    assert "others         1.00 GiB" in text
    assert f"sequences that fit: {loaded.layout.num_blocks // 2} of 32 tokens" in text


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_too_little_memory_is_an_error_with_hints(checkpoint, monkeypatch):
    with pytest.raises(ConfigError, match="no GPU memory is left for KV"):
        on_gpu(checkpoint, UnmeasuredGpu(peak=8 * GIB), kv_blocks=0)
    with pytest.raises(ConfigError, match="another process has allocated GPU memory"):
        on_gpu(checkpoint, UnmeasuredGpu(), allocate=out_of_memory)
    gpu = FakeGpu()
    monkeypatch.setattr(gpu, "peak_of", out_of_memory)
    with pytest.raises(ConfigError, match="the model and a step of it do not fit"):
        on_gpu(checkpoint, gpu)


def test_what_tritons_kernels_cannot_run_torch_computes(checkpoint, caplog):
    loaded = on_gpu(checkpoint, block_size=8)
    assert type(loaded.runner) is Runner
    assert "slow: blocks of 8 tokens" in caplog.text
    loaded.prepare()
    with pytest.raises(ConfigError, match="--kernels triton: blocks of 8 tokens"):
        on_gpu(checkpoint, block_size=8, kernels="triton")
    with pytest.raises(ConfigError, match="--kernels native runs on a CPU only"):
        on_gpu(checkpoint, kernels="native")


def test_kernels_that_are_chosen_or_refused(checkpoint):
    config = ModelConfig.load(checkpoint)
    assert choose_kernels(EngineConfig(), config, (8, 0), "") == "triton"
    assert choose_kernels(EngineConfig(kernels="torch"), config, (9, 0), "") == "torch"
    assert choose_kernels(EngineConfig(), config, (9, 0), "no triton") == "torch"
    with pytest.raises(ConfigError, match="--kernels triton: no triton; leave it out"):
        choose_kernels(EngineConfig(kernels="triton"), config, (9, 0), "no triton")
    assert refused(config, 32, (8, 0)) == ""
    wide = {"head_size": 256}
    for changes, capability, reason in (
        ({}, (7, 5), "compute capability 7.5"),
        (wide, (8, 9), "8.9"),
        ({"head_size": 528}, (9, 0), "up to 512"),
        ({"num_heads": 256, "num_kv_heads": 1}, (9, 0), "256 heads"),
    ):
        assert reason in refused(replace(config, **changes), 16, capability)
    assert not refused(replace(config, **wide), 16, (9, 0))


@pytest.mark.parametrize("kind", ["quantization", "kv_dtype"])
def test_8_bit_formats_need_tritons_kernels_and_a_gpu_that_has_them(checkpoint, kind):
    option = "--" + kind.replace("_", "-")
    for value in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=f"{option} {value}: it needs Triton's kernels"):
            on_gpu(checkpoint, kernels="torch", **{kind: value})
    with pytest.raises(ConfigError, match=rf"{option} fp8: .*8\.9 .*leave it out"):
        on_gpu(checkpoint, FakeGpu((8, 0)), **{kind: "fp8"})
    loaded = on_gpu(checkpoint, UnmeasuredGpu((8, 0)), **{kind: "int8"})
    assert isinstance(loaded.runner, GpuRunner)


@pytest.mark.parametrize(("version", "runs"), [("2.11.0+cu130", False), ("2.12.0a0", True)])
def test_fp8_on_ada_needs_a_torch_that_keeps_its_product_on_the_stream(
    checkpoint, version, runs, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", version)
    expected = nullcontext() if runs else pytest.raises(ConfigError, match=r"8\.9 .*torch 2\.12")
    with expected:
        on_gpu(checkpoint, UnmeasuredGpu((8, 9)), quantization="fp8")
    on_gpu(checkpoint, UnmeasuredGpu((8, 9)), kv_dtype="fp8")
    on_gpu(checkpoint, UnmeasuredGpu((9, 0)), quantization="fp8")


def test_the_gpu_is_the_engine_threads_before_anything_else(checkpoint, monkeypatch):
    """CUDA keeps the current device for each thread."""
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: seen.append((current_thread().name, device))
    )
    on_cpu = build.load(EngineConfig(str(checkpoint), **{**SETTINGS, "kernels": "torch"}))
    device = torch.device("cuda", 1)
    runner = SimpleNamespace(
        pool=SimpleNamespace(device=device),
        launches_ahead=False,
        ranks=None,
        wait_for_writes=lambda blocks=None: None,
        zero_blocks=lambda blocks: None,
        close=lambda: None,
    )
    for loaded in (on_cpu, replace(on_cpu, runner=runner)):
        engine = loaded.engine(lambda report: None)
        first = engine.submit(lambda: list(seen))
        engine.start()
        found = first.result(WAIT_S)
        engine.stop()
    assert found == seen == [("engine", device)]


def test_chunks_are_larger_while_no_sequence_waits_for_its_token(checkpoint):
    config = EngineConfig(str(checkpoint), **{**SETTINGS, "chunk_tokens": 2048})
    on_cpu = build.load(config, backend=CpuBackend(replace(config, kernels="torch")))
    device = torch.device("cuda", 0)
    pool = SimpleNamespace(device=device)
    runner = SimpleNamespace(pool=pool, ranks=None, zero_blocks=lambda blocks: None)
    plan = ScheduledStep(
        [ScheduledSequence(Sequence("", [0] * 2001, 2001, SamplingParams()), 0, 2000)]
    )
    found = []
    for changes in ({}, {"chunk_ms": 30.0}):
        loaded = replace(on_cpu, runner=runner, settings=replace(config, **changes))
        chunk = loaded.engine(lambda report: None)._scheduler.chunk
        chunk.record_step(plan, 0.1)  # 20,000 tokens a second
        found.append((chunk.tokens, chunk.alone_tokens))
    assert found == [(500, 2000), (600, 600)]


CONFIG = qwen_config()  # 2 layers, 2 KV heads of 32: 512 B a token in bfloat16
BLOCK = 16 * 512


@pytest.fixture
def planned(monkeypatch):
    """The findings of a plan by subject, on a fake GPU."""
    monkeypatch.setattr(model_plan, "device_of", lambda settings: torch.device("cuda", 0))
    monkeypatch.setattr(model_plan, "Gpu", lambda device: FakeGpu())
    monkeypatch.setattr(model_plan, "check_model", lambda settings: None)  # it has no tokenizer
    return lambda settings: {one.subject: one for one in model_plan.check_plan(settings)}


def test_a_plan_of_a_gpu_counts_states_and_refuses_what_models_with_them_lack(tmp_path, planned):
    make_checkpoint(tmp_path, "Qwen3NextForCausalLM")
    found = planned(settings := EngineConfig(str(tmp_path), max_batch=2))
    assert found["kernels"].text == "Triton's"
    assert "KiB a token and 0.0352 MiB a sequence" in found["KV"].text
    found = planned(replace(settings, kv_blocks=9))
    assert found["KV"].level == "fail" and "takes 9 blocks of 9" in found["KV"].text
    assert planned(replace(settings, kv_blocks=10, max_context=8))["KV"].level == "ok"
    assert "before proposed tokens" in planned(replace(settings, speculate=2))["model"].text
    found = planned(replace(settings, max_lora_rank=171))
    assert "a rank of at most 170" in found["model"].text


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_plan_of_a_gpu_is_near_what_its_worker_finds(
    checkpoint, quantization, planned, monkeypatch
):
    monkeypatch.setattr(memory, "MOST_BLOCKS", 1 << 40)
    settings = EngineConfig(str(checkpoint), quantization=quantization, max_batch=2)
    found = planned(settings)
    assert found["kernels"].text == "Triton's"
    assert "GPU memory of cuda:0 Card: 8.00 GiB" in found["memory"].text
    ranked = replace(settings, tp=2)
    divided = planned(ranked)
    assert divided["weights"].text.endswith("divided among 2 ranks")
    tokens = [re.search(r"hold ([\d,]+) tokens", one["KV"].text)[1] for one in (found, divided)]
    one, two = (int(number.replace(",", "")) for number in tokens)
    assert two == pytest.approx(2 * one, rel=0.01), "each GPU has half of the heads"
    monkeypatch.setattr(FakeGpu, "free_and_total", lambda self: (1 << 20, 8 * GIB))
    found = planned(settings)
    assert found["model"].level == "fail" and "another GPU" in found["model"].text


ROOMY = MemoryProfile(
    total=80 * GIB, free=63 * GIB, weights=16 * GIB, activations=2 * GIB, graphs=1 * GIB
)


class TestMemory:
    @pytest.fixture(autouse=True)
    def _as_many_blocks_as_fit(self, monkeypatch):
        monkeypatch.setattr(memory, "MOST_BLOCKS", 1 << 40)

    def layout(self, usage, dtype=torch.bfloat16, **settings):
        config, asked = EngineConfig(**settings), None
        if config.kv_blocks or config.kv_cache_bytes:
            asked = plan_layout(CONFIG, dtype, 16, config.kv_blocks, config.kv_cache_bytes)
        return memory.kv_layout(usage, config, CONFIG, dtype, asked)

    @pytest.mark.parametrize(
        ("usage", "dtype", "settings", "num_blocks"),
        [
            (ROOMY, torch.bfloat16, {}, (72 * GIB - 19 * GIB) // BLOCK),
            (ROOMY, torch.bfloat16, {"gpu_memory": 0.5}, 21 * GIB // BLOCK),
            (ROOMY, torch.int8, {}, (72 * GIB - 19 * GIB) // (16 * 2 * 2 * 2 * 36)),
            # others hold 40 GiB, and a spare is left
            (MemoryProfile(80 * GIB, 24 * GIB, 16 * GIB, 2 * GIB, 1 * GIB), torch.bfloat16, {},
             (21 * GIB - memory.SPARE_BYTES) // BLOCK),
            # a size that is asked for wins
            (ROOMY, torch.bfloat16, {"kv_cache_bytes": 3 * BLOCK + 1, "gpu_memory": 0.01}, 3),
            (ROOMY, torch.bfloat16, {"kv_blocks": 7, "kv_cache_bytes": GIB}, 7),
        ],
    )  # fmt: skip
    def test_kv_gets_what_is_asked_for_or_left(self, usage, dtype, settings, num_blocks):
        assert self.layout(usage, dtype, **settings).num_blocks == num_blocks

    @pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.9, 1.0])
    @pytest.mark.parametrize("others", [0, 1, 10, 30])
    def test_all_of_it_adds_up_to_no_more_than_there_is(self, share, others):
        usage = MemoryProfile(80 * GIB, (64 - others) * GIB, 16 * GIB, 2 * GIB, 1 * GIB)
        taken = self.layout(usage, gpu_memory=share).num_bytes + usage.non_kv
        all_taken = taken + usage.others + memory.SPARE_BYTES
        assert taken <= 80 * GIB * share and all_taken <= 80 * GIB
        assert taken + BLOCK > 80 * GIB * share or all_taken + BLOCK > 80 * GIB

    def test_more_blocks_than_a_planner_can_use_are_not_kept(self, monkeypatch):
        monkeypatch.setattr(memory, "MOST_BLOCKS", 1000)
        assert self.layout(ROOMY).num_blocks == 1000
        assert self.layout(ROOMY, kv_blocks=1001).num_blocks == 1001

    @pytest.mark.parametrize(
        ("usage", "settings", "message"),
        [
            (ROOMY, {"kv_cache_bytes": 61 * GIB},
             r"--kv-cache asks for 61\.00 GiB and .* 60\.00 GiB left"),
            (ROOMY, {"kv_blocks": 10**9}, r"--kv-blocks asks for .*; try a smaller --kv-bl"),
            # others have it all
            (MemoryProfile(80 * GIB, 2 * GIB, 16 * GIB, 2 * GIB, 0), {},
             r"left for KV: .*try another GPU .* hold 62\.00 GiB"),
            # a share too small
            (ROOMY, {"gpu_memory": 0.2}, r"try a larger --gpu-memory, or --quantization fp8 or"),
            # weights too large, in 8 bits already
            (MemoryProfile(24 * GIB, 1 * GIB, 22 * GIB, 1 * GIB, 0),
             {"quantization": "fp8", "kv_dtype": "fp8", "gpu_memory": 0.95},
             r"weights take 22\.00 GiB.*; try a larger GPU, or more of them: a larger --tp"),
            # steps too large
            (MemoryProfile(24 * GIB, 9 * GIB, 14 * GIB, 7 * GIB, 2 * GIB), {},
             r"activations 7\.00 GiB, graphs 2\.00 GiB.*smaller --max-batch, --chunk-tokens"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_an_error_with_hints(self, usage, settings, message):
        with pytest.raises(ConfigError, match=message):
            self.layout(usage, **settings)
