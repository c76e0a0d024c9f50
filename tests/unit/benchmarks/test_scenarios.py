"""The scenarios' own parts: a wrong figure would go unnoticed."""

import json
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from baton.bench import servers
from baton.bench.generator import Run
from baton.bench.request import Demand
from benchmarks.__main__ import COMMANDS, parser
from benchmarks.gpu import serve as gpu_serve
from benchmarks.gpu.part import Part
from benchmarks.scenarios import roles, router_cost
from tests.unit.bench.outcomes import FakeServer


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out


def test_structured_output_tells_what_is_accepted_and_fails_where_that_is_wrong(tmp_path, capsys):
    def run(*tests):
        groups = [
            {"schema": {"type": "integer", "minimum": 3}, "tests": tests},
            {"schema": {"not": {}}, "tests": []},
        ]
        (tmp_path / "suite.json").write_text(json.dumps(groups))
        argv = ["structured_output", "--suite", str(tmp_path), "--samples", "5"]
        args = parser(argv[0]).parse_args(argv)
        return args.main(args), capsys.readouterr().out

    status, out = run({"data": 2, "valid": False}, {"data": 4, "valid": True})
    assert status == 0
    assert " ".join(out.split()) == (
        "schemas: 1 of 2 accepted 1 not 5 random outputs valid "
        "1 instances invalid, refused 1 instances valid, taken"
    )
    status, out = run({"data": 4, "valid": False}, {"data": 3.0, "valid": True})
    assert status == 1
    assert "invalid, taken: 4 by" in out and "valid, refused: 3.0 by" in out


@pytest.mark.parametrize("clients", [1, 6, 7, 8])
def test_clients_have_as_many_streams_together_as_the_row_says(clients):
    """On a device of 12 cores there are 6, which do not divide 64."""
    work = []

    def starmap(drive, given, chunksize):
        work.extend(given)
        return [(Run(seconds=1.0), Run())] * len(given)

    part = Part(print, "cpu", 1.0, smoke=True)
    pool = SimpleNamespace(starmap=starmap)
    gpu_serve._under_load(part, pool, clients, "http://a", 64, beside=True)
    streams = [of_client[1] for of_client in work]
    assert sum(streams) == 64 and max(streams) - min(streams) <= 1


def test_refused_requests_count_once_in_the_share_that_met_the_targets():
    """Two of four prompts are longer than a worker's KV cache."""
    tokens = (100, 1_000_000, 100, 1_000_000)
    demands = [Demand(float(at), ((at, count),), 4) for at, count in enumerate(tokens)]
    met, *_ = roles.simulated([{"mixed": 1}], False, demands, "ttft=5,tpot=1")
    assert met == 0.5


@pytest.mark.parametrize(("requests", "alone"), [(1, 1), (3, 1), (8, 2)])
async def test_few_requests_have_one_caller_too(requests, alone, monkeypatch):
    class Answering(FakeServer):
        async def answer(self, demand, outcome):
            assert len(self.demands) < 100, "it does not end"
            outcome.output_tokens = demand.new_tokens
            outcome.add_tokens(demand.new_tokens, 0.1)

    server = Answering()

    @asynccontextmanager
    async def connected(*_):
        yield server

    monkeypatch.setattr(servers, "connected", connected)
    of = [SimpleNamespace(name=name, pid=os.getpid()) for name in ("router", "decode-0")]
    cluster = SimpleNamespace(
        processes={one.name: one for one in of}, address="a", http_addresses=["b"]
    )
    argv = ["router_cost", "--requests", str(requests), "--callers", "2"]
    await router_cost._measure(parser(argv[0]).parse_args(argv), cluster, "gRPC", 0)
    assert len(server.demands) == router_cost._WARM_UP + alone + requests
