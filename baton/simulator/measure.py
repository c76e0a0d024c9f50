"""Measures what a simulation needs to know of a worker: its speed, its KV cache, a transfer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from baton.bench.engine import EngineDriver, load, most_sequences
from baton.config import EngineConfig, SimulatedSpeed
from baton.engine.build import Loaded
from baton.errors import ConfigError
from kvtransfer.checksum import Checksum
from kvtransfer.pool import KvPool, Slots, copy_slots

_TRIES, _WARM_UP, _STEPS = 3, 3, 8
_PROMPTS = (256, 1024, 2048)  # tokens
_CONTEXTS, _BATCHES = (128, 1024), (1, 4, 16)
_ENOUGH_S = 2.0  # of one prompt's tries
_COPIED_BYTES = 32 << 20

Show = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A worker with these settings on this machine."""

    speed: SimulatedSpeed
    num_blocks: int
    block_size: int
    token_bytes: int
    max_context: int
    chunk_s: float
    transfer_bytes_per_s: float | None  # None: not measured


def measure(settings: EngineConfig, show: Show) -> Measured:
    """Loads the model and measures it.

    Raises ConfigError if too little context fits, and as `baton.bench.engine.load`.
    """
    show("loading the model")
    loaded = load(settings)
    layout = loaded.layout
    longest = min(loaded.max_context, layout.num_tokens) - _WARM_UP - _STEPS - 4
    if longest < _PROMPTS[0]:
        raise ConfigError(
            f"contexts of {longest} tokens are too short to measure: raise --max-context or "
            "--kv-cache"
        )
    with closing(EngineDriver(loaded)) as driver:
        rate, doubled_at = _prefill(driver, longest, show)
        step_ms, sequence_ms, context_ms = _decode(driver, longest, loaded, show)
        speed = SimulatedSpeed(rate, step_ms, sequence_ms, context_ms, doubled_at)
        mixed = _mixed(driver, speed, min(longest, _PROMPTS[1]), show)
    return Measured(
        SimulatedSpeed(rate, step_ms, sequence_ms, context_ms, doubled_at, mixed),
        layout.num_blocks,
        layout.block_size,
        layout.bytes_per_token,
        loaded.max_context,
        loaded.chunk_s,
        _transfer(loaded, show),
    )


def _prefill(driver: EngineDriver, longest: int, show: Show) -> tuple[float, float]:
    """Tokens a second at the start of a prompt, and the context after which they take twice as
    long; 0 if no context slows them down."""
    tokens = [count for count in _PROMPTS if count <= longest]
    seconds: list[float] = []
    for count in tokens:
        tries = [driver.prefill(count)]
        while len(tries) < _TRIES and sum(tries) < _ENOUGH_S:
            tries.append(driver.prefill(count))
        seconds.append(statistics.median(tries))
        show(f"prefill  {count:6,} tokens  {count / seconds[-1]:12,.0f} tokens/s")
    # seconds / tokens = 1 / rate + tokens / (2 * rate * doubled_at)
    lengths, each = np.array(tokens, np.float64), np.array(seconds) / tokens
    slope, base = np.polyfit(lengths, each, 1) if len(tokens) > 1 else (0.0, each[0])
    if slope <= 0 or base <= 0:  # longer prompts are computed as fast, or faster
        return float(lengths.sum() / sum(seconds)), 0.0
    return 1 / float(base), float(base / slope / 2)


def _decode(
    driver: EngineDriver, longest: int, loaded: Loaded, show: Show
) -> tuple[float, float, float]:
    """Milliseconds of a decode step: alone, for each sequence, for each 1,000 tokens of context."""
    rows, step_ms = [], []
    for context in sorted({min(one, longest) for one in _CONTEXTS}):
        most = most_sequences(loaded, context + _WARM_UP + _STEPS + 2)
        for batch in [one for one in _BATCHES if one <= max(1, most)]:
            took_s = driver.decode([context] * batch, _WARM_UP, _STEPS)
            rows.append((1.0, batch, batch * context / 1e3))
            step_ms.append(took_s * 1e3)
            show(f"decode   batch {batch:3}, context {context:6,}  {took_s * 1e3:9.2f} ms a step")
    return _fit(np.array(rows), np.array(step_ms))


def _fit(rows: np.ndarray, values: np.ndarray) -> tuple[float, float, float]:
    """The least squares of non-negative parts, where no part is left out but a negative one.

    Relative errors count, so that short steps are as right as long ones.
    """
    used = [0, 1, 2]
    while True:
        weighted = rows[:, used] / values[:, None]
        found, *_ = np.linalg.lstsq(weighted, np.ones(len(values)), rcond=None)
        if (found >= 0).all():
            parts = dict(zip(used, found.tolist(), strict=True))
            return parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0)
        used.pop(int(found.argmin()))


def _mixed(driver: EngineDriver, speed: SimulatedSpeed, tokens: int, show: Show) -> float:
    """Duration of steps that compute a prompt beside streams, over the sum of both parts."""
    streams, context = 4, 128
    total_s, steps = driver.beside([context] * streams, tokens, _WARM_UP)
    apart_s = speed.step_s(tokens, 0, 0, tokens * tokens / 2)
    apart_s += steps * speed.step_s(0, streams, streams * context)
    show(
        f"mixed    {tokens:6,} tokens beside {streams} streams  {total_s * 1e3:9.1f} ms in {steps} "
        f"steps, {total_s / apart_s:.2f} of both apart"
    )
    return min(2.0, max(0.5, total_s / apart_s))


def _transfer(loaded: Loaded, show: Show) -> float | None:
    """Bytes a second of a handoff through shared memory, with its checksum; None on a GPU."""
    pool = loaded.runner.pool
    if pool.device.type != "cpu":
        show("transfer is not measured on a GPU: give --transfer-rate")
        return None
    layout = loaded.layout
    block_bytes = layout.bytes_per_token * layout.block_size
    count = max(1, min(layout.num_blocks, _COPIED_BYTES // block_bytes))
    slots = Slots(tuple(range(count)), count * layout.block_size)
    other = KvPool(torch.empty_like(pool[:count]))
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        copy_slots(KvPool(pool), slots, other, slots, Checksum())
        seconds.append(time.perf_counter() - began)
    rate = count * block_bytes / statistics.median(seconds)
    show(f"transfer {rate / 1e9:.2f} GB/s, through shared memory")
    return rate
