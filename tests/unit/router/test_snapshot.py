"""Whether requests can be served, and if not, what people are told."""

import pytest

from baton.v1 import common_pb2, worker_pb2
from router.fleet.snapshot import READY, SILENT, Snapshot, WorkerView


def worker(name, state=READY, reason="", dtype="float32", **kv):
    descriptor = common_pb2.KvDescriptor(dtype=dtype, **kv)
    record = common_pb2.WorkerRecord(incarnation=name, kv=descriptor)
    return WorkerView(record, worker_pb2.Load(), state, reason)


def test_one_usable_pair_is_enough():
    others = worker("p1", SILENT), worker("d1", dtype="bfloat16")
    snapshot = Snapshot((others[0], worker("p0")), (others[1], worker("d0")))
    assert snapshot.ready
    assert snapshot.why_not_ready == ""
    assert [(p.incarnation, d.incarnation) for p, d in snapshot.usable_pairs()] == [("p0", "d0")]


@pytest.mark.parametrize(
    ("prefill", "decode", "shut", "why"),
    [
        ([], [worker("d0")], {}, "no prefill worker is ready (none is registered)"),
        ([worker("p0")], [], {}, "no decode worker is ready (none is registered)"),
        (
            [worker("p0")],
            [worker("d0", SILENT, "no heartbeat"), worker("d1", "DRAINING")],
            {},
            "no decode worker is ready (d0 is SILENT: no heartbeat; d1 is DRAINING)",
        ),
        (
            [worker("p0")],
            [worker("d0", dtype="bfloat16")],
            {},
            "no prefill and decode worker have compatible KV caches: "
            "prefill worker p0 has dtype=float32, decode worker d0 has dtype=bfloat16",
        ),
        (
            [worker("p0", quantization="int8")],
            [worker("d0")],
            {},
            "no prefill and decode worker have compatible KV caches: "
            "prefill worker p0 has quantization=int8, decode worker d0 has quantization=none",
        ),
        (
            [worker("p0")],
            [worker("d0")],
            {("p0", "d0"): "quarantined"},
            "no prefill worker that is ready can hand over to a decode worker"
            " (p0 to d0: quarantined)",
        ),
    ],
)
def test_what_is_missing_is_said(prefill, decode, shut, why):
    snapshot = Snapshot(tuple(prefill), tuple(decode), shut)
    assert not snapshot.ready
    assert snapshot.why_not_ready == why


def test_of_thousands_that_are_not_ready_a_few_are_told():
    many = tuple(worker(f"p{i:04}", SILENT, "it is not there") for i in range(2000))
    why = Snapshot(many, many).why_not_ready
    assert why.startswith("no prefill worker is ready (p0000 is SILENT: it is not there; p0001")
    assert why.endswith("; and 1992 more)") and len(why) < 1000
