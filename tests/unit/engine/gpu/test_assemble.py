"""An engine for a GPU, assembled and run on a CPU: all but the GPU's own figures is real."""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.backends.gpu import assemble as assembling
from baton.engine.backends.gpu.assemble import assemble, choose_kernels, unsupported
from baton.engine.backends.gpu.device import Gpu
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.build import Loaded
from baton.engine.loop import Progress, StepReport
from baton.engine.models.config import ModelConfig
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence
from baton.engine.settings import Parts
from baton.engine.weights.quantize import Int8Weight
from baton.errors import ConfigError
from baton.sampling import SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint

GIB = 1 << 30
SETTINGS = {
    "dtype": "float32", "kv_blocks": 8, "max_context": 32, "max_batch": 2, "chunk_tokens": 8,
}  # fmt: skip


class FakeGpu(Gpu):
    """A GPU of 8 GiB, of which 1 is others', beside a CPU that computes."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(torch.device("cpu"))
        self.told_capability = capability
        self.used = 0
        self.peaks: list[int] = []
        self.peak = GIB
        self.held = 0

    @property
    def name(self) -> str:
        return "cuda:0 Card"

    @property
    def capability(self) -> tuple[int, int]:
        return self.told_capability

    def use(self) -> None:
        self.used += 1

    def free_and_total(self) -> tuple[int, int]:
        return 7 * GIB - self.held, 8 * GIB

    def allocated(self) -> int:
        return self.held

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        self.peaks.append(self.peak)
        return self.peak


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    return tmp_path


def assembled(checkpoint: Path, gpu: Gpu | None = None, **settings: Any) -> Parts:
    config = ModelConfig.load(checkpoint)
    engine = EngineConfig(str(checkpoint), **{**SETTINGS, **settings})
    return assemble(engine, checkpoint, config, torch.float32, gpu or FakeGpu(), None)


def tokens_of(loaded: Loaded, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What an engine over it generates, greedily, for several prompts at once."""
    news: queue.SimpleQueue[Progress] = queue.SimpleQueue()

    def publish(report: StepReport) -> None:
        for progress in report.progress:
            news.put(progress)

    params = SamplingParams(max_tokens=count, ignore_eos=True)
    sequences = [Sequence(str(n), list(p), len(p), params) for n, p in enumerate(prompts)]
    engine = loaded.engine(publish)
    engine.start()
    try:
        for sequence in sequences:
            engine.add(sequence).result()
        running = len(sequences)
        while running:
            progress = news.get(timeout=20)
            assert not progress.abort_reason
            running -= progress.finish_reason is not None
    finally:
        engine.stop()
    return [sequence.tokens[len(p) :] for sequence, p in zip(sequences, prompts, strict=True)]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loaded]]:
    """`build.load` as where there is a GPU."""

    def parts(*args: Any) -> Parts:
        *rest, _, allocate = args
        return assemble(*rest, FakeGpu(), allocate)

    def load(checkpoint: Path, **settings: Any) -> Loaded:
        monkeypatch.setattr(build, "_on_cpu", parts)
        try:
            return build.load(EngineConfig(str(checkpoint), **{**SETTINGS, **settings}))
        finally:
            monkeypatch.undo()

    yield load


def test_the_engine_says_what_a_cpus_says(checkpoint: Path, on_gpu: Callable[..., Loaded]) -> None:
    prompts = [list(range(10, 22)), [3, 5], [6]]
    cpu = build.load(EngineConfig(str(checkpoint), **{**SETTINGS, "kernels": "torch"}))
    gpu = on_gpu(checkpoint)
    assert isinstance(gpu.runner, GpuRunner)
    build.warm_up(gpu)
    assert tokens_of(gpu, prompts, 4) == tokens_of(cpu, prompts, 4)
    assert gpu.descriptor == cpu.descriptor
    assert gpu.max_context == cpu.max_context == 32


@pytest.mark.parametrize(("overlap", "graphs"), [(False, True), (True, False)])
def test_switches_reach_the_runner(checkpoint: Path, overlap: bool, graphs: bool) -> None:
    parts = assembled(checkpoint, overlap=overlap, graphs=graphs)
    assert isinstance(parts.runner, GpuRunner)
    assert parts.lookahead == overlap
    assert len(parts.runner.model._cos) == 32  # not the checkpoint's own context
    limits = parts.runner.settings
    assert (limits.overlap, limits.graphs) == (overlap, graphs)
    assert (limits.max_batch, limits.max_context, limits.block_size) == (2, 32, 16)


