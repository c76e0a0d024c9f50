"""The report's form, and the table that is made of it."""

import json
import re
from pathlib import Path

import pytest

from baton.bench.generator import Run
from baton.bench.report import SCHEMA, Stage, report_of
from baton.bench.terminal import report_lines
from baton.bench.workload import Workload
from baton.config.slo import Slo
from tests.unit.bench.outcomes import failed, finish, outcome

DOCS = Path(__file__).parents[3] / "docs" / "benchmarking.md"
SERVER = {"url": "http://a<script>", "protocol": "openai", "model": "m&m"}
TIMED = finish(queue_ms=10, ttft_ms=90, e2e_ms=500, transfer_ms=4, transfer_bytes=4096)
SWEEP = (1.0, 2.0, 4.0)


def text_of(found):
    """What a terminal shows."""
    return "\n".join(report_lines(found))


def run(scale=1.0):
    """Three answers and an error."""
    outcomes = [
        outcome(
            *(0.1 * scale, 0.2 * scale, 0.35 * scale), sent_s=0.5 * i, at_s=0.5 * i - 0.001,
            cached_tokens=5, finish=TIMED,
        )
        for i in range(3)
    ]  # fmt: skip
    error = failed("HTTP_429", "<slow>", sent_s=1.6, at_s=1.599)
    return Run([*outcomes, error], 2.0, [0.002] * 9, 0.5)


def report():
    """One with everything in it."""
    stages = [Stage(Workload(rate=value), value, run(value)) for value in SWEEP]
    slo = Slo.parse("ttft=0.15,tpot=1")
    return report_of({"sweep": SWEEP}, SERVER, stages, slo, partial=True)


def names_in(value, data):
    """All field names, except in the dictionaries `data`, whose keys are data themselves."""
    for one in value if isinstance(value, list) else ():
        yield from names_in(one, data)
    for name, one in value.items() if isinstance(value, dict) else ():
        yield name
        yield from names_in([*one.values()] if name in data else one, data)


def test_every_field_of_a_report_is_documented_and_shown():
    found = json.loads(json.dumps(report(), allow_nan=False))  # JSON knows no infinite numbers
    one, other, _ = found["stages"]
    assert (one["figures"]["requests"]["sent"], one["figures"]["seconds"]) == (4, 2.0)
    assert other["figures"]["ttft_s"]["p50"] == pytest.approx(0.2)

    docs = DOCS.read_text()
    shown = re.findall(r"`[^`]+`", re.sub(r"```.*?```", "", docs, flags=re.S))
    documented = {name for code in shown for name in re.findall(r"\w+", code)}
    names = set(names_in(found, ("statuses", "slo", "met")))
    assert not names - documented and len(names) > 50
    assert found["schema"] == SCHEMA and f"`{SCHEMA}`" in docs

    text = text_of(found)
    for part in (
        "2 req/s", "time in gaps over 200 ms", "good requests, %", "1 HTTP_429: <slow>",
        "TTFT p50, ms", "knee: none", "PARTIAL", "TTFT p95, ms",
        "requests late by p50 1.00 p99 1.00 ms", "queue p50, ms", "25% of a core", "cached, %",
    ):  # fmt: skip
        assert part in text, part
    assert "bottleneck" not in text


def test_a_rate_or_share_of_zero_is_shown_and_a_count_of_zero_is_not():
    stage = Stage(Workload(), None, Run([failed("A"), outcome(0.1, cached_tokens=0)], 2.0))
    found = report_of({}, SERVER, [stage], Slo.parse("ttft=0.01"), partial=False)
    rows = {" ".join(line.split()) for line in report_lines(found)}
    assert {"good requests, % 0.0", "of them cached, % 0.0", "requests failed 1"} <= rows
    assert not [row for row in rows if "interrupted" in row or "shorter" in row]


@pytest.mark.parametrize("interrupted", [Run(), run(9.0)])
def test_an_interrupted_stage_makes_no_knee(interrupted):
    good = Run([outcome(0.1, 0.2)] * 4, 2.0)
    stages = [Stage(Workload(rate=1.0), 1.0, good), Stage(Workload(rate=2.0), 2.0, interrupted)]
    arguments = {"sweep": [1.0, 2.0, 4.0]}, SERVER, stages, Slo.parse("ttft=0.15")
    found = report_of(*arguments, partial=True)
    assert found["knee"] is None and "knee: none" in text_of(found)
    assert report_of(*arguments, partial=False)["knee"] == 1.0


@pytest.mark.parametrize(
    ("found", "warnings"),
    [
        (Run(), []),
        (Run([outcome(0.1, sent_s=i, at_s=i - 0.02) for i in range(99)], 10.0, [0.02] * 99, 9.0),
         ["requests were sent late (p99 20.0 ms)", "its event loop was late (p99 20.0 ms)",
          "it kept a core busy (90%)"]),
    ],
)  # fmt: skip
def test_a_generator_that_was_late_or_busy_is_a_warning(found, warnings):
    """A run without requests makes a report too."""
    made = report_of({"sweep": []}, SERVER, [Stage(Workload(), None, found)], None, False)
    assert json.loads(json.dumps(made, allow_nan=False))["generator"]["complaints"] == warnings
    assert ("bottleneck" in text_of(made)) == bool(warnings)
