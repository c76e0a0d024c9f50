"""Metrics and traces of a running cluster: they agree with the requests and explain their time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.client import AsyncClient, Completion
from baton.config import EngineConfig, RouterLimits
from baton.errors import DeadlineExceeded, InvalidRequest
from baton.local.cluster import LocalCluster
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from baton.local.trace_tree import coverage
from baton.metrics import table
from tests.cluster.conftest import ClusterFactory
from tests.cluster.oracle import Oracle, all_blocks_free
from tests.cluster.streams import decoding_process
from tests.cluster.test_equality import BYTES_PER_TOKEN

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
OF_ALL = {"gen_ai_request_model": "demo", "gen_ai_operation_name": "text_completion"}
SILENT = {"baton.kv.transfer.failures", "baton.engine.gpu.rows"}  # did not happen here


@dataclass
class Page:
    """The metrics of one process."""

    samples: list[Sample]

    def value(self, name: str, **labels: str) -> float:
        """One sample's value."""
        return self._one(name, labels).value

    def total(self, name: str, **labels: str) -> float:
        """Over all samples with these labels."""
        found = [one for one in self.samples if one.name == name]
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def exemplars(self, name: str) -> set[str]:
        """Trace ids of a histogram's exemplars."""
        found = (one.exemplar for one in self.samples if one.name == name)
        return {exemplar.labels["trace_id"] for exemplar in found if exemplar}

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


