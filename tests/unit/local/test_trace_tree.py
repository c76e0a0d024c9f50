"""What a trace says of its request, and its drawing, against golden text."""

import sys
from dataclasses import replace

import pytest

from baton.local.span_store import Span
from baton.local.trace_tree import coverage, entry_of, render, summarize

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(name, service, ids, start_ms, end_ms, is_entry=False, failed=None, **attributes):
    """`ids` is "id" for a root or "parent/id"."""
    parent, _, own = ids.rpartition("/")
    start_ns, end_ns = int(start_ms * 1e6), int(end_ms * 1e6)
    return Span(TRACE, own, parent, name, service, start_ns, end_ns, attributes, is_entry, failed)


def entry(start=0, end=100, ids="client/r", **fields):
    return span("router.generate", "baton-router", ids, start, end, is_entry=True, **fields)


def request():
    return [  # in an order in which batches may arrive: not by start
        span("kv.transfer", "prefill", "d/e", 160.5, 195.25, transfer_bytes=3_300_000, gbps=0.7654),
        span("prefill", "prefill", "b/d", 112, 193),
        span("decode", "decode", "b/f", 195, 500, tokens=64),
        span("generate", "client", "a", 100, 512.34),
        span("Generate", "router", "a/b", 101, 511, **{"baton.attempts": 1, "rpc.system": "grpc"}),
        span("reserve", "decode", "b/c", 104, 105),
    ]


WHOLE = """\
trace 0af7651916cd43dd8448eb211c80319c: 6 spans, 412.3 ms
service  span                                               start     took ms
client  generate                                              0.0    412.3 ms |████████████████████|
└─ router  Generate                                           1.0    410.0 ms |████████████████████|
   │  attempts=1
   ├─ decode  reserve                                         4.0      1.0 ms |█                   |
   ├─ prefill  prefill                                       12.0     81.0 ms |█████               |
   │  └─ prefill  kv.transfer                                60.5     34.8 ms |  ███               |
   │        transfer_bytes=3.1 MiB gbps=0.7654
   └─ decode  decode                                         95.0    305.0 ms |    ███████████████ |
         tokens=64"""

ORPHANED = """\
trace 0af7651916cd43dd8448eb211c80319c: 3 spans, 100.0 ms
service  span                                               start     took ms
client  generate                                              0.0    100.0 ms |████████████████████|
├─ router  Generate                                           1.0     98.0 ms |████████████████████|
└─ ? ! decode  decode                                        50.0     50.0 ms |          ██████████|
      error=out of blocks tokens=3
? = the parent span did not arrive"""


def test_a_request_is_drawn_in_order_of_time():
    assert render(request()) == render(request()[::-1]) == WHOLE
    assert render([]) == "(no spans)"


def test_missing_parent_and_failure_are_marked():
    lost = span("decode", "decode", "lost/c", 50, 100, tokens=3, failed="out of blocks")
    root, router = span("generate", "client", "a", 0, 100), span("Generate", "router", "a/b", 1, 99)
    assert render([root, lost, router]) == ORPHANED
    # Without a root the earliest span is on top: a client may keep its own spans elsewhere.
    lines = render([span("prefill", "prefill", "b/d", 12, 93), replace(router, parent_id="away")])
    assert "\nrouter  Generate" in lines and "\n└─ prefill  prefill" in lines
    assert "?" not in lines


def test_every_line_fits():
    deep = [span("n" * 80, "service", "0", 0, 10, text="word " * 99)]
    deep += [span("n" * 80, "service", f"{i}/{i + 1}", i, 10, text="word " * 99) for i in range(9)]
    for width in (60, 100, 140):
        lines = render(deep, width).splitlines()
        assert max(len(line) for line in lines) == width
        assert len(lines) == 2 + 10 * (1 + 3)  # attributes take three lines at most
        assert lines[1 + 4].endswith("word …")
    long = render([span("run", "s", "a", 0, 1, text="x" * 80, more="y" * 30, last=1)]).splitlines()
    assert [line.strip() for line in long[3:]] == ["text=" + "x" * 80, f"more={'y' * 30} last=1"]


def test_spans_may_be_nested_without_limit_and_below_themselves():
    count = 2 * sys.getrecursionlimit()
    lines = render([span("a", "s", f"{n}/{n + 1}", n, count) for n in range(count)]).splitlines()
    assert len(lines) == 2 + count and all("s  a" in line for line in lines[2:20])

    spans = [span("a", "s", "y/x", 0, 0), span("b", "s", "x/y", 0, 0), span("c", "s", "z", 0, 0)]
    assert "s  c" in render(spans)


@pytest.mark.parametrize(
    ("spans", "known_ms", "gaps_ms"),
    [
        (  # 5 to 10 and 12 to 80; what overlaps counts once
            [
                entry(),
                span("router.admit", "baton-router", "r/a", 5, 10),
                span("router.attempt", "baton-router", "r/b", 10, 95),  # contains others
                span("prefill", "baton-prefill", "b/c", 12, 40),
                span("decode.run", "baton-decode", "b/d", 35, 80),
                span("kv.transfer", "baton-prefill", "b/e", 36, 38),  # within another
            ],
            73, [(80, 100), (0, 5), (10, 12)],
        ),
        (  # what is outside the request, or measures it, does not count
            [
                entry(10, 90),
                span("generate", "baton-client", "client", 0, 100),
                span("router.first_token", "baton-router", "r/f", 10, 90),
                span("router.prefill", "baton-router", "r/p", 20, 70),
                span("router.stream", "baton-router", "r/s", 30, 90),
                span("router.admit", "baton-router", "r/a", 0, 20),
                span("decode.run", "baton-decode", "r/d", 80, 500),
            ],
            20, [(20, 80)],
        ),
        ([entry()], 0, [(0, 100)]),
    ],
)  # fmt: skip
def test_coverage_is_the_time_of_spans_without_children(spans, known_ms, gaps_ms):
    found = coverage(spans)
    assert found is not None and found.known_ns == known_ms * 1_000_000
    assert [(a // 1_000_000, b // 1_000_000) for a, b in found.gaps] == gaps_ms
    assert found.share == pytest.approx(found.known_ns / found.took_ns)


def test_of_several_routers_the_one_that_ended_last_is_the_requests_entry():
    first, second = entry(0, 50, "c/r1"), entry(60, 90, "c/r2")
    assert entry_of([second, first]) is second
    worker = span("decode", "baton-decode", "x", 0, 1, is_entry=True)
    assert entry_of([worker]) is coverage([worker]) is summarize([worker]) is None
