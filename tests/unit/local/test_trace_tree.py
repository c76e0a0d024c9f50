"""What a trace says of its request, and its drawing, against golden text."""

from typing import Any

import pytest

from baton.local.span_store import Span
from baton.local.trace_tree import (
    bytes_text,
    coverage,
    entry_of,
    is_trace_id,
    is_whole,
    render,
    summarize,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(
    name: str, service: str, ids: str, start_ms: float, end_ms: float, **attributes: Any
) -> Span:
    """`ids` is "id" for a root or "parent/id"."""
    parent, _, own = ids.rpartition("/")
    error = attributes.pop("failed", None)
    start_ns, end_ns = int(start_ms * 1e6), int(end_ms * 1e6)
    return Span(TRACE, own, parent, name, service, start_ns, end_ns, attributes, error=error)


def request() -> list[Span]:
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


def test_a_whole_request() -> None:
    assert render(request()) == WHOLE


def test_order_of_arrival_does_not_matter() -> None:
    assert render(request()[::-1]) == WHOLE


def test_missing_parent_and_failure_are_marked() -> None:
    lost = span("decode", "decode", "lost/c", 50, 100, tokens=3, failed="out of blocks")
    spans = [
        span("generate", "client", "a", 0, 100),
        lost,
        span("Generate", "router", "a/b", 1, 99),
    ]
    assert render(spans) == ORPHANED


def test_without_a_root_the_earliest_span_is_on_top() -> None:
    """A client may keep its own spans elsewhere."""
    spans = [
        span("prefill", "prefill", "b/d", 12, 93),
        span("Generate", "router", "away/b", 1, 411),
    ]
    lines = render(spans).splitlines()
    assert lines[2].startswith("router  Generate")
    assert lines[3].startswith("└─ prefill  prefill")
    assert "?" not in render(spans)


def test_every_line_fits() -> None:
    deep = [span("n" * 80, "service", "0", 0, 10, text="word " * 99)]
    deep += [span("n" * 80, "service", f"{i}/{i + 1}", i, 10, text="word " * 99) for i in range(9)]
    for width in (60, 100, 140):
        lines = render(deep, width).splitlines()
        assert max(len(line) for line in lines) == width
        assert len(lines) == 2 + 10 * (1 + 3)  # attributes take three lines at most
        assert lines[1 + 4].endswith("word …")


def test_long_attributes_go_on_below() -> None:
    lines = render([span("run", "s", "a", 0, 1, text="x" * 80, more="y" * 30, last=1)]).splitlines()
    assert [line.strip() for line in lines[3:]] == [
        "text=" + "x" * 80,
        "more=" + "y" * 30 + " last=1",
    ]


def test_a_cycle_and_an_instant_do_not_hang_or_break() -> None:
    spans = [span("a", "s", "y/x", 0, 0), span("b", "s", "x/y", 0, 0), span("c", "s", "z", 0, 0)]
    assert "s  c" in render(spans)
    assert render([]) == "(no spans)"


def test_bytes_text() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]


def part(name: str, ids: str, start: int, end: int, **fields: Any) -> Span:
    """`ids` is "id" for a root or "parent/id"; times are milliseconds."""
    parent, _, own = ids.rpartition("/")
    return Span(TRACE, own, parent, name, fields.pop("service", "baton-router"),
                start * 1_000_000, end * 1_000_000, **fields)  # fmt: skip


def entry(start: int = 0, end: int = 100, ids: str = "client/r", **fields: Any) -> Span:
    return part("router.generate", ids, start, end, is_entry=True, **fields)


def test_gaps_are_when_nothing_below_the_request_ran() -> None:
    told = coverage(
        [
            entry(),
            part("router.admit", "r/a", 5, 10),
            part("router.attempt", "r/b", 10, 95),  # contains the others: explains nothing
            part("prefill", "b/c", 12, 40, service="baton-prefill"),
            part("decode.run", "b/d", 35, 80, service="baton-decode"),
            part("kv.transfer", "b/e", 36, 38, service="baton-prefill"),  # within another
        ]
    )
    assert told is not None
    assert told.took_ns == 100_000_000
    assert told.known_ns == 73_000_000  # 5 to 10 and 12 to 80; what overlaps counts once
    assert [(a // 1_000_000, b // 1_000_000) for a, b in told.gaps] == [(80, 100), (0, 5), (10, 12)]
    assert told.share == pytest.approx(0.73)


def test_what_is_outside_the_request_or_measures_it_does_not_count() -> None:
    told = coverage(
        [
            entry(10, 90),
            part("generate", "client", 0, 100, service="baton-client"),
            part("router.first_token", "r/f", 10, 90),
            part("router.admit", "r/a", 0, 20),
            part("decode.run", "r/d", 80, 500),
        ]
    )
    assert told is not None and told.known_ns == 20_000_000


def test_a_request_alone_is_not_explained_at_all() -> None:
    told = coverage([entry()])
    assert told is not None and told.share == 0.0
    assert told.gaps == ((0, 100_000_000),)
    assert coverage([part("other", "x", 0, 1)]) is None


def test_of_several_routers_the_one_that_ended_last_counts() -> None:
    first, second = entry(0, 50, "c/r1"), entry(60, 90, "c/r2")
    assert entry_of([second, first]) is second
    assert entry_of([part("decode", "x", 0, 1, service="baton-decode", is_entry=True)]) is None


def test_a_trace_is_whole_when_every_parent_but_the_callers_has_come() -> None:
    attempt, decode = part("router.attempt", "r/b", 1, 9), part("decode", "b/d", 2, 8)
    assert is_whole([entry(), attempt, decode])
    assert not is_whole([entry(), decode])
    assert not is_whole([attempt, decode])
    assert not is_whole([])


def test_a_summary_is_the_requests_own() -> None:
    tokens = {"gen_ai.usage.input_tokens": 717, "gen_ai.usage.output_tokens": 40}
    told = summarize(
        [
            part("router.attempt", "r/b", 1, 9),
            part("router.attempt", "r/c", 10, 99),
            entry(5, 105, attributes=tokens, error="gone"),
        ]
    )
    assert told is not None
    assert (told.trace_id, told.start_ns, told.took_ms, told.spans) == (TRACE, 5_000_000, 100.0, 3)
    assert (told.input_tokens, told.output_tokens, told.attempts) == (717, 40, 2)
    assert told.error == "gone"
    refused = summarize([entry()])
    assert refused is not None and (refused.input_tokens, refused.error) == (0, None)
    assert summarize([part("router.attempt", "r/b", 1, 9)]) is None


@pytest.mark.parametrize("text", ["", TRACE[:-1], TRACE + "0", TRACE.upper(), "g" * 32, "0" * 32])
def test_what_is_no_trace_id(text: str) -> None:
    assert is_trace_id(TRACE) and not is_trace_id(text)
