"""Which device, numbers, pool, context and cores an engine gets from its settings."""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.config import EngineConfig, options
from baton.engine import cpu_affinity
from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.build import choose_dtype, device_of
from baton.engine.kernels.native.packing import PackedWeight
from baton.engine.kernels.torch.row_quantization import SCALE_BYTES
from baton.errors import ConfigError
from tests.unit.engine.bench import load
from tests.unit.engine.checkpoints import SMALL, make_checkpoint


def with_gpus(monkeypatch, *names):
    """As if torch had CUDA and saw these."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


def device(name, **settings):
    return str(device_of(EngineConfig(device=name, **settings)))


def test_a_gpu_has_a_number_and_one_that_is_not_there_is_an_error(monkeypatch):
    with_gpus(monkeypatch, "A", "B")
    found = {name: device(name) for name in ("auto", "cuda", "cuda:1", "cpu")}
    assert found == {"auto": "cuda:0", "cuda": "cuda:0", "cuda:1": "cuda:1", "cpu": "cpu"}
    assert device_of(EngineConfig(simulate="1,1")) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device cuda:2: .* only cuda:0 \(A\), cuda:1 \(B\)"):
        device("cuda:2")
    assert device("auto", tp=2) == "cuda:0"
    with pytest.raises(ConfigError, match=r"2 ranks take a GPU each, .* and torch sees 2"):
        device("cuda:1", tp=2)
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
    ("asked", "blocks", "longest"), [(0, 100, 512), (100, 100, 100), (512, 100, 512),
                                     (0, 4, 63), (60, 4, 60), (63, 4, 63)],
)  # fmt: skip
def test_model_settings_and_pool_limit_a_sequence(directory, caplog, asked, blocks, longest):
    """Where the pool cuts the model's context, that is said."""
    loaded = load(directory, max_context=asked, kv_blocks=blocks, kernels="torch")
    assert loaded.max_context == longest
    said = [text for text in caplog.messages if text.startswith("contexts end at ")]
    if asked or longest == 512:
        assert not said
        return
    (text,) = said
    assert text.startswith("contexts end at 63 tokens, and the model's at 512: --kv-blocks ")
    more = {"kv_blocks": int(text.split()[-3])}
    assert load(directory, kernels="torch", **more).max_context == 512


def test_a_pool_that_cuts_the_models_context_is_advised_as_it_was_sized(directory, caplog):
    cut = load(directory, kv_blocks=4, kernels="torch").layout.num_bytes
    caplog.clear()
    assert load(directory, kv_blocks=0, kv_cache_bytes=cut, kernels="torch").max_context == 63
    (text,) = [text for text in caplog.messages if text.startswith("contexts end at ")]
    option, given = text.split()[-4:-2]
    assert option == "--kv-cache"
    more = options.size(given)
    assert load(directory, kv_blocks=0, kv_cache_bytes=more, kernels="torch").max_context == 512


@pytest.mark.parametrize(
    ("asked", "blocks", "reason"),
    [
        (9999, 1000, "9999 is more than the model's own 512"),
        (64, 4, "64 does not fit the KV cache, which holds 64 tokens.*--max-context to 63"),
        (512, 4, r"512 does not fit .*give it --kv-blocks 33, or lower"),
    ],
)
def test_a_context_that_cannot_be_kept_is_refused(directory, asked, blocks, reason):
    with pytest.raises(ConfigError, match=reason):
        load(directory, max_context=asked, kv_blocks=blocks, kernels="torch")


def test_workers_that_compute_otherwise_are_never_paired(directory):
    found = {}
    names = ("dtype", "quantization", "kv_dtype")
    for values in itertools.product(("float32", "bfloat16"), ("none", "int8"), ("auto", "int8")):
        settings = dict(zip(names, values, strict=True))
        found[values] = load(directory, kernels="torch", **settings).descriptor
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], (one, other)
    assert len({descriptor.model_fingerprint for descriptor in found.values()}) == 1
    plain = found["bfloat16", "none", "auto"]
    assert (plain.dtype, plain.compute_dtype, plain.quantization) == ("bfloat16", "", "")
    small = found["bfloat16", "int8", "int8"]
    assert (plain.layout_version, small.layout_version) == (1, 2)
    assert (small.dtype, small.compute_dtype, small.quantization) == ("int8", "bfloat16", "int8")
    assert small.head_size == plain.head_size == SMALL["head_dim"]


def test_an_int8_pool_has_room_for_the_scales_and_is_scrubbed_with_them(directory):
    loaded = load(directory, kv_blocks=8, kv_dtype="int8")
    pool = loaded.runner.pool
    assert pool.dtype == torch.int8
    assert pool.shape == (8, 2, 2, 2, 16, SMALL["head_dim"] + SCALE_BYTES)
    pool.fill_(-1)  # as bytes from a broken transfer: scales that are no numbers
    loaded.runner.zero_blocks([2, 5])
    kept = pool.any(dim=5).flatten(1)
    assert kept.all(dim=1).tolist() == [block not in (2, 5) for block in range(8)]
    assert not kept[[2, 5]].any()


@pytest.mark.parametrize(
    ("head_dim", "block_size", "reason"),
    [(24, 16, "heads of 24 elements"), (16, 8, "blocks of 8 tokens")],
)
def test_a_model_that_native_attention_cannot_take_has_native_products(
    tmp_path, caplog, head_dim, block_size, reason
):
    make_checkpoint(tmp_path, head_dim=head_dim)
    with caplog.at_level("INFO"):
        model = load(tmp_path, block_size=block_size, kernels="native").runner.model
    assert type(model) is NativeOps
    assert all(isinstance(layer.qkv, PackedWeight) for layer in model._weights.layers)
    assert f"attention by torch: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "fp8"}, "--quantization fp8 .*: use int8, or add --device cuda"),
        ({"kv_dtype": "fp8"}, "--kv-dtype fp8 .*: use int8, or add --device cuda"),
        ({"kernels": "triton"}, "--kernels triton .* leave it out, or add --device cuda"),
    ],
)
def test_a_cpu_refuses_what_needs_a_gpu(directory, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(directory, device="cpu", **settings)


ALL = os.sched_getaffinity(0)


def place():
    """The calling thread's cores and niceness."""
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(*work):
    """The results of calls on one new thread."""
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(call).result() for call in work]


def test_a_thread_and_those_it_starts_are_pinned_and_stand_back():
    before = place()
    last = {max(ALL)}
    nice = before[1] + 3

    def child():
        return in_a_thread(place)[0]

    _, here, below = in_a_thread(lambda: cpu_affinity.pin_thread(last, nice), place, child)
    assert here == below == (last, nice)
    assert place() == before
    _, here = in_a_thread(lambda: cpu_affinity.pin_thread((), 0), place)
    assert here == before


def test_confined_gives_the_cores_back_whatever_happens():
    def fail():
        with cpu_affinity.pinned_to({min(ALL)}):
            assert os.sched_getaffinity(0) == {min(ALL)}
            raise ValueError("seen")

    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(ValueError, match="seen"):
            thread.submit(fail).result()
        assert thread.submit(place).result()[0] == ALL
