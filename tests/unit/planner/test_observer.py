"""Rates, means and abilities from what routers say."""

import pytest

from baton.planner.observer import Observer, versions_of
from baton.v1 import common_pb2, fleet_pb2, worker_pb2

PREFILL, DECODE, MIXED = (
    common_pb2.WORKER_ROLE_PREFILL,
    common_pb2.WORKER_ROLE_DECODE,
    common_pb2.WORKER_ROLE_MIXED,
)


def router(name="router-1", requests=0, latency=None, refused=0, of=("", ""), **more):
    """After so many requests of 100 prompt and 20 output tokens, a quarter of them cached."""
    model, version = of
    traffic = fleet_pb2.ModelTraffic(
        model=model,
        version=version,
        counts=fleet_pb2.RouterCounts(
            admitted=requests,
            turned_away=refused,
            refused=refused,
            ended={"OK": requests, "RESOURCE_EXHAUSTED": refused},
            prompt_tokens=100 * requests,
            cached_tokens=25 * requests,
            output_tokens=20 * requests,
        ),
        latency=fleet_pb2.Latency(**latency or {}),
        **more,
    )
    return fleet_pb2.RouterStatus(incarnation=name, traffic=[traffic])


def worker(name, role, state="READY", load=None, **record):
    kv = common_pb2.KvDescriptor(block_size=16)
    record = {"blocks_total": 100, "max_batch": 8, **record}
    record = common_pb2.WorkerRecord(incarnation=name, role=role, kv=kv, **record)
    return fleet_pb2.WorkerStatus(record=record, state=state, load=worker_pb2.Load(**load or {}))


def status(one, workers=(), siblings=()):
    return fleet_pb2.GetStatusResponse(router=one, workers=workers, siblings=siblings)


def test_rates_are_differences_over_the_window():
    observer = Observer(window_s=60.0)
    for number in range(20):
        seen = observer.observe(10.0 * number, {"a": status(router(requests=100 + 50 * number))})
    assert (seen.arrivals_per_s, seen.prompt_tokens, seen.output_tokens) == (5.0, 100.0, 20.0)
    assert seen.cached_share == 0.25 and not seen.incomplete and seen.time_s == 190.0
    seen = observer.observe(200.0, {"a": status(router(requests=1050))})  # none within 10 s
    assert seen.arrivals_per_s == pytest.approx(250 / 60)


def test_what_was_turned_away_is_demand_and_has_no_output():
    observer = Observer()
    observer.observe(0.0, {"a": status(router())})
    seen = observer.observe(10.0, {"a": status(router(requests=10, refused=40))})
    assert (seen.arrivals_per_s, seen.output_tokens, seen.prompt_tokens) == (5.0, 20.0, 100.0)


def test_means_stay_while_nothing_is_measured():
    observer = Observer(window_s=10.0)
    for time_s in (0.0, 10.0):
        observer.observe(time_s, {"a": status(router(requests=int(time_s)))})
    for time_s in (20.0, 30.0):
        seen = observer.observe(time_s, {"a": status(router(requests=10))})
    assert (seen.arrivals_per_s, seen.prompt_tokens, seen.output_tokens) == (0.0, 100.0, 20.0)


def test_routers_and_their_processes_are_summed():
    observer = Observer()
    for number in (0, 10):
        routers = {
            "a": status(router("a", number, queued=1, running=3), siblings=[router("b", number)]),
            "c": status(router("c", number, queued=2, running=4)),
        }
        seen = observer.observe(float(number), routers)
    assert (seen.arrivals_per_s, seen.queued, seen.running) == (3.0, 3, 7)


def test_percentiles_are_weighted_by_requests():
    few = {"requests": 10, "ttft_p95_ms": 1000.0, "tpot_p95_ms": 100.0}
    many = {"requests": 30, "ttft_p95_ms": 200.0, "tpot_p95_ms": 20.0}
    answers = {
        "a": status(router("a", latency=few)),
        "b": status(router("b", latency=many)),
        "c": status(router("c")),
    }
    seen = Observer().observe(0.0, answers)
    assert (seen.ttft_p95_s, seen.tpot_p95_s) == pytest.approx((0.4, 0.04))


def test_a_router_that_starts_again_counts_from_its_own_beginning():
    observer = Observer()
    observer.observe(0.0, {"a": status(router("a-1", 1000)), "b": status(router("b", 0))})
    observer.observe(10.0, {"a": status(router("a-2", 5)), "b": status(router("b", 10))})
    seen = observer.observe(20.0, {"a": status(router("a-2", 25)), "b": status(router("b", 20))})
    assert seen.arrivals_per_s == 3.0


def test_a_silent_router_makes_it_incomplete_until_it_counts_as_gone():
    observer = Observer(silent_s=30.0)
    for time_s in (0.0, 10.0):
        observer.observe(time_s, dict.fromkeys("ab", status(router("a", int(time_s)))))
    assert (
        "at b does" in observer.observe(39.0, {"a": status(router("a", 39)), "b": None}).incomplete
    )
    seen = observer.observe(41.0, {"a": status(router("a", 41)), "b": None})
    assert not seen.incomplete and seen.arrivals_per_s == 1.0


