"""What is recorded is what Prometheus reads, in both of its formats."""

import gc
import itertools
import re
import weakref

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import parser
from prometheus_client.openmetrics import parser as open_parser

from baton.telemetry import tracing
from baton.telemetry.metrics import instruments
from baton.telemetry.metrics.instruments import INSTRUMENTS
from baton.telemetry.metrics.prometheus import Recorder

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
TTFT = "gen_ai.server.time_to_first_token"
CHAT = {
    "gen_ai.request.model": "m",
    "baton.model.version": "v1",
    "gen_ai.provider.name": "baton",
    "gen_ai.operation.name": "chat",
}


def labels_of(attributes):
    return {name.replace(".", "_"): value for name, value in attributes.items()}


LABELS = labels_of(CHAT)


@pytest.fixture
def recorder():
    return Recorder("router", {"service.instance.id": 'a "b"\\'})


def samples_of(recorder, accept=OPEN):
    """By (name, labels); both formats are read by Prometheus' own client."""
    content_type, body = recorder.render(accept)
    if accept:
        assert content_type.startswith("application/openmetrics-text; version=1.0.0")
        families = open_parser.text_string_to_metric_families(body.decode())
    else:
        assert content_type.startswith("text/plain; version=0.0.4")
        families = parser.text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample
        for family in families
        for sample in family.samples
    }


GAPS = "baton.request.inter_token_latency"


@pytest.mark.parametrize("accept", [OPEN, ""])
def test_counters_gauges_and_histograms(recorder, accept):
    """Gaps, which are counted at every token without the library, are a histogram like others."""
    recorder.count("baton.failovers", 1, {"reason": "Stale"})
    recorder.count("baton.failovers", 2, {"reason": "Stale"})
    recorder.count("baton.failovers", 0, {"reason": "Unavailable"})
    recorder.observe("baton.requests.running", lambda: [(7, {})])
    labels = {"gen_ai.request.model": "m", "baton.model.version": "v1"}
    recorder.observe("baton.tokens.output", lambda: [(1234567, labels)])
    gaps = recorder.gaps(GAPS)
    for value in (0.005, 0.0051, 100.0):
        recorder.record(TTFT, value, CHAT)
        gaps.record(value)
    samples = samples_of(recorder, accept)

    def value_of(name, **labels):
        return samples[name, tuple(sorted(labels.items()))].value

    assert value_of("baton_failovers_total", reason="Stale") == 3
    assert value_of("baton_failovers_total", reason="Unavailable") == 0
    assert value_of("baton_requests_running") == 7
    assert value_of("baton_tokens_output_total", **labels_of(labels)) == 1234567
    target = {"service_name": "baton-router", "service_instance_id": 'a "b"\\'}
    assert value_of("target_info", **target) == 1
    for name, labels in ((TTFT, LABELS), (GAPS, {})):
        series = f"{name.replace('.', '_')}_seconds"
        bounds = {"0.004": 0, "0.006": 2} if name == GAPS else {"0.005": 1, "0.01": 2, "60.0": 2}
        for bound, count in (bounds | {"+Inf": 3}).items():
            assert value_of(f"{series}_bucket", le=bound, **labels) == count
        assert value_of(f"{series}_count", **labels) == 3
        assert value_of(f"{series}_sum", **labels) == pytest.approx(100.0101)


def spans(**settings):
    tracer = TracerProvider(shutdown_on_exit=False, **settings).get_tracer("test")
    return tracer.start_span("request", context=Context())


def exemplars(recorder):
    return {s.labels["le"]: s.exemplar for s in samples_of(recorder).values() if s.exemplar}


def test_a_bucket_leads_to_the_trace_of_an_exported_request(recorder):
    span, dropped = spans(), spans(sampler=ALWAYS_OFF)
    recorder.record(TTFT, 0.07, CHAT, tracing.example(span))
    recorder.record(TTFT, 0.3, CHAT)
    recorder.record(TTFT, 0.9, CHAT, tracing.example(dropped))
    recorder.record(TTFT, 2.9, CHAT, tracing.example(dropped, kept=True))
    found = exemplars(recorder)
    assert {bound: one.value for bound, one in found.items()} == {"0.08": 0.07, "3.0": 2.9}
    assert found["0.08"].labels == {
        "trace_id": tracing.trace_id_of(span),
        "span_id": f"{span.get_span_context().span_id:016x}",
    }
    assert "trace_id" not in recorder.render("")[1].decode(), "the older format has no room for it"
    seen = weakref.ref(span)
    del span
    gc.collect()
    assert seen() is None, "nothing of a request is kept"


def test_everything_is_announced_before_anything_happened(recorder):
    page = recorder.render(OPEN)[1].decode()
    for one in instruments.for_process("router").values():
        assert f"# TYPE {one.series} {one.kind}\n" in page
    assert page.endswith("# EOF\n")


def test_a_process_reports_itself_by_the_names_of_prometheus_own_clients(recorder):
    samples = {
        name: sample.value for (name, labels), sample in samples_of(recorder).items() if not labels
    }
    assert 0 < samples["process_cpu_seconds_total"] < 1e6
    assert samples["process_resident_memory_bytes"] > 1 << 20
    assert samples["process_max_fds"] >= samples["process_open_fds"] > 2
    listed = {name for one in instruments.for_process("router").values() for name in one.samples}
    assert {name for name in samples if name.startswith("process_")} <= listed


def test_only_what_is_listed_for_the_process_can_be_recorded(recorder):
    for attempt in (
        lambda: recorder.count("baton.nonsense"),
        lambda: recorder.count("baton.reservations"),  # a decode worker's
        lambda: recorder.record("baton.engine.batch.size", 1),
        lambda: recorder.observe("baton.kv.blocks", list),
        lambda: recorder.gaps("baton.prefill.queue_time"),
        lambda: recorder.count("baton.failovers", 1, {"cause": "x"}),  # not its attribute
        lambda: recorder.record(TTFT, 0.1, {"gen_ai.request.model": "m"}),  # one is missing
    ):
        with pytest.raises(KeyError):
            attempt()
    with pytest.raises(AssertionError):
        recorder.count("baton.workers")  # a gauge


def test_the_tables_rows_are_whole_with_unique_names_that_have_units():
    for one in INSTRUMENTS:
        assert one.kind in (instruments.COUNTER, instruments.GAUGE, instruments.HISTOGRAM), one.name
        assert one.processes and set(one.processes) <= set(instruments.EVERYBODY), one.name
        assert one.text.endswith(".") and "|" not in one.text, one.name
        assert (one.kind == instruments.HISTOGRAM) == bool(one.buckets), one.name
        assert all(low < high for low, high in itertools.pairwise(one.buckets)), one.name
        assert all(re.fullmatch("[a-z_][a-z0-9_]*", name) for name in one.samples), one.name
    samples = [name for one in INSTRUMENTS for name in one.samples]
    assert len(set(samples)) == len(samples)
    assert {
        *("baton_tokens_output_total", "process_cpu_seconds_total"),
        *("baton_engine_step_age_seconds", "baton_kv_transfer_io_bytes_total"),
    } <= set(samples)
