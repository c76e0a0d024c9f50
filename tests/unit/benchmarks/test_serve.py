"""The comparison of servers: how they are started, and what is missing or fails."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import serve
from benchmarks.child import Failed
from benchmarks.environment import Missing, Rivals, cores


def start(tmp_path, rivals):
    return serve.Start("tiny", tmp_path, rivals)


def test_a_rival_that_is_not_installed_is_missing(tmp_path):
    with pytest.raises(Missing, match="no llama-server"):
        serve.llama_server(start(tmp_path, Rivals(llama_cpp=tmp_path)))
    with pytest.raises(Missing, match="surely_no_such"):
        Rivals().need("surely_no_such_library")
    Rivals().need("json")


async def test_a_server_that_ends_is_a_failure_with_its_last_lines():
    argv = [sys.executable, "-c", "print('no model'); raise SystemExit(4)"]
    with pytest.raises(Failed, match=r"status 4: no model \| no model"):
        async with serve.program(argv, {}):
            pass


async def test_the_aggregated_cluster_computes_every_prompt_on_its_decode_worker(
    tmp_path, monkeypatch
):
    seen = SimpleNamespace()

    def cluster(config, extra_args, **_):
        seen.config, seen.extra = config, extra_args
        raise Failed

    monkeypatch.setattr(serve, "LocalCluster", cluster)
    with pytest.raises(Failed):
        async with serve.SERVERS["baton-aggregated"](start(tmp_path, Rivals())):
            pass
    assert seen.config.limits.local_prefill_max_tokens > 1_000_000
    threads = seen.extra["decode"].index("--threads")
    assert int(seen.extra["decode"][threads + 1]) == len(cores())
