"""`baton worker`, also on a host that only runs ranks of one; `prefill-worker`, `decode-worker`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from baton.cli import options, process_setup
from baton.config import WorkerConfig, new_incarnation

_NAMES = {"prefill-worker": "prefill", "decode-worker": "decode"}
_TEXT = """\
Computes prompts, hands their KV blocks over to other workers, takes blocks in, and generates tokens
in a continuous batch. Its role says which of that routers prefer it for; it does the rest where no
other worker can, and `baton role` changes the role while it runs. Registers in etcd when the model
is loaded and warmed up. SIGTERM drains: running requests finish, exit status 0.
`baton prefill-worker` is short for `baton worker --role prefill`, and decode-worker likewise."""
_EXAMPLES = """\
  baton worker --model /models/llama --etcd 10.0.0.5:2379 --host 0.0.0.0 \\
        --advertise 10.0.0.7:7710 --port 7710
  baton worker --role decode --cpus 0,1    on two cores, with two threads
  baton worker --tp 16 --nnodes 2 --node-rank 1 --name large --model /models/large
                                         the second of two hosts with eight GPUs each"""


def add_commands(commands: options.Commands) -> None:
    """Adds the command, and its names with a role."""
    summary = "run a worker, which computes prompts and generates tokens"
    parser = options.add_command(commands, "worker", summary, _TEXT, _EXAMPLES, list(_NAMES))
    parser.set_defaults(run=_run, extra="worker", takes_model=True)
    options.add_declared(parser, WorkerConfig)
    options.add_config_option(parser)
    process_setup.add_child_options(parser)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """A worker's settings."""
    if role := _NAMES.get(args.command):
        vars(args).setdefault("role", role)
    config = options.settings(WorkerConfig, "worker", args)
    incarnation = new_incarnation(config.name or config.role)
    return replace(
        config, engine=process_setup.with_threads(config.engine), incarnation=incarnation
    )


def _run(args: argparse.Namespace) -> int:
    config = worker_config(args)
    process_setup.start_service(args, config, "worker")
    from baton.local.model_check import check_model

    check_model(config.engine, worker=True)  # it takes longer to import torch
    process_setup.limit_cpu(config.engine.threads, config.engine.cpus)
    if config.node_rank:
        from baton.worker import rank_hosts

        return rank_hosts.run(config)
    from baton.worker import node
    from decode_worker.worker import DecodePart
    from prefill_worker.worker import PrefillPart

    return node.run(config, (PrefillPart, DecodePart))
