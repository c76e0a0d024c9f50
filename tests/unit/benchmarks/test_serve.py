"""The comparison of servers: how they are started, and what is missing or fails."""

import sys
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from baton.bench.request import RequestOptions
from baton.bench.workload import Interference, Settings, Workload
from benchmarks import serve
from benchmarks.child import Failed
from benchmarks.environment import Missing, Rivals, cores
from benchmarks.serve import Comparison
from tests.unit.bench.scripted_openai import HELLO, ScriptedOpenAI, serving


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


def test_a_variant_that_fails_is_left_out_and_what_there_is_is_shown(capsys):
    order = []

    @asynccontextmanager
    async def start(name):
        order.append(name)
        if order.count(name) == 2 and name == "broken":
            raise Failed("no memory")
        async with serving(ScriptedOpenAI(HELLO)) as url:
            yield url, RequestOptions()

    loads = {
        "closed": Settings(Workload(concurrency=2, count=4)),
        "beside": Settings(
            Workload(concurrency=1), interference=Interference(9, 2, 0.1, 1, ramp_s=0.05)
        ),
    }
    comparison = Comparison(loads)
    assert comparison.run({name: partial(start, name) for name in ("good", "broken")}, 3) == 0
    assert order == ["good", "broken", "broken", "good", "good"]
    rounds = {
        kind: {n: len(of) for n, of in found.items()} for kind, found in comparison.results.items()
    }
    assert rounds == {kind: {"good": 3, "broken": 1} for kind in loads}
    assert comparison.absent == {"broken": "failed: no memory"}
    assert comparison.results["closed"]["good"][0]["requests"]["ok"] == 4
    shown = capsys.readouterr().out
    assert "closed: median (min-max)" in shown and "streams beside: tokens/s" in shown
