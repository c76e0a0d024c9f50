"""The checks of `baton doctor` on a cluster: its workers, every pair of them, and its requests.

A pair's transport follows from the two records by `kvtransfer.pairing`, as the workers decide it
themselves; here it is explained, with what it costs and how to do better. How fast it is comes from
real handoffs, each of which was verified at its Commit.
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
from baton.registry.membership import ROLES
from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord
from baton.v1.fleet_pb2 import GetStatusResponse, WorkerStatus
from baton.v1.worker_pb2 import PairStatus
from kvtransfer import pairing
from kvtransfer.pairing import Kind, transport_name

_MAX_PAIRS_NAMED = 4
_TEST_TOKENS = 1024  # in the prompt of a test
_MOST_TESTS, _MOST_FAILURES, _TEST_S = 64, 8, 30.0
# Fastest first.
_ON_CPU = (common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO)
_ON_GPU = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL)
_HARDWARE_LISTS = ("visible_gpus", "peer_gpus", "gpu_links", "rdma_devices")
_VERSIONS = ("torch", "cuda", "nccl", "driver")

Problem = tuple[str, str]  # what a pair could do better, and how


def worker_of(worker: WorkerStatus) -> dict[str, Any]:
    """A worker in the object of `--json`."""
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
    """Every pair of workers in the object of `--json`, and what is wrong in the cluster.

    A pair's `transport` is what the two would agree on now, None where their handoffs fail; `link`
    connects their GPUs by the driver ("NV18", "SYS"); `in_use` is the transport of their open link,
    `gb_per_s` how fast it has moved KV so far, and `sent_bytes` how much; `not_possible` says why
    each faster one cannot be used; `ranks` says which rank sends which which KV heads, where one of
    the two has a KV pool for each of its ranks.
    """
    found = list(_check_workers(status))
    links = {(pair.prefill, pair.decode): pair for pair in status.pairs}
    pairs: list[dict[str, Any]] = []
    grouped: dict[Problem, list[str]] = {}  # pairs with the same problem
    for prefill, decode in product(*(_workers(status, role) for role in ROLES)):
        names = prefill.incarnation, decode.incarnation
        pair, problems = _check_pair(prefill, decode, links.get(names, PairStatus()))
        pairs.append(pair)
        for problem in problems:
            grouped.setdefault(problem, []).append(" → ".join(names))
    if pairs and not any(pair["transport"] for pair in pairs):
        found.append(fail("pairs", "none can hand a prompt's KV over", "see the reasons below"))
    for (text, fix), named in grouped.items():
        found.append(warn(_listed(named), text, fix))
    return pairs, found or [ok("cluster", "every worker is READY, every pair does its best")]


def check_handoffs(client: Client, status: GetStatusResponse) -> Iterator[Finding]:
    """Has KV handed over once between each pair of READY workers, or between the first of many.

    The prompts are random tokens, which no worker caches; what arrives is verified at Commit.
    """
    pairs = list(product(*(_workers(status, role, "READY") for role in ROLES)))
    verified, failed = 0, dict[str, list[str]]()  # pairs by why
    for prefill, decode in pairs[:_MOST_TESTS]:
        names = prefill.incarnation, decode.incarnation
        try:
            # The first token is prefill's, the second one decode's.
            done = client.generate(
                _test_prompt(client),
                workers=names,
                max_tokens=2,
                ignore_eos=True,
                cache_salt=secrets.token_hex(8),
                timeout=_TEST_S,
            )
            why = "" if done.route.transport else "a request was served there without a handoff"
        except BatonError as error:
            why = f"a request fails there: {error}"
        if why:
            failed.setdefault(why, []).append(" → ".join(names))
        verified += not why
        if sum(map(len, failed.values())) == _MOST_FAILURES:
            break
    for why, named in failed.items():
        yield fail(_listed(named), why, "see these pairs above, and the logs of both workers")
    if not pairs:
        yield fail("handoff test", "there is no pair of READY workers", "see the workers above")
    if verified:
        text = f"{verified} of {len(pairs)} pairs handed a prompt's KV over, and it was verified"
        yield (ok if verified == len(pairs) else warn)("handoff test", text)


def check_requests(client: Client, status: GetStatusResponse) -> Finding:
    """Whether the router's requests were handed over to decode workers; where none was, why."""
    counts = status.router.counts
    served = {way: number for way, number in counts.served.items() if number}
    total = sum(served.values())
    shown = ", ".join(f"{number} {way}" for way, number in sorted(served.items()))
    if not total:
        return ok("requests", "none has ended OK yet: `baton doctor --test` sends some")
    alone = status.workers and not _workers(status, common_pb2.WORKER_ROLE_PREFILL)
    if alone or "handed_over" in served or total == served.get("prefill_only"):
        return ok("requests", f"{total} ended OK: {shown}")
    text = f"{total} ended OK, and for none was KV handed over: {shown}"
    try:
        explained = client.explain(_test_prompt(client), max_tokens=2, timeout=_TEST_S)
    except BatonError as error:
        return warn("requests", f"{text}; why cannot be asked: {error}", "use --api-key-file")
    size = f"a new prompt of {explained['prompt_tokens']} tokens"
    if explained["refused"]:
        return warn("requests", f"{text}; {size} would wait or be refused: {explained['refused']}")
    if explained["decode_prefills"]:
        fix = "the router's --local-prefill-max says how much decode may compute"
        return warn("requests", f"{text}; decode would compute {size}, too", fix)
    return ok("requests", f"{text}; they were short or cached: {size} would be handed over")


