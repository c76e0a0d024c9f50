"""The spans of a sequence on its decode worker follow one another."""

import time

import pytest
from opentelemetry.context import Context

from baton.engine.step_report import SequenceProgress
from decode_worker.spans import DecodeSpans
from tests.tracing import Traces

MS = 1_000_000


@pytest.mark.parametrize("answer", ["before the report", "after the report"])
def test_a_first_step_that_is_told_late_is_over_by_decode_run(answer):
    """The event loop learns of the reservation when the step has ended already."""
    traces = Traces()
    arrived_ns = time.time_ns()
    spans = DecodeSpans(traces.tracer, Context())
    while time.time_ns() < arrived_ns + 3 * MS:
        pass
    started_ns, ended_ns = arrived_ns + MS, arrived_ns + 2 * MS
    spans.committed()
    if answer == "before the report":
        spans.reserved(0, started=True)
    spans.step(started_ns, ended_ns, SequenceProgress("a", 1, (7,)))
    if answer == "after the report":
        spans.reserved(0, started=True)
    spans.end("length")
    by_name = {span.name: span for span in traces.spans}
    first, run = by_name["decode.first_step"], by_name["decode.run"]
    assert (first.start_time, first.end_time, run.start_time) == (started_ns, ended_ns, ended_ns)
    assert all(span.start_time <= span.end_time for span in traces.spans)
    assert by_name["decode.admit"].end_time == started_ns
    if answer == "after the report":
        assert by_name["decode.reserve"].end_time == started_ns
