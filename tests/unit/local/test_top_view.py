"""What `baton top` concludes from routers' answers: rates, and whom to believe."""

import pytest

from baton.local.top.poll import Poller, Sample, Watched
from baton.local.top.view import View, view_of
from baton.v1 import fleet_pb2

from .statuses import DECODE, pair, status, watched, worker

Counts = fleet_pb2.RouterCounts


def seen(*routers: Watched, now: float = 12.0) -> View:
    return view_of(routers, now, 0.0)


def test_rates_are_differences_over_the_time_between() -> None:
    old = status(
        [worker("p0", tokens_computed=100, tokens_generated=1)],
        [pair(sent_bytes=1_000, sent_ms=1.0)],
        counts=Counts(ended={"OK": 10}, late=1, prompt_tokens=50, output_tokens=5),
    )
    new = status(
        [worker("p0", tokens_computed=600, tokens_generated=5)],
        [pair(sent_bytes=5_000, sent_ms=3.0)],
        counts=Counts(ended={"OK": 16, "CANCELLED": 2}, late=3, prompt_tokens=90, output_tokens=25),
    )
    view = seen(watched(new, old))
    router, (first,), (link,) = view.routers[0], view.workers, view.pairs
    assert (router.requests_per_s, router.good_per_s) == (4.0, 2.0)
    assert (router.prompt_tokens_per_s, router.output_tokens_per_s) == (20.0, 10.0)
    assert router.good_share == pytest.approx(13 / 18)
    assert (first.computed_per_s, first.generated_per_s) == (250.0, 2.0)
    assert (link.bytes_per_s, link.wire_bytes_per_s) == (2_000.0, 2_000_000.0)


def test_one_answer_makes_no_rates() -> None:
    view = seen(watched(status([worker("p0")], [pair()])))
    assert view.routers[0].requests_per_s is None
    assert view.routers[0].good_share is None
    assert view.workers[0].computed_per_s is None
    assert view.pairs[0].bytes_per_s is None


def test_a_new_link_and_a_new_worker_begin_at_nothing() -> None:
    old = status([worker("p0")], [pair(sent_bytes=9_000, sent_ms=9.0, epoch=1)])
    new = status(
        [worker("p0"), worker("p1", tokens_computed=7)],
        [pair(sent_bytes=400, sent_ms=0.5, epoch=2)],
    )
    view = seen(watched(new, old))
    assert view.pairs[0].bytes_per_s == 200.0
    assert view.workers[1].computed_per_s is None


def test_nothing_sent_has_no_speed() -> None:
    same = status(pairs=[pair(sent_bytes=9, sent_ms=9.0)])
    link = seen(watched(same, same)).pairs[0]
    assert (link.bytes_per_s, link.wire_bytes_per_s) == (0.0, None)


def test_the_worst_word_about_a_worker_counts() -> None:
    silent = worker("p0", state="SILENT", reason="no heartbeat", steps=4)
    here = watched(status([worker("p0", steps=9, running=3)]), address="a:1")
    there = watched(status([silent], incarnation="r1"), address="b:1")
    for routers in ((here, there), (there, here)):
        (line,) = seen(*routers).workers
        assert (line.state, line.reason) == ("SILENT", "no heartbeat (says b:1)")
        assert line.load.running == 3  # of the one that heard of it last
    both = seen(watched(status([silent])), there).workers[0]
    assert both.reason == "no heartbeat"


def test_workers_are_in_order_of_role_and_name() -> None:
    workers = [worker("a", DECODE), worker("z"), worker("b", DECODE), worker("c")]
    lines = seen(watched(status(workers))).workers
    assert [(line.role, line.record.incarnation) for line in lines] == [
        ("prefill", "c"), ("prefill", "z"), ("decode", "a"), ("decode", "b"),
    ]  # fmt: skip


def test_a_router_that_does_not_answer_tells_of_nobody_while_another_does() -> None:
    dead = watched(status([worker("old")]), address="a:1", failure="gone")
    alive = watched(status([worker("new")], incarnation="r1"), address="b:1")
    view = seen(dead, alive, now=15.0)
    assert [line.record.incarnation for line in view.workers] == ["new"]
    assert view.answered and view.answering
    assert (view.routers[0].failure, view.routers[0].silent_s) == ("gone", 3.0)
    alone = seen(dead)
    assert [line.record.incarnation for line in alone.workers] == ["old"]
    assert alone.answered and not alone.answering
    nobody = seen(Watched("a:1", failure="gone"))
    assert not nobody.answered and not nobody.answering


def test_a_routers_word_about_a_pair_goes_before_the_workers() -> None:
    here = watched(status(pairs=[pair(), pair("p1")]), address="a:1")
    there = watched(status(pairs=[pair(state="EJECTED")], incarnation="r1"), address="b:1")
    for routers in ((here, there), (there, here)):
        states = [(line.status.prefill, line.status.state) for line in seen(*routers).pairs]
        assert states == [("p0", "EJECTED"), ("p1", "OPEN")]


def test_the_newest_event_of_all_routers_comes_first() -> None:
    def told(*times_ms: int, name: str) -> Watched:
        events = [fleet_pb2.RouterEvent(time_ms=time_ms, text=name) for time_ms in times_ms]
        return watched(status(events=events, incarnation=name), address=name)

    events = seen(told(1, 4, name="a"), told(2, 3, name="b")).events
    assert [line.event.time_ms for line in events] == [4, 3, 2, 1]
    assert [line.address for line in events] == ["a", "b", "b", "a"]


def test_a_poller_forgets_what_is_old_and_what_another_process_said() -> None:
    poller = Poller("h:1", 1.0, lambda: None)
    for at in range(9):
        poller.take(Sample(float(at), status()))
    assert poller.watched.first is not None and poller.watched.last is not None
    assert (poller.watched.first.at, poller.watched.last.at) == (3.0, 8.0)
    poller.take(Sample(9.0, status(incarnation="another")))
    assert poller.watched.first == poller.watched.last


def test_a_slow_poller_still_has_an_older_answer() -> None:
    poller = Poller("h:1", 60.0, lambda: None)
    for at in (0.0, 60.0, 120.0, 180.0):
        poller.take(Sample(at, status()))
    assert poller.watched.first is not None and poller.watched.first.at < 180.0
