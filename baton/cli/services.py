"""`baton router`, `prefill-worker` and `decode-worker`: one service in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from baton.cli import options, telemetry
from baton.cli.values import Collected
from baton.config import EngineConfig, RouterConfig, RouterLimits, WorkerConfig, new_incarnation
from baton.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

_ROUTER_TEXT = """\
Takes requests (gRPC: baton.v1.InferenceService), places each on a prefill and a decode worker that
it finds in etcd, and streams the answer. It keeps nothing: run as many as you like."""
_ROUTER_EXAMPLES = """\
  baton router --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0
  baton router --etcd 10.0.0.5:2379 --http-port 7780    with OpenAI's HTTP API"""
_PREFILL_TEXT = """\
Runs prompts in chunks and hands their KV blocks to decode workers. Registers in etcd when the model
is loaded and warmed up. SIGTERM drains: no new work, what runs is finished, exit status 0."""
_DECODE_TEXT = """\
Takes KV blocks in from prefill workers and runs the continuous batch. Registers in etcd when the
model is loaded and warmed up. SIGTERM drains: no new work, what runs ends, exit status 0."""
_WORKER_EXAMPLES = """\
  baton {role}-worker --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0 \\
        --advertise 10.0.0.7:7710 --port 7710
  baton {role}-worker --cpus 0,1                 on two cores, with two threads"""


def add_commands(commands: options.Commands) -> None:
    """Adds the three services."""
    _add_router(commands)
    for role, what, text in (
        ("prefill", "run a worker that computes prompts", _PREFILL_TEXT),
        ("decode", "run a worker that generates tokens", _DECODE_TEXT),
    ):
        examples = _WORKER_EXAMPLES.format(role=role)
        parser = options.add_command(commands, f"{role}-worker", what, text, examples)
        options.add_engine_options(parser)
        options.add_cpus_option(parser)
        options.add_nice_option(parser)
        _add_worker_options(parser)
        options.add_registry_options(parser)
        telemetry.add_options(parser)
        _add_die_with_parent(parser)
        parser.set_defaults(run=_run_worker, role=role, extra="worker")


def router_config(args: argparse.Namespace) -> RouterConfig:
    """The router's settings."""
    registry, incarnation = options.registry_config(args), new_incarnation(args.name or "router")
    return options.filled(RouterConfig, args, registry=registry, incarnation=incarnation)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """A worker's settings."""
    registry = options.registry_config(args)
    engine = options.filled(EngineConfig, args, threads=args.threads or len(args.cpus))
    incarnation = new_incarnation(args.name or args.role)
    return options.filled(
        WorkerConfig, args, engine=engine, registry=registry, incarnation=incarnation
    )


def limit_cpu(threads: int, cpus: Sequence[int]) -> None:
    """Sets the thread counts, and warns of too many. Must come before torch is imported.

    Raises ConfigError when the engine may not run on one of the cores.
    """
    allowed = os.sched_getaffinity(0)
    if not set(cpus) <= allowed:
        wanted = sorted(set(cpus))
        raise ConfigError(f"--cpus: this process may run on {sorted(allowed)}, not on {wanted}")
    if threads > (there := len(set(cpus) or allowed)):
        log.warning("%d threads on %d cores slow each other down: lower --threads", threads, there)
    if threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def _run_router(args: argparse.Namespace) -> int:
    _prepare(args)
    config = router_config(args)
    from router import main

    frontends = []
    if config.http_port:
        from baton import gateway

        frontends.append(gateway.frontend(config.host, config.http_port))
    return main.run(config, frontends)


def _run_worker(args: argparse.Namespace) -> int:
    _prepare(args)
    config = worker_config(args)
    from baton.local.model_check import check_model

    check_model(config.engine, worker=True)  # it takes longer to import torch
    limit_cpu(config.engine.threads, config.engine.cpus)
    if config.role == "prefill":
        from prefill_worker import worker as prefill

        return prefill.run(config)
    from decode_worker import worker as decode

    return decode.run(config)