async def test_metrics_of_every_process_agree_with_the_requests(
    own_cluster: ClusterFactory, oracle: Oracle, traces: OtlpReceiver
) -> None:
    limits = RouterLimits(slos=("patient:ttft=500", "never:ttft=0.000001"))
    cluster = await own_cluster(
        metrics_port=0, limits=limits, price_per_hour=3600.0, otlp=traces.address
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
    trace_ids = {one.trace_id for one in everything}
    for histogram in ("time_to_first_token", "request_duration"):
        exemplars = router.exemplars(f"gen_ai_server_{histogram}_seconds_bucket")
        assert exemplars and exemplars <= trace_ids
    _check_workers(prefill, decode, everything)
    for name, page in pages.items():
        _check_complete(page, name.partition("-")[0])


def _check_requests(router: Page, done: list) -> None:  # type: ignore[type-arg]
    """The router's metrics agree with the responses."""
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
    """The workers' metrics agree with the responses' handoffs and tokens."""
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
    generated = sum(page.value("baton_engine_tokens_generated_total") for page in (prefill, decode))
    assert generated == sum(one.usage.completion_tokens for one in done)
    for page in (prefill, decode):
        assert page.value("baton_kv_blocks", state="held") == 0
        assert page.total("baton_kv_blocks") == page.value("baton_kv_blocks", state="free") + (
            page.value("baton_kv_blocks", state="cached")
        )
        assert page.value("baton_worker_cost_total") > 0.1  # a unit a second, and it has run longer
        steps = page.total("baton_engine_step_duration_seconds_count")
        assert steps == page.value("baton_engine_batch_size_count") > 0


def _check_complete(page: Page, process: str) -> None:
    """Every documented metric is there, with exactly the documented attributes."""
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


# Simulated: the time is the protocol's, not the model's.
ENGINE = EngineConfig(dtype="float32", kv_cache_bytes=64 << 20, simulate="500,10")
PROMPT = tuple(range(300, 700))
SERVICES = {"baton-router", "baton-prefill", "baton-decode"}
LEAST_SHARE = 0.95
TRIES = 8  # on a busy machine a process may sleep between two spans
ARRIVAL_S = 20.0


async def trace_of(receiver: OtlpReceiver, trace_id: str, services: set[str]) -> list[Span]:
    return await receiver.store.wait_for(
        trace_id, lambda spans: is_complete(spans, services), ARRIVAL_S
    )


# Spans in which the router waits for workers.
WAITING = {"router.prefill", "router.stream"}


def share(spans: Sequence[Span], without: Collection[str] = ()) -> float:
    """Of the request's time that its spans explain, those of some names left out."""
    explained = coverage([span for span in spans if span.name not in without])
    assert explained is not None
    return explained.share


@pytest.mark.parametrize("new_tokens", [1, 30])
async def test_spans_account_for_a_requests_time(
    cluster_factory: ClusterFactory, traces: OtlpReceiver, new_tokens: int
) -> None:
    """All of them for any request, and for one of some length what the workers did."""
    shares, of_workers = [0.0], [0.0]
    cluster = await cluster_factory(otlp=traces.address, engine=ENGINE)
    async with AsyncClient(cluster.address) as client:
        for number in range(TRIES):
            salt = f"{new_tokens}-{number}"
            done = await client.generate(
                list(PROMPT), max_tokens=new_tokens, ignore_eos=True, cache_salt=salt
            )
            spans = await trace_of(traces, done.trace_id, SERVICES)
            shares.append(share(spans))
            of_workers.append(share(spans, without=WAITING))
            if min(max(shares), max(of_workers)) >= LEAST_SHARE:
                break
    assert max(shares) >= LEAST_SHARE, shares
    assert max(of_workers) >= LEAST_SHARE, of_workers


async def killed_midway(cluster: LocalCluster, client: AsyncClient) -> Completion:
    """A stream whose decode worker dies after some tokens."""
    stream = client.stream(list(PROMPT), max_tokens=60, ignore_eos=True, cache_salt="killed")
    tokens = 0
    async with stream:
        async for delta in stream:
            tokens += len(delta.token_ids)
            if tokens == 10:
                cluster.kill(await decoding_process(cluster, client))
    return stream.completion


async def test_failed_and_slow_requests_are_kept_whatever_is_sampled(
    own_cluster: ClusterFactory,
) -> None:
    """Nothing is sampled here; what is kept comes from the router and its workers."""
    limits = RouterLimits(trace_slow_s=3.0, slos=("loose:ttft=1000,tpot=1000",))
    async with OtlpReceiver(SpanStore()) as receiver:
        cluster = await own_cluster(
            otlp=receiver.address, engine=ENGINE, decode=2, restart=False, trace_sample=0.0,
            limits=limits, log_format="json",
        )  # fmt: skip
        async with AsyncClient(cluster.address) as client:
            healthy = await client.generate(list(range(400, 480)), max_tokens=5, ignore_eos=True)
            # 1,900 tokens at 500 a second.
            slow = await client.generate(list(range(100, 2000)), max_tokens=3)
            with contextlib.suppress(DeadlineExceeded):
                await client.generate(
                    list(PROMPT), max_tokens=1000, ignore_eos=True, timeout=3.0, cache_salt="late"
                )
            broken = await killed_midway(cluster, client)
            await all_blocks_free(client)
        assert healthy.route.attempts == 1 and broken.route.attempts > 1
        assert slow.timing.ttft_ms > 3000
        for done in (slow, broken):
            assert is_complete(await trace_of(receiver, done.trace_id, SERVICES), SERVICES)
        spans = receiver.store.trace(broken.trace_id)
        assert share(spans) >= LEAST_SHARE
        assert sum(span.name == "router.attempt" for span in spans) == broken.route.attempts
        failed = await _failed_trace(receiver)
        assert {span.service for span in failed} == SERVICES
        assert receiver.store.trace(healthy.trace_id) == []
        assert len(receiver.store) == 3
        _check_log(cluster, broken.trace_id)


async def _failed_trace(receiver: OtlpReceiver) -> list[Span]:
    """The one trace whose request ended with an error."""
    async with asyncio.timeout(ARRIVAL_S):
        while True:
            for trace_id in list(receiver.store._traces):
                spans = receiver.store.trace(trace_id)
                entry = [span for span in spans if span.name == "router.generate"]
                services = {span.service for span in spans}
                cut = any(one.error is not None or "baton.cancelled" in one.attributes
                          for one in entry)  # fmt: skip
                if cut and services == SERVICES:
                    return spans
            await asyncio.sleep(0.05)


def _check_log(cluster: LocalCluster, trace_id: str) -> None:
    """The log line of the failed attempt has its trace id."""
    lines = [json.loads(line) for line in cluster.processes["router"].log if line.startswith("{")]
    (failed,) = (line for line in lines if line.get("trace_id") == trace_id)
    assert failed["logger"].startswith("router.dispatch") and failed["level"] == "warning"
    assert failed["request_id"] in failed["message"]
