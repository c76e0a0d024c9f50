"""`baton doctor`: what this machine has and lacks, and how a cluster's KV would travel."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.options import seconds
from baton.cli.status import table
from baton.errors import BatonError, Unavailable

if TYPE_CHECKING:
    from baton.local.doctor.finding import Finding
    from baton.local.doctor.fleet import Pair
    from baton.v1.common_pb2 import WorkerRecord
    from baton.v1.fleet_pb2 import GetStatusResponse, WorkerStatus

_TEXT = """\
Looks at this machine: Python, torch, compilers, memory, GPUs and what connects them, etcd, ports.
Where a router answers, also at its cluster: what each worker computes on, which transport every
pair of workers takes, why not a faster one, and whether KV quietly goes over sockets. Exit status 0
if nothing failed; warnings are allowed."""
_EXAMPLES = """\
  baton doctor
  baton doctor --target 10.0.0.9:7700 --json"""
_WORKER_COLUMNS = {
    "role": "role",
    "incarnation": "worker",
    "address": "address",
    "state": "state",
    "device": "computes on",
    "peers": "peers",
    "rdma": "RDMA",
    "transports": "transports",
}
_PAIR_COLUMNS = {
    "prefill": "prefill",
    "decode": "decode",
    "transport": "transport",
    "in_use": "in use",
    "why": "why none that is faster",
}

_LONGEST_SUBJECT = 28  # what names pairs can be longer, and alone is
_LEAST_TEXT = 40  # columns


def add_commands(commands: options.Commands) -> None:
    """Adds `doctor`."""
    parser = options.add_command(
        commands, "doctor", "look for what is missing or slow", _TEXT, _EXAMPLES
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help=f"the router's address (default: {options.DEFAULT_TARGET}, if one answers there)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=3.0, metavar="SECONDS", help="for the router's answer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    report = look(args.target, args.timeout)
    columns = shutil.get_terminal_size((200, 24)).columns
    print(json.dumps(report) if args.json else render(report, columns))
    return 1 if report["status"] == "fail" else 0


def look(target: str | None, timeout_s: float) -> dict[str, Any]:
    """The object of `baton doctor --json`.

    Raises BatonError when `target` names routers and none answers.
    """
    from baton.local.doctor import cards, fleet, machine

    status = _ask(target, timeout_s)
    router_here = status is not None and _is_here(target or options.DEFAULT_TARGET)
    here = [*machine.examine(router_here), *cards.examine()]
    pairs = fleet.pairs_of(status) if status is not None else []
    there = list(fleet.examine(status, pairs)) if status is not None else []
    return {
        "status": _worst([*here, *there]),
        "machine": [dataclasses.asdict(finding) for finding in here],
        "router": _router(target, status),
        "workers": [_worker(worker) for worker in status.workers] if status is not None else [],
        "pairs": [_pair(pair) for pair in pairs],
        "cluster": [dataclasses.asdict(finding) for finding in there],
    }


def _ask(target: str | None, timeout_s: float) -> GetStatusResponse | None:
    """A router's view; None when none answers at the default address, where none need be."""
    import grpc

    from baton import rpc
    from baton.v1 import fleet_pb2, fleet_pb2_grpc

    asked = fleet_pb2.GetStatusRequest()
    problem: BatonError = Unavailable("no router is named")
    for address in (target or options.DEFAULT_TARGET).split(","):
        try:
            with (
                options.calling(address, timeout_s),
                rpc.translated(),
                grpc.insecure_channel(address.strip(), options=rpc.OPTIONS) as channel,
            ):
                stub = fleet_pb2_grpc.FleetServiceStub(channel)
                answer: GetStatusResponse = stub.GetStatus(asked, timeout=timeout_s)
                return answer
        except BatonError as error:
            problem = error
    if target is not None:
        raise problem
    return None


def _is_here(target: str) -> bool:
    """Whether a router's address is this machine's loopback."""
    hosts = {address.strip().rpartition(":")[0] for address in target.split(",")}
    return bool(hosts & {"127.0.0.1", "localhost", "[::1]"})


def _worst(findings: Sequence[Finding]) -> str:
    levels = {finding.level.value for finding in findings}
    return next((level for level in ("fail", "warn") if level in levels), "ok")


