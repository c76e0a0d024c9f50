"""What `baton top` concludes from routers' answers, and its frames as a terminal shows them."""

import io
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from baton.local.top import Options, blocks_bar, frame
from baton.local.top_view import PolledRouter, Sample, View, WorkerLine, view_of
from baton.v1 import fleet_pb2

from .statuses import DECODE, pair, polled, status, worker

OPTIONS = Options(1.0)
AT = 1_700_000_000.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def seen(*routers: PolledRouter, now: float = 12.0) -> View:
    return view_of(routers, now, AT)


def lines(view: View, width: int = 160, height: int = 60, options: Options = OPTIONS) -> list[str]:
    console = Console(width=width, height=height, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(frame(view, options, width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def busy() -> View:
    counts = fleet_pb2.RouterCounts(ended={"OK": 10}, refused=3, failovers=2, output_tokens=5)
    old = status([worker("p0"), worker("d0", DECODE)], [pair()], counts=counts)
    later = fleet_pb2.RouterCounts(
        ended={"OK": 30}, late=3, refused=3, failovers=2, output_tokens=1005, prompt_tokens=9000
    )
    latency = fleet_pb2.Latency(
        requests=20, ttft_p50_ms=120, ttft_p95_ms=480.4, tpot_p50_ms=9.51, tpot_p95_ms=12
    )
    prefill = worker("p0", queue_tokens=717, prefill_tokens_per_s=2514, tokens_computed=9000)
    load = {"running": 7, "waiting": 2, "step_ms": 6.96, "preemptions": 4}
    load |= {"tokens_generated": 1000, "blocks_quarantined": 1, "blocks_free": 69}
    decode = worker("d0", DECODE, "STALLED", "its step takes 12 s", **load)
    link = pair(sent_bytes=4 << 20, sent_ms=4.0)
    told = {"counts": later, "latency": latency, "running": 8, "queued": 5}
    new = status([prefill, decode], [link], **told)
    return seen(polled(new, old))


def test_a_wide_frame_tells_everything() -> None:
    when = time.strftime("%H:%M:%S", time.localtime(AT))
    assert lines(busy()) == [
        f"baton top  cluster default, model demo  {when}"
        "  q quit  p pause  r role: all  s sort: name",
        "router  state    running  queued  req/s  good/s   good  tok/s in  out  TTFT p50/95 ms"
        "  TPOT p50/95 ms  refused  failovers",
        "h:1     SERVING        8       5   10.0     8.5  90.0%     4,500  500         120/480"
        "        9.5/12.0        3          2",
        "",
        "role     worker  state    batch  wait  queue tok  KV blocks                 used  tok/s"
        "  sampled/s  prefill cap.  step ms  preempt",
        "prefill  p0      READY     0/64     0        717  ██▓▓▓▓▓░░░░░░░░░░░░░░░░░   10%  4,500"
        "          0         2,514        -        0",
        "decode   d0      STALLED   7/64     2          0  ██▓▓▓▓▓▒░░░░░░░░░░░░░░░░   11%      0"
        "        500             -      7.0        4",
        "KV blocks: █ held ▓ cached ▒ quarantined ░ free",
        "  d0: its step takes 12 s",
        "",
        "prefill  decode  over  link     KV/s  wire GB/s     sent",
        "p0       d0      shm   OPEN  2.0 MiB       1.05  4.0 MiB",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 140])
def test_a_frame_fits_the_terminal_and_keeps_what_matters(width: int) -> None:
    drawn = lines(busy(), width)
    assert max(map(cell_len, drawn)) <= width
    text = "\n".join(drawn)
    for word in ("SERVING", "STALLED", "p0", "its step takes 12 s", "OPEN", "queued"):
        assert word in text, word
    rows = [line for line in drawn if "░" in line and "blocks" not in line]
    assert len(rows) == 2 and "…" not in "".join(rows)


@pytest.mark.parametrize("height", [24, 30, 50])
def test_a_large_fleet_is_cut_to_the_terminals_height(height: int) -> None:
    names = [f"w{number:02}" for number in range(60)]
    workers = [worker(name, DECODE) for name in names]
    events = [fleet_pb2.RouterEvent(time_ms=at, text=f"event {at}") for at in range(9)]
    view = seen(
        polled(status(workers, [pair("p0", name) for name in names], events=events)),
        polled(address="b:1", failure="gone"),
    )
    drawn = lines(view, height=height)
    assert len(drawn) <= height
    shown = sum("░" in line for line in drawn) - 1  # one tells what blocks mean
    assert f"… and {60 - shown} more workers" in drawn
    assert any("more pairs" in line for line in drawn)
    assert "event 8" in drawn[-6] and "event 3" in drawn[-1]


def test_it_says_who_does_not_answer() -> None:
    dead = polled(status([worker("p0")]), failure="connection\n refused")
    text = "\n".join(lines(view_of([dead], 15.0, AT)))
    assert "NO ANSWER" in text
    assert "router h:1 does not answer for 3 s: connection refused" in text
    assert "no router answers: what follows is old" in text
    other = polled(status([worker("p0")], incarnation="r1", registry_connected=False))
    text = "\n".join(lines(view_of([dead, other], 15.0, AT)))
    assert "what follows is old" not in text
    assert "router h:1 does not reach the registry" in text


def test_before_any_answer_there_is_nothing_to_see() -> None:
    text = "\n".join(lines(seen(polled(address="[::1]:7700"))))
    assert "[::1]:7700" in text and "no workers" in text
    assert "does not answer" not in text and "old" not in text


def test_events_tell_kind_count_text_and_trace() -> None:
    event = fleet_pb2.RouterEvent(
        time_ms=int(AT * 1000), kind=fleet_pb2.EVENT_KIND_FAILOVER, times=3,
        text="the stream of [red]d0 broke " + "x" * 200, trace_id=TRACE,
    )  # fmt: skip
    view = seen(polled(status(events=[event])))
    when = time.strftime("%H:%M:%S", time.localtime(AT))
    wide = lines(view, 120)[-1]
    assert wide.startswith(f"{when} failover x3 the stream of [red]d0 broke xx")
    assert wide.endswith(f"…  trace {TRACE}") and cell_len(wide) == 120
    narrow = lines(view, 60)[-1]
    assert "trace" not in narrow and cell_len(narrow) == 60


def test_keys_choose_role_and_order() -> None:
    view = seen(
        polled(
            status(
                [
                    worker("p0", queue_tokens=5, blocks_held=1),
                    worker("p1", queue_tokens=9),
                    worker("d0", DECODE, queue_tokens=7, blocks_held=50),
                ]
            )
        )
    )

    def order(options: Options) -> list[str]:
        rows = [line.split() for line in lines(view, options=options) if "░░" in line]
        return [row[1] for row in rows]

    prefill, by_queue = OPTIONS.next_role(), OPTIONS.next_sort()
    by_blocks = by_queue.next_sort()
    assert order(OPTIONS) == ["p0", "p1", "d0"]
    assert order(prefill) == ["p0", "p1"] and order(prefill.next_role()) == ["d0"]
    assert order(by_queue) == ["p1", "d0", "p0"] and order(by_blocks) == ["d0", "p1", "p0"]
    assert prefill.next_role().next_role() == OPTIONS == by_blocks.next_sort().next_sort()


@pytest.mark.parametrize(
    ("blocks", "bar"),
    [
        ((0, 0, 0), "░░░░░░░░"),
        ((1, 0, 0), "█░░░░░░░"),
        ((50, 25, 25), "████▓▓▒▒"),
        ((100, 0, 0), "████████"),
        ((98, 1, 1), "██████▓▒"),
        ((0, 1, 0), "▓░░░░░░░"),
    ],
)
def test_the_bar(blocks: tuple[int, int, int], bar: str) -> None:
    held, cached, quarantined = blocks
    told = worker("p", blocks_held=held, blocks_cached=cached, blocks_quarantined=quarantined)
    line = WorkerLine(told.record, told.load, "READY", "")
    assert blocks_bar(line, 8).plain == bar


def test_rates_are_differences_over_the_time_between() -> None:
    old = status(
        [worker("p0", tokens_computed=100, tokens_generated=1)],
        [pair(sent_bytes=1_000, sent_ms=1.0)],
        counts=fleet_pb2.RouterCounts(ended={"OK": 10}, late=1, prompt_tokens=50, output_tokens=5),
    )
    new = status(
        [worker("p0", tokens_computed=600, tokens_generated=5)],
        [pair(sent_bytes=5_000, sent_ms=3.0)],
        counts=fleet_pb2.RouterCounts(
            ended={"OK": 16, "CANCELLED": 2}, late=3, prompt_tokens=90, output_tokens=25
        ),
    )
    view = seen(polled(new, old))
    router, (first,), (link,) = view.routers[0], view.workers, view.pairs
    assert (router.requests_per_s, router.good_per_s) == (4.0, 2.0)
    assert (router.prompt_tokens_per_s, router.output_tokens_per_s) == (20.0, 10.0)
    assert router.good_share == pytest.approx(13 / 18)
    assert (first.computed_per_s, first.sampled_per_s) == (250.0, 2.0)
    assert (link.bytes_per_s, link.wire_bytes_per_s) == (2_000.0, 2_000_000.0)


def test_a_new_link_and_a_new_worker_begin_at_nothing() -> None:
    old = status([worker("p0")], [pair(sent_bytes=9_000, sent_ms=9.0, epoch=1)])
    new = status(
        [worker("p0"), worker("p1", tokens_computed=7)],
        [pair(sent_bytes=400, sent_ms=0.5, epoch=2)],
    )
    view = seen(polled(new, old))
    assert view.pairs[0].bytes_per_s == 200.0
    assert view.workers[1].computed_per_s is None


def test_nothing_sent_has_no_speed() -> None:
    same = status(pairs=[pair(sent_bytes=9, sent_ms=9.0)])
    link = seen(polled(same, same)).pairs[0]
    assert (link.bytes_per_s, link.wire_bytes_per_s) == (0.0, None)


def test_the_worst_word_about_a_worker_counts() -> None:
    silent = worker("p0", state="SILENT", reason="no sign of life", steps=4)
    here = polled(status([worker("p0", steps=9, running=3)]), address="a:1")
    there = polled(status([silent], incarnation="r1"), address="b:1")
    for routers in ((here, there), (there, here)):
        (line,) = seen(*routers).workers
        assert (line.state, line.reason) == ("SILENT", "no sign of life (says b:1)")
        assert line.load.running == 3  # of the one that heard of it last
    both = seen(polled(status([silent])), there).workers[0]
    assert both.reason == "no sign of life"


def test_a_router_that_does_not_answer_tells_of_nobody_while_another_does() -> None:
    dead = polled(status([worker("old")]), address="a:1", failure="gone")
    alive = polled(status([worker("new")], incarnation="r1"), address="b:1")
    view = seen(dead, alive, now=15.0)
    assert [line.record.incarnation for line in view.workers] == ["new"]
    assert view.answered and not view.is_old
    assert (view.routers[0].failure, view.routers[0].silent_s) == ("gone", 3.0)
    alone = seen(dead)
    assert [line.record.incarnation for line in alone.workers] == ["old"]
    assert alone.answered and alone.is_old
    nobody = seen(polled(address="a:1", failure="gone"))
    assert not nobody.answered and nobody.is_old


def test_a_routers_word_about_a_pair_goes_before_the_workers() -> None:
    here = polled(status(pairs=[pair(), pair("p1")]), address="a:1")
    there = polled(status(pairs=[pair(state="EJECTED")], incarnation="r1"), address="b:1")
    for routers in ((here, there), (there, here)):
        states = [(line.status.prefill, line.status.state) for line in seen(*routers).pairs]
        assert states == [("p0", "EJECTED"), ("p1", "OPEN")]


def test_the_newest_event_of_all_routers_comes_first() -> None:
    def told(*times_ms: int, name: str) -> PolledRouter:
        events = [fleet_pb2.RouterEvent(time_ms=time_ms, text=name) for time_ms in times_ms]
        return polled(status(events=events, incarnation=name), address=name)

    events = seen(told(1, 4, name="a"), told(2, 3, name="b")).events
    assert [line.event.time_ms for line in events] == [4, 3, 2, 1]
    assert [line.address for line in events] == ["a", "b", "b", "a"]


def test_a_poller_forgets_what_is_old_and_what_another_process_said() -> None:
    poller = PolledRouter("h:1")
    for at in range(9):
        poller.take(Sample(float(at), status()))
    assert poller.first is not None and poller.last is not None
    assert (poller.first.at, poller.last.at) == (3.0, 8.0)
    poller.take(Sample(9.0, status(incarnation="another")))
    assert poller.first == poller.last


def test_a_slow_poller_still_has_an_older_answer() -> None:
    poller = PolledRouter("h:1")
    for at in (0.0, 60.0, 120.0, 180.0):
        poller.take(Sample(at, status()))
    assert poller.first is not None and poller.first.at < 180.0
