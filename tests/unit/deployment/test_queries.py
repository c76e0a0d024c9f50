"""The check of queries finds what Prometheus would answer with nothing at all."""

from __future__ import annotations

import pytest
from check_deployment import query_errors, samples

TTFT = "gen_ai_server_time_to_first_token_seconds"


@pytest.mark.parametrize(
    "expr",
    [
        f"histogram_quantile(0.9, sum by (le) (rate({TTFT}_bucket[5m])))",
        'sum by (state) (baton_kv_blocks{job="$job", instance=~"$instance"})',
        'label_values(up{job=~"prefill|decode"}, job)',
        "rate(baton_tokens_output_total[$__rate_interval]) > 0 and absent(up)",
        "min_over_time(baton_kv_blocks[5m:1m]) / -(baton_engine_queue)",
    ],
)
def test_what_can_be_answered_passes(expr: str) -> None:
    assert not list(query_errors(expr, samples()))


@pytest.mark.parametrize(
    ("expr", "told"),
    [
        ("sum(rate(baton_tokens_total[5m]))", "not exported"),
        (f"rate({TTFT}[5m])", "not exported"),  # a histogram has no sample of its own name
        ('baton_kv_blocks{role="decode"}', "role"),
        ("sum by (tenant) (baton_requests_queued)", "tenant"),
        (f"sum by (le) ({TTFT}_count)", "le"),
        (f"histogram_quantile(0.9, sum(rate({TTFT}_bucket[5m])))", "summed up without it"),
        ("1 + (baton_nothing)", "not exported"),
        ("label_values(up, tenant)", "tenant"),
        ("sum(rate(up[5m])", "is not PromQL"),
        ("rate(up)", "is not PromQL"),
    ],
)
def test_what_cannot_be_answered_is_told(expr: str, told: str) -> None:
    (complaint,) = query_errors(expr, samples())
    assert told in complaint