def _router(target: str | None, status: GetStatusResponse | None) -> dict[str, Any]:
    if status is None:
        return {"target": target or options.DEFAULT_TARGET, "answers": False}
    router = status.router
    return {
        "target": target or options.DEFAULT_TARGET,
        "answers": True,
        "address": router.address,
        "state": router.state,
        "model": router.model,
        "cluster": router.cluster,
    }


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    from baton.client.fleet import device_of
    from baton.v1 import common_pb2
    from kvtransfer.pairing import name_of

    record: WorkerRecord = worker.record
    hardware = record.hardware
    return {
        "role": common_pb2.WorkerRole.Name(record.role).removeprefix("WORKER_ROLE_").lower(),
        "incarnation": record.incarnation,
        "address": record.address,
        "state": worker.state,
        "host_id": record.host_id,
        "device": device_of(record),
        "gpu": hardware.gpu.uuid or None,
        "memory_bytes": hardware.gpu.memory_bytes or None,
        "capability": hardware.gpu.capability or None,
        "visible_gpus": list(hardware.visible_gpus),
        "peer_gpus": list(hardware.peer_gpus),
        "gpu_links": list(hardware.gpu_links),
        "rdma_devices": list(hardware.rdma_devices),
        "transports": [name_of(kind) for kind in record.transports],
        "versions": {
            "torch": hardware.torch_version,
            "cuda": hardware.cuda_version,
            "nccl": hardware.nccl_version,
            "driver": hardware.driver_version,
        },
    }


def _pair(pair: Pair) -> dict[str, Any]:
    from kvtransfer.pairing import name_of

    judged = pair.judgement
    return {
        "prefill": pair.prefill.incarnation,
        "decode": pair.decode.incarnation,
        "transport": None if judged.transport is None else name_of(judged.transport),
        "link": judged.link or None,
        "in_use": None if pair.in_use is None else name_of(pair.in_use),
        "not_possible": {name_of(kind): why for kind, why in judged.obstacles.items()},
        "troubles": [trouble.text for trouble in judged.troubles],
    }


def render(report: dict[str, Any], width: int = 200) -> str:
    """The object of `baton doctor --json` as text for people; tables may be wider than `width`."""
    here = _findings(report["machine"], width)
    lines = ["this machine", *here, "", _router_line(report["router"])]
    if report["workers"]:
        lines += ["", *table(_WORKER_COLUMNS, [_shown(worker) for worker in report["workers"]])]
    if report["pairs"]:
        lines += ["", *table(_PAIR_COLUMNS, [_explained(pair) for pair in report["pairs"]])]
    if report["cluster"]:
        lines += ["", "cluster", *_findings(report["cluster"], width)]
    return "\n".join([*lines, "", _summary([*report["machine"], *report["cluster"]])])


def _findings(findings: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    longest = max((len(finding["subject"]) for finding in findings), default=0)
    column = min(longest, _LONGEST_SUBJECT)
    for finding in findings:
        head = f"  {finding['level']:<4}  {finding['subject']:<{column}}  "
        yield from _folded(head, finding["text"], width)
        if finding["mend"]:
            yield from _folded(" " * (column + 10) + "→ ", finding["mend"], width)


def _folded(head: str, text: str, width: int) -> list[str]:
    """The text behind its head, in as many lines as it takes."""
    room = max(width, len(head) + _LEAST_TEXT)
    indent = " " * len(head)
    return textwrap.wrap(text, room, initial_indent=head, subsequent_indent=indent)


def _router_line(router: dict[str, Any]) -> str:
    if not router["answers"]:
        return f"router: none answers at {router['target']}"
    return (
        f"router at {router['address']}: {router['state']}, model {router['model']}, "
        f"cluster {router['cluster']}"
    )


def _shown(worker: dict[str, Any]) -> dict[str, str]:
    seen = len(worker["visible_gpus"]) - 1
    return {
        **worker,
        "peers": f"{len(worker['peer_gpus'])} of {seen}" if worker["gpu"] else "-",
        "rdma": ", ".join(worker["rdma_devices"]) or "-",
        "transports": ", ".join(worker["transports"]),
    }


def _explained(pair: dict[str, Any]) -> dict[str, str]:
    reasons = [f"{name}: {reason}" for name, reason in pair["not_possible"].items()]
    why = "; ".join(reasons or ([] if pair["transport"] else pair["troubles"]))
    over = f" over {pair['link']}" if pair["link"] else ""
    return {**pair, "transport": f"{pair['transport'] or 'NONE'}{over}", "why": why or "-"}


def _summary(findings: Sequence[dict[str, Any]]) -> str:
    failed = sum(finding["level"] == "fail" for finding in findings)
    warned = sum(finding["level"] == "warn" for finding in findings)
    if not failed and not warned:
        return "nothing is missing"
    return f"{failed} failed, {warned} warning{'' if warned == 1 else 's'}"
