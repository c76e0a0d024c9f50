"""`baton advise` says how many workers of which role a load needs, by simulation."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.process_setup import limit_cpu, with_threads
from baton.config import EngineConfig, SimulatedSpeed
from baton.config.options import build
from baton.simulator.settings import AdviseConfig

if TYPE_CHECKING:
    from baton.simulator.advise import Load, Tried
    from baton.simulator.worker import WorkerSpec

_TEXT = """\
Says how many prefill, decode and mixed workers serve a load within latency limits, and with which
chunks, or that prefill and decode should not be on different workers. It measures a worker on this
machine (or takes the speed of --simulate), and simulates arrangements under the load with the
router's own admission, queueing and placement on a virtual clock: a minute of load takes seconds.
docs/capacity.md says what is simulated, and how closely."""
_EXAMPLES = """\
  baton advise --model DIR --rate 4 --prompt-tokens 2000 --output-tokens 200 --slo ttft=1,tpot=0.05
  baton advise --simulate 8000,10,0.5 --rate 12 --workers 4       a worker's speed is known
  baton advise --simulate 40000,8,0.1 --trace conversation_trace.jsonl --json
  baton advise --simulate 8000,10 --rate 8 --arrangement prefill=1,decode=1 --arrangement mixed=2"""
_SIMULATE = (
    "speed of a worker, instead of measuring this machine: prefill tokens a second, ms of a decode "
    "step, ms more for each sequence, and what else docs/capacity.md says"
)
_KV_TOKENS, _TOKEN_BYTES = 131072, 65536  # of a worker that is not measured
_HEAD = (
    f"{'workers':24} {'chunk':>6} {'TTFT p50':>9} {'p95':>7} {'TPOT p50':>9} {'p95':>6} "
    f"{'ITL p99':>8} {'good':>7} {'req/s':>7}  busy"
)


def add_commands(commands: options.Commands) -> None:
    """Adds `advise`."""
    text = "say how many workers of which role a load needs"
    parser = options.add_command(commands, "advise", text, _TEXT, _EXAMPLES)
    options.add_declared(parser, AdviseConfig)
    options.add_declared(parser, EngineConfig, texts={"simulate": _SIMULATE})
    options.add_config_option(parser)
    parser.add_argument("--json", action="store_true", help="print the advice as one JSON object")
    parser.set_defaults(run=_run, extra="worker")


def _run(args: argparse.Namespace) -> int:
    values: dict[str, Any] = {"seed": 0, **vars(args)}
    values["arrangement"] = tuple(values.get("arrangement", ()))
    config = build(AdviseConfig, values)
    engine = options.settings(EngineConfig, "advise", args)

    def show(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    from baton.simulator.advise import Advisor, Load

    load = Load.from_workload(config.workload)
    show(_described(load))
    config, spec = _worker(config, engine, show)
    show(f"a worker: --simulate {spec.speed}, KV of {spec.num_blocks * spec.block_size:,} tokens")
    show(f"\n{_HEAD}")
    advice = Advisor(config, load, spec, lambda tried: show(_row(tried))).advise()
    if args.json:
        print(json.dumps({"simulate": str(spec.speed), **advice.as_dict()}))
        return 0
    best = advice.best
    if not advice.meets:
        print("\nNo arrangement that was tried meets the limits; the best one:")
    print(
        f"\n{best.name}, --chunk-ms {best.chunk_s * 1e3:.0f}: {advice.why}."
        if best.is_disaggregated
        else f"\nDo not disaggregate: {best.name}, --chunk-ms {best.chunk_s * 1e3:.0f}: "
        f"{advice.why}."
    )
    return 0


def _worker(
    config: AdviseConfig, engine: EngineConfig, show: Any
) -> tuple[AdviseConfig, WorkerSpec]:
    """What a worker is like, as given or as measured, and the settings with what was measured."""
    from baton.simulator.worker import WorkerSpec

    if engine.simulate:
        size = engine.block_size
        spec = WorkerSpec(
            SimulatedSpeed.parse(engine.simulate),
            num_blocks=engine.kv_blocks or (config.kv_tokens or _KV_TOKENS) // size,
            block_size=size,
            max_batch=engine.max_batch,
            chunk_tokens=engine.chunk_tokens,
            chunk_s=engine.chunk_ms / 1e3 or 0.06,
            token_bytes=config.token_bytes or _TOKEN_BYTES,
        )
        return config, spec
    engine = with_threads(engine)
    from baton.local.model_check import check_model

    check_model(engine, worker=True)
    limit_cpu(engine.threads, engine.cpus)
    from baton.simulator.measure import measure

    found = measure(engine, show)
    blocks = config.kv_tokens // found.block_size or found.num_blocks
    spec = WorkerSpec(
        found.speed, blocks, found.block_size, engine.max_batch, engine.chunk_tokens,
        found.chunk_s, config.token_bytes or found.token_bytes, found.max_context,
    )  # fmt: skip
    rate = config.transfer_gb_per_s or (found.transfer_bytes_per_s or 0.0) / 1e9
    return replace(config, transfer_gb_per_s=rate), spec


def _described(load: Load) -> str:
    return (
        f"load: {len(load.demands):,} requests in {load.seconds:.0f} s ({load.rate:.3g} a second), "
        f"prompts of {load.prompt_tokens:.0f} and outputs of {load.output_tokens:.0f} tokens on "
        "average"
    )


def _row(tried: Tried) -> str:
    stats = tried.stats
    ttft, tpot, itl = stats["ttft_s"] or {}, stats["tpot_s"] or {}, stats["itl_s"] or {}
    busy = ", ".join(f"{role} {one['busy_share']:.0%}" for role, one in stats["workers"].items())
    nan = float("nan")
    return (
        f"{tried.name:24} {tried.chunk_s * 1e3:3.0f} ms {ttft.get('p50', nan):7.2f} s "
        f"{ttft.get('p95', nan):5.2f} s {tpot.get('p50', nan) * 1e3:6.1f} ms "
        f"{tpot.get('p95', nan) * 1e3:6.1f} {itl.get('p99', nan) * 1e3:5.0f} ms "
        f"{tried.share:6.1%} {stats['goodput']['requests_per_s']:7.2f}  {busy}"
    )