def test_the_pool_is_what_the_budget_leaves(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gpu, given = FakeGpu(), []

    def allocate(num_bytes: int) -> torch.Tensor:
        given.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    config = ModelConfig.load(checkpoint)
    gpu.peak = int(5.98 * GIB)  # of 7.2 GiB, so that the rest is no burden for a test
    settings = EngineConfig(
        str(checkpoint), graphs=False, gpu_memory=0.75, **{**SETTINGS, "kv_blocks": 0}
    )
    parts = assemble(settings, checkpoint, config, torch.float32, gpu, allocate)
    block_bytes = parts.layout.num_bytes // parts.layout.num_blocks
    left = int(8 * GIB * 0.75) - gpu.peak
    assert parts.layout.num_blocks == left // block_bytes
    assert given == [parts.layout.num_bytes]
    assert gpu.used == 1
    assert len(gpu.peaks) == 2
    told = [text for text in caplog.messages if text.startswith("GPU memory of cuda:0 Card")]
    assert len(told) == 1
    assert "reserved" in told[0]
    parts.prepare()
    told = [text for text in caplog.messages if text.startswith("GPU memory of cuda:0 Card")]
    assert len(told) == 2
    assert "measured" in told[1]


def test_weights_are_what_was_allocated_while_loading(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gpu, original = FakeGpu(), assembling.weights_of
    gpu.held = 5  # by another engine of this process

    def weights_of(*args: Any) -> Any:
        gpu.held += 3 * GIB
        return original(*args)

    monkeypatch.setattr(assembling, "weights_of", weights_of)
    assembled(checkpoint, gpu)
    (told,) = (text for text in caplog.messages if text.startswith("GPU memory"))
    assert "weights        3.00 GiB" in told
    assert "others         1.00 GiB" in told


def test_steps_without_room_are_told(checkpoint: Path) -> None:
    gpu = FakeGpu()
    gpu.peak = 8 * GIB
    with pytest.raises(ConfigError, match="no GPU memory is left for KV"):
        assembled(checkpoint, gpu, kv_blocks=0)

    def peak_of(run: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.peak_of = peak_of  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="the model and a step of it do not fit"):
        assembled(checkpoint, gpu)


def test_a_pool_that_another_process_took_is_told(checkpoint: Path) -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    config, settings = ModelConfig.load(checkpoint), EngineConfig(str(checkpoint), **SETTINGS)
    with pytest.raises(ConfigError, match="another process took GPU memory meanwhile"):
        assemble(settings, checkpoint, config, torch.float32, FakeGpu(), allocate)


def test_what_triton_cannot_run_torch_does(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = assembled(checkpoint, block_size=8)
    assert isinstance(parts.runner, Runner)
    assert parts.lookahead == 0
    assert "slow: blocks of 8 tokens" in caplog.text
    parts.prepare()
    with pytest.raises(ConfigError, match="--kernels triton: blocks of 8 tokens"):
        assembled(checkpoint, block_size=8, kernels="triton")
    with pytest.raises(ConfigError, match="--kernels native: they compute on a CPU"):
        assembled(checkpoint, kernels="native")


@pytest.mark.parametrize("kind", ["quantization", "kv_dtype"])
def test_int8_and_fp8_need_tritons_kernels_and_a_gpu_that_has_them(
    checkpoint: Path, kind: str
) -> None:
    option = "--" + kind.replace("_", "-")
    for value in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=f"{option} {value}: it needs Triton's kernels"):
            assembled(checkpoint, kernels="torch", **{kind: value})
    with pytest.raises(ConfigError, match=rf"{option} fp8: .*8\.9 .*leave it out"):
        assembled(checkpoint, FakeGpu((8, 0)), **{kind: "fp8"})
    assert isinstance(assembled(checkpoint, FakeGpu((8, 0)), **{kind: "int8"}).runner, GpuRunner)


def test_quantized_weights_and_pools_are_what_is_loaded(checkpoint: Path) -> None:
    parts = assembled(checkpoint, quantization="int8", kv_dtype="fp8")
    assert isinstance(parts.runner, GpuRunner)
    assert isinstance(parts.runner.model._weights.layers[0].qkv, Int8Weight)
    assert parts.runner.pool.dtype == torch.float8_e4m3fn
    assert parts.runner.pool.shape[-1] == 16 + 4


def test_what_is_asked_of_kernels_is_kept(checkpoint: Path) -> None:
    config = ModelConfig.load(checkpoint)
    assert choose_kernels(EngineConfig(), config, (8, 0), "") == "triton"
    assert choose_kernels(EngineConfig(kernels="torch"), config, (9, 0), "") == "torch"
    assert choose_kernels(EngineConfig(), config, (9, 0), "no triton") == "torch"
    with pytest.raises(ConfigError, match="--kernels triton: no triton; leave it out"):
        choose_kernels(EngineConfig(kernels="triton"), config, (9, 0), "no triton")
    assert "compute capability 7.5" in unsupported(config, 16, (7, 5))
    assert unsupported(config, 32, (8, 0)) == ""
    wide = dataclasses.replace(config, head_size=256)
    assert "8.9" in unsupported(wide, 16, (8, 9)) and not unsupported(wide, 16, (9, 0))
    assert "up to 256" in unsupported(dataclasses.replace(config, head_size=272), 16, (9, 0))
    many = dataclasses.replace(config, num_heads=256, num_kv_heads=1)
    assert "256 heads" in unsupported(many, 16, (9, 0))


def test_the_gpu_is_the_engine_threads_before_anything_else(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps the current device for each thread."""
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: seen.append((current_thread().name, device))
    )
    settings = EngineConfig(str(checkpoint), **{**SETTINGS, "kernels": "torch"})
    on_cpu = build.load(settings)
    device = torch.device("cuda", 1)
    runner = SimpleNamespace(pool=SimpleNamespace(device=device))
    for loaded in (on_cpu, dataclasses.replace(on_cpu, runner=runner)):
        engine = loaded.engine(lambda report: None)
        first = engine.submit(lambda: list(seen))
        engine.start()
        told = first.result(timeout=10)
        engine.stop()
    assert told == seen == [("engine", device)]
