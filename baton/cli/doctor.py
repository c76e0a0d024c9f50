"""`baton doctor`: checks this machine, and a cluster's workers and transports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.options import seconds
from baton.config import EngineConfig
from baton.errors import BatonError, Unauthenticated, Unavailable
from baton.tables import table

if TYPE_CHECKING:
    from baton.local.doctor import Finding
    from baton.v1.fleet_pb2 import GetStatusResponse

_TEXT = """\
Checks this machine: Python, torch, compilers, memory, GPUs and their interconnects, etcd, ports.
If a router answers, also its cluster: each worker's device, the transport of every pair of workers,
its measured speed, why a faster one is not used, and whether requests are handed over at all. With
--model also whether a worker with these options can serve that model here, and the memory it needs,
without loading it. Exit status 0 if nothing failed; warnings are allowed."""
_EXAMPLES = """\
  baton doctor
  baton doctor --test
  baton doctor --model ~/models/Qwen3-8B --quantization int8 --kv-cache 8GiB
  baton doctor --target 10.0.0.9:7700 --json"""
_MODEL_TEXT = "Hugging Face model directory to check"
_WORKER_COLUMNS = {
    "role": "role", "incarnation": "worker", "address": "address", "state": "state",
    "device": "computes on", "peers": "peers", "rdma": "RDMA", "transports": "transports",
}  # fmt: skip
_PAIR_COLUMNS = {
    "prefill": "prefill", "decode": "decode", "transport": "transport", "in_use": "in use",
    "gb_per_s": "GB/s", "why": "why none faster",
}  # fmt: skip
_REPORT_S, _HEARTBEAT_S = 2.0, 0.2  # workers report to routers five times a second
_MAX_SUBJECT = 28  # columns; subjects that name pairs may be longer


def add_commands(commands: options.Commands) -> None:
    """Adds `doctor`."""
    summary = "check this machine and a cluster"
    parser = options.add_command(commands, "doctor", summary, _TEXT, _EXAMPLES)
    add = parser.add_argument
    text = f"the router's address (default: {options.DEFAULT_TARGET}, if one answers there)"
    add("--target", metavar="HOST:PORT", help=text)
    options.add_tls_options(parser)
    options.add_key_option(parser)
    add(
        "--timeout",
        type=seconds,
        default=3.0,
        metavar="SECONDS",
        help="longest wait for the router",
    )
    text = "first hand over a prompt of up to 1,024 random tokens between each pair (at most 64)"
    add("--test", action="store_true", help=text)
    add("--json", action="store_true", help="print one JSON object")
    options.add_declared(parser, EngineConfig, "with --model", {"model": _MODEL_TEXT})
    options.add_config_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    plan: EngineConfig | None = options.settings(EngineConfig, "doctor", args)
    if plan == EngineConfig() and "model" not in vars(args):
        plan = None
    args.extra = "worker" if plan else None  # the extra to install if a library is missing
    report = look(args.target, args.timeout, options.api_key(args), args.test, plan)
    print(json.dumps(report) if args.json else render(report))
    return 1 if report["status"] == "fail" else 0


def look(
    target: str | None,
    timeout_s: float,
    api_key: str | None,
    test: bool,
    plan: EngineConfig | None = None,
) -> dict[str, Any]:
    """The object of `baton doctor --json`; `test`: with test handoffs; `plan`: for a worker.

    Raises BatonError if no router answers although `target` or `test` is given, or the key is
    wrong.
    """
    from baton.local import doctor, doctor_cluster

    addresses = target or options.DEFAULT_TARGET
    status = _router_status(addresses if test else target, api_key, timeout_s)
    hosts = {address.strip().rpartition(":")[0] for address in addresses.split(",")}
    router_here = status is not None and bool(hosts & {"127.0.0.1", "localhost", "[::1]"})
    machine = [*doctor.check_machine(router_here), *doctor.check_gpus()]
    model: list[Finding] = []
    if plan is not None:
        from baton.local.model_plan import check_plan

        model = list(check_plan(plan))
    router: dict[str, Any] = {"target": addresses, "answers": status is not None}
    pairs: list[dict[str, Any]] = []
    cluster: list[Finding] = []
    if status:
        from baton.client import Client, RetryPolicy

        once = RetryPolicy(max_attempts=1)  # at each address
        with Client(addresses, api_key=api_key, retry=once) as client:
            tested = list(doctor_cluster.check_handoffs(client, status)) if test else []
            if test:
                status = _reported(addresses, api_key, timeout_s) or status
            requests = doctor_cluster.check_requests(client, status)
        pairs, cluster = doctor_cluster.check_cluster(status)
        cluster += [*tested, requests]
        router |= {f: getattr(status.router, f) for f in ("address", "state", "model", "cluster")}
    levels = {finding.level for finding in (*machine, *model, *cluster)}
    return {
        "status": next((level for level in ("fail", "warn") if level in levels), "ok"),
        "machine": [dataclasses.asdict(finding) for finding in machine],
        "model": [dataclasses.asdict(finding) for finding in model],
        "router": router,
        "workers": [*map(doctor_cluster.worker_of, status.workers)] if status else [],
        "pairs": pairs,
        "cluster": [dataclasses.asdict(finding) for finding in cluster],
    }


def _router_status(
    target: str | None, api_key: str | None, timeout_s: float
) -> GetStatusResponse | None:
    """A router's status; None if none answers at the default address."""
    import grpc

    from baton.net import rpc
    from baton.v1 import fleet_pb2, fleet_pb2_grpc

    problem: BatonError = Unavailable("no router is named")
    for address in map(str.strip, (target or options.DEFAULT_TARGET).split(",")):
        try:
            with (
                options.calling(address, timeout_s),
                rpc.translated(),
                rpc.channel(address, kind=grpc) as channel,
            ):
                fleet: Any = fleet_pb2_grpc.FleetServiceStub(channel)
                status: GetStatusResponse = fleet.GetStatus(
                    fleet_pb2.GetStatusRequest(), timeout=timeout_s, metadata=rpc.bearer(api_key)
                )
                return status
        except BatonError as error:
            problem = error
    if target is not None or isinstance(problem, Unauthenticated):
        raise problem
    return None


