"""`baton doctor --model`: the memory that a worker of a model needs on this machine.

Reads only config.json and the headers of safetensors: weights are built as in a worker, but on
torch's meta device. The memory of a step is estimated; a worker on a GPU measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from baton.config import CPU_KV_CACHE_BYTES, EngineConfig, model_path
from baton.engine.backends.backend import unsupported
from baton.engine.backends.cpu import backend as cpu
from baton.engine.backends.gpu import memory
from baton.engine.backends.gpu.backend import refused
from baton.engine.backends.gpu.cuda_graphs import shapes_of
from baton.engine.backends.gpu.device import Gpu
from baton.engine.build import choose_dtype, device_of, kv_dtype_of
from baton.engine.checkpoint.tensor_headers import ELEMENT_BYTES
from baton.engine.draft_model import draft_layout
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.models.tensor_names import EMBEDDING, LM_HEAD, num_parameters, text_tensors
from baton.engine.models.weight_loader import random_weights
from baton.engine.quantization.config import GgufConfig, weight_format
from baton.engine.quantization.linear_weight import DenseWeight
from baton.errors import CheckpointError, ConfigError
from baton.local import doctor
from baton.local.doctor import Finding, fail, ok, warn
from baton.local.model_check import check_model

PROCESS_BYTES = 400 << 20  # Python, torch and gRPC in a worker on a CPU
_SHORT = 1024  # tokens of a typical sequence
_SCALES = ("_scales", ".weight_scale")
_GIB = float(1 << 30)


def check_plan(settings: EngineConfig) -> Iterator[Finding]:
    """Checks that a worker with these settings fits here, and how much KV it has room for."""
    try:
        check_model(settings)
        config, device = ModelConfig.load(model_path(settings.model)), device_of(settings)
        config.check_device(settings, device.type)
        gpu = Gpu(device) if device.type == "cuda" else None
        part = f" (of {config.wrapper}, text only)" if config.wrapper else ""
        yield ok(
            "model",
            f"{config.architecture}{part}, {num_parameters(config) / 1e6:,.1f} M parameters, "
            f"contexts of up to {config.max_context:,} tokens",
        )
        yield _kernels(settings, config, gpu)
        yield from _memory(settings, config, gpu)
    except (CheckpointError, ConfigError) as error:
        yield fail("model", str(error))


def _kernels(settings: EngineConfig, config: ModelConfig, gpu: Gpu | None) -> Finding:
    if settings.kernels == "torch":
        reason = "--kernels torch"
    elif gpu is None:
        reason = unsupported(config, settings.block_size, "native")
    else:
        reason = refused(config, settings.block_size, gpu.capability)
    if reason:
        return warn("kernels", f"torch's kernels will be used, several times slower: {reason}")
    return ok("kernels", "native" if gpu is None else "Triton's")


def _memory(settings: EngineConfig, config: ModelConfig, gpu: Gpu | None) -> Iterator[Finding]:
    dtype = choose_dtype(settings.dtype, config.dtype, torch.device("cuda" if gpu else "cpu"))
    kv_dtype = kv_dtype_of(settings, dtype)
    context = config.longest_context(settings)
    kv_bytes = settings.kv_cache_bytes or (0 if gpu else CPU_KV_CACHE_BYTES)
    layout = None
    if settings.kv_blocks or kv_bytes:
        size = settings.block_size, settings.kv_blocks, kv_bytes, settings.chunk_tokens
        layout = plan_layout(config, kv_dtype, *size)
    longest = min(context, layout.num_tokens) if layout else context
    held = weight_format(settings, config.quantization)
    weights = weight_bytes(settings, config, dtype, gpu is not None)
    form = str(dtype).removeprefix("torch.") if held == "none" else held
    own, ranks = Shard(0, settings.tp, settings.tp > 1 and settings.expert_parallel), settings.tp
    divided = f", divided among {ranks} ranks" if ranks > 1 else ""
    yield ok("weights", f"{weights / _GIB:.2f} GiB in {form}{divided}")
    step = step_bytes(settings, config, dtype, longest)
    if gpu is None:
        assert layout is not None, "it has a size for KV"
        yield _kv(settings, layout, context)
        drafting = 0
        if settings.speculative_model:
            drafting, found = _draft(settings, config, dtype, layout)
            yield found
        yield _host_memory(settings, config, dtype, weights, layout.num_bytes + step + drafting)
        return
    free, total = gpu.free_and_total()
    graphs = len(shapes_of(settings, context))
    graphs = memory.graphs_reserve(step, graphs, config.num_layers)
    each = -(-weights // ranks)
    usage = memory.MemoryProfile(total, free - each, each, step, graphs)
    shard = own.config(config)  # with the heads whose KV a GPU holds
    if layout is not None:
        layout = replace(layout, num_kv_heads=shard.num_kv_heads)
    layout = memory.kv_layout(usage, settings, shard, kv_dtype, layout)
    yield _kv(settings, replace(layout, num_kv_heads=config.num_kv_heads), context)
    yield ok("memory", memory.summary(gpu.name, usage, layout, settings, context))


def _draft(
    settings: EngineConfig, config: ModelConfig, dtype: torch.dtype, layout: KvLayout
) -> tuple[int, Finding]:
    """Bytes of the draft model, and what to say of them. layout: of the other model's KV."""
    draft = config.draft(settings)
    own = settings.of_draft(draft.quantization is not None)
    kv = draft_layout(settings, draft, layout, dtype)
    shares = settings.is_mtp and settings.tp == 1  # the embedding and output layer of the model
    weights = weight_bytes(own, draft, dtype, False, shares)
    draft = replace(draft, vocab_size=1) if shares else draft
    name = "multi-token prediction layer" if settings.is_mtp else draft.architecture
    return weights + kv.num_bytes, ok(
        "draft model",
        f"{name}, {num_parameters(draft) / 1e6:,.1f} M parameters: "
        f"{weights / _GIB:.2f} GiB of weights and {kv.num_bytes / _GIB:.2f} GiB of KV",
    )


