"""The report's form, and what is made of it: a table and a page."""

from __future__ import annotations

import io
import json
import re
import types
import typing
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.bench.generator import Lag, Run
from baton.bench.page import page_of
from baton.bench.report import SCHEMA, Report, ServerInfo, Stage, WorkloadInfo, report_of
from baton.bench.request import Phases
from baton.bench.terminal import show
from baton.bench.workload import Workload
from baton.slo import Slo
from tests.unit.bench.outcomes import failed, outcome

DOCS = Path(__file__).parents[3] / "docs" / "benchmarking.md"
INFO = WorkloadInfo(
    rate=2.0, sweep=[], concurrency=None, arrivals="poisson", burstiness=None, count=4,
    duration_s=None, prompt_tokens="10", output_tokens="3", shared_prefix=0, prefixes=0,
    trace=None, rate_scale=None, length_scale=None, seed=1, prompt_form="ids", ignore_eos=True,
    timeout_s=9.0,
)  # fmt: skip
SERVERS = [
    ServerInfo(name=name, url=f"http://{name}<script>", protocol="openai", model="m&m")
    for name in "AB"
]
PHASES = Phases(0.01, 0.09, 0.5, 0.004, 4096)


def text_of(found: Report) -> str:
    """What a terminal shows."""
    out = io.StringIO()
    show(found, Console(file=out, width=100))
    return out.getvalue()


def run(scale: float = 1.0) -> Run:
    """Three answers and an error."""
    outcomes = [
        outcome(0.1 * scale, 0.2 * scale, 0.35 * scale, sent_s=0.5 * i, phases=PHASES)
        for i in range(3)
    ]
    lag = Lag([0.001] * 4, [0.002] * 9, 0.5, 2.0)
    return Run([*outcomes, failed("HTTP_429", "<slow>", sent_s=1.6)], 2.0, lag)


def report(
    servers: int = 2, sweep: Sequence[float | None] = (None,), partial: bool = False
) -> Report:
    """One with everything in it."""
    stages = [
        Stage(Workload(rate=v or 2.0), v, [[run(1 + i) for i in range(servers)] for _ in range(4)])
        for v in sweep
    ]
    slo = Slo.parse("ttft=0.15,tpot=1")
    return report_of(INFO, SERVERS[:servers], stages, slo, partial)


def check(value: Any, form: Any, where: str = "report") -> None:
    """That a value is of a type made of TypedDicts, lists, dicts and unions."""
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin in (typing.Union, types.UnionType):
        for one in args:
            try:
                return check(value, one, where)
            except AssertionError:
                continue
        raise AssertionError(f"{where}: {value!r} is no {form}")
    if typing.is_typeddict(form):
        hints = typing.get_type_hints(form)
        assert isinstance(value, dict) and set(value) == set(hints), where
        for name, hint in hints.items():
            check(value[name], hint, f"{where}.{name}")
    elif origin is list:
        assert isinstance(value, list), where
        for i, one in enumerate(value):
            check(one, args[0], f"{where}[{i}]")
    elif origin is dict:
        assert isinstance(value, dict), where
        for name, one in value.items():
            check(one, args[1], f"{where}.{name}")
    else:
        kinds = (int, float) if form is float else (form,)
        assert isinstance(value, kinds) and (form is bool or not isinstance(value, bool)), (
            f"{where}: {value!r} is no {form}"
        )
    return None


@pytest.mark.parametrize("sweep", [(None,), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_report_is_of_its_schema(servers: int, sweep: Sequence[float | None]) -> None:
    """Also after its journey through JSON, which knows no infinite numbers."""
    found = report(servers, sweep)
    assert found["schema"] == SCHEMA == "baton.bench.serve/1"
    check(json.loads(json.dumps(found, allow_nan=False)), Report)
    assert len(found["stages"]) == len(sweep)
    assert (found["knees"] is None) == (sweep == (None,))
    assert (found["stages"][0]["comparison"] is None) == (servers == 1)


def test_every_field_is_documented() -> None:
    """Each name in the report's types stands in the documentation."""
    documented = {
        name
        for code in re.findall(r"`[^`]+`", re.sub(r"```.*?```", "", DOCS.read_text(), flags=re.S))
        for name in re.findall(r"\w+", code)
    }
    assert not names_in(Report) - documented
    assert f"`{SCHEMA}`" in DOCS.read_text() and len(names_in(Report)) > 60


def names_in(form: Any) -> set[str]:
    """All field names of a type and those in it."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(form).items() if typing.is_typeddict(form) else ():
        found |= {name} | names_in(hint)
    return found.union(*(names_in(one) for one in typing.get_args(form)))


def test_runs_of_nothing_make_a_report_too() -> None:
    empty = report_of(INFO, SERVERS[:1], [Stage(Workload(rate=1), None, [[Run()]])], None, True)
    check(json.loads(json.dumps(empty, allow_nan=False)), Report)
    assert "PARTIAL" in text_of(empty)
    assert "</html>" in page_of(empty)


def test_blocks_are_put_together() -> None:
    found = report()["stages"][0]
    a, b = found["servers"]
    assert (a["blocks"], a["figures"]["requests"]["sent"], a["figures"]["seconds"]) == (4, 16, 8.0)
    assert sum(a["timeline"]["sent"]) == 16
    assert a["timeline"]["begin_s"][-1] >= 7.5  # the blocks' clocks follow each other
    assert b["figures"]["ttft_s"] and b["figures"]["ttft_s"]["p50"] == pytest.approx(0.2)
    compared = {one["figure"]: one for one in found["comparison"] or ()}
    assert compared["ttft_s.p50"]["ratio"] == pytest.approx(2.0)
    assert compared["ttft_s.p50"]["better"] == "first"


def test_the_table_tells_it_all() -> None:
    text = text_of(report(sweep=(1.0, 2.0, 4.0), partial=True))
    for part in (
        "A: 2 req/s, ms", "time to first token", "goodput   75.0%", "4 HTTP_429: <slow>",
        "in 120: 15/s; out 36: 4/s", "ttft_s.p50", "knee of A: none", "PARTIAL",
        "requests late by p50 1 p99 1 ms", "queue 10", "25% of a core",
    ):  # fmt: skip
        assert part in text, part
    assert "bottleneck" not in text


class Page(HTMLParser):
    """Whether every element is closed, and what the page would load."""

    VOID = ("meta", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [f"{tag} {n}" for n, _ in attrs if n in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("sweep", [(None,), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_page_is_whole_and_loads_nothing(servers: int, sweep: Sequence[float | None]) -> None:
    html, page = page_of(report(servers, sweep)), Page()
    page.feed(html)
    assert page.open == [] and page.loads == []
    assert "url(" not in html.replace("url(#", "") and "@import" not in html
    plots = 9 * len(sweep) + (4 if sweep != (None,) else 0)
    assert page.seen.count("svg") == plots
    assert "nan" not in re.sub(r"<script.*", "", html).lower()
    assert "http://A<script>" not in html and "http://A&lt;script&gt;" in html
    assert page.seen.count("script") == 1  # the report itself, as data


def test_the_page_carries_the_report() -> None:
    found = report()
    data = re.search(r'<script type="application/json"[^>]*>(.*)</script>', page_of(found))
    assert data and json.loads(data[1]) == json.loads(json.dumps(found))
