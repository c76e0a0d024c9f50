"""The checks of `baton doctor` on a cluster: workers, pairs of workers, handoffs.

A pair's transport is computed from both records by `kvtransfer.pairing`, as the workers do it, and
explained with its drawbacks and remedies. Speeds are those of verified handoffs.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from itertools import product
from typing import Any

from baton import kv_descriptor
from baton.client import Client
from baton.client.results import device_of, fields_of, gb_per_s
from baton.errors import BatonError
from baton.local.doctor import Finding, fail, ok, warn
from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord
from baton.v1.fleet_pb2 import GetStatusResponse, WorkerStatus
from baton.v1.worker_pb2 import PairStatus
from kvtransfer import pairing
from kvtransfer.pairing import Kind, transport_name

_PARTS = {"prefill": common_pb2.WORKER_ROLE_PREFILL, "decode": common_pb2.WORKER_ROLE_DECODE}
_MIXED = common_pb2.WORKER_ROLE_MIXED
_MAX_PAIRS_NAMED = 4
_TEST_TOKENS = 1024  # in a test's prompt
_TEST_IDS = 100  # token ids that every vocabulary has
_MOST_TESTS, _MOST_FAILURES, _TEST_S = 64, 8, 30.0
# Fastest first.
_ON_CPU = (common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO)
_ON_GPU = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL)
_HARDWARE_LISTS = ("visible_gpus", "peer_gpus", "gpu_links", "rdma_devices")
_VERSIONS = ("torch", "cuda", "nccl", "driver")

Problem = tuple[str, str]  # a problem of a pair, and its remedy


def worker_of(worker: WorkerStatus) -> dict[str, Any]:
    """A worker as `--json` shows it."""
    record = fields_of(worker.record)
    hardware = record["hardware"]
    gpu = hardware["gpu"]
    return {
        **{name: record[name] for name in ("role", "incarnation", "address", "host_id")},
        "state": worker.state,
        "device": device_of(worker.record),
        "gpu": gpu["uuid"] or None,
        "memory_bytes": gpu["memory_bytes"] or None,
        "capability": gpu["capability"] or None,
        **{name: hardware[name] for name in _HARDWARE_LISTS},
        "transports": record["transports"],
        "versions": {name: hardware[f"{name}_version"] for name in _VERSIONS},
    }


def check_cluster(status: GetStatusResponse) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Every pair of workers as `--json` shows it, and the cluster's problems.

    Keys of a pair: `transport`: what the two would agree on now, None if handoffs are impossible;
    `link`: the interconnect of their GPUs as the driver calls it ("NV18", "SYS"); `in_use`: the
    transport of their open link; `gb_per_s`, `sent_bytes`: its measured speed and total;
    `not_possible`: why each faster transport cannot be used; `ranks`: which rank sends which KV
    heads to which, if one of the two has a KV pool for each rank.
    """
    found = list(_check_workers(status))
    links = {(pair.prefill, pair.decode): pair for pair in status.pairs}
    pairs: list[dict[str, Any]] = []
    grouped: dict[Problem, list[str]] = {}  # pairs with the same problem
    for prefill, decode in _pairs(status):
        names = prefill.incarnation, decode.incarnation
        pair, problems = _check_pair(prefill, decode, links.get(names, PairStatus()))
        pairs.append(pair)
        for problem in problems:
            grouped.setdefault(problem, []).append(" → ".join(names))
    if pairs and not any(pair["transport"] for pair in pairs):
        found.append(fail("pairs", "no pair can hand over KV", "see the reasons below"))
    for (text, fix), named in grouped.items():
        found.append(warn(_listed(named), text, fix))
    return pairs, found or [ok("cluster", "workers are READY, pairs use their best transport")]


def check_handoffs(client: Client, status: GetStatusResponse) -> Iterator[Finding]:
    """Runs a handoff between each pair of READY workers, or between the first of many.

    The prompts are random tokens, which no worker has cached; KV is verified at Commit.
    """
    pairs = list(_pairs(status, "READY"))
    verified, failed = 0, dict[str, list[str]]()  # pairs by cause
    for prefill, decode in pairs[:_MOST_TESTS]:
        names = prefill.incarnation, decode.incarnation
        try:
            # The first token is prefill's, the second one decode's.
            done = client.generate(
                _test_prompt([prefill, decode]),
                workers=names,
                max_tokens=2,
                ignore_eos=True,
                cache_salt=secrets.token_hex(8),
                timeout=_TEST_S,
            )
            why = "" if done.route.transport else "the test request was served without a handoff"
        except BatonError as error:
            why = f"the test request failed: {error}"
        if why:
            failed.setdefault(why, []).append(" → ".join(names))
        verified += not why
        if sum(map(len, failed.values())) == _MOST_FAILURES:
            break
    for why, named in failed.items():
        yield fail(_listed(named), why, "see these pairs above and the logs of both workers")
    if not pairs:
        yield fail("handoff test", "no pair of workers is READY", "see the workers above")
    if verified:
        text = f"{verified} of {len(pairs)} pairs handed over KV, and it was verified"
        yield (ok if verified == len(pairs) else warn)("handoff test", text)