def _kv(settings: EngineConfig, layout: KvLayout, context: int) -> Finding:
    groups, tokens, beyond = layout.groups, layout.num_tokens, ""
    needed = layout.bytes_of(context + 1)
    remedy = f"--kv-cache {math.ceil(needed / _GIB)}GiB"
    if settings.kv_blocks:  # it sizes the pool, whatever --kv-cache is
        remedy = f"--kv-blocks {needed // layout.block_bytes}"
    if tokens < 1:
        text = f"a sequence's state takes {layout.state_blocks} blocks of {layout.num_blocks}"
        return fail("KV", text, remedy)
    if layout.state_blocks:
        beyond = f" and {layout.state_bytes / 2**20:,.3g} MiB a sequence"
    if groups.slide:
        tokens = min(tokens, context + 1)
        size = groups.windows.count(0) * layout.block_bytes / layout.block_size
        beyond = f", {size / 1024:,.3g} beyond windows of {max(groups.windows):,}"
    share = groups.longest(layout.num_blocks // settings.max_batch, layout.step_tokens)
    text = (
        f"{layout.bytes_per_token / 1024:,.3g} KiB a token{beyond}; "
        f"{layout.num_bytes / _GIB:.2f} GiB hold {tokens:,} tokens: "
        f"{layout.num_bytes // layout.bytes_of(_SHORT):,} sequences of {_SHORT:,}, or "
        f"--max-batch {settings.max_batch} of {min(share, tokens):,}"
    )
    if tokens > context:
        return ok("KV", text)
    found = fail if settings.max_context else warn  # an explicit --max-context is never lowered
    return found(
        "KV",
        f"{text}; contexts are limited to {tokens - 1:,} tokens instead of {context:,}",
        f"{remedy}, or accept it with --max-context {tokens - 1}",
    )


def _host_memory(
    settings: EngineConfig, config: ModelConfig, dtype: torch.dtype, weights: int, others: int
) -> Finding:
    need, free = weights + others + settings.tp * PROCESS_BYTES, doctor.host_memory()[1]
    text = f"a worker needs {need / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB are free"
    if 2 * need <= free:
        return ok("memory", text)
    fixes = ["a smaller --kv-cache"] if others > weights else []
    if weight_format(settings, config.quantization) == "none":
        for name in ("int8", "int4"):
            changed = weight_bytes(replace(settings, quantization=name), config, dtype, False)
            saved = (weights - changed) / _GIB
            fixes.append(f"--quantization {name} ({saved:.2f} GiB less)")
    fix = ", or ".join([*fixes, "a larger machine"])
    if need <= free:
        return warn("memory", f"{text}: too little for a worker of each role", fix)
    return fail("memory", text, fix)


def weight_bytes(
    settings: EngineConfig, config: ModelConfig, dtype: torch.dtype, on_gpu: bool,
    shares: bool = False,
) -> int:  # fmt: skip
    """Bytes of a worker's weights; an experts' router counts as part of the experts.

    shares: whether embedding and output layer are another model's.
    """
    if isinstance(config.quantization, GgufConfig):
        if on_gpu:  # which has no products of these formats
            return num_parameters(config) * dtype.itemsize
        stored = text_tensors(model_path(settings.model), config)[0]
        embedding = stored[EMBEDDING]
        is_copied = embedding.num_bytes if config.tie_embeddings else 0
        table = config.vocab_size * config.hidden_size * dtype.itemsize
        others = sum(one.num_bytes for one in stored.values()) - embedding.num_bytes
        return others + table + is_copied
    is_mxfp4 = config.experts is not None and config.experts.mxfp4
    if not settings.random_weights and (config.quantization or is_mxfp4):  # loaded as stored
        return sum(
            # Scales in 8 bits become float32.
            one.num_bytes * (4 if name.endswith(_SCALES) and ELEMENT_BYTES[one.dtype] == 1 else 1)
            for name, one in text_tensors(model_path(settings.model), config)[0].items()
            if not (shares and name in (EMBEDDING, LM_HEAD))
        )
    config = replace(config, vocab_size=1) if shares else config
    if on_gpu:
        from baton.engine.backends.gpu.linear import prepare  # noqa: PLC0415 - imports triton

        prepared = partial(prepare, quantization=settings.quantization)
    else:
        is_native = not unsupported(config, settings.block_size, "") and settings.kernels != "torch"
        prepared = partial(cpu.prepare_weight, quantization=settings.quantization, native=is_native)

    def held(config: ModelConfig) -> int:
        weights = random_weights(config, dtype, torch.device("meta"), 0, prepared)
        head = weights.lm_head
        is_tied = isinstance(head, DenseWeight) and head.tensor is weights.embedding
        looked_up = 0 if is_tied else weights.embedding.nbytes
        if weights.token_inputs is not None:
            looked_up += weights.token_inputs.embedding.nbytes
        return weights.num_bytes + looked_up

    if (experts := config.experts) is None:
        return held(config)
    # All layers are alike, and thousands of tensors would take a minute.
    one, two = (held(replace(config, experts=replace(experts, count=count))) for count in (1, 2))
    return one + (experts.count - 1) * (two - one)


def step_bytes(
    settings: EngineConfig, config: ModelConfig, dtype: torch.dtype, context: int
) -> int:
    """Estimated bytes of a full step's activations, and of the RoPE tables."""
    rows, experts = settings.chunk_tokens + settings.max_batch, config.experts
    layers = [config.layer(index) for index in range(config.num_layers)]
    attention = max((2 * one.num_heads + 2 * one.num_kv_heads) * one.head_size for one in layers)
    inner, taken = config.intermediate_size, 0
    if experts is not None:
        inner, taken = max(experts.size, experts.shared_size), experts.routing.per_token
    row = (4 + taken) * config.hidden_size + attention + 3 * inner * max(taken, 1)
    logits = 3 * settings.max_batch * config.vocab_size * 4  # with the sampler's copies
    ropes = {(rope, one.rope_size) for rope, one in zip(config.ropes, layers, strict=True)}
    tables = sum(2 * context * size * 4 for _, size in ropes)
    return rows * row * dtype.itemsize + logits + tables
