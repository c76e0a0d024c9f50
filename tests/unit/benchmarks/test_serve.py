"""The comparison of servers: how they are started, and what is missing or fails."""

import sys
from types import SimpleNamespace

import pytest

from baton.config import EngineConfig
from benchmarks import serve
from benchmarks.child import Failed
from benchmarks.environment import Missing, Rivals, cores


def start(tmp_path, rivals):
    return serve.Start("tiny", tmp_path, rivals, tmp_path / "log", EngineConfig())


def test_a_rival_that_is_not_installed_is_missing(tmp_path):
    with pytest.raises(Missing, match="no llama-server"):
        serve.llama_server(start(tmp_path, Rivals(llama_cpp=tmp_path)))
    with pytest.raises(Missing, match="surely_no_such"):
        Rivals().need("surely_no_such_library")
    Rivals().need("json")


async def test_a_server_that_ends_is_a_failure_with_its_last_lines(tmp_path):
    argv = [sys.executable, "-c", "print('no model'); raise SystemExit(4)"]
    with pytest.raises(Failed, match=r"status 4 \| no model"):
        async with serve.program(argv, {}, tmp_path / "log"):
            pass


def test_the_aggregated_cluster_computes_every_prompt_on_its_decode_worker(tmp_path, monkeypatch):
    seen = SimpleNamespace()
    monkeypatch.setattr(
        serve, "_cluster", lambda config, extra: seen.__dict__.update(c=config, e=extra)
    )
    serve.baton_aggregated(start(tmp_path, Rivals()))
    assert seen.c.limits.local_prefill_max_tokens > 1_000_000
    threads = seen.e["decode"].index("--threads")
    assert int(seen.e["decode"][threads + 1]) == len(cores())
