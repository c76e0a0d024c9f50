"""`baton top`: what it concludes from answers, its frames, what keys do and what it leaves."""

import asyncio
import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from baton.local import top_view
from baton.local.top import SORTS, Moment, View, blocks_bar, frame
from baton.local.top_view import PolledRouter, WorkerLine
from baton.v1 import common_pb2, fleet_pb2
from baton.v1.planner_pb2 import Plan, RolePlan
from baton.v1.route_pb2 import CANARY_STATE_ROLLED_BACK, Canary, ModelRoute, RouteTarget
from tests.waiting import WAIT_S, eventually

from .statuses import DECODE, Router, pair, polled, status, worker

AT = 1_700_000_000.0
WHEN = time.strftime("%H:%M:%S", time.localtime(AT))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
Counts = fleet_pb2.RouterCounts


def lines(*routers, width=160, now=12.0, **options):
    console = Console(width=width, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(frame(Moment(routers, now, AT), View(**options), width))
    return [line.rstrip() for line in captured.get().splitlines()]


def busy():
    counts = Counts(ended={"OK": 10}, refused=3, failovers=2, output_tokens=5)
    old = status(worker("p0"), worker("d0", DECODE), pair(), counts=counts)
    later = Counts(
        ended={"OK": 30}, with_target=9, late=3, refused=3, failovers=2, output_tokens=1005,
        prompt_tokens=9000,
    )  # fmt: skip
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


def test_a_wide_frame_shows_everything():
    assert lines(busy()) == [
        f"baton top  cluster default, model demo  {WHEN}  q quit  r role: all  s sort: name",
        "router  state    running  queued  req/s  good/s   good  tok/s in  out  TTFT p50/95 ms"
        "  TPOT p50/95 ms  refused  failovers",
        "h:1     SERVING        8       5   10.0     8.5  90.0%     4,500  500         120/480"
        "        9.5/12.0        3          2",
        "  d0: its step takes 12 s",
        "",
        "role     worker  state    batch  wait  queue tok  KV blocks                 used  tok/s"
        "  sampled/s  prefill cap.  step ms  preempt",
        "prefill  p0      READY     0/64     0        717  ██▓▓▓▓▓░░░░░░░░░░░░░░░░░   10%  4,500"
        "          0         2,514        -        0",
        "decode   d0      STALLED   7/64     2          0  ██▓▓▓▓▓▒░░░░░░░░░░░░░░░░   11%      0"
        "        500             -      7.0        4",
        "KV blocks: █ held ▓ cached ▒ quarantined ░ free",
        "",
        "prefill  decode  over  link     KV/s  wire GB/s     sent",
        "p0       d0      shm   OPEN  2.0 MiB       1.05  4.0 MiB",
    ]


def test_routes_canaries_and_the_plan_are_shown():
    targets = [RouteTarget(model="chat", version=name, weight=1.0) for name in ("v1", "v2")]
    canary = Canary(target=targets[1], state=CANARY_STATE_ROLLED_BACK, reason="more errors")
    roles = [
        RolePlan(role=role, need=need, ready=1, wanted=wanted, model="chat", version=version)
        for version in ("v1", "v2")
        for role, need, wanted in (("prefill", 1.5, 2), ("decode", 0.3, 1))
    ]
    routes = [ModelRoute(name="chat", targets=targets, canary=canary)]
    text = lines(polled(status(worker("p0"), routes=routes, plan=Plan(roles=roles))))
    assert [line for line in text if line.startswith(("route ", "plan "))] == [
        "route chat: chat@v1 50 %, chat@v2 50 %  canary rolled back: more errors",
        "plan for chat@v1: prefill 1, wanted 2, needed 1.50; decode 1, wanted 1, needed 0.30",
        "plan for chat@v2: prefill 1, wanted 2, needed 1.50; decode 1, wanted 1, needed 0.30",
    ]


def test_nothing_is_called_good_where_no_request_had_a_target():
    heads, row = lines(polled(*(status(counts=Counts(ended={"OK": n})) for n in (10, 30))))[1:3]
    good = [
        row[: heads.index(name) + len(name)].split()[-1] for name in ("req/s", "good/s", "good ")
    ]
    assert good == ["10.0", "-", "-"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 140])
def test_a_frame_fits_the_terminal_and_keeps_what_matters(width):
    drawn = lines(busy(), width=width)
    assert max(map(cell_len, drawn)) <= width
    text = "\n".join(drawn)
    for word in ("SERVING", "STALLED", "p0", "its step takes 12 s", "OPEN", "queued"):
        assert word in text, word
    rows = [line for line in drawn if "░" in line and "blocks" not in line]
    assert len(rows) == 2 and "…" not in "".join(rows)


