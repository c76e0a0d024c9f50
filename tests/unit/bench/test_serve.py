"""`baton bench serve` as a whole, against servers that tests write."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from dataclasses import replace

import pytest

from baton.bench import serve, terminal
from baton.bench.request import RequestOptions
from baton.bench.terminal import Progress
from baton.bench.trace_workload import Scale
from baton.bench.workload import Interference, Lengths, Settings, Workload
from baton.cli import main as cli
from baton.cli.bench import settings_of
from baton.config.slo import Slo
from baton.errors import ConfigError, Unavailable
from tests.unit.bench.outcomes import NO_SERVER
from tests.unit.bench.scripted_openai import HELLO, ScriptedOpenAI, serving, text
from tests.unit.client import scripted_router
from tests.unit.client.scripted_router import ScriptedRouter
from tests.waiting import WAIT_S

LOAD = Workload(
    concurrency=2, count=8, prompt_lengths=Lengths(3, 9), output_lengths=Lengths(2, 2), seed=3
)


async def bench(load, url, said=None, **settings):
    """The report and what was said meanwhile, which is added to `said`."""
    said = [] if said is None else said
    made = Settings(load, (url, RequestOptions()), **settings)
    async with asyncio.timeout(WAIT_S):
        report = await serve.run(made, Progress(said.append))
    return report, "\n".join(said)


async def test_one_server(tmp_path):
    """The warm-up counts nowhere; errors do; all files are written."""
    server = ScriptedOpenAI(*[HELLO] * 4, (429, "later"), [text("a")], HELLO)
    async with serving(server) as url:
        report, _ = await bench(LOAD, url, slo=Slo.parse("e2e=60"), output=tmp_path)
    figures = report["stages"][0]["figures"]
    assert figures["requests"] == {"sent": 8, "ok": 6, "failed": 2, "interrupted": 0}
    assert figures["statuses"] == {"OK": 6, "HTTP_429": 1, "INCOMPLETE": 1}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies) == 8 + 4
    assert (figures["input_tokens"], figures["output_tokens"]) == (18, 12)
    assert figures["goodput"]["share"] == 0.75
    assert figures["opened_connections"] == 0  # the warm-up opened them
    assert not report["partial"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and {line["stage"] for line in lines} == {0}
    assert sum(len(line["token_times_s"]) for line in lines if line["status"] == "OK") == 12


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_a_sweep_has_a_stage_for_each_rate_with_prompts_of_its_own(over_grpc):
    load = Workload(
        burstiness=1e6, count=8, prompt_lengths=Lengths(3, 9), output_lengths=Lengths(2, 2)
    )
    server, router = ScriptedOpenAI(HELLO), ScriptedRouter(scripted_router.HELLO)
    async with serving(server) as http, scripted_router.serving(router) as grpc:
        url = f"grpc://{grpc}" if over_grpc else http
        report, _ = await bench(load, url, warm_up=0, sweep=(50, 200))
    called = (report["server"]["protocol"], report["server"]["model"])
    assert called == (("grpc", "demo") if over_grpc else ("openai", "scripted"))
    assert [(s["label"], s["value"]) for s in report["stages"]] == [
        ("50 req/s", 50), ("200 req/s", 200),
    ]  # fmt: skip
    asked = {"sweep": [50, 200], "prompt-tokens": "3-9", "seed": 0}
    assert asked.items() <= report["workload"].items() and "rate" not in report["workload"]
    assert [s["figures"]["requests"]["ok"] for s in report["stages"]] == [8, 8]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    prompts += [tuple(request.token_ids.ids) for request in router.requests]
    sizes = [sorted(map(len, some)) for some in (prompts[:8], prompts[8:])]
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 1
    assert len(set(prompts)) == 16


async def test_interference_is_a_workload(tmp_path):
    load = Interference(prompt=9, every_s=0.1, periods=1, ramp_s=0.05)
    async with serving(ScriptedOpenAI(HELLO)) as url:
        report, _ = await bench(LOAD, url, interference=load, output=tmp_path)
    assert report["stages"] == []
    assert report["interference"]["prompts"]["sent"] == 1
    assert json.loads((tmp_path / "report.json").read_text()) == report
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    sent = Counter(line["stage"] for line in lines)
    assert sent.keys() == {"alone", "beside", "prompts"} and sent["prompts"] == 1
    shown = "\n".join(terminal.report_lines(report))
    for title in ("share of tokens/s kept, %", "long prompts not answered"):
        assert title in shown


async def test_a_signal_ends_it_early(monkeypatch):
    """With a report of what there is, marked so, and no handler left behind."""
    monkeypatch.setattr(terminal, "_EVERY_S", 0.05)
    server = ScriptedOpenAI(HELLO, HELLO, [text("a"), asyncio.Event()])
    before, lines = signal.getsignal(signal.SIGINT), list[str]()
    progress = re.compile(r"4 sent, 2 done, 2 running, TTFT p50 \d+ ms, 4 tokens")

    async def end_early():
        while not any(map(progress.search, lines)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    async with serving(server) as url, asyncio.TaskGroup() as group:
        group.create_task(end_early())
        endless = replace(LOAD, count=0, duration_s=2 * WAIT_S)
        report, said = await bench(endless, url, lines, warm_up=0)
    figures = report["stages"][0]["figures"]
    assert report["partial"] and "ended early" in said
    assert figures["requests"] == {"sent": 2, "ok": 2, "failed": 0, "interrupted": 2}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("partial", "errors", "status"),
    [(False, [], 0), (False, [("HTTP_400", "too long")], 1), (True, [("HTTP_400", "no")], 130)],
)
def test_the_exit_status_says_how_it_ended(partial, errors, status, monkeypatch, capsys):
    """A request that failed is a failure, and the reason is said."""
    found = [{"status": status, "count": 2, "message": message} for status, message in errors]
    stages = [{"figures": {"errors": some}} for some in ([], found)]
    report = {"partial": partial, "stages": stages, "interference": None}

    async def run(settings, progress):
        return report

    monkeypatch.setattr(serve, "run", run)
    assert cli.main(["bench", "serve", "--json"]) == status
    shown = capsys.readouterr()
    assert json.loads(shown.out) == report
    assert ("2 requests failed: HTTP_400: too long" in shown.err) == (status == 1)


async def test_a_server_that_does_not_answer_is_an_error(tmp_path):
    server = ScriptedOpenAI((503, "warming up"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    async with serving(server) as url:
        with pytest.raises(ConfigError, match="cannot be made"):
            await bench(LOAD, url, output=blocked / "out")
        assert not server.bodies  # the directory is made first
        with pytest.raises(Unavailable, match="HTTP_503: warming up"):
            await bench(LOAD, url)
    with pytest.raises(Unavailable, match=NO_SERVER):
        await bench(LOAD, f"http://{NO_SERVER}")


def settings_from(options):
    """What the command line asks for."""
    return settings_of(cli.parser().parse_args(["bench", "serve", *options.split()]))


def test_the_server_is_called_as_the_options_say(monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "secret")
    found = settings_from("--target http://a --model m --timeout 3 --stop-at-eos --ids 7-9")
    wanted = {"timeout_s": 3.0, "stop_at_eos": True, "ids": range(7, 9)}
    assert found.target == ("http://a", RequestOptions(model="m", api_key="secret", **wanted))


@pytest.mark.parametrize(
    ("options", "workload", "settings"),
    [
        ("", {"duration_s": 30}, {"slo": None}),
        ("--count 5", {"duration_s": 0, "count": 5}, {}),
        ("--seed 5 --sweep 1,2.5 --slo ttft=1", {"seed": 5},
         {"sweep": (1, 2.5), "slo": Slo.parse("ttft=1")}),
        ("--trace x --rate-scale 2 --length-scale 0.5 --max-prompt 7 --max-output 8",
         {"duration_s": 0, "scale": Scale(2, 0.5, 7, 8)}, {}),
        ("--interference 1000,2 --duration 7", {"concurrency": 6},
         {"interference": Interference(prompt=1000, every_s=2.0, periods=4)}),
        ("--interference --concurrency 3 --output-tokens 9",
         {"concurrency": 3, "prompt_lengths": Lengths(64, 64), "output_lengths": Lengths(9, 9)},
         {"interference": Interference()}),
    ],
)  # fmt: skip
def test_settings_are_what_the_options_say(options, workload, settings):
    found = settings_from(options)
    assert {name: getattr(found.workload, name) for name in workload} == workload
    assert {name: getattr(found, name) for name in settings} == settings
    assert (found.workload.seed == settings_from(options).workload.seed) == ("seed" in options)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--rate 1 --concurrency 2", 2, "--concurrency"),
        ("--rate inf", 2, "--rate must be between"),
        ("--duration 0", 2, "--duration must be between 0.001"),
        ("--count 0", 2, "--count must be at least 1"),
        ("--sweep 1,,2", 2, "--sweep"),
        ("--sweep 1,nan", 2, "--rate must be between"),
        ("--trace x --rate 2", 2, "--rate-scale"),
        ("--interference --rate 2", 2, "--interference"),
        ("--sweep 1,2 --concurrency 2", 2, "--concurrency"),
        ("--sweep 1,2 --rate 2", 2, "--rate does not go with --sweep"),
        ("--sweep 1,2 --trace x --rate-scale 2", 2, "--rate-scale does not go with --sweep"),
        ("--concurrency 2 --burstiness 2", 2, "--burstiness does not go with --concurrency"),
        ("--trace x --prompt-tokens 9", 2, "--prompt-tokens does not go with --trace"),
        ("--interference --count 2", 2, "--count does not go with --interference"),
        ("--interference --slo ttft=1", 2, "--slo does not go with --interference"),
        ("--rate-scale 2", 2, "--rate-scale needs --trace"),
        ("--max-output 2", 2, "--max-output needs --trace"),
        ("--prefixes 2", 2, "--prefixes needs --shared-prefix"),
        ("--trace x --shared-prefix 9", 2, "--shared-prefix"),
        ("--ids 9-7", 2, "no range"),
        ("--interference 0,1", 2, "--interference"),
        ("--target nowhere", 1, "nowhere"),
        ("--target ftp://x", 1, "is no server"),
        (f"--target {NO_SERVER}", 1, NO_SERVER),
    ],
)
def test_a_bad_option_is_an_error_and_writes_nothing(
    options, status, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    try:
        found = cli.main(["bench", "serve", *options.split(), "--json"])
    except SystemExit as end:  # bad usage
        found = end.code
    error = capsys.readouterr().err
    assert found == status and "error: " in error and message in error
    assert not list(tmp_path.iterdir())