def _prepare(args: argparse.Namespace) -> None:
    if args.die_with_parent:
        from baton.local.child import die_with_parent

        die_with_parent()
        if os.getppid() != args.die_with_parent:
            raise Unavailable("the process that started this one has ended")
    telemetry.log_to_stderr(args.log_level, args.log_format)


def _add_router(commands: options.Commands) -> None:
    parser = options.add_command(commands, "router", "run a router", _ROUTER_TEXT, _ROUTER_EXAMPLES)
    service = parser.add_argument_group("service")
    _add_service_options(service, RouterConfig.port, RouterConfig.drain_s)
    service.add_argument(
        "--http-port",
        type=int,
        default=RouterConfig.http_port,
        metavar="PORT",
        help="serve OpenAI's HTTP API at this port too (default: 0, no)",
    )
    options.add_model_options(service)
    options.add_model_name_option(service)
    add_limit_options(parser)
    options.add_registry_options(parser)
    telemetry.add_options(parser)
    _add_die_with_parent(parser)
    parser.set_defaults(run=_run_router)


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """What a router accepts and how long it waits: the fields of RouterLimits."""
    limits = parser.add_argument_group("limits")
    for option, field, unit, text in (
        ("--max-queue", "max_queue", "REQUESTS", "waiting; one more is refused at once"),
        ("--max-attempts", "max_attempts", "N", "in a row without a token before a request fails"),
        ("--default-timeout", "default_timeout_s", "SECONDS", "for requests without a deadline"),
        ("--ttft-target", "ttft_target_ms", "MS", "refuse what cannot start in time (default: no)"),
        ("--max-prompt-tokens", "max_prompt_tokens", "N", "of a prompt (default: the context)"),
        ("--silence", "silence_s", "SECONDS", "without a heartbeat until a worker is lost"),
        ("--stall", "stall_s", "SECONDS", "that a worker's engine may take for a step"),
        ("--recovery-timeout", "recovery_s", "SECONDS", "that requests wait for a lost worker"),
        ("--trace-slow", "trace_slow_s", "SECONDS", "to a first token: such traces are kept"),
    ):
        default = getattr(RouterLimits, field)
        kind = type(default)
        limits.add_argument(option, dest=field, type=kind, default=default, metavar=unit, help=text)
    limits.add_argument(
        "--slo",
        dest="slos",
        action=Collected,
        default=RouterLimits.slos,
        metavar="[NAME:]ttft=S,tpot=S",
        help="count how many requests kept these targets (also e2e=S); once for each class",
    )
    limits.add_argument(
        "--tenants",
        dest="tenants_file",
        type=Path,
        metavar="FILE",
        help="TOML file with tenants, their keys, shares and limits (default: one, unlimited)",
    )
    limits.add_argument(
        "--local-prefill-max",
        dest="local_prefill_max_tokens",
        type=int,
        default=RouterLimits.local_prefill_max_tokens,
        metavar="TOKENS",
        help="decode computes a prompt itself when no more than this is left of it",
    )


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("service")
    _add_service_options(group, WorkerConfig.port, WorkerConfig.drain_s)
    group.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="address that others reach it at (default: --host and the port)",
    )
    options.add_model_name_option(group)
    options.add_transport_option(group)
    telemetry.add_price_option(group)
    for option, field, text in (
        ("--reservation-lease", "lease_s", "that a handoff may take before its blocks are freed"),
        ("--transfer-timeout", "transfer_timeout_s", "for one transfer of KV blocks"),
    ):
        default = getattr(WorkerConfig, field)
        group.add_argument(
            option, dest=field, type=float, default=default, metavar="SECONDS", help=text
        )


def _add_service_options(group: options.Options, port: int, drain_s: float) -> None:
    group.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="of this process in status, traces and logs, which append an id of its run to it "
        "(default: its role)",
    )
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    port_text = "port to listen on" + ("" if port else " (default: a free one)")
    group.add_argument("--port", type=int, default=port, help=port_text)
    options.add_drain_option(group, drain_s)


def _add_die_with_parent(parser: argparse.ArgumentParser) -> None:
    """For supervisors: the process ends when the one that started it does."""
    parser.add_argument("--die-with-parent", type=int, metavar="PID", help=argparse.SUPPRESS)
