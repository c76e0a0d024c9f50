"""What is recorded is what Prometheus reads, in both of its formats."""

import gc
import math
import weakref

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import parser
from prometheus_client.openmetrics import parser as open_parser

from baton import telemetry
from baton.metrics import exposition, table
from baton.metrics.recorder import Recorder

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
TTFT = "gen_ai.server.time_to_first_token"


@pytest.fixture
def recorder():
    made = Recorder("router", {"service.instance.id": 'a "b"\\'})
    yield made
    made.close()


def samples_of(recorder, accept=OPEN):
    """By (name, labels); both formats are read by Prometheus' own client."""
    content_type, body = recorder.render(accept)
    if accept:
        assert content_type == exposition.OPEN_METRICS
        families = open_parser.text_string_to_metric_families(body.decode())
    else:
        assert content_type == exposition.PLAIN
        families = parser.text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample
        for family in families
        for sample in family.samples
    }


def value_of(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))].value


@pytest.mark.parametrize("accept", [OPEN, ""])
def test_counters_and_gauges(recorder, accept):
    recorder.count("baton.failovers", 1, {"reason": "Stale"})
    recorder.count("baton.failovers", 2, {"reason": "Stale"})
    recorder.count("baton.failovers", 0, {"reason": "Unavailable"})
    recorder.observe("baton.requests.running", lambda: [(7, {})])
    recorder.observe("baton.tokens.output", lambda: [(1234567, {})])
    samples = samples_of(recorder, accept)
    assert value_of(samples, "baton_failovers_total", reason="Stale") == 3
    assert value_of(samples, "baton_failovers_total", reason="Unavailable") == 0
    assert value_of(samples, "baton_requests_running") == 7
    assert value_of(samples, "baton_tokens_output_total") == 1234567
    target = {"service_name": "baton-router", "service_instance_id": 'a "b"\\'}
    assert value_of(samples, "target_info", **target) == 1


@pytest.mark.parametrize("accept", [OPEN, ""])
def test_histograms_count_by_upper_bound(recorder, accept):
    for value in (0.005, 0.0051, 100.0):
        recorder.record(TTFT, value, {"gen_ai.request.model": "m"})
    samples = samples_of(recorder, accept)
    name, model = "gen_ai_server_time_to_first_token_seconds", {"gen_ai_request_model": "m"}
    assert value_of(samples, f"{name}_bucket", le="0.005", **model) == 1
    assert value_of(samples, f"{name}_bucket", le="0.01", **model) == 2
    assert value_of(samples, f"{name}_bucket", le="60.0", **model) == 2
    assert value_of(samples, f"{name}_bucket", le="+Inf", **model) == 3
    assert value_of(samples, f"{name}_count", **model) == 3
    assert value_of(samples, f"{name}_sum", **model) == pytest.approx(100.0101)


def test_gaps_are_a_histogram_like_others(recorder):
    gaps = recorder.gaps("baton.request.inter_token_latency")
    assert recorder.gaps("baton.request.inter_token_latency") is gaps
    for value in (0.0005, 0.00051, 3.0):
        gaps.record(value)
    samples = samples_of(recorder)
    name = "baton_request_inter_token_latency_seconds"
    assert value_of(samples, f"{name}_bucket", le="0.0005") == 1
    assert value_of(samples, f"{name}_bucket", le="0.001") == 2
    assert value_of(samples, f"{name}_bucket", le="+Inf") == 3
    assert value_of(samples, f"{name}_sum") == pytest.approx(3.00101)


def test_a_bucket_leads_to_the_trace_of_a_sampled_request(recorder):
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    span = tracer.start_span("request", context=Context())
    span.end()
    recorder.record(TTFT, 0.07, {}, telemetry.example(span))
    recorder.record(TTFT, 0.3, {})
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    samples = samples_of(recorder)
    example = samples[name, (("le", "0.08"),)].exemplar
    assert example.value == 0.07
    assert example.labels["trace_id"] == telemetry.trace_id_of(span)
    assert example.labels["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert all(s.exemplar is None for key, s in samples.items() if key[1] != (("le", "0.08"),))
    assert "trace_id" not in recorder.render("")[1].decode(), "the older format has no room for it"


def test_what_is_not_exported_is_no_example_unless_it_is_kept(recorder):
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    span = tracer.start_span("request", context=Context())
    recorder.record(TTFT, 0.07, {}, telemetry.example(span))
    recorder.record(TTFT, 0.5, {}, telemetry.example(span, kept=True))
    found = {key[1]: s.exemplar for key, s in samples_of(recorder).items() if s.exemplar}
    assert [(labels, example.value) for labels, example in found.items()] == [
        ((("le", "0.5"),), 0.5)
    ]


def test_everything_is_announced_before_anything_happened(recorder):
    page = recorder.render(OPEN)[1].decode()
    for one in table.of("router").values():
        assert f"# TYPE {one.series} {one.kind}\n" in page
    assert page.endswith("# EOF\n")


def test_only_what_is_listed_for_the_process_can_be_recorded(recorder):
    for attempt in (
        lambda: recorder.count("baton.nonsense"),
        lambda: recorder.count("baton.reservations"),  # a decode worker's
        lambda: recorder.record("baton.engine.batch.size", 1),
        lambda: recorder.observe("baton.kv.blocks", list),
        lambda: recorder.gaps("baton.prefill.queue_time"),
    ):
        with pytest.raises(KeyError):
            attempt()
    with pytest.raises(AssertionError):
        recorder.count("baton.workers")  # a gauge


def test_nothing_of_a_request_is_kept(recorder):
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    span = tracer.start_span("request", context=Context())
    seen = weakref.ref(span)
    recorder.record(TTFT, 0.07, {}, telemetry.example(span))
    span.end()
    del span
    gc.collect()
    assert seen() is None
    samples_of(recorder)


def test_numbers_that_are_none():
    assert [exposition._number(value) for value in (math.inf, -math.inf, math.nan, 3, 0.1)] == [
        "+Inf", "-Inf", "NaN", "3", "0.1"]  # fmt: skip
