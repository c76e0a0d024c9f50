"""The dashboards as data: for each panel its title, its unit and what it asks Prometheus.

`scripts/dashboards.py` writes them down as Grafana's JSON.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """One line of a panel."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture; `width` is of 24 columns. `limits` are (value, colour), from there on."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    width: int = 8
    kind: str = "timeseries"  # or "stat"
    stacked: bool = False
    limits: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """A headline and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One page. `variables` are (name, query) of drop-down lists."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str], ...] = ()


def quantiles(
    series: str, where: str = "", by: str = "", *, exemplars: bool = True
) -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram, for each value of the label `by`."""
    grouping = f"le, {by}" if by else "le"
    named = f" {{{{{by}}}}}" if by else ""
    buckets = rate(f"{series}_bucket", where, grouping)
    return tuple(
        Query(
            f"histogram_quantile({q}, {buckets})",
            f"p{q * 100:.0f}{named}",
            exemplars and q == 0.99,
        )
        for q in (0.5, 0.95, 0.99)
    )


def rate(series: str, where: str = "", by: str = "") -> str:
    """A counter's rate, summed over processes, for each value of the label `by`."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({series}{where}[$__rate_interval]))"


def rates(series: str, by: str, where: str = "") -> tuple[Query, ...]:
    """A line for each value of the label `by`."""
    return (Query(rate(series, where, by), f"{{{{{by}}}}}"),)


GOODPUT = ((0, "red"), (0.95, "orange"), (0.99, "green"))
READY = ((0, "red"), (1, "green"))
THIS = '{job="$job", instance=~"$instance"}'
TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
E2E = "gen_ai_server_request_duration_seconds"
HELD = 'sum by (job) (baton_kv_blocks{state="held"}) / sum by (job) (baton_kv_blocks)'

OVERVIEW = Dashboard(
    "baton-overview", "Baton: overview against SLOs",
    "Does everybody get what they were promised, and if not, what stands in the way?",
    (
        Row("Promises", (
            Panel("Goodput by SLO class", "percentunit", (Query(
                f'{rate("baton_slo_requests_total", """{met="true"}""", "slo")} / '
                f'{rate("baton_slo_requests_total", "", "slo")}', "{{slo}}"),),
                "Share of requests that met every target of their class (--slo).",
                6, "stat", limits=GOODPUT),
            Panel("Good requests", "reqps",
                  rates("baton_slo_requests_total", "slo", '{met="true"}'),
                width=6, kind="stat"),
            Panel("Ready workers", "short", (Query(
                'max by (role) (baton_workers{state="READY"})', "{{role}}"),),
                width=6, kind="stat", limits=READY),
            Panel("Requests inside", "short", (
                Query("sum(baton_requests_running)", "running or waiting"),
                Query("sum(baton_requests_queued)", "in the line"),), width=6, kind="stat"),
        )),
        Row("What callers see", (
            Panel("Time to first token", "s", quantiles(TTFT),
                  "From arrival to the first token. Its dots open traces."),
            Panel("Time per output token", "s", quantiles(TPOT)),
            Panel("Whole request", "s", quantiles(E2E)),
            Panel("Gap between two tokens", "s",
                  quantiles("baton_request_inter_token_latency_seconds", exemplars=False),
                  "Every single gap, pauses of a failover included."),
            Panel("Wait for blocks", "s", quantiles("baton_request_queue_time_seconds"),
                  "From arrival until a decode worker held blocks."),
            Panel("Predicted by actual time to first token", "short",
                  quantiles("baton_request_ttft_prediction_ratio"),
                  "1 where the router knew what a request would wait."),
            Panel("Goodput over time", "percentunit", (Query(
                f'{rate("baton_slo_requests_total", """{met="true"}""", "slo")} / '
                f'{rate("baton_slo_requests_total", "", "slo")}', "{{slo}}"),), limits=GOODPUT),
        )),
        Row("Load and answers", (
            Panel("Requests by status", "reqps",
                  rates("baton_requests_ended_total", "status"),
                  stacked=True),
            Panel("Refusals by cause", "reqps",
                  rates("baton_requests_refused_total", "cause"),
                  stacked=True),
            Panel("Requests by tenant", "reqps",
                  rates("baton_requests_ended_total", "tenant"),
                  stacked=True),
            Panel("Tokens", "short", (
                Query(rate("baton_tokens_input_total"), "in, a second"),
                Query(rate("baton_tokens_cached_total"), "of them cached"),
                Query(rate("baton_tokens_output_total"), "out, a second"))),
            Panel("In the line", "short", (
                Query("sum by (instance) (baton_requests_queued)", "{{instance}} waiting"),
                Query("sum by (instance) (baton_requests_running)", "{{instance}} inside"))),
            Panel("Prefix-cache hits", "percentunit", (Query(
                f'{rate("baton_tokens_cached_total")} / {rate("baton_tokens_input_total")}',
                "of prompt tokens"),)),
        )),
        Row("Failures", (
            Panel("Workers by state", "short", (Query(
                "max by (role, state) (baton_workers)", "{{role}} {{state}}"),), stacked=True),
            Panel("Failovers", "short", rates("baton_failovers_total", "reason"),
                "Attempts that failed and were followed by another, a second."),
            Panel("Ejections", "short", rates("baton_breaker_ejections_total", "kind")),
        )),
    ),
)  # fmt: skip

WORKER = Dashboard(
    "baton-worker", "Baton: one worker",
    "What an engine does, step by step.",
    (
        Row("Steps", (
            Panel("Step duration", "s",
                  quantiles("baton_engine_step_duration_seconds", THIS, "kind")),
            Panel("Steps", "ops",
                  rates("baton_engine_step_duration_seconds_count", "kind", THIS),
                  stacked=True),
            Panel("Sequences in a step", "short",
                  quantiles("baton_engine_batch_size", THIS, exemplars=False)),
            Panel("Age of the running step", "s",
                  (Query(f"baton_engine_step_age_seconds{THIS}", "{{instance}}"),),
                  "A line that only climbs is an engine that makes no progress."),
            Panel("Tokens computed", "short",
                  rates("baton_engine_tokens_computed_total", "instance", THIS)),
            Panel("Tokens drawn", "short",
                  rates("baton_engine_tokens_generated_total", "instance", THIS)),
        )),
        Row("Queue and memory", (
            Panel("Sequences", "short",
                  (Query(f"sum by (state) (baton_engine_sequences{THIS})", "{{state}}"),),
                  stacked=True),
            Panel("Tokens to compute", "short",
                  (Query(f"baton_engine_queue{THIS}", "{{instance}}"),)),
            Panel("KV blocks", "short",
                  (Query(f"sum by (state) (baton_kv_blocks{THIS})", "{{state}}"),), stacked=True),
            Panel("Preemptions", "short",
                  rates("baton_engine_preemptions_total", "instance", THIS)),
            Panel("Wait for the first chunk", "s",
                  quantiles("baton_prefill_queue_time_seconds", THIS)),
            Panel("Reservations", "short", rates("baton_reservations_total", "outcome", THIS),
                stacked=True),
        )),
        Row("Process", (
            Panel("CPU", "short", rates("process_cpu_time_seconds_total", "cpu_mode", THIS),
                "Cores in use.", 12, stacked=True),
            Panel("Memory", "bytes", (
                Query(f"process_memory_usage_bytes{THIS}", "{{instance}}"),), width=12),
        )),
    ),
    (("job", 'label_values(up{job=~"prefill|decode"}, job)'),
     ("instance", 'label_values(up{job="$job"}, instance)')),
)  # fmt: skip

TRANSFER = Dashboard(
    "baton-kv-transfer", "Baton: KV transfer",
    "Blocks on their way from prefill to decode workers.",
    (
        Row("Handoffs", (
            Panel("Duration", "s",
                  quantiles("baton_kv_transfer_duration_seconds", by="transport"),
                  "From the first block leaving to Commit acknowledged."),
            Panel("Throughput of one handoff", "Bps",
                  quantiles("baton_kv_transfer_throughput_bytes_per_second", by="transport"),
                  "Its bytes by the time they were moving."),
            Panel("Handoffs", "ops",
                  rates("baton_kv_transfer_duration_seconds_count", "transport")),
            Panel("Bytes", "Bps", rates("baton_kv_transfer_io_bytes_total", "transport")),
            Panel("Bytes of a handoff", "bytes", (Query(
                f'{rate("baton_kv_transfer_io_bytes_total", "", "transport")} / '
                f'{rate("baton_kv_transfer_duration_seconds_count", "", "transport")}',
                "{{transport}}, mean"),)),
            Panel("Skipped: already cached", "percentunit", (Query(
                f'{rate("baton_tokens_cached_total")} / {rate("baton_tokens_input_total")}',
                "of prompt tokens"),)),
        )),
        Row("What goes wrong", (
            Panel("Failures", "short", rates("baton_kv_transfer_failures_total", "reason")),
            Panel("Sent again", "short", rates("baton_kv_transfer_resends_total", "transport")),
            Panel("Blocks in quarantine", "short", (Query(
                'baton_kv_blocks{state="quarantined"}', "{{job}} {{instance}}"),),
                "Not used again until their writer acknowledged the abort or is gone."),
            Panel("Reservations", "short", rates("baton_reservations_total", "outcome"),
                stacked=True, width=12),
            Panel("Blocks held", "short", (Query(
                'sum by (job, instance) (baton_kv_blocks{state="held"})',
                "{{job}} {{instance}}"),), width=12),
        )),
    ),
)  # fmt: skip

CAPACITY = Dashboard(
    "baton-capacity", "Baton: capacity and cost",
    "How much room is left, which role to add, and what a token costs.",
    (
        Row("Room", (
            Panel("KV blocks held", "percentunit", (Query(HELD, "{{job}}"),),
                  limits=((0, "green"), (0.8, "orange"), (0.95, "red"))),
            Panel("Tokens waiting to be computed", "short", (
                Query("sum by (job) (baton_engine_queue)", "{{job}}"),)),
            Panel("Engines busy", "percentunit", (Query(
                "sum by (job) (rate(baton_engine_step_duration_seconds_sum[$__rate_interval])) / "
                "count by (job) (baton_engine_step_age_seconds)", "{{job}}"),),
                "Share of the time in which a step runs."),
            Panel("Refused for want of room", "reqps",
                  rates("baton_requests_refused_total", "cause", '{cause=~"queue_full|too_late"}')),
            Panel("Preemptions", "short", rates("baton_engine_preemptions_total", "job")),
            Panel("Workers", "short", (
                Query('max by (role) (baton_workers{state="READY"})', "{{role}}"),)),
        )),
        Row("Cost", (
            Panel("Workers, an hour", "short", (Query(
                rate("baton_worker_cost_total", "", "job") + " * 3600", "{{job}}"),),
                "In the currency of --worker-price.", 8),
            Panel("1,000 output tokens", "short", (Query(
                f'{rate("baton_worker_cost_total")} / {rate("baton_tokens_output_total")} * 1000',
                "all workers"),), "What they cost while the load is as it is."),
            Panel("1,000 tokens in and out", "short", (Query(
                f'{rate("baton_worker_cost_total")} / ({rate("baton_tokens_output_total")} + '
                f'{rate("baton_tokens_input_total")}) * 1000', "all workers"),)),
            Panel("CPU", "short", rates("process_cpu_time_seconds_total", "job"),
                "Cores in use.", stacked=True),
            Panel("Router CPU for 1,000 requests", "s", (Query(
                f'{rate("process_cpu_time_seconds_total", """{job="router"}""")} / '
                f'{rate("baton_requests_ended_total")} * 1000', "all routers"),)),
            Panel("Memory", "bytes", (
                Query('sum by (job) (process_memory_usage_bytes{job=~"router|prefill|decode"})',
                      "{{job}}"),), stacked=True),
        )),
        Row("Registry", (
            Panel("etcd answers", "short", (Query('min(up{job="etcd"})', "up"),),
                  width=12, limits=READY),
            Panel("etcd: size of its database", "bytes", (
                Query("etcd_mvcc_db_total_size_in_bytes", "{{instance}}"),), width=12),
        )),
    ),
)  # fmt: skip

DASHBOARDS = {"overview": OVERVIEW, "worker": WORKER, "kv-transfer": TRANSFER, "capacity": CAPACITY}