def check_requests(client: Client, status: GetStatusResponse) -> Finding:
    """Checks that requests were handed over to decode workers; if none was, finds out why."""
    counts = status.router.counts
    served = {way: number for way, number in counts.served.items() if number}
    total = sum(served.values())
    shown = ", ".join(f"{number} {way}" for way, number in sorted(served.items()))
    if not total:
        return ok("requests", "none has succeeded yet: `baton doctor --test` sends some")
    alone = status.workers and not _workers(status, common_pb2.WORKER_ROLE_PREFILL)
    if alone or "handed_over" in served or total == served.get("prefill_only"):
        return ok("requests", f"{total} succeeded: {shown}")
    text = f"{total} succeeded, none of them with a handoff: {shown}"
    records = [one.record for one in status.workers if one.record.model == status.router.model]
    try:
        explained = client.explain(_test_prompt(records), max_tokens=2, timeout=_TEST_S)
    except BatonError as error:
        return warn("requests", f"{text}; the cause is unknown: {error}")
    size = f"a new prompt of {explained['prompt_tokens']} tokens"
    if explained["refused"]:
        return warn("requests", f"{text}; {size} would wait or be refused: {explained['refused']}")
    if explained["decode_prefills"]:
        fix = "lower --local-prefill-max of the router, up to which decode workers compute prompts"
        return warn("requests", f"{text}; a decode worker would compute {size}, too", fix)
    return ok("requests", f"{text}; they were short or cached: {size} would be handed over")