def _reported(addresses: str, api_key: str | None, timeout_s: float) -> GetStatusResponse | None:
    """A router's status, after a short wait for reports of all open links."""
    deadline = time.monotonic() + _REPORT_S
    while True:
        status = _router_status(addresses, api_key, timeout_s)
        reported = status and all(one.sent_bytes for one in status.pairs if one.state == "OPEN")
        if reported or time.monotonic() > deadline:
            return status
        time.sleep(_HEARTBEAT_S)


def render(report: dict[str, Any]) -> str:
    """Renders the object of `baton doctor --json` as text."""
    lines = ["this machine", *_findings(report["machine"]), ""]
    if report["model"]:
        lines += ["a worker of the model", *_findings(report["model"]), ""]
    router = report["router"]
    if router["answers"]:
        lines.append(
            "router at {address}: {state}, model {model}, cluster {cluster}".format(**router)
        )
    else:
        lines.append(f"router: none answers at {router['target']}")
    if report["workers"]:
        lines += ["", *table(_WORKER_COLUMNS, [_shown(worker) for worker in report["workers"]])]
    if report["pairs"]:
        ranks = (
            {"ranks": "KV heads by rank"} if any(one["ranks"] for one in report["pairs"]) else {}
        )
        columns = {**_PAIR_COLUMNS, **ranks}
        lines += ["", *table(columns, [_explained(pair) for pair in report["pairs"]])]
    if report["cluster"]:
        lines += ["", "cluster", *_findings(report["cluster"])]
    every = (*report["machine"], *report["model"], *report["cluster"])
    levels = [finding["level"] for finding in every]
    failed, warned = levels.count("fail"), levels.count("warn")
    counts = f"{failed} failed, {warned} warning{'' if warned == 1 else 's'}"
    return "\n".join([*lines, "", counts if failed or warned else "no problems found"])


def _findings(findings: Sequence[dict[str, Any]]) -> Iterator[str]:
    longest = max((len(finding["subject"]) for finding in findings), default=0)
    column = min(longest, _MAX_SUBJECT)
    for finding in findings:
        yield f"  {finding['level']:<4}  {finding['subject']:<{column}}  {finding['text']}"
        if finding["fix"]:
            yield f"{'':<{column + 10}}→ {finding['fix']}"


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
    why = "; ".join(reasons or ([] if pair["transport"] else pair["problems"]))
    over = f" over {pair['link']}" if pair["link"] else ""
    heads = [
        f"{one['prefill']} → {one['decode']}: "
        + "-".join(map(str, sorted({one["heads"][0], one["heads"][1] - 1})))
        for one in pair["ranks"]
    ]
    return {
        **pair,
        "transport": f"{pair['transport'] or 'NONE'}{over}",
        "why": why or "-",
        "ranks": ", ".join(heads) or "-",
    }
