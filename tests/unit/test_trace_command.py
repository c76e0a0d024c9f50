"""`baton trace` as it is typed: what it prints, where it looks, and what it says when it cannot."""

import json
import re
from collections.abc import Sequence

import pytest

from baton import cli
from baton.errors import Unavailable
from baton.local import trace_source
from baton.local.span_store import Span
from baton.local.trace_tree import summaries
from baton.v1.trace_pb2 import TraceSummary

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER = "1" * 32


def spans_of(trace_id: str, end: int, error: str | None = None) -> list[Span]:
    attributes = {"gen_ai.usage.input_tokens": 7}
    return [
        Span(trace_id, "b", "a", "router.admit", "baton-router", end - 9_000_000, end),
        Span(trace_id, "a", "", "router.generate", "baton-router", end - 10_000_000, end,
             attributes, is_entry=True, error=error),
    ]  # fmt: skip


class Kept:
    """Two traces; the last one failed."""

    def __init__(self, name: str = "here") -> None:
        self.name = name
        self.traces = {
            OTHER: spans_of(OTHER, 10_000_000),
            TRACE: spans_of(TRACE, 20_000_000, "gone"),
        }

    def trace(self, trace_id: str, timeout_s: float) -> Sequence[Span]:
        return self.traces.get(trace_id, [])

    def summaries(self, slowest: bool, most: int, timeout_s: float) -> Sequence[TraceSummary]:
        return summaries(self.traces.values(), slowest, most)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What a router at h:1 leads to."""
    source = Kept()

    def found(target: str, timeout_s: float) -> Kept:
        if target != "h:1":
            raise Unavailable("failed to connect to all addresses")
        return source

    monkeypatch.setattr(trace_source, "kept_by", found)
    return source


Output = pytest.CaptureFixture[str]


def run(*argv: str) -> int:
    return cli.main(["trace", "--target", "h:1", *argv])


@pytest.mark.parametrize("text", [TRACE.upper(), "4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "--last"])
def test_a_trace_is_drawn_with_what_is_not_explained(kept: Kept, capsys: Output, text: str) -> None:
    assert run(text) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"trace {TRACE}: 2 spans, 10.0 ms\n")
    assert "└─ router  router.admit" in out
    assert out.endswith(
        "spans account for 90.0% of the request's 10.0 ms; longest gaps: 1.0 ms at 0.0\n"
    )
    assert run(text, "--json") == 0
    trace = json.loads(capsys.readouterr().out)
    assert (trace["trace_id"], trace["accounted_share"]) == (TRACE, 0.9)
    assert [span["name"] for span in trace["spans"]] == ["router.generate", "router.admit"]


def test_requests_are_listed(kept: Kept, capsys: Output) -> None:
    assert run() == 0
    head, first, second = capsys.readouterr().out.splitlines()
    titles = ["trace", "ended", "took ms", "tokens in", "out", "attempts", "spans", "failed"]
    assert re.split("  +", head) == titles
    assert first.split()[0] == TRACE and first.endswith("gone")
    assert second.split()[:1] + second.split()[2:] == [OTHER, "10.0", "7", "0", "0", "2"]
    assert run("--slowest", "1", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)["traces"]
    assert listed == {
        "trace_id": TRACE, "start_ns": 20_000_000 - 10_000_000, "took_ms": 10.0, "spans": 2,
        "error": "gone", "input_tokens": 7, "output_tokens": 0, "attempts": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["2" * 32], f"here has no trace {'2' * 32}"),
        (["not-an-id"], "'not-an-id' is no trace id: it has 32 hexadecimal digits"),
        ([TRACE, "--jaeger", "ftp://h"], "--jaeger ftp://h: not a URL"),
        ([TRACE, "--target", "h:2"], "no router answers at h:2: start one with `baton up`"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    kept: Kept, capsys: Output, argv: list[str], why: str
) -> None:
    assert run(*argv) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("baton: error: ") and why in shown.err


@pytest.mark.parametrize("argv", [[], ["--last"], ["--slowest", "3"]])
def test_nothing_is_recorded_yet(kept: Kept, capsys: Output, argv: list[str]) -> None:
    kept.traces.clear()
    assert run(*argv) == 1
    assert "here keeps no trace of a request yet" in capsys.readouterr().err
    if not argv:
        assert run("--json") == 0
        assert json.loads(capsys.readouterr().out) == {"traces": []}


def test_other_sources_can_be_named(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(trace_source, "KeptTraces", Kept)
    monkeypatch.setattr(trace_source, "Jaeger", Kept)
    for option, where in (("--from", "f:1"), ("--jaeger", "http://j:1")):
        assert run("2" * 32, option, where) == 1
        assert f"{where} has no trace" in capsys.readouterr().err
