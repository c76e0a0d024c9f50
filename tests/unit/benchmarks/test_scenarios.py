"""The scenarios' own parts: a wrong figure would go unnoticed."""

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest

from baton.bench.request import RequestOptions
from baton.bench.workload import Interference, Settings, Workload
from benchmarks.__main__ import COMMANDS, parser
from benchmarks.child import Failed
from benchmarks.scenarios.common import Comparison
from tests.unit.bench.scripted_openai import HELLO, ScriptedOpenAI, serving


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out


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
