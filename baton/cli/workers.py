"""`baton prefill-worker` and `baton decode-worker`, also on a host that only runs ranks of one."""

from __future__ import annotations

import argparse
from dataclasses import replace

from baton.cli import options, process_setup
from baton.config import WorkerConfig, new_incarnation

_PREFILL_TEXT = """\
Computes prompts in chunks and sends their KV blocks to decode workers. Registers in etcd when the
model is loaded and warmed up. SIGTERM drains: running requests finish, exit status 0."""
_DECODE_TEXT = """\
Receives KV blocks from prefill workers and generates tokens in a continuous batch. Registers in
etcd when the model is loaded and warmed up. SIGTERM drains: running requests finish, exit status
0."""
_WORKER_EXAMPLES = """\
  baton {name} --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0 \\
        --advertise 10.0.0.7:7710 --port 7710
  baton {name} --cpus 0,1                 on two cores, with two threads
  baton {name} --tp 16 --nnodes 2 --node-rank 1 --name large --model /models/large
                                          the second of two hosts with eight GPUs each"""


def add_commands(commands: options.Commands) -> None:
    """Adds both commands."""
    for role, summary, text in (
        ("prefill", "run a worker that computes prompts", _PREFILL_TEXT),
        ("decode", "run a worker that generates tokens", _DECODE_TEXT),
    ):
        name = f"{role}-worker"
        examples = _WORKER_EXAMPLES.format(name=name)
        parser = options.add_command(commands, name, summary, text, examples)
        parser.set_defaults(run=_run, role=role, extra="worker", takes_model=True)
        options.add_declared(parser, WorkerConfig)
        options.add_config_option(parser)
        process_setup.add_child_options(parser)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """A worker's settings."""
    config = options.settings(WorkerConfig, f"{args.role}-worker", args, role=args.role)
    incarnation = new_incarnation(config.name or config.role)
    return replace(
        config, engine=process_setup.with_threads(config.engine), incarnation=incarnation
    )


def _run(args: argparse.Namespace) -> int:
    process_setup.raise_file_limit()
    process_setup.follow_parent(args)
    config = worker_config(args)
    process_setup.log_to_stderr(config.log_level, config.log_format)
    from baton.local.model_check import check_model

    check_model(config.engine, worker=True)  # it takes longer to import torch
    process_setup.limit_cpu(config.engine.threads, config.engine.cpus)
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