def test_a_link_that_uses_a_slow_fallback_shows_what_was_to_be_expected():
    link = pair(transport=common_pb2.TRANSPORT_GLOO, fallback="not shm: they run as other users")
    assert lines(polled(status(link)))[-1].startswith("p0       d0      gloo (not shm)  OPEN")


def test_routers_that_do_not_answer_are_named():
    dead = polled(status(worker("p0")), failure="connection\n refused")
    text = "\n".join(lines(dead, now=15.0))
    assert "NO ANSWER" in text and "no router answers: the tables below are old" in text
    assert "router h:1 does not answer for 3 s: connection refused" in text
    assert "p0" in text
    other = polled(status(worker("p1"), incarnation="r1", registry_connected=False))
    text = "\n".join(lines(dead, other, now=15.0))
    assert "router h:1 does not reach the registry" in text
    assert "the tables below are old" not in text
    assert "p1" in text and "p0" not in text  # of those that answer
    text = "\n".join(lines(polled(address="[::1]:7700")))  # before any answer
    assert "[::1]:7700" in text and "no workers" in text
    assert "does not answer" not in text and "old" not in text


def test_processes_at_one_address_have_a_line_each_whichever_answers():
    """The one that answers tells of the other, and nothing is known of that when it does not."""

    def answer(own, other, old):
        siblings = status(incarnation=other, counts=Counts(ended={"OK": 10 + 4 * old}))
        own = status(worker("p0"), incarnation=own, counts=Counts(ended={"OK": 20 * old}))
        own.siblings.append(siblings.router)
        return own

    for own, other, rates in (("r0", "r1", ("10.0", "2.0")), ("r1", "r0", ("2.0", "10.0"))):
        router = polled(answer(own, other, 0), answer(own, other, 1))
        drawn = lines(*top_view.processes([router]))
        assert [line.split()[:6] for line in drawn[2:4]] == [
            ["h:1", name, "SERVING", "0", "0", rate]
            for name, rate in zip(("r0", "r1"), rates, strict=True)
        ]
        assert sum("p0" in line for line in drawn) == 1
        router.failure = "refused"
        shown = [
            line.split()[1:3] for line in lines(*top_view.processes([router])) if "h:1 r" in line
        ]
        assert shown == [[own, "NO"]]


def test_events_have_kind_count_text_and_trace_and_the_newest_comes_first():
    event = fleet_pb2.RouterEvent(
        time_ms=int(AT * 1000), kind=fleet_pb2.EVENT_KIND_FAILOVER, times=3,
        text="the stream of [red]d0 broke " + "x" * 200, trace_id=TRACE,
    )  # fmt: skip
    older, oldest = (fleet_pb2.RouterEvent(time_ms=at, text=f"at {at}") for at in (2, 1))
    one = polled(status(events=[oldest, event]), address="a:1")
    other = polled(status(events=[older], incarnation="r1"), address="b:1")
    wide, *rest = lines(one, other, width=120)[4:7]
    assert wide.startswith(f"{WHEN} failover x3 at a:1 the stream of [red]d0 broke xx")
    assert wide.endswith(f"…  trace {TRACE}") and cell_len(wide) == 120
    assert "at 2" in rest[0] and "at 1" in rest[1]
    narrow = lines(one, width=60)[3]
    assert "trace" not in narrow and cell_len(narrow) == 60


def test_role_and_order_can_be_chosen():
    router = polled(
        status(
            worker("p0", queue_tokens=5, blocks_held=1),
            worker("p1", queue_tokens=9),
            worker("d0", DECODE, queue_tokens=7, blocks_held=50),
        )
    )

    def order(**options):
        rows = [line.split() for line in lines(router, **options) if "░░" in line]
        return [row[1] for row in rows]

    assert [order(role=role) for role in ("prefill", "decode")] == [["p0", "p1"], ["d0"]]
    orders = {"name": ["p0", "p1", "d0"], "queue": ["p1", "d0", "p0"], "blocks": ["d0", "p1", "p0"]}
    assert {sort: order(sort=sort) for sort in SORTS} == orders | {"tokens": orders["name"]}


