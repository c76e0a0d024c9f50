"""What does a decode step cost the host, whatever the device takes?

The engine's own loop over the GPU's runner, on a stream that runs nothing: what is left is the CPU
time of the engine's thread, but for the calls into CUDA. Then what a decode worker does on its
event loop with the report of such a step: load, metrics, and events for a router, as bytes. Each is
the least of several rounds, and has a budget: above it, the command ends with status 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from baton.block_hash import hash_chain
from baton.config import EngineConfig, WorkerConfig
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.block_manager import BlockManager
from baton.engine.collectives import SINGLE_RANK
from baton.engine.engine import Engine
from baton.engine.sampling.sampler import Sampler
from baton.engine.scheduler import ChunkBudget, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.step_report import StepReport
from baton.generation.sampling_params import SamplingParams
from baton.net.message_stream import serialized
from baton.tables import align
from baton.telemetry import propagation, tracing
from baton.v1.dispatch_pb2 import WorkerMessage
from baton.worker.metrics import LoadTracker, WorkerMetrics
from decode_worker.events import DecodeSpans, EventStream
from decode_worker.handoff import Handoff, State
from decode_worker.handoffs import Handoffs

BATCHES = (1, 64, 256)
# ms of the engine's thread for a step, and for each of its rows; of the event loop for a token
FIXED_MS, ROW_MS, TOKEN_MS = 0.15, 0.003, 0.001
_CONTEXT, _STEPS, _VOCAB, _BLOCK = 512, 32, 256, 16
_WARM_UP = 8
_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "one row in eight with penalties": {"frequency_penalty": 0.5},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6, help="of which the least counts: 6")


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    over, rows = False, list[tuple[str, ...]]()
    for batch in BATCHES:
        budget = FIXED_MS + ROW_MS * batch
        for name, settings in _SETTINGS.items():
            found = min(engine_ms(batch, settings) for _ in range(args.rounds))
            kept_to = "penalties" not in name  # which may cost more
            over |= kept_to and found > budget
            cells = f"{found:.3f}", f"{found / batch * 1e3:.2f}", f"{budget:.3f}" if kept_to else ""
            rows.append((f"engine, {batch}, {name}", *cells))
    for batch in BATCHES[1:]:
        found, budget = min(worker_ms(batch) for _ in range(args.rounds)), TOKEN_MS * batch
        over |= found > budget
        cells = f"{found:.3f}", f"{found / batch * 1e3:.2f}", f"{budget:.3f}"
        rows.append((f"event loop, {batch}", *cells))
    print(*align([("step", "ms CPU", "us a row", "budget ms"), *rows]), sep="\n")
    return int(over)


class _NoDevice(Stream):
    """Runs nothing: every token is 0."""

    def put(self, work: Callable[[], object]) -> None:
        pass


class _NoModel:
    """What a runner needs to know of a model whose steps do not run."""

    expert_tokens = hidden = None
    collectives = SINGLE_RANK

    def on_all_ranks(self, *_: object) -> Any:
        return nullcontext()


def decoding(batch: int, settings: dict[str, Any], publish: Callable[[StepReport], None]) -> Engine:
    """An engine that is not started, whose sequences decode."""
    most = _CONTEXT + 2 * _STEPS
    blocks = BlockManager(-(-most // _BLOCK) * batch + 8, _BLOCK, prefix_cache=False)
    pool = torch.zeros(blocks.num_blocks, 1, 2, 1, _BLOCK, 16)
    sampler = Sampler(frozenset({1}), _VOCAB)
    model: Any = _NoModel()
    options = EngineConfig(max_batch=batch)
    runner = GpuRunner(model, pool, sampler, options, most + 64, _NoDevice())
    scheduler = Scheduler(blocks, ChunkBudget(2048, 1.0, 64), batch)
    engine = Engine(runner, scheduler, frozenset({1}), most + 64, publish, overlap=True)
    prompt, hashes = [2] * _CONTEXT, hash_chain([2] * _CONTEXT, _BLOCK, "")
    for number in range(batch):
        plain = "frequency_penalty" in settings and number % 8
        params = SamplingParams(seed=number, max_tokens=2 * _STEPS, **({} if plain else settings))
        sequence = Sequence(
            f"{number:032x}", list(prompt), _CONTEXT, params, block_hashes=list(hashes)
        )
        engine.reserve(sequence)
        engine.resume(sequence.seq_id, _CONTEXT, 7)
    engine._inbox.run_all()
    return engine


def engine_ms(batch: int, settings: dict[str, Any]) -> float:
    """CPU of a step in the midst of many."""
    engine = decoding(batch, settings, lambda report: None)
    for _ in range(_WARM_UP):
        engine._step()
    began = time.thread_time()
    for _ in range(_STEPS):
        engine._step()
    return (time.thread_time() - began) / _STEPS * 1e3


class _Router:
    """Takes messages, as a connection does, and sends none."""

    def __init__(self) -> None:
        self.outgoing_soon = WorkerMessage()

    def flush(self) -> None:
        """Nothing leaves by itself."""

    def sent(self) -> bytes:
        message, self.outgoing_soon = self.outgoing_soon, WorkerMessage()
        return serialized(message)


def worker_ms(batch: int) -> float:
    """CPU of a decode worker's event loop for a step in the midst of many."""
    reports = list[StepReport]()
    engine = decoding(batch, {}, reports.append)
    for _ in range(_WARM_UP + _STEPS):
        engine._step()
    tracker, metrics = LoadTracker(), WorkerMetrics(WorkerConfig("decode"))
    router, unused = _Router(), dict.fromkeys(("limits", "grammars", "lease_s", "verify_timeout_s"))
    made: Any = Handoffs
    handoffs: Handoffs = made(engine, **unused)
    tracer = tracing.setup("benchmark", "", {}, 0.0).tracer
    for seq_id, sequence in engine._sequences.items():
        spans = DecodeSpans(tracer, propagation.extract([]))
        connection: Any = router
        events = EventStream(connection, seq_id)
        handoff = Handoff(seq_id, sequence, _BLOCK, None, events, spans, State.RUNNING)
        handoffs._handoffs[seq_id] = handoff
    began = 0.0
    for number, report in enumerate(reports):
        if number == len(reports) - _STEPS:
            began = time.thread_time()
        tracker.update(report)
        metrics.stepped(report)
        handoffs.on_step(report)
        router.sent()
    return (time.thread_time() - began) / _STEPS * 1e3
