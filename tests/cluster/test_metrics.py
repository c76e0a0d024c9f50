"""Every process of a running cluster is scraped as Prometheus does it, and the numbers are true."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.client import AsyncClient
from baton.config import RouterLimits
from baton.errors import InvalidRequest
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore
from baton.metrics import table
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Oracle, all_blocks_free
from tests.cluster.test_handoff import BYTES_PER_TOKEN

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
OF_ALL = {"gen_ai_request_model": "demo", "gen_ai_operation_name": "text_completion"}
# They tell of things that did not happen here.
SILENT = {"baton.kv.transfer.failures", "baton.engine.gpu.rows"}  # there are none, here


@dataclass
class Page:
    """What one process shows."""

    samples: list[Sample]

    def value(self, name: str, **labels: str) -> float:
        """One sample's value."""
        return self._one(name, labels).value

    def total(self, name: str, **labels: str) -> float:
        """Over all samples with these labels."""
        found = [one for one in self.samples if one.name == name]
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def examples(self, name: str) -> set[str]:
        """Trace ids of a histogram's exemplars."""
        found = [one.exemplar for one in self.samples if one.name == name and one.exemplar]
        return {example.labels["trace_id"] for example in found}

    def _one(self, name: str, labels: Mapping[str, str]) -> Sample:
        (found,) = (s for s in self.samples if s.name == name and s.labels == labels)
        return found


async def scrape(cluster: LocalCluster) -> dict[str, Page]:
    """All pages, by process name."""

    def read(address: str) -> str:
        request = urllib.request.Request(
            f"http://{address}/metrics", headers={"Accept": OPEN_METRICS}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
            text: str = response.read().decode()
            return text

    pages = {}
    for name, address in cluster.metrics.items():
        text = await asyncio.to_thread(read, address)
        families = text_string_to_metric_families(text)
        pages[name] = Page([sample for family in families for sample in family.samples])
    return pages


async def test_every_process_tells_what_was_done(
    own_cluster: ClusterFactory, oracle: Oracle
) -> None:
    limits = RouterLimits(slos=("patient:ttft=500", "never:ttft=0.000001"))
    async with OtlpReceiver(SpanStore()) as receiver:
        cluster = await own_cluster(
            metrics_port=0, limits=limits, price_per_hour=3600.0, otlp=receiver.address
        )
        assert cluster.metrics.keys() == cluster.processes.keys()
        lengths, new_tokens = (333, 500, 10), 12
        options = {"max_tokens": new_tokens, "temperature": 0.0}
        async with AsyncClient(cluster.address) as client:
            done = [
                await client.generate(oracle.prompt(length, start=900 * n), **options)  # type: ignore[arg-type]
                for n, length in enumerate(lengths)
            ]
            again = await client.generate(oracle.prompt(lengths[0], start=0), **options)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest):
                await client.generate("x", max_tokens=4, temperature=-1.0)
            await all_blocks_free(client)
        pages = await scrape(cluster)
    router, prefill, decode = (pages[name] for name in ("router", "prefill-0", "decode-0"))
    everything = [*done, again]
    _check_requests(router, everything)
    assert {done[0].trace_id} <= {one.trace_id for one in everything}
    assert router.examples("gen_ai_server_time_to_first_token_seconds_bucket") <= {
        one.trace_id for one in everything
    }
    assert router.examples("gen_ai_server_request_duration_seconds_bucket")
    _check_workers(prefill, decode, everything)
    for name, page in pages.items():
        _check_complete(page, name.partition("-")[0])


def _check_requests(router: Page, done: list) -> None:  # type: ignore[type-arg]
    """The router's figures are those that callers were told."""
    delivered = sum(one.usage.completion_tokens for one in done)
    given = sum(one.usage.prompt_tokens for one in done)
    assert router.total("baton_requests_ended_total", status="OK") == len(done)
    assert router.total("baton_requests_ended_total", status="INVALID_ARGUMENT") == 1
    assert router.value("baton_requests_refused_total", cause="invalid") == 1
    assert router.total("baton_requests_refused_total") == 1
    assert router.value("baton_requests_running") == 0
    assert router.value("baton_requests_queued") == 0
    assert router.value("baton_tokens_input_total") == given
    assert router.value("baton_tokens_output_total") == delivered
    cached = sum(one.usage.cached_tokens for one in done)
    assert router.value("baton_tokens_cached_total") == cached > 0
    gaps = router.value("baton_request_inter_token_latency_seconds_count")
    assert gaps == delivered - len(done)
    assert router.value("gen_ai_server_request_duration_seconds_count", **OF_ALL) == len(done)
    ttft_s = router.value("gen_ai_server_time_to_first_token_seconds_sum", **OF_ALL)
    assert ttft_s == pytest.approx(sum(one.timing.ttft_ms for one in done) / 1e3, rel=1e-3)
    usage = "gen_ai_client_token_usage_sum"
    assert router.value(usage, **OF_ALL, gen_ai_token_type="output") == delivered
    assert router.value("baton_slo_requests_total", slo="patient", met="true") == len(done)
    assert router.value("baton_slo_requests_total", slo="never", met="false") == len(done)
    for role in ("prefill", "decode"):
        assert router.value("baton_workers", role=role, state="READY") == 1


def _check_workers(prefill: Page, decode: Page, done: list) -> None:  # type: ignore[type-arg]
    """The workers' figures are what the requests were told of their handoffs and tokens."""
    handed_over = [one for one in done if one.route.prefill]
    num_bytes = sum(one.timing.transfer_bytes for one in handed_over)
    assert num_bytes == BYTES_PER_TOKEN * sum(one.usage.prompt_tokens for one in handed_over)
    transport = {"transport": "shm"}
    assert prefill.value("baton_kv_transfer_io_bytes_total", **transport) == num_bytes
    assert prefill.value("baton_kv_transfer_duration_seconds_count", **transport) == len(
        handed_over
    )
    assert prefill.value("baton_prefill_queue_time_seconds_count") == len(handed_over)
    held = decode.value("baton_reservations_total", outcome="held")
    started = decode.value("baton_reservations_total", outcome="started")
    assert (held, started) == (len(handed_over), len(done) - len(handed_over))
    drawn = sum(page.value("baton_engine_tokens_generated_total") for page in (prefill, decode))
    assert drawn == sum(one.usage.completion_tokens for one in done)
    for page in (prefill, decode):
        assert page.value("baton_kv_blocks", state="held") == 0
        assert page.total("baton_kv_blocks") == page.value("baton_kv_blocks", state="free") + (
            page.value("baton_kv_blocks", state="cached")
        )
        assert page.value("baton_worker_cost_total") > 0.1  # a unit a second, and it has run longer
        steps = page.total("baton_engine_step_duration_seconds_count")
        assert steps == page.value("baton_engine_batch_size_count") > 0


def _check_complete(page: Page, process: str) -> None:
    """All that is listed is there, with the attributes that are listed and no others."""
    shown = {sample.name for sample in page.samples}
    for one in table.of(process).values():
        if one.name in SILENT:
            continue
        assert set(one.samples) <= shown, one.name
        labels = {name.replace(".", "_") for name in one.attributes} | {"le"}
        for sample in page.samples:
            if sample.name in one.samples:
                assert sample.labels.keys() <= labels, sample
                assert labels - {"le"} <= sample.labels.keys(), sample
