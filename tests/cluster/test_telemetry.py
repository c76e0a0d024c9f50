"""Metrics and traces of a running cluster: they agree with the requests and explain their time."""

import contextlib
import json
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.config import RouterLimits
from baton.errors import DeadlineExceeded, InvalidRequest
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import SpanStore, is_complete
from baton.local.trace_tree import coverage
from baton.telemetry.metrics import instruments
from tests.cluster.oracle import SIMULATED, all_blocks_free, decoding_process
from tests.cluster.test_equality import BYTES_PER_TOKEN, SERVICES, spans_of
from tests.waiting import eventually

OPEN_METRICS = "application/openmetrics-text"
MODEL = {"gen_ai_request_model": "demo", "baton_model_version": ""}
OF_ALL = {**MODEL, "gen_ai_provider_name": "baton", "gen_ai_operation_name": "text_completion"}
OF_ALL_OK = {**OF_ALL, "error_type": ""}
# What did not happen here.
SILENT = {
    "baton.batch.requests",
    "baton.batches",
    "baton.kv.transfer.failures",
    "baton.engine.gpu.rows",
    "baton.engine.gpu.wait_time",
    "baton.engine.expert.imbalance",
    "baton.route.share",
    "baton.canary.decisions",
    "baton.canary.step.age",
}
# What a worker of this role measures only when it does the other role's part.
OF_THE_OTHER = {
    "prefill": ("baton.reservations", "baton.engine.draft_tokens"),
    "decode": ("baton.prefill.", "baton.kv.transfer.", "baton.kv.link."),
}


class Page(list[Sample]):
    """The metrics of one process."""

    def value(self, name, **labels):
        """One sample's value."""
        (found,) = (one.value for one in self if one.name == name and one.labels == labels)
        return found

    def total(self, name, **labels):
        """Over all samples with these labels."""
        found = [one for one in self if one.name == name]
        return sum(one.value for one in found if labels.items() <= one.labels.items())


async def scrape(cluster):
    """All pages, by process name."""
    pages = {}
    async with httpx.AsyncClient(headers={"accept": f"{OPEN_METRICS}; version=1.0.0"}) as client:
        for name, address in cluster.metrics.items():
            response = await client.get(f"http://{address}/metrics")
            assert response.headers["content-type"].startswith(OPEN_METRICS)
            families = text_string_to_metric_families(response.text)
            pages[name] = Page(sample for family in families for sample in family.samples)
    return pages


async def test_metrics_of_every_process_agree_with_the_requests(clusters, simulated):
    limits = RouterLimits(slos=("patient:ttft=500", "never:ttft=0.000001"))
    cluster, client = await clusters(
        alone=True, engine=SIMULATED, metrics_port=0, limits=limits, price_per_hour=36000.0
    )
    assert cluster.metrics.keys() == cluster.processes.keys()
    # The first again, at the end, is cached.
    prompts = [simulated.prompt(length, 900 * n) for n, length in enumerate((333, 500, 10))]
    done = [
        await client.generate(prompt, max_tokens=12, temperature=0.0, stream_interval=1)
        for prompt in prompts
    ]
    done.append(await client.generate(prompts[0], max_tokens=12, temperature=0.0))
    with pytest.raises(InvalidRequest):
        await client.generate("x", max_tokens=4, temperature=-1.0)
    await all_blocks_free(client)
    pages = await scrape(cluster)
    _check_requests(pages["router"], done)
    _check_workers(pages["prefill-0"], pages["decode-0"], done)
    for name, page in pages.items():
        _check_complete(page, name.partition("-")[0])