def test_a_kind_of_blocks_is_never_lost_in_the_bar():
    for held, cached, quarantined, bar in (
        (0, 0, 0, "░░░░░░░░"),
        (1, 0, 0, "█░░░░░░░"),
        (50, 25, 25, "████▓▓▒▒"),
        (100, 0, 0, "████████"),
        (98, 1, 1, "██████▓▒"),
    ):
        shown = worker("p", blocks_held=held, blocks_cached=cached, blocks_quarantined=quarantined)
        assert str(blocks_bar(WorkerLine(PolledRouter("h:1"), shown, "READY", ""), 8)) == bar


def test_rates_are_differences_over_the_time_between():
    gone = pair("p2", sent_bytes=9, sent_ms=9.0)
    old = status(worker("p0", tokens_computed=100), pair("p1", sent_bytes=9_000), gone)
    new = status(
        worker("p0", tokens_computed=600), worker("p9", tokens_computed=7),
        pair("p1", sent_bytes=400, epoch=2), gone,
    )  # fmt: skip
    router = polled(old, new)
    known, newcomer = top_view.workers([router])
    assert (known.rate("tokens_computed"), newcomer.rate("tokens_computed")) == (250.0, None)
    sent = [(p.rate("sent_bytes"), p.wire_gb_per_s) for p in top_view.pairs([router])]
    assert sent == [(200.0, None), (0.0, None)]  # a new link began at 0
    assert polled(new).rate(top_view.ended) is None


def test_of_several_routers_the_worst_state_counts():
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


def test_answers_are_forgotten_that_are_old_or_of_another_process():
    def times(*at):
        router = PolledRouter("h:1")
        for one in at:
            router.take(status(incarnation="r0" if one < 999 else "another"), one)
        return [one for one, _ in router.samples]

    assert times(*map(float, range(9))) == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert times(0.0, 60.0, 120.0, 180.0) == [60.0, 120.0, 180.0]  # a long interval
    assert times(1.0, 2.0, 999.0) == [999.0]


ROOT = Path(__file__).parents[3]
PATIENCE_S = WAIT_S
STYLE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of 120 columns with `baton top` in it."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.mode = termios.tcgetattr(self.slave)
        self.shown = b""

    async def start(self, target):
        env = {key: os.environ[key] for key in os.environ.keys() - {"COLUMNS", "LINES"}}
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", "top", "--interval", "0.1", "--target", target),
            env={**env, "TERM": "xterm-256color"}, cwd=ROOT, start_new_session=True,
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
        )  # fmt: skip
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self):
        with contextlib.suppress(OSError):
            self.shown += os.read(self.master, 65536)

    def press(self, keys):
        """Keys; from now on only what is drawn after them counts."""
        self.shown = b""
        os.write(self.master, keys.encode())

    async def shows(self, text):
        """One picture, once it has the text."""

        async def look():
            return STYLE.sub(b"", self.shown.rpartition(b"baton top")[2]).decode(errors="replace")

        missing = f"{text!r} is not shown"
        return await eventually(look, lambda seen: text in seen, missing, PATIENCE_S)

    async def close(self):
        asyncio.get_running_loop().remove_reader(self.master)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
async def router():
    fleet = status(worker("pre0"), worker("dec0", DECODE), pair("pre0", "dec0"))
    async with Router(fleet) as serving:
        yield serving


@pytest.fixture
async def top(router):
    terminal = Terminal()
    await terminal.start(router.address)
    yield terminal
    await terminal.close()


async def test_it_follows_routers_and_keys(top, router):
    assert "SERVING" in await top.shows("pre0")
    router.status.router.queued = 4321
    await top.shows("4321")
    top.press("r")
    assert "dec0  READY" not in await top.shows("role: prefill")
    top.press("\x1b[A")  # an arrow is no key of ours
    top.press("s")
    await top.shows("sort: queue")
    await router.__aexit__()
    assert "NO ANSWER" in await top.shows("does not answer for")


@pytest.mark.parametrize(
    ("how", "exit_status"), [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 0)]
)
async def test_however_it_ends_the_terminal_is_as_it_was(top, how, exit_status):
    await top.shows("SERVING")
    assert termios.tcgetattr(top.slave) != top.mode  # keys come without Enter
    top.press(how) if how == "q" else top.process.send_signal(how)
    async with asyncio.timeout(PATIENCE_S):
        assert await top.process.wait() == exit_status
    assert termios.tcgetattr(top.slave) == top.mode
    leaves = b"\x1b[?1049l"  # the screen of full-screen programs

    async def shown():
        return top.shown

    await eventually(shown, lambda seen: leaves in seen, "the screen is not left")