def _test_prompt(records: list[WorkerRecord]) -> list[int]:
    """Random tokens, which are in no cache, for these workers; operators' keys list no models."""
    length = min([_TEST_TOKENS, *(record.max_context // 2 for record in records)])
    return [random.randrange(_TEST_IDS) for _ in range(length)]  # noqa: S311 - no secret


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_PAIRS_NAMED
    return ", ".join(names[:_MAX_PAIRS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _pairs(
    status: GetStatusResponse, state: str = ""
) -> Iterator[tuple[WorkerRecord, WorkerRecord]]:
    """Those that routers may pair, by roles."""
    for prefill, decode in product(*(_workers(status, role, state) for role in _PARTS.values())):
        if prefill.incarnation != decode.incarnation:
            yield prefill, decode


def _workers(
    status: GetStatusResponse, role: common_pb2.WorkerRole, state: str = ""
) -> list[WorkerRecord]:
    """Workers with this role, mixed ones included."""
    mine = (one for one in status.workers if one.record.role in (role, _MIXED))
    return [worker.record for worker in mine if not state or worker.state == state]


def _check_workers(status: GetStatusResponse) -> Iterator[Finding]:
    for name, role in _PARTS.items():
        if _workers(status, role):
            continue
        text, fix = f"has no {name} worker", f"start one: baton {name}-worker"
        if status.router.state == "SERVING":
            yield warn("cluster", f"{text}: the others do its work, too", fix)
        else:
            yield fail("cluster", text, fix)
    if not status.router.registry_connected:
        yield warn("registry", "the router does not reach etcd: workers cannot join or leave")
    for worker in status.workers:
        if worker.state != "READY":
            why = f": {worker.reason}" if worker.reason else ""
            yield warn(worker.record.incarnation, f"{worker.state}{why}")


def _on_gpu(record: WorkerRecord) -> bool:
    described = bool(record.hardware.gpu.name or record.hardware.gpu.uuid)
    return described or any(kind in record.transports for kind in _ON_GPU)


def _check_pair(
    prefill: WorkerRecord, decode: WorkerRecord, link: PairStatus
) -> tuple[dict[str, Any], list[Problem]]:
    different = kv_descriptor.differences(prefill.kv, decode.kv)
    chosen = None if different else pairing.fastest(prefill, decode)
    kinds: list[Kind] = []  # transports for the pair's kind of memory, fastest first
    if not different and _on_gpu(prefill) == _on_gpu(decode):
        kinds = list(_ON_GPU if _on_gpu(prefill) else _ON_CPU)
    faster = kinds[: kinds.index(chosen)] if chosen in kinds else kinds
    there = decode.hardware.gpu.uuid
    links = (link.partition(" ") for link in prefill.hardware.gpu_links)
    problems = list(_problems(prefill, decode, chosen, different))
    used = link.transport if link.state == "OPEN" else None
    if chosen and used and used != chosen:
        why = link.fallback or f"and {transport_name(chosen)} is faster"
        fix = "remove the reason, then restart the workers of this pair"
        problems.append((f"the open link uses {transport_name(used)}, {why}", fix))
    if link.state not in ("", "OPEN"):
        text = f"{link.state}: not used for a while after failed handoffs"
        problems.append((text, "see the logs of both workers; `baton top` shows failovers"))
    pair = {
        "prefill": prefill.incarnation,
        "decode": decode.incarnation,
        "transport": transport_name(chosen) if chosen else None,
        "link": next((kind for kind, _, uuid in links if there and uuid == there), None),
        "in_use": transport_name(used) if used else None,
        "gb_per_s": gb_per_s(link),
        "sent_bytes": link.sent_bytes,
        "not_possible": {
            transport_name(kind): pairing.obstacle(kind, prefill, decode) for kind in faster
        },
        "ranks": _ranks(prefill, decode),
        "problems": [text for text, _ in problems],
    }
    return pair, problems


def _ranks(prefill: WorkerRecord, decode: WorkerRecord) -> list[dict[str, Any]]:
    counts = prefill.kv_pools or 1, decode.kv_pools or 1
    pairs = pairing.rank_pairs(*counts, prefill.kv.num_kv_heads) if max(counts) > 1 else []
    return [
        {"prefill": one.sender, "decode": one.receiver, "heads": [one.heads.start, one.heads.stop]}
        for one in pairs
    ]


def _problems(
    prefill: WorkerRecord, decode: WorkerRecord, chosen: Kind | None, different: list[str]
) -> Iterator[Problem]:
    if _on_gpu(prefill) != _on_gpu(decode):
        yield (
            "one computes on a GPU and the other on a CPU: KV cannot be transferred between them",
            "use one kind of device in a cluster, or two clusters (--cluster)",
        )
    elif different:
        yield (
            f"their KV caches differ in {'; '.join(different)}",
            "start both with the same model, --dtype, --kv-dtype, --quantization and --block-size",
        )
    elif chosen is None:
        yield (
            f"no common transport: prefill offers {_names(prefill)}, decode {_names(decode)}",
            "start both with --transport auto",
        )
    elif chosen == common_pb2.TRANSPORT_NCCL:
        yield from _nccl_problems(prefill, decode)
    elif expected := pairing.missed_transport(chosen, prefill, decode):
        kind, why = expected
        yield (
            f"KV is sent over the network within one machine, not by {transport_name(kind)}: {why}",
            "start both with --transport auto, as one user with one /dev/shm (in containers ipc: "
            "host), or keep gloo: it works, slower",
        )


def _nccl_problems(prefill: WorkerRecord, decode: WorkerRecord) -> Iterator[Problem]:
    ours, theirs = prefill.hardware, decode.hardware
    if not (ours.gpu.uuid and theirs.gpu.uuid):
        yield (
            "a worker does not report which GPU it computes on",
            "see its log at --log-level debug; faster transports cannot be checked without it",
        )
    elif not pairing.topology_of(prefill, decode).same_machine:
        if not (ours.rdma_devices and theirs.rdma_devices):
            yield (
                "NCCL will use TCP sockets between their machines: one has no RDMA device",
                "give both RDMA devices (in containers /dev/infiniband and memlock: -1), or place "
                "them on one machine",
            )
    elif ours.gpu.uuid not in theirs.visible_gpus or theirs.gpu.uuid not in ours.visible_gpus:
        yield (
            "they are on one machine but do not see each other's GPU: NCCL cannot use NVLink or "
            "PCIe between them and falls back to the host's memory or sockets",
            "make every GPU visible to every worker and choose with --device cuda:N; in "
            "containers also set ipc: host and the same NCCL_HOSTID",
        )
    elif prefill.host_id != decode.host_id and theirs.gpu.uuid in ours.peer_gpus:
        why = pairing.separation(prefill.host_id, decode.host_id)
        yield (
            f"KV is sent over NCCL although one GPU could write into the other: {why}",
            "run both as one user with one /dev/shm (in containers ipc: host)",
        )
    if ours.nccl_version and theirs.nccl_version and ours.nccl_version != theirs.nccl_version:
        yield (
            f"NCCL {ours.nccl_version} and {theirs.nccl_version} may be incompatible",
            "run both from the same image",
        )


def _names(record: WorkerRecord) -> str:
    return ", ".join(map(transport_name, record.transports)) or "none"
