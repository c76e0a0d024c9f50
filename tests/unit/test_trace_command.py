"""`baton trace` as it is typed: what it prints, where it looks, and what it says when it cannot."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from baton import cli
from baton.errors import Unavailable
from baton.local import trace_source
from baton.local.span_store import Span
from baton.local.trace_source import TraceSource
from baton.local.trace_tree import Summary, summarize

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER = "1" * 32


def spans_of(trace_id: str, error: str | None = None) -> list[Span]:
    attributes = {"gen_ai.usage.input_tokens": 7}
    return [
        Span(trace_id, "b", "a", "router.admit", "baton-router", 1_000_000, 10_000_000),
        Span(trace_id, "a", "", "router.generate", "baton-router", 0, 10_000_000, attributes,
             is_entry=True, error=error),
    ]  # fmt: skip


class Kept(TraceSource):
    """Two traces; the last one failed."""

    name = "here"

    def __init__(self, *traces: list[Span]) -> None:
        self.traces = {spans[0].trace_id: spans for spans in traces}
        self.asked: list[Any] = []

    def trace(self, trace_id: str, timeout_s: float) -> Sequence[Span]:
        self.asked.append((trace_id, timeout_s))
        return self.traces.get(trace_id, [])

    def summaries(self, slowest: bool, most: int, timeout_s: float) -> Sequence[Summary]:
        self.asked.append((slowest, most, timeout_s))
        return [told for spans in self.traces.values() if (told := summarize(spans))][:most]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What a router at h:1 leads to."""
    source = Kept(spans_of(TRACE, "gone"), spans_of(OTHER))

    def found(target: str, timeout_s: float) -> TraceSource:
        assert target == "h:1"
        return source

    monkeypatch.setattr(trace_source, "kept_by", found)
    return source


def run(*argv: str) -> int:
    return cli.main(["trace", *argv, "--target", "h:1"])


@pytest.mark.parametrize("text", [TRACE, TRACE.upper(), "4bf92f35-77b3-4da6-a3ce-929d0e0e4736"])
def test_a_trace_is_drawn_with_what_is_not_explained(
    kept: Kept, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert run(text, "--timeout", "3") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"trace {TRACE}: 2 spans, 10.0 ms\n")
    assert "└─ router  router.admit" in out
    assert out.endswith(
        "spans account for 90.0% of the request's 10.0 ms; longest gaps: 1.0 ms at 0.0\n"
    )
    assert kept.asked == [(TRACE, 3.0)]


def test_a_trace_as_json(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TRACE, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["trace_id"], told["accounted_share"]) == (TRACE, 0.9)
    assert [span["name"] for span in told["spans"]] == ["router.generate", "router.admit"]


def test_the_last_request(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--last") == 0
    assert capsys.readouterr().out.startswith(f"trace {TRACE}")
    assert [asked[:2] for asked in kept.asked] == [(False, 1), (TRACE, 10.0)]


def test_requests_are_listed(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == [
        "trace", "ended", "took ms", "tokens in", "out", "attempts", "spans", "failed",
    ]  # fmt: skip
    assert first.split()[0] == TRACE and first.endswith("gone")
    assert second.split()[:1] + second.split()[2:] == [OTHER, "10.0", "7", "0", "0", "2"]
    assert run("--slowest", "1", "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert (told["trace_id"], told["error"]) == (TRACE, "gone")
    assert [asked[:2] for asked in kept.asked] == [(False, 20), (True, 1)]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["2" * 32], f"here has no trace {'2' * 32}"),
        (["not-an-id"], "'not-an-id' is no trace id: it has 32 hexadecimal digits"),
        (["0" * 32], "is no trace id"),
        ([TRACE, "--jaeger", "ftp://h"], "--jaeger ftp://h: not a URL"),
    ],
)
def test_what_cannot_be_shown_is_told(
    kept: Kept, capsys: pytest.CaptureFixture[str], argv: list[str], why: str
) -> None:
    assert run(*argv) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.startswith("baton: error: ")) == ("", True)
    assert why in told.err


@pytest.mark.parametrize("argv", [[], ["--last"], ["--slowest", "3"]])
def test_nothing_is_recorded_yet(
    kept: Kept, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    kept.traces.clear()
    assert run(*argv) == 1
    assert "here keeps no trace of a request yet" in capsys.readouterr().err
    if not argv:
        assert run("--json") == 0
        assert json.loads(capsys.readouterr().out) == {"traces": []}


def test_it_looks_where_it_is_told(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def elsewhere(where: str) -> Kept:
        looked.append(where)
        return kept

    monkeypatch.setattr(trace_source, "KeptTraces", elsewhere)
    monkeypatch.setattr(trace_source, "Jaeger", elsewhere)
    assert run(TRACE, "--from", "f:1") == run(TRACE, "--jaeger", "http://j:1") == 0
    assert looked == ["f:1", "http://j:1"]


def test_no_router_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(target: str, timeout_s: float) -> TraceSource:
        raise Unavailable("failed to connect to all addresses")

    monkeypatch.setattr(trace_source, "kept_by", nobody)
    assert run(TRACE) == 1
    assert "no router answers at h:1: start one with `baton up`" in capsys.readouterr().err
