"""`baton doctor`: what it says of a machine alone and of clusters, most with one thing wrong."""

import itertools
import json
import os
import re
import socket
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from baton.cli import doctor as command
from baton.cli import main as cli
from baton.client import Completion, Route
from baton.errors import BatonError, ConfigError, KvMismatch, TransferFailed, Unauthenticated
from baton.local import doctor, etcd_process
from baton.local.doctor import Finding
from baton.local.doctor_cluster import check_cluster, check_handoffs, check_requests
from baton.local.ports import free
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from baton.worker import nvidia_smi
from baton.worker.nvidia_smi import Card
from kvtransfer import pairing
from tests.processes import PYTHON, run

H100 = Card(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", 80 << 30, "9.0")
REPORTED = common_pb2.Hardware(
    gpu=common_pb2.Gpu(uuid="GPU-aaaa", name="NVIDIA H100 80GB HBM3"),
    visible_gpus=["GPU-aaaa", "GPU-bbbb"], peer_gpus=["GPU-bbbb"], gpu_links=["NV18 GPU-bbbb"],
    cuda_version="12.8", nccl_version="2.27.5",
)  # fmt: skip


def test_a_machine_is_looked_at_without_torch():
    """A client's installation: neither torch nor rich can be imported."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['rich'] = None\n"
        "from baton.cli.main import main; sys.exit(main(['doctor', '--json']))"
    )
    status, out, error = run([*PYTHON, code])
    assert (status, error) == (0, "")
    report = json.loads(out)
    assert set(report) == {"status", "machine", "model", "router", "workers", "pairs", "cluster"}
    subjects = {finding["subject"] for finding in report["machine"]}
    assert {"python", "torch", "CPU kernels", "cores", "memory", "etcd", "GPU"} <= subjects
    for finding in report["machine"]:
        assert set(finding) == {"level", "subject", "text", "fix"}
        assert finding["level"] in ("ok", "warn")


def test_programs_that_are_missing(tmp_path, monkeypatch):
    def program(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)

    monkeypatch.setattr(doctor, "BUILT_KERNELS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    no_etcd = mock.Mock(side_effect=ConfigError("no etcd to start: put etcd on PATH"))
    monkeypatch.setattr(etcd_process, "etcd_binary", no_etcd)
    found = {one.subject: one for one in doctor.check_machine(False)}
    fixes = {"torch": "'.[worker]'", "etcd": "put etcd on PATH", "CPU kernels": "g++"}
    for subject, fix in fixes.items():
        assert found[subject].level == "warn" and fix in found[subject].fix
    program("g++", "exit 1")
    assert "does not run" in doctor.compiler().text
    (tmp_path / "avx2-0.so").touch()
    assert doctor.compiler().level == "ok"

    assert "'.[gpu]'" in doctor.triton(needed=True).fix
    monkeypatch.setattr(doctor, "version_of", lambda package: "3.7.1")
    assert doctor.triton(needed=False).level == "ok"
    assert "C compiler" in doctor.triton(needed=True).text
    program("gcc", "")
    assert doctor.triton(needed=True).fix == "install python3-dev"
    (tmp_path / "Python.h").touch()
    assert doctor.triton(needed=True).text == "3.7.1"


def test_cores_and_memory_are_what_the_container_may_have(tmp_path, monkeypatch):
    def limit(name, text):
        (tmp_path / name).write_text(f"{text}\n")

    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert doctor.cores().text == "8"
    limit("cpu.max", "max 100000")
    assert doctor.cores().level == "ok"
    limit("cpu.max", "250000 100000")
    found = doctor.cores()
    assert found.level == "warn" and "quota is 2.5" in found.text and "2 in total" in found.fix

    limit("meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB")
    assert doctor.memory().text == "64.0 GiB, 32.0 GiB of it free"
    limit("memory.max", str(8 << 30))
    limit("memory.current", str(7 << 30))
    limit("memory.stat", f"anon 1\ninactive_file {4 << 30}")
    found = doctor.memory()
    assert (found.level, found.text) == ("ok", "8.0 GiB, 5.0 GiB of it free")
    limit("memory.stat", "inactive_file 0")
    assert doctor.memory().level == "warn"


def test_a_port_may_be_in_use_by_a_router():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.free_port(port, "--port", router_here=True).level == "ok"
        found = doctor.free_port(port, "--port", router_here=False)
        assert found.level == "warn" and "--port" in found.fix
    assert doctor.free_port(free(), "--port", router_here=False).text == "free"


OLD = Card(0, "GPU-a", "V100", 16 << 30, "7.0")
ALONE = common_pb2.Hardware(gpu=REPORTED.gpu, visible_gpus=["GPU-aaaa"], cuda_version="12.8")
NO_PEERS = common_pb2.Hardware(gpu=REPORTED.gpu, visible_gpus=["GPU-aaaa", "GPU-bbbb"])


@pytest.mark.parametrize(
    ("cards", "in_torch", "found"),
    [
        ([H100, H100], [REPORTED, REPORTED], {
            "GPU 0": "ok: NVIDIA H100 80GB HBM3, 80 GiB, GPU-aaaa, compute capability 9.0",
            "CUDA": "ok: 12.8, driver 570.86.15",
            "cuda:0": "ok: NVIDIA H100 80GB HBM3 writes 1 of 1 others: GPU-bbbb NV18",
            "NCCL": "ok: 2.27.5: two workers may not share a GPU",
        }),
        ([H100], [], {"CUDA": "warn: .* GPUs of driver 570.86.15 install a CUDA build of torch"}),
        ([H100, H100], [ALONE], {
            "CUDA": "warn: 12.8, .* sees 1 of 2 GPUs leave CUDA_VISIBLE_DEVICES unset",
            "cuda:0": "ok: .*, alone", "NCCL": "warn: not found",
        }),
        ([OLD], [NO_PEERS], {
            "GPU 0": "warn: V100, .*Ampere", "cuda:0": "warn: .* writes 0 of 1 .* host's memory",
        }),
        ([replace(OLD, capability="")], [ALONE], {"GPU 0": "ok: V100"}),
        ([], [], {"GPU": "warn: driver 570.86.15 is loaded, .* container toolkit"}),
        ([H100], [REPORTED], {"NCCL_P2P_DISABLE": "warn: is 1, which .* unset it"}),
    ],
)  # fmt: skip
def test_gpus_by_driver_and_torch(cards, in_torch, found, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "cards", lambda timeout_s: cards)
    monkeypatch.setattr(nvidia_smi, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(doctor, "seen_by_torch", lambda: in_torch)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    shown = {one.subject: f"{one.level}: {one.text} {one.fix}" for one in doctor.check_gpus()}
    for subject, text in found.items():
        assert re.match(text, shown[subject]), shown[subject]
    assert "NCCL_IB_DISABLE" not in shown


def test_the_folder_where_workers_meet_is_there_and_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SHM", tmp_path)
    monkeypatch.setattr(doctor, "MIN_SHM_BYTES", 1)
    assert doctor.shared_memory().level == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    assert doctor.shared_memory().text == "not writable: KV can only be sent over NCCL"
    monkeypatch.setattr(doctor, "SHM", tmp_path / "none")
    assert doctor.shared_memory().fix == "ipc: host, or shm_size"


def finding(level, subject, text, fix=""):
    return {"level": level, "subject": subject, "text": text, "fix": fix}


PAIR = {"prefill": "p", "decode": "d", "transport": None, "link": None, "in_use": "gloo",
        "gb_per_s": None,
        "problems": ["nothing fits"], "not_possible": {}, "ranks": []}  # fmt: skip
WORKER = {"role": "prefill", "incarnation": "p", "address": "h:1", "state": "READY",
          "device": "H100", "gpu": "GPU-a", "visible_gpus": ["GPU-a", "GPU-b"], "peer_gpus": [],
          "rdma_devices": ["mlx5_0"], "transports": ["nccl"]}  # fmt: skip


@pytest.mark.parametrize(("worst", "exit_status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_a_report_is_shown_and_only_failures_exit_with_1(worst, exit_status, monkeypatch, capsys):
    obstacles = {"cuda_ipc": "they are apart", "nccl": "none offers it"}
    report = {
        "status": worst,
        "machine": [finding(worst, "it", "is so", "do that")],
        "model": [],
        "router": {"target": "127.0.0.1:7700", "answers": False},
        "workers": [WORKER],
        "pairs": [
            PAIR,
            {**PAIR, "not_possible": obstacles},
            {
                **PAIR,
                "transport": "cuda_ipc",
                "link": "NV18",
                "gb_per_s": 12.5,
                "ranks": [{"prefill": 0, "decode": 1, "heads": [4, 8]}],
            },
        ],
        "cluster": [finding("ok", "p → d", "many words")],
    }
    monkeypatch.setattr(command, "look", lambda *asked: report)
    assert cli.main(["doctor"]) == exit_status
    shown = capsys.readouterr().out
    assert f"  {worst:<4}  it  is so\n            → do that\n" in shown
    assert "router: none answers at 127.0.0.1:7700" in shown
    counted = {"ok": "no problems found", "warn": "0 failed, 1 warning", "fail": "1 failed"}
    assert counted[worst] in shown.splitlines()[-1]
    assert "READY  H100         0 of 1  mlx5_0  nccl" in shown
    assert "NONE                gloo    -     nothing fits" in shown
    assert "NONE                gloo    -     cuda_ipc: they are apart; nccl: none offers" in shown
    assert "cuda_ipc over NV18  gloo    12.5  -" in shown and "0 → 1: 4-7\n" in shown
    assert "\n  ok    p → d  many words\n" in shown


# Clusters.

CUDA_IPC, NCCL = common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL
SHM, GLOO = common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO
HOST = "boot-a/shm:1:1/1000"
CONTAINER = "boot-a/shm:2:1/1000"
OTHER_USER = "boot-a/shm:1:1/1001"
ELSEWHERE = "boot-b/shm:1:1/1000"
ROLES = {"p": common_pb2.WORKER_ROLE_PREFILL, "d": common_pb2.WORKER_ROLE_DECODE}


def cpu(name, host=HOST, **fields):
    """A worker on a CPU; names begin with p or d, for their role."""
    known = {
        "model": "demo", "max_context": 600,
        "incarnation": name, "role": ROLES[name[0]], "host_id": host, "transports": [SHM, GLOO],
        "kv": common_pb2.KvDescriptor(dtype="bfloat16", block_size=16),
        "hardware": common_pb2.Hardware(torch_version="2.11.0"),
    }  # fmt: skip
    return common_pb2.WorkerRecord(**{**known, **fields})


def gpu(name, own, others="", host=HOST, *, peers=None, nccl="2.27.5", rdma=(), **fields):
    """A worker on the GPU named by one letter, which sees those of `others`, too."""
    hardware = common_pb2.Hardware(
        gpu=common_pb2.Gpu(uuid=own, name="NVIDIA H100 80GB HBM3", capability="9.0"),
        visible_gpus=[own, *others], peer_gpus=others if peers is None else peers,
        nccl_version=nccl, rdma_devices=rdma,
    )  # fmt: skip
    return cpu(name, host, **{"transports": [CUDA_IPC, NCCL], "hardware": hardware, **fields})


def check(*records, state="READY", registry=True, link=None, router="NOT_SERVING"):
    """The pairs of a cluster of these workers, and what is found; `link` is that of p and d."""
    link = link and worker_pb2.PairStatus(**{"prefill": "p", "decode": "d", "state": "OPEN"} | link)
    return check_cluster(
        fleet_pb2.GetStatusResponse(
            router=fleet_pb2.RouterStatus(registry_connected=registry, state=router),
            workers=[fleet_pb2.WorkerStatus(record=one, state=state) for one in records],
            pairs=[link] if link else [],
        )
    )


IB: dict[str, Any] = {"rdma": ("mlx5_0",)}
ONE_NCCL: dict[str, Any] = {"transports": [NCCL]}
LATE_NCCL: dict[str, Any] = {**ONE_NCCL, "nccl": "2.30.3"}
UNKNOWN: dict[str, Any] = {
    "hardware": common_pb2.Hardware(torch_version="2.11.0"), "transports": [NCCL]
}  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "finding"),
    [
        (cpu("p"), cpu("d"), "shm", ""),
        (cpu("p", transports=[GLOO]), cpu("d", transports=[GLOO]), "gloo", ""),
        (cpu("p"), cpu("d", ELSEWHERE), "gloo", ""),
        (gpu("p", "A", "B"), gpu("d", "B", "A"), "cuda_ipc", ""),
        (gpu("p", "A"), gpu("d", "A"), "cuda_ipc", ""),
        (gpu("p", "A", "B", transports=[NCCL]), gpu("d", "B", "A"), "nccl", ""),
        (gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""), "nccl", ""),
        (gpu("p", "A", **IB), gpu("d", "B", host=ELSEWHERE, **IB), "nccl", ""),
        (gpu("p", "A", **LATE_NCCL), gpu("d", "A", **LATE_NCCL), "nccl", ""),
        # Containers that see one GPU each fall to sockets.
        (gpu("p", "A"), gpu("d", "B", host=CONTAINER), "nccl",
         "do not see each other's GPU … sockets → make every GPU visible … ipc: host"),
        # Containers that see both share no memory.
        (gpu("p", "A", "B"), gpu("d", "B", "A", host=CONTAINER), "nccl",
         "they share no /dev/shm → … ipc: host"),
        # One machine or both have no RDMA.
        *((gpu("p", "A", rdma=rdma), gpu("d", "B", host=ELSEWHERE), "nccl",
           "NCCL will use TCP sockets … → … /dev/infiniband") for rdma in ((), ("mlx5_0",))),
        # CPUs of one machine that use the network.
        (cpu("p"), cpu("d", CONTAINER), "gloo",
         "within one machine, not by shm: they share no /dev/shm → … as one user"),
        (cpu("p"), cpu("d", OTHER_USER), "gloo",
         "within one machine, not by shm: they run as different users → … as one user"),
        (cpu("p", transports=[GLOO]), cpu("d"), "gloo",
         "not by shm: the prefill worker does not offer it → start both with --transport auto"),
        (gpu("p", "A", **IB), gpu("d", "B", host=ELSEWHERE, nccl="2.26.2", **IB), "nccl",
         "NCCL 2.27.5 and 2.26.2 … → … same image"),
        (gpu("p", "A", **UNKNOWN), gpu("d", "B"), "nccl",
         "does not report which GPU … → … --log-level debug"),
        # What cannot work.
        (gpu("p", "A", **ONE_NCCL), gpu("d", "A", **ONE_NCCL), None, "no common transport"),
        (gpu("p", "A"), cpu("d"), None,
         "one computes on a GPU and the other on a CPU … → … --cluster"),
        (cpu("p", transports=[SHM]), cpu("d", transports=[GLOO]), None,
         "prefill offers shm, decode gloo → start both with --transport auto"),
        *((cpu("p"), cpu("d", kv=common_pb2.KvDescriptor(
            **{"dtype": "bfloat16", "block_size": 16, field: value})), None,
           f"{field}: … → … --kv-dtype") for field, value in (
            ("model_fingerprint", "other"), ("dtype", "float32"), ("block_size", 32))),
    ],
)  # fmt: skip
def test_a_pair_and_what_it_could_do_better(prefill, decode, transport, finding):
    (pair,), findings = check(prefill, decode)
    assert pair["transport"] == transport
    levels = ["ok"] if not finding else ["warn"] if transport else ["fail", "warn"]
    assert [one.level for one in findings] == levels
    if finding:
        said = findings[-1]
        assert said.subject == "p → d" and pair["problems"] == [said.text]
        at = 0
        for part in finding.split("…"):  # in this order
            at = f"{said.text} → {said.fix}".index(part.strip(), at)


def test_which_rank_sends_which_which_heads_is_reported():
    kv = common_pb2.KvDescriptor(dtype="bfloat16", block_size=16, num_kv_heads=8)
    (pair,), _ = check(cpu("p", kv=kv, kv_pools=2), cpu("d", kv=kv))
    assert pair["ranks"] == [
        {"prefill": 0, "decode": 0, "heads": [0, 4]}, {"prefill": 1, "decode": 0, "heads": [4, 8]},
    ]  # fmt: skip
    (pair,), _ = check(cpu("p", kv=kv), cpu("d", kv=kv))
    assert pair["ranks"] == []


def test_links_and_obstacles_of_pairs_are_reported():
    prefill = gpu("p", "A", "BC")
    prefill.hardware.gpu_links.extend(["NV18 B", "SYS C"])
    pairs, _ = check(prefill, gpu("d1", "B", "AC"), gpu("d2", "C", "AB"), gpu("d3", "D"))
    assert [pair["link"] for pair in pairs] == ["NV18", "SYS", None]
    apart, _ = check(gpu("p", "A"), gpu("d", "B", host=CONTAINER))
    assert apart[0]["not_possible"] == {"cuda_ipc": "they share no /dev/shm"}
    no_peers, _ = check(gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""))
    assert "cannot write" in no_peers[0]["not_possible"]["cuda_ipc"]
    shared, _ = check(gpu("p", "A", **ONE_NCCL), gpu("d", "A", **ONE_NCCL))
    assert "2.30" in shared[0]["not_possible"]["nccl"]
    assert not check(gpu("p", "A"), cpu("d"))[0][0]["not_possible"]


def test_problems_of_several_pairs():
    """One pair that works is enough not to fail; the same problem is reported once."""
    pairs, (found,) = check(gpu("p", "A", "B"), gpu("d1", "B", "A"), cpu("d2"))
    assert [pair["transport"] for pair in pairs] == ["cuda_ipc", None]
    assert (found.level, found.subject) == ("warn", "p → d2")
    prefill = [gpu(f"p{i}", "A") for i in range(3)]
    _, (found,) = check(*prefill, *(gpu(f"d{i}", "B", host=CONTAINER) for i in range(2)))
    assert found.subject.endswith("p1 → d1 and 2 more")


def test_links_that_could_be_faster_and_clusters_that_cannot_serve():
    moved = {"transport": GLOO, "sent_bytes": 3_000_000, "sent_ms": 2.0}
    (pair,), (found,) = check(cpu("p"), cpu("d"), link=moved)
    assert (pair["in_use"], pair["gb_per_s"], pair["sent_bytes"]) == ("gloo", 1.5, 3_000_000)
    assert "uses gloo, and shm is faster" in found.text
    _, (found,) = check(cpu("p"), cpu("d"), link={**moved, "fallback": "not shm: it is full"})
    assert (found.level, found.text) == ("warn", "the open link uses gloo, not shm: it is full")
    (pair,), (found,) = check(cpu("p"), cpu("d"), link={"state": "EJECTED"})
    assert pair["in_use"] is pair["gb_per_s"] is None and found.text.startswith("EJECTED: not used")
    _, (found,) = check(cpu("p"), cpu("d"), link={**moved, "transport": SHM})
    assert found.level == "ok"
    missing = Finding("fail", "cluster", "has no decode worker", "start one: baton decode-worker")
    assert check(cpu("p")) == ([], [missing])
    pairs, (found,) = check(cpu("d"), router="SERVING")
    assert pairs == [] and (found.level, found.subject) == ("warn", "cluster")
    assert "no prefill worker: the others do its work" in found.text
    _, findings = check(cpu("p"), cpu("d"), state="STALLED", registry=False)
    subjects = [(found.level, found.subject) for found in findings]
    assert subjects == [("warn", "registry"), ("warn", "p"), ("warn", "d")]


class Cluster:
    """What `baton.Client` answers: an explanation, and by pair a transport or an error."""

    def __init__(self, explained=None, pairs=()):
        self.explained, self.pairs = explained, dict(pairs)

    def models(self, timeout):
        raise Unauthenticated("the API key is an operator's: requests need a tenant's")

    def explain(self, prompt, **options):
        if isinstance(self.explained, BatonError):
            raise self.explained
        plain = {"refused": "", "decode_prefills": False, "prompt_tokens": len(prompt)}
        return {**plain, **self.explained}

    def generate(self, prompt, workers, **options):
        assert len(prompt) == 300
        if isinstance(found := self.pairs[workers], BatonError):
            raise found
        return Completion("", (5, 6), "length", route=Route(*workers, found, 1))


@pytest.mark.parametrize(
    ("served", "explained", "level", "text"),
    [
        ({}, None, "ok", "none has succeeded yet: `baton doctor --test`"),
        ({"handed_over": 3, "local": 40}, None, "ok", "43 succeeded: 3 handed_over, 40 local"),
        ({"prefill_only": 2}, None, "ok", "2 succeeded: 2 prefill_only"),
        ({"local": 7}, {}, "ok",
         "7 succeeded, none of them with a handoff: 7 local; they were short or cached: a new "
         "prompt of 300 tokens would be handed over"),
        ({"cached": 1, "local": 7}, {"decode_prefills": True}, "warn",
         "8 succeeded, none .*; a decode worker would compute a new prompt of 300 tokens, too"),
        ({"local": 7}, {"refused": "no prefill worker is ready"}, "warn",
         ".* would wait or be refused: no prefill worker is ready"),
        ({"local": 7}, Unauthenticated("no key"), "warn", ".*; the cause is unknown: no key"),
    ],
)  # fmt: skip
def test_requests_that_are_not_handed_over_are_said_and_why(served, explained, level, text):
    counts = fleet_pb2.RouterCounts(served={"handed_over": 0, **served})
    others = cpu("p2", model="other", max_context=64)
    status = fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(counts=counts, model="demo"),
        workers=[fleet_pb2.WorkerStatus(record=one) for one in (cpu("p"), cpu("d"), others)],
    )
    found = check_requests(Cluster(explained), status)
    assert (found.level, found.subject) == (level, "requests")
    assert re.match(text, found.text), found.text


def test_a_handoff_between_each_pair_that_fails_is_a_failure():
    """Workers that are not READY are left out."""
    workers = [
        fleet_pb2.WorkerStatus(record=one, state="STARTING" if one.incarnation == "p2" else "READY")
        for one in (cpu("p1"), cpu("p2"), cpu("d1"), cpu("d2"), cpu("d3"))
    ]
    (none,) = check_handoffs(Cluster(), fleet_pb2.GetStatusResponse(workers=workers[1:]))
    assert (none.level, none.text) == ("fail", "no pair of workers is READY")
    status = fleet_pb2.GetStatusResponse(workers=workers)
    pairs: dict[tuple[str, str], Any] = {("p1", name): "shm" for name in ("d1", "d2", "d3")}
    assert [(one.level, one.text) for one in check_handoffs(Cluster(pairs=pairs), status)] == [
        ("ok", "3 of 3 pairs handed over KV, and it was verified")
    ]
    pairs |= {("p1", "d2"): None, ("p1", "d3"): TransferFailed("the link was lost")}
    assert [
        (one.level, one.subject, one.text) for one in check_handoffs(Cluster(pairs=pairs), status)
    ] == [
        ("fail", "p1 → d2", "the test request was served without a handoff"),
        ("fail", "p1 → d3", "the test request failed: the link was lost"),
        ("warn", "handoff test", "1 of 3 pairs handed over KV, and it was verified"),
    ]


OFFERS = [(CUDA_IPC, NCCL), (NCCL,), (CUDA_IPC,), (SHM, GLOO), (GLOO,)]
PLACES = [("A", ""), ("A", "B"), ("B", "A"), ("B", "")]


@pytest.mark.parametrize("host", [HOST, ELSEWHERE])
def test_the_workers_choose_the_transport_that_is_reported(host):
    """Every combination of offers, sights and machines: the records lead to the Offer's choice."""
    for ours, theirs, (own, others), (there, beyond) in itertools.product(
        OFFERS, OFFERS, PLACES, PLACES
    ):
        prefill = gpu("p", own, others, transports=ours)
        decode = gpu("d", there, beyond, host=host, transports=theirs)
        reachable = (own, *others)
        apart = pairing.separation(HOST, host)
        ends = pairing.PairTopology(apart, gpu=there, reachable=reachable, nccl=(2, 27, 5))
        try:
            chosen = pairing.choose(ours, theirs, ends)
        except KvMismatch:
            chosen = None
        assert pairing.fastest(prefill, decode) == chosen