def test_what_a_router_counts_is_not_taken_for_no_requests_after_it_was_silent():
    observer, other = Observer(), status(router("b"))
    for time_s in (0.0, 10.0, 20.0, 30.0, 40.0):
        mine = None if time_s == 20.0 else status(router("a", int(time_s)))
        seen = observer.observe(time_s, {"a": mine, "b": other})
        assert seen.incomplete or seen.arrivals_per_s == 1.0
    assert not seen.incomplete


def test_without_an_answer_the_last_observation_stays_with_its_time_and_nothing_follows_of_it():
    observer = Observer()
    assert observer.observe(0.0, {"a": None}) is None
    for time_s in (1.0, 2.0):
        assert observer.observe(time_s, {"a": status(router())})
    for silent in ({"a": None}, {}):
        seen = observer.observe(3.0, silent)
        assert (seen.time_s, seen.incomplete) == (2.0, "no router answers")
    assert not observer.observe(4.0, {"a": status(router())}).incomplete


def test_each_version_has_its_own_requests_and_workers():
    """Also where it comes back to a router, and its counts begin anew."""
    versions = [("chat", "v1"), ("chat", "v2"), ("code", "")]
    observers = {one: Observer(one) for one in versions}
    workers = [worker(f"d-{m}{v}", DECODE, model=m, version=v) for m, v in versions]
    for time_s, number in ((0.0, 0), (10.0, 1), (20.0, 2)):
        rates = {one: 10 * (1 + i) * number for i, one in enumerate(versions)}
        both = fleet_pb2.RouterStatus(
            incarnation="r",
            traffic=[router(requests=n, of=one).traffic[0] for one, n in rates.items()],
        )
        statuses = {"a": status(both, workers), "b": None}
        assert versions_of(statuses) == set(versions)
        seen = {one: observer.observe(time_s, statuses) for one, observer in observers.items()}
    assert [one.arrivals_per_s for one in seen.values()] == [1.0, 2.0, 3.0]
    assert [[w.name for w in one.workers] for one in seen.values()] == [
        ["d-chatv1"], ["d-chatv2"], ["d-code"],
    ]  # fmt: skip
    again = {"a": status(router("r", requests=1, of=versions[0]), workers)}
    assert "second look" in observers[versions[0]].observe(30.0, again).incomplete


def test_workers_are_seen_as_by_the_router_that_can_use_them():
    views = [
        worker("d", DECODE, load={"running": 3}),
        worker("p", PREFILL, "STARTING"),
        worker("m", MIXED),
        worker("other", DECODE, "MISMATCH"),
    ]
    unreachable = [worker("d", DECODE, "UNREACHABLE")]
    for order in ((views, unreachable), (unreachable, views)):
        answers = {str(n): status(router(), workers) for n, workers in enumerate(order)}
        seen = Observer().observe(0.0, answers).workers
        assert [(one.name, one.role, one.ready, one.running) for one in seen] == [
            ("d", "decode", True, 3), ("m", "mixed", True, 0), ("p", "prefill", False, 0)
        ]  # fmt: skip


def test_what_a_usual_worker_can_do_is_the_median_of_its_role():
    workers = [
        *(
            worker(f"p{n}", PREFILL, load={"prefill_tokens_per_s": rate})
            for n, rate in enumerate((9, 10, 99))
        ),
        worker("d", DECODE, load={"prefill_tokens_per_s": 1.0}, blocks_total=10, max_batch=4),
        worker("d2", DECODE, blocks_total=10, max_batch=4),
    ]
    seen = Observer().observe(0.0, {"a": status(router(), workers)})
    assert (seen.prefill_tokens_per_s, seen.max_batch, seen.kv_tokens) == (10.0, 4, 160)
    alone = Observer().observe(0.0, {"a": status(router(), workers[3:4])})
    assert alone.prefill_tokens_per_s == 1.0, "of another role, where its own has measured none"


def test_a_decode_step_is_a_line_through_what_was_measured():
    observer = Observer()
    for time_s, running in enumerate((1, 10, 4, 20)):
        load = {"running": running, "step_ms": 12.0 + 0.5 * running}
        prefill = {"running": 9, "step_ms": 900.0}
        workers = [worker("d", DECODE, load=load), worker("p", PREFILL, load=prefill)]
        seen = observer.observe(float(time_s), {"a": status(router(), workers)})
    assert (seen.step_ms, seen.sequence_ms) == pytest.approx((12.0, 0.5))


def test_a_line_through_small_batches_is_not_trusted():
    observer = Observer()
    for time_s, (running, step_ms) in enumerate([(1, 18.0), (2, 60.0), (3, 22.0)]):
        workers = [worker("d", DECODE, load={"running": running, "step_ms": step_ms})]
        seen = observer.observe(float(time_s), {"a": status(router(), workers)})
    assert (seen.step_ms, seen.sequence_ms) == pytest.approx((16.0, 2.0)), "the median's"


@pytest.mark.parametrize("running", [0, 1])
def test_where_one_batch_was_measured_the_line_is_the_cost_models(running):
    workers = [worker("d", DECODE, load={"running": running, "step_ms": 18.0})]
    seen = Observer().observe(0.0, {"a": status(router(), workers)})
    assert (seen.step_ms, seen.sequence_ms) == pytest.approx((16.0, 2.0))
