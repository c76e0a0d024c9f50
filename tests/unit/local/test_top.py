"""What `baton top` concludes from routers' answers, and its frames as a terminal shows them."""

import io
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from baton.local import top_view
from baton.local.top import SORTS, Moment, View, blocks_bar, frame
from baton.local.top_view import PolledRouter, WorkerLine
from baton.v1 import fleet_pb2

from .statuses import DECODE, pair, polled, status, worker

AT = 1_700_000_000.0
WHEN = time.strftime("%H:%M:%S", time.localtime(AT))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
Counts = fleet_pb2.RouterCounts


def lines(
    *routers: PolledRouter, width: int = 160, height: int = 60, now: float = 12.0, **options: Any
) -> list[str]:
    console = Console(width=width, height=height, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(frame(Moment(routers, now, AT), View(**options), width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def busy() -> PolledRouter:
    counts = Counts(ended={"OK": 10}, refused=3, failovers=2, output_tokens=5)
    old = status(worker("p0"), worker("d0", DECODE), pair(), counts=counts)
    later = Counts(
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
    seen = {"counts": later, "latency": latency, "running": 8, "queued": 5}
    return polled(old, status(prefill, decode, link, **seen))


def test_a_wide_frame_shows_everything() -> None:
    assert lines(busy()) == [
        f"baton top  cluster default, model demo  {WHEN}"
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
    drawn = lines(busy(), width=width)
    assert max(map(cell_len, drawn)) <= width
    text = "\n".join(drawn)
    for word in ("SERVING", "STALLED", "p0", "its step takes 12 s", "OPEN", "queued"):
        assert word in text, word
    rows = [line for line in drawn if "░" in line and "blocks" not in line]
    assert len(rows) == 2 and "…" not in "".join(rows)


@pytest.mark.parametrize("height", [24, 30, 50])
def test_a_large_fleet_is_cut_to_the_terminals_height(height: int) -> None:
    names = [f"w{number:02}" for number in range(60)]
    fleet = [*(worker(name, DECODE) for name in names), *(pair("p0", name) for name in names)]
    events = [fleet_pb2.RouterEvent(time_ms=at, text=f"event {at}") for at in range(9)]
    gone = polled(address="b:1", failure="gone")
    drawn = lines(polled(status(*fleet, events=events)), gone, height=height)
    assert len(drawn) <= height
    shown = sum("░" in line for line in drawn) - 1  # one explains the bar
    assert f"… and {60 - shown} more workers" in drawn
    assert any("more pairs" in line for line in drawn)
    assert "event 8" in drawn[-6] and "event 3" in drawn[-1]


def test_routers_that_do_not_answer_are_named() -> None:
    dead = polled(status(worker("p0")), failure="connection\n refused")
    text = "\n".join(lines(dead, now=15.0))
    assert "NO ANSWER" in text and "no router answers: what follows is old" in text
    assert "router h:1 does not answer for 3 s: connection refused" in text
    assert "p0" in text
    other = polled(status(worker("p1"), incarnation="r1", registry_connected=False))
    text = "\n".join(lines(dead, other, now=15.0))
    assert "router h:1 does not reach the registry" in text
    assert "what follows is old" not in text
    assert "p1" in text and "p0" not in text  # of those that answer
    text = "\n".join(lines(polled(address="[::1]:7700")))  # before any answer
    assert "[::1]:7700" in text and "no workers" in text
    assert "does not answer" not in text and "old" not in text


def test_events_have_kind_count_text_and_trace() -> None:
    event = fleet_pb2.RouterEvent(
        time_ms=int(AT * 1000), kind=fleet_pb2.EVENT_KIND_FAILOVER, times=3,
        text="the stream of [red]d0 broke " + "x" * 200, trace_id=TRACE,
    )  # fmt: skip
    wide = lines(polled(status(events=[event])), width=120)[-1]
    assert wide.startswith(f"{WHEN} failover x3 the stream of [red]d0 broke xx")
    assert wide.endswith(f"…  trace {TRACE}") and cell_len(wide) == 120
    narrow = lines(polled(status(events=[event])), width=60)[-1]
    assert "trace" not in narrow and cell_len(narrow) == 60


def test_role_and_order_can_be_chosen() -> None:
    router = polled(
        status(
            worker("p0", queue_tokens=5, blocks_held=1),
            worker("p1", queue_tokens=9),
            worker("d0", DECODE, queue_tokens=7, blocks_held=50),
        )
    )

    def order(**options: Any) -> list[str]:
        rows = [line.split() for line in lines(router, **options) if "░░" in line]
        return [row[1] for row in rows]

    assert [order(role=role) for role in ("prefill", "decode")] == [["p0", "p1"], ["d0"]]
    orders = {"name": ["p0", "p1", "d0"], "queue": ["p1", "d0", "p0"], "blocks": ["d0", "p1", "p0"]}
    assert {sort: order(sort=sort) for sort in SORTS} == orders | {"tokens": orders["name"]}


def test_a_kind_of_blocks_is_never_lost_in_the_bar() -> None:
    for held, cached, quarantined, bar in (
        (0, 0, 0, "░░░░░░░░"),
        (1, 0, 0, "█░░░░░░░"),
        (50, 25, 25, "████▓▓▒▒"),
        (100, 0, 0, "████████"),
        (98, 1, 1, "██████▓▒"),
    ):
        shown = worker("p", blocks_held=held, blocks_cached=cached, blocks_quarantined=quarantined)
        assert str(blocks_bar(WorkerLine(PolledRouter("h:1"), shown, "READY", ""), 8)) == bar


def test_rates_are_differences_over_the_time_between() -> None:
    counts = Counts(ended={"OK": 10}, late=1, prompt_tokens=50)
    later = Counts(ended={"OK": 16, "CANCELLED": 2}, late=3, prompt_tokens=90)
    old = status(
        worker("p0", tokens_computed=100), pair(sent_bytes=1_000, sent_ms=1.0),
        pair("p1", sent_bytes=9_000, sent_ms=9.0), pair("p2", sent_bytes=9, sent_ms=9.0),
        counts=counts,
    )  # fmt: skip
    new = status(
        worker("p0", tokens_computed=600), worker("p9", tokens_computed=7),
        pair(sent_bytes=5_000, sent_ms=3.0), pair("p1", sent_bytes=400, epoch=2),
        pair("p2", sent_bytes=9, sent_ms=9.0), counts=later,
    )  # fmt: skip
    router = polled(old, new)
    assert (router.rate(top_view.ended), router.rate(top_view.good)) == (4.0, 2.0)
    known, newcomer = top_view.workers([router])
    assert (known.rate("tokens_computed"), newcomer.rate("tokens_computed")) == (250.0, None)
    sent = [(p.rate("sent_bytes"), p.wire_gb_per_s) for p in top_view.pairs([router])]
    assert sent == [(2_000.0, 0.002), (200.0, None), (0.0, None)]  # a new link began at 0
    assert polled(new).rate(top_view.ended) is None


def test_of_several_routers_the_worst_state_counts() -> None:
    silent = worker("p0", state="SILENT", reason="no heartbeat", steps=4)
    here = polled(status(worker("p0", steps=9, running=3), pair(), pair("p1")), address="a:1")
    there = polled(status(silent, pair(state="EJECTED"), incarnation="r1"), address="b:1")
    for routers in ((here, there), (there, here)):
        (line,) = top_view.workers(routers)
        assert (line.state, line.reason) == ("SILENT", "no heartbeat (says b:1)")
        assert line.load.running == 3  # of the newest report
        states = [(one.status.prefill, one.status.state) for one in top_view.pairs(routers)]
        assert states == [("p0", "EJECTED"), ("p1", "OPEN")]
    (line,) = top_view.workers([there])
    assert line.reason == "no heartbeat"


def test_the_newest_event_of_all_routers_comes_first() -> None:
    def router(*times_ms: int, name: str) -> PolledRouter:
        events = [fleet_pb2.RouterEvent(time_ms=time_ms, text=name) for time_ms in times_ms]
        return polled(status(events=events, incarnation=name), address=name)

    events = top_view.events([router(1, 4, name="a"), router(2, 3, name="b")])
    assert [(at, event.time_ms) for at, event in events] == [("a", 4), ("b", 3), ("b", 2), ("a", 1)]


def test_answers_are_forgotten_that_are_old_or_of_another_process() -> None:
    def times(*at: float) -> list[float]:
        router = PolledRouter("h:1")
        for one in at:
            router.take(status(incarnation="r0" if one < 999 else "another"), one)
        return [one for one, _ in router.samples]

    assert times(*map(float, range(9))) == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert times(0.0, 60.0, 120.0, 180.0) == [60.0, 120.0, 180.0]  # a long interval
    assert times(1.0, 2.0, 999.0) == [999.0]
