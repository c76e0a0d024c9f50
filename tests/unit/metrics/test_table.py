"""The table of metrics is sound by itself."""

import itertools
import re

import pytest

from baton.metrics import table
from baton.metrics.table import TABLE

NAME = re.compile(r"[a-z_][a-z0-9_]*")


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_each_row_is_whole(one):
    assert one.kind in (table.COUNTER, table.GAUGE, table.HISTOGRAM)
    assert one.processes and set(one.processes) <= set(table.EVERYBODY)
    assert one.text.endswith(".") and "|" not in one.text
    assert (one.kind == table.HISTOGRAM) == bool(one.buckets)
    assert all(low < high for low, high in itertools.pairwise(one.buckets))
    assert all(NAME.fullmatch(name) for name in one.samples)


def test_no_two_metrics_share_a_name_in_queries():
    names = list(table.sample_names())
    assert len(names) == len(set(names))


def test_buckets_reach_as_far_as_people_wait():
    router = table.of("router")
    first = router["gen_ai.server.time_to_first_token"].buckets
    between = router["gen_ai.server.time_per_output_token"].buckets
    assert (first[0], first[-1]) == (0.005, 60.0)
    assert (between[0], between[-1]) == (0.0005, 2.0)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("baton.tokens.output", ("baton_tokens_output_total",)),
        ("process.cpu.time", ("process_cpu_time_seconds_total",)),
        ("baton.engine.step.age", ("baton_engine_step_age_seconds",)),
        ("baton.kv.transfer.io", ("baton_kv_transfer_io_bytes_total",)),
        (
            "baton.prefill.queue_time",
            tuple(f"baton_prefill_queue_time_seconds_{end}" for end in ("bucket", "sum", "count")),
        ),
    ],
)
def test_names_for_prometheus(name, samples):
    (one,) = (one for one in TABLE if one.name == name)
    assert one.samples == samples


def test_each_process_has_its_own():
    prefill, decode = table.of("prefill"), table.of("decode")
    assert "baton.kv.transfer.io" in prefill and "baton.kv.transfer.io" not in decode
    assert prefill.keys() & decode.keys() >= {"baton.kv.blocks", "process.cpu.time"}
