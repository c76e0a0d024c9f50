"""The check of queries finds what Prometheus would answer with nothing; alerts fire in time."""

import shutil
import subprocess
from pathlib import Path

import pytest
from check_deployment import query_errors, samples

TTFT = "gen_ai_server_time_to_first_token_seconds"


@pytest.mark.parametrize(
    ("expr", "error"),
    [
        (f"histogram_quantile(0.9, sum by (le) (rate({TTFT}_bucket[5m])))", None),
        ('sum by (state) (baton_kv_blocks{job="$job", instance=~"$instance"})', None),
        ('label_values(up{job=~"prefill|decode"}, job)', None),
        ("rate(baton_tokens_output_total[$__rate_interval]) > 0 and absent(up)", None),
        ("min_over_time(baton_kv_blocks[5m:1m]) / -(baton_engine_queue)", None),
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
def test_a_query_that_cannot_be_answered_is_an_error(expr, error):
    found = list(query_errors(expr, samples()))
    assert len(found) == (error is not None) and (error or "") in "".join(found)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_alerts_fire_when_they_should_and_not_before():
    argv = ["promtool", "test", "rules", str(Path(__file__).parent / "alerts.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