def _check_requests(router, done):
    """The router's metrics agree with the responses."""
    delivered = sum(one.usage.completion_tokens for one in done)
    cached = sum(one.usage.cached_tokens for one in done)
    assert cached > 0
    gaps = sum(one.usage.completion_tokens - 1 for one in done[:-1])  # the last came together
    for name, labels, expected in (
        ("baton_requests_refused_total", {"cause": "invalid"}, 1),
        ("baton_requests_running", {}, 0),
        ("baton_requests_queued", {}, 0),
        ("baton_tokens_input_total", MODEL, sum(one.usage.prompt_tokens for one in done)),
        ("baton_tokens_output_total", MODEL, delivered),
        ("baton_tokens_cached_total", MODEL, cached),
        ("baton_request_inter_token_latency_seconds_count", {}, gaps),
        ("gen_ai_server_request_duration_seconds_count", OF_ALL_OK, len(done)),
        ("gen_ai_client_token_usage_sum", {**OF_ALL, "gen_ai_token_type": "output"}, delivered),
        ("baton_slo_requests_total", {"slo": "patient", "met": "true"}, len(done)),
        ("baton_slo_requests_total", {"slo": "never", "met": "false"}, len(done)),
        ("baton_workers", {**MODEL, "role": "prefill", "state": "READY"}, 1),
        ("baton_workers", {**MODEL, "role": "decode", "state": "READY"}, 1),
    ):
        assert router.value(name, **labels) == expected, (name, labels)
    assert router.total("baton_requests_ended_total", status="OK") == len(done)
    assert router.total("baton_requests_ended_total", status="INVALID_ARGUMENT") == 1
    assert router.total("baton_requests_refused_total") == 1
    assert router.value("baton_placement_duration_seconds_count") >= 2 * len(done)
    assert router.value("baton_event_loop_lag_seconds_count") > 0
    ttft_s = router.value("gen_ai_server_time_to_first_token_seconds_sum", **OF_ALL)
    assert ttft_s == pytest.approx(sum(one.timing.ttft_ms for one in done) / 1e3, rel=1e-3)
    for histogram in ("time_to_first_token", "request_duration"):
        name = f"gen_ai_server_{histogram}_seconds_bucket"
        traces = {s.exemplar.labels["trace_id"] for s in router if s.name == name and s.exemplar}
        assert traces and traces <= {one.trace_id for one in done}


def _check_workers(prefill, decode, done):
    """The workers' metrics agree with the responses' handoffs and tokens."""
    handed_over = [one for one in done if one.route.prefill]
    num_bytes = sum(one.timing.transfer_bytes for one in handed_over)
    assert num_bytes == BYTES_PER_TOKEN * sum(one.usage.prompt_tokens for one in handed_over)
    shm, count = {"transport": "shm"}, len(handed_over)
    assert prefill.value("baton_kv_transfer_io_bytes_total", **shm) == num_bytes
    assert prefill.value("baton_kv_transfer_duration_seconds_count", **shm) == count
    assert prefill.value("baton_prefill_queue_time_seconds_count") == count
    assert decode.value("baton_reservations_total", outcome="held") == count
    assert decode.value("baton_reservations_total", outcome="started") == len(done) - count
    generated = sum(page.value("baton_engine_tokens_generated_total") for page in (prefill, decode))
    assert generated == sum(one.usage.completion_tokens for one in done)
    for page in (prefill, decode):
        assert page.value("baton_kv_blocks", state="held") == 0
        free = page.value("baton_kv_blocks", state="free")
        assert page.total("baton_kv_blocks") == free + page.value("baton_kv_blocks", state="cached")
        assert page.value("baton_worker_cost_total") > 0.1  # ten units a second
        steps = page.total("baton_engine_step_duration_seconds_count")
        assert steps == page.value("baton_engine_batch_size_count") > 0


def _check_complete(page, process):
    """Every documented metric is there, with exactly the documented attributes."""
    shown = {sample.name for sample in page}
    for one in instruments.for_process(process).values():
        if one.name in SILENT or one.name.startswith(OF_THE_OTHER.get(process, ())):
            continue
        assert set(one.samples) <= shown, one.name
        labels = {name.replace(".", "_") for name in one.attributes} | {"le"}
        for sample in page:
            if sample.name in one.samples:
                assert sample.labels.keys() <= labels, sample
                assert labels - {"le"} <= sample.labels.keys(), sample


