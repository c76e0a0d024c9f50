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
from benchmarks.engine.adapters.gguf_file import gguf_of
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


def test_a_file_for_a_rival_that_cannot_be_written_says_why(tmp_path):
    """Not only with which status its program ended."""
    missing = tmp_path / "no such model"
    missing.mkdir()
    with pytest.raises(
        Failed, match=r"bf16.gguf cannot be written: it ended with status 1 \| .*Error"
    ):
        gguf_of(sys.executable, str(missing), "tiny", "bf16")


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
    assert seen.config.workers == {"prefill": 0, "decode": 1, "mixed": 0}
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


def test_a_variant_whose_requests_fail_is_named_with_the_reason_and_fails_the_run(capsys):
    @asynccontextmanager
    async def start(*scripts):
        async with serving(ScriptedOpenAI(*scripts)) as url:
            yield url, RequestOptions()

    refusal = (400, '{"error": {"message": "the context holds 1024 tokens"}}')
    variants = {
        "good": partial(start, HELLO),
        "refusing": partial(start, *[HELLO] * 4, refusal),
    }
    comparison = Comparison({"closed": Settings(Workload(concurrency=2, count=4))})
    assert comparison.run(variants, 1) == 1
    why = "4 requests failed: HTTP_400: the context holds 1024 tokens"
    assert comparison.failed == {"refusing": f"closed: {why}"}
    assert f"refusing: closed: {why}" in capsys.readouterr().out
