"""A worker's metrics of steps, transfers and reservations, and its load as watchers get it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from opentelemetry.context import Context

from baton.config import WorkerConfig
from baton.engine.block_manager import CacheChanges
from baton.engine.runner import StepRunner
from baton.engine.step_report import Load, SequenceProgress, StepReport
from baton.errors import Stale
from baton.kv_groups import KvGroups
from baton.v1 import common_pb2, worker_pb2
from baton.worker.metrics import (
    CacheWatcher,
    ExpertImbalance,
    LoadTracker,
    WorkerMetrics,
    kind_of,
)

LOAD = Load(0, 0, 0, 8, 8, 0, 0, 0, 1, 0, 2000.0, 120)


def step(num_tokens, *sampled, ended_ns=5_000_000, chunks=0):
    """A step whose sequences have sampled a token or not, and some of which compute prompts."""
    progress = [SequenceProgress(str(n), 1, (7,) if one else ()) for n, one in enumerate(sampled)]
    return StepReport(0, ended_ns, num_tokens, progress, LOAD, num_chunks=chunks)


DRAFTED = StepReport(
    0,
    5_000_000,
    6,
    [SequenceProgress("a", 9, (7, 8, 9)), SequenceProgress("b", 1, (7,))],
    LOAD,
    num_proposed=4,
    num_accepted=2,
)


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (step(3, True, True, True), "decode"),
        (step(512, False, chunks=1), "prefill"),
        (step(100, True, chunks=1), "prefill"),  # the last chunk samples the first token
        (step(200, True, True, chunks=2), "prefill"),
        (step(102, True, True, False, chunks=1), "mixed"),
        (step(150, False, False, chunks=2), "prefill"),
        (DRAFTED, "decode"),
        (dataclasses.replace(DRAFTED, num_tokens=66, num_chunks=1), "mixed"),
    ],
)
def test_what_a_step_computed(report, kind):
    assert kind_of(report) == kind


class OnGpu(StepRunner):
    """A runner that has computed some decode steps."""

    decode_rows = property(lambda self: {"wanted": 10, "padding": 6, "wasted": 1})
    waited_s = 2.5


def page(metrics):
    lines = metrics.render("")[1].decode().splitlines()
    return [line.removesuffix(".0") for line in lines]


def cost(metrics):
    (line,) = (line for line in page(metrics) if line.startswith("baton_worker_cost_total"))
    return float(line.split()[1])


def test_a_decode_worker_counts_steps_drafts_reservations_and_cost():
    metrics = WorkerMetrics(WorkerConfig("decode", price_per_hour=3_600_000.0))
    assert 'baton_engine_draft_tokens_total{accepted="yes"} 0' in page(metrics)  # before the first
    for report in (DRAFTED, DRAFTED, step(0)):
        metrics.stepped(report)
    metrics.reserved("held")
    metrics.reserved("refused")
    drafting = SimpleNamespace(seconds=1.5)
    load = worker_pb2.Load(blocks_held_by_group=[3, 5, 2, 4])
    groups = KvGroups((0, 512, 512), state_blocks=2)
    metrics.observe_engine(lambda: load, OnGpu.__new__(OnGpu), drafting, groups)
    duration = "baton_engine_step_duration_seconds"
    expected = {
        'baton_engine_draft_tokens_total{accepted="yes"} 4',
        'baton_engine_draft_tokens_total{accepted="no"} 4',
        "baton_engine_draft_time_seconds_total 1.5",
        f'{duration}_count{{kind="decode"}} 2',
        f'{duration}_bucket{{kind="decode",le="0.004"}} 0',
        f'{duration}_bucket{{kind="decode",le="0.006"}} 2',
        "baton_engine_batch_size_sum 4",
        "baton_engine_batch_size_count 2",
        'baton_reservations_total{outcome="held"} 1',
        'baton_reservations_total{outcome="started"} 0',
        'baton_reservations_total{outcome="refused"} 1',
        'baton_reservations_total{outcome="failed"} 0',
        'baton_engine_gpu_rows_total{kind="padding"} 6',
        "baton_engine_gpu_wait_time_seconds_total 2.5",
        'baton_kv_group_blocks{window="full"} 3',
        'baton_kv_group_blocks{window="512"} 7',
        'baton_kv_group_blocks{window="state"} 4',
    }
    assert expected <= set(page(metrics))
    assert cost(metrics) > 0


def test_a_prefill_worker_counts_transfers_and_without_a_price_no_cost():
    metrics = WorkerMetrics(WorkerConfig("prefill"))
    stats = SimpleNamespace(
        num_bytes=3_000_000, transfer_s=0.02, wire_s=0.001, transport="shm", resends=1
    )
    metrics.transferred(stats, Context())
    with pytest.raises(Stale), metrics.transferring():
        raise Stale("gone")
    with pytest.raises(RuntimeError), metrics.transferring():
        raise RuntimeError("not a transfer's")
    metrics.observe_engine(worker_pb2.Load, StepRunner(None, None))
    moved = {"sent_bytes": 3_000_000, "sent_ms": 2.0, "fallback": "not shm: it is full"}
    metrics.observe_links(
        lambda: [
            worker_pb2.PairStatus(
                decode="d0", transport=common_pb2.TRANSPORT_GLOO, state="OPEN", **moved
            ),
            worker_pb2.PairStatus(decode="d1", transport=common_pb2.TRANSPORT_SHM, state="OPEN"),
            worker_pb2.PairStatus(decode="d2", state="QUARANTINED"),
        ]
    )
    link = "baton_kv_link_throughput_bytes_per_second"
    assert [line for line in page(metrics) if line.startswith(link)] == [
        f'{link}{{fallback="yes",peer="d0",transport="gloo"}} 1.5e+09',
        f'{link}{{fallback="no",peer="d1",transport="shm"}} 0',
    ]
    throughput = "baton_kv_transfer_throughput_bytes_per_second"
    expected = {
        'baton_kv_transfer_io_bytes_total{transport="shm"} 3e+06',
        'baton_kv_transfer_resends_total{transport="shm"} 1',
        'baton_kv_transfer_duration_seconds_sum{transport="shm"} 0.02',
        f'{throughput}_bucket{{le="2e+09",transport="shm"}} 0',
        f'{throughput}_bucket{{le="4e+09",transport="shm"}} 1',
    }
    assert expected <= set(page(metrics))
    failures = [one for one in page(metrics) if one.startswith("baton_kv_transfer_failures_total")]
    assert failures == ['baton_kv_transfer_failures_total{reason="Stale"} 1']
    assert not any("baton_engine_gpu_rows_total{" in line for line in page(metrics))
    assert cost(metrics) == 0


def test_expert_imbalance_is_of_the_tokens_since_a_reading_ten_seconds_ago():
    now, tokens = [0.0], torch.tensor([[100, 0, 0, 0], [5, 5, 5, 5]])
    imbalance = ExpertImbalance(tokens, lambda: now[0])
    tokens += torch.tensor([[2, 2, 2, 2], [10, 30, 10, 30]])
    now[0] = 9.0
    assert imbalance.read() == 1.0
    now[0] = 10.0
    assert imbalance.read() == 1.5
    tokens[0, 0] += 7
    now[0] = 19.0
    assert imbalance.read() == 1.5
    now[0] = 20.0
    assert imbalance.read() == 4.0
    now[0] = 30.0
    assert imbalance.read() == 1.0, "nothing was computed"


def test_experts_have_their_imbalance_and_ranks_the_time_of_their_collectives_on_the_page():
    metrics, runner = WorkerMetrics(WorkerConfig("prefill")), StepRunner(None, None)
    metrics.observe_engine(worker_pb2.Load, runner)
    assert not any(line.startswith("baton_engine_expert_imbalance_ratio") for line in page(metrics))
    runner.expert_tokens = torch.zeros(2, 4, dtype=torch.int64)
    runner.ranks = SimpleNamespace(collective_s=2.5)
    metrics.observe_engine(worker_pb2.Load, runner)
    assert {
        "baton_engine_expert_imbalance_ratio 1",
        "baton_engine_collective_time_seconds_total 2.5",
    } <= set(page(metrics))


def cache_step(stored=(), evicted=(), tokens=0, ms=0):
    changes = CacheChanges(set(stored), set(evicted))
    return StepReport(0, ms * 1_000_000, tokens, [], LOAD, changes)


def test_a_watcher_gets_all_that_is_cached_and_then_the_net_effect():
    tracker, wakes = LoadTracker(), []
    tracker.update(cache_step((1, 2)))
    tracker.update(cache_step((), (2,)))
    watcher = CacheWatcher(tracker, lambda: wakes.append(True))
    event = watcher.event()
    assert event.cleared and (list(event.stored), list(event.evicted)) == ([1], [])
    for changes in (((2,), (1,)), ((1,), (2,)), ((3, 2), ()), ((), (3, 1)), ((1,), ()), ((), (1,))):
        tracker.update(cache_step(*changes))
    event = watcher.event()
    assert not event.cleared and (list(event.stored), list(event.evicted)) == ([2], [1])
    tracker.update(cache_step((2,), (2,)))  # stored again in the step that evicted it
    assert watcher.event() is None
    watcher.close()
    tracker.update(cache_step((7,)))
    assert (watcher.event(), len(wakes)) == (None, 7)


def test_a_load_has_the_time_of_decode_steps_whatever_their_batch():
    tracker = LoadTracker()
    tracker.update(step(100, False, ended_ns=50_000_000, chunks=1))
    assert (tracker.load.prefill_tokens_per_s, tracker.load.chunk_tokens) == (2000, 120)
    assert tracker.load.step_ms == 0
    tracker.update(step(40, *[True] * 40, ended_ns=10_000_000))
    assert tracker.load.step_ms == 10
    assert 0.01 < tracker.mean_step_s < 0.05
    for other in (cache_step(), step(41, *[True] * 40, chunks=1), step(3, True, chunks=1)):
        tracker.update(other)
        assert tracker.load.step_ms == 10


def test_tokens_are_counted_since_start_and_drafts_only_if_right():
    tracker = LoadTracker()
    sampled = [
        SequenceProgress("a", 5, (0,)),
        SequenceProgress("b", 5),
        SequenceProgress("c", 5, (9,)),
    ]
    for tokens, progress in ((100, []), (3, sampled), (1, sampled[:1]), (0, [])):
        tracker.update(StepReport(0, 1, tokens, progress, LOAD))
    assert (tracker.load.tokens_computed, tracker.load.tokens_generated) == (104, 3)
    tracker, sampled = LoadTracker(), [SequenceProgress(name, 5, (1, 2, 3)) for name in "abcdefgh"]
    tracker.update(StepReport(0, 10_000_000, 40, sampled, LOAD, num_proposed=32, num_accepted=16))
    assert (tracker.load.tokens_computed, tracker.load.tokens_generated) == (24, 24)
    assert tracker.load.step_ms == 10