# Simulated, and slow: the time is the protocol's, and steps are longer than the gaps between spans.
SLOW = replace(SIMULATED, simulate="1000,10")
SLOW_S = 1.5
PROMPT = list(range(300, 700))
LEAST_SHARE = 0.95
TRIES = 8  # on a busy machine a process may sleep between two spans


@pytest.mark.parametrize("new_tokens", [1, 30])
async def test_spans_account_for_a_requests_time(clusters, receiver, new_tokens):
    shares = []
    _, client = await clusters(engine=SLOW)
    for number in range(TRIES):
        salt = f"{new_tokens}-{number}"
        done = await client.generate(
            PROMPT, max_tokens=new_tokens, ignore_eos=True, cache_salt=salt
        )
        spans = await spans_of(receiver, done)
        explained = coverage(spans)
        assert explained is not None
        shares.append(explained.share)
        if max(shares) >= LEAST_SHARE:
            return
    raise AssertionError(f"explained: {shares}")


@pytest_asyncio.fixture(loop_scope="session")
async def own_receiver():
    """Gets the spans of one test's cluster; it must outlive that."""
    async with OtlpReceiver(SpanStore()) as receiver:
        yield receiver


async def test_failed_and_slow_requests_are_kept_whatever_is_sampled(own_receiver, clusters):
    """Nothing is sampled here; what is kept comes from the router and its workers."""
    limits = RouterLimits(trace_slow_s=SLOW_S, slos=("loose:ttft=1000,tpot=1000",))
    cluster, client = await clusters(
        alone=True, otlp=own_receiver.address, engine=SLOW, decode=2, trace_sample=0.0,
        limits=limits, log_format="json", drain_s=1.0,
    )  # fmt: skip
    healthy = await client.generate(list(range(400, 480)), max_tokens=5, ignore_eos=True)
    slow = await client.generate(list(range(100, 1900)), max_tokens=3)
    with contextlib.suppress(DeadlineExceeded):
        await client.generate(
            PROMPT, max_tokens=1000, ignore_eos=True, timeout=1.0, cache_salt="late"
        )
    stream = client.stream(PROMPT, max_tokens=60, ignore_eos=True, cache_salt="killed")
    async with stream:
        for _ in range(10):
            await anext(stream)
        cluster.kill(await decoding_process(cluster, client))
        async for _ in stream:
            pass
    broken = stream.completion
    await all_blocks_free(client)
    assert healthy.route.attempts == 1 and broken.route.attempts > 1
    assert slow.timing.ttft_ms > 1e3 * SLOW_S
    await spans_of(own_receiver, slow)
    spans = await spans_of(own_receiver, broken)
    explained = coverage(spans)
    assert explained is not None
    assert explained.share > 0.5  # once only: on a busy machine processes sleep between spans
    assert sum(span.name == "router.attempt" for span in spans) == broken.route.attempts
    store = own_receiver.store

    async def cut():
        """The ends of whole traces of requests that failed."""
        whole = [
            spans for one in list(store._traces) if is_complete(spans := store.trace(one), SERVICES)
        ]
        ends = [span for spans in whole for span in spans if span.name == "text_completion demo"]
        return [one for one in ends if one.error is not None or "baton.cancelled" in one.attributes]

    await eventually(cut, bool, "no trace")
    assert store.trace(healthy.trace_id) == []
    assert len(store) == 3

    lines = [json.loads(line) for line in cluster.processes["router"].log if line.startswith("{")]
    (failed,) = (line for line in lines if line.get("trace_id") == broken.trace_id)
    assert failed["logger"].startswith("router.dispatch") and failed["level"] == "warning"
    assert failed["request_id"] in failed["message"]