def _test_prompt(client: Client) -> list[int]:
    """Tokens that were never sent before."""
    model = client.models(timeout=_TEST_S)[0]
    length = min(_TEST_TOKENS, model.max_context // 2)
    return [random.randrange(model.vocab_size) for _ in range(length)]  # noqa: S311 - no secret


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_PAIRS_NAMED
    return ", ".join(names[:_MAX_PAIRS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _workers(
    status: GetStatusResponse, role: common_pb2.WorkerRole, state: str = ""
) -> list[WorkerRecord]:
    mine = (one for one in status.workers if one.record.role == role)
    return [worker.record for worker in mine if not state or worker.state == state]


def _check_workers(status: GetStatusResponse) -> Iterator[Finding]:
    for role, name in ROLES.items():
        if _workers(status, role):
            continue
        text, fix = f"has no {name} worker", f"start one: baton {name}-worker"
        if status.router.state == "SERVING":
            yield warn("cluster", f"{text}: decode workers compute prompts, but no embeddings", fix)
        else:
            yield fail("cluster", text, fix)
    if not status.router.registry_connected:
        yield warn("registry", "the router does not reach etcd: no worker joins or leaves")
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
    kinds: list[Kind] = []  # of the pair's own kind of memory, fastest first
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
        text = f"{link.state}: handoffs between them failed, and for a while none is tried"
        problems.append((text, "the logs of both workers say why; `baton top` shows failovers"))
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
            "one computes on a GPU and the other on a CPU: KV cannot travel between them",
            "use one kind of device in a cluster, or two clusters (--cluster)",
        )
    elif different:
        yield (
            f"their KV caches differ in {'; '.join(different)}",
            "start both with the same model, --dtype, --kv-dtype, --quantization and --block-size",
        )
    elif chosen is None:
        yield (
            f"no transport that both can use: prefill offers {_names(prefill)}, decode "
            f"{_names(decode)}",
            "start both with --transport auto",
        )
    elif chosen == common_pb2.TRANSPORT_NCCL:
        yield from _nccl_problems(prefill, decode)
    elif expected := pairing.fallback(chosen, prefill, decode):
        kind, why = expected
        yield (
            f"KV travels over the network within one machine, not by {transport_name(kind)}: {why}",
            "start both with --transport auto, as one user with one /dev/shm (in containers ipc: "
            "host), or leave it: gloo works",
        )


def _nccl_problems(prefill: WorkerRecord, decode: WorkerRecord) -> Iterator[Problem]:
    ours, theirs = prefill.hardware, decode.hardware
    if not (ours.gpu.uuid and theirs.gpu.uuid):
        yield (
            "a worker does not report which GPU it computes on",
            "see its log at --log-level debug; without it faster transports cannot be judged",
        )
    elif not pairing.topology_of(prefill, decode).same_machine:
        if not (ours.rdma_devices and theirs.rdma_devices):
            yield (
                "between their machines NCCL will use TCP sockets: one has no RDMA device",
                "give both RDMA devices (in containers /dev/infiniband and memlock: -1), or place "
                "them on one machine",
            )
    elif ours.gpu.uuid not in theirs.visible_gpus or theirs.gpu.uuid not in ours.visible_gpus:
        yield (
            "they are on one machine and do not see each other's GPU: NCCL can use neither NVLink "
            "nor PCIe between them and falls to the host's memory or to sockets",
            "show every GPU to every worker and choose with --device cuda:N; in containers also "
            "ipc: host and one NCCL_HOSTID for the machine",
        )
    elif prefill.host_id != decode.host_id and theirs.gpu.uuid in ours.peer_gpus:
        why = pairing.separation(prefill.host_id, decode.host_id)
        yield (
            f"NCCL moves KV that one GPU could write straight into the other: {why}",
            "run both as one user with one /dev/shm (in containers ipc: host)",
        )
    if ours.nccl_version and theirs.nccl_version and ours.nccl_version != theirs.nccl_version:
        yield (
            f"NCCL {ours.nccl_version} and {theirs.nccl_version} may not understand each other",
            "run both with one image",
        )


def _names(record: WorkerRecord) -> str:
    return ", ".join(map(transport_name, record.transports)) or "none"
