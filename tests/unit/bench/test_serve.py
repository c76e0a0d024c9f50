"""`baton bench serve` as a whole, against servers that tests write."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton import cli
from baton.bench import serve
from baton.bench.generator import Run
from baton.bench.interference import Interference
from baton.bench.report import Report
from baton.bench.serve import Settings
from baton.bench.servers import RequestOptions
from baton.bench.terminal import Progress, show, status_of
from baton.bench.trace import Scale
from baton.bench.workload import Lengths, Workload
from baton.cli.bench import settings_of
from baton.errors import ConfigError, Unavailable
from baton.slo import Slo
from tests.unit.bench.outcomes import failed, outcome
from tests.unit.bench.scripted_openai import HELLO, ScriptedOpenAI, serving, text
from tests.unit.client import scripted_router
from tests.unit.client.scripted_router import ScriptedRouter

LOAD = Workload(
    concurrency=2, count=8, prompt_lengths=Lengths(3, 9), output_lengths=Lengths(2, 2), seed=3
)


async def bench(settings: Settings) -> tuple[Report, str]:
    """The report and what was said meanwhile."""
    said = io.StringIO()
    async with asyncio.timeout(90):
        return await serve.run(settings, Progress(Console(file=said))), said.getvalue()


async def test_one_server(tmp_path: Path) -> None:
    server = ScriptedOpenAI(HELLO)
    async with serving(server) as url:
        settings = Settings(
            LOAD, [(url, RequestOptions())], slo=Slo.parse("e2e=60"), output=tmp_path
        )
        report, _ = await bench(settings)
    figures = report["stages"][0]["servers"][0]["figures"]
    assert figures["requests"] == {"sent": 8, "ok": 8, "failed": 0, "interrupted": 0}
    assert len(server.bodies) == 8 + settings.warm_up  # which no figure has
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12
    assert (figures["input_tokens"], figures["output_tokens"]) == (24, 16)
    assert figures["goodput"] and figures["goodput"]["share"] == 1.0
    assert figures["opened_connections"] == 0  # the warm-up opened them
    assert not report["partial"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "<svg" in (tmp_path / "report.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert sum(len(line["token_times_s"]) for line in lines) == 16
    assert {(line["stage"], line["server"], line["status"]) for line in lines} == {(0, "A", "OK")}


async def test_two_servers_take_turns(tmp_path: Path) -> None:
    """Both get the same sizes, in other words, and neither always begins."""
    asked: list[str] = []

    class Noting(ScriptedOpenAI):
        def __init__(self, name: str) -> None:
            super().__init__(HELLO)
            self.name = name

        async def complete(self, request: Any) -> Any:
            asked.append(self.name)
            return await super().complete(request)

    one, other = Noting("A"), Noting("B")
    async with serving(one) as a, serving(other) as b:
        targets = [(a, RequestOptions()), (b, RequestOptions())]
        report, _ = await bench(Settings(LOAD, targets, warm_up=0, blocks=4, output=tmp_path))
    assert "".join(asked) == "AABB" + "BBAA" + "AABB" + "BBAA"
    stage = report["stages"][0]
    assert [s["figures"]["requests"]["ok"] for s in stage["servers"]] == [8, 8]
    assert stage["comparison"] and len(stage["comparison"][0]["block_ratios"]) == 4
    sizes = [[len(body["prompt"]) for body in server.bodies] for server in (one, other)]
    assert sorted(sizes[0]) == sorted(sizes[1]) and len(set(sizes[0])) > 1
    prompts = [{tuple(body["prompt"]) for body in server.bodies} for server in (one, other)]
    assert len(prompts[0] | prompts[1]) == 16


async def test_a_router_against_a_gateway(tmp_path: Path) -> None:
    """gRPC and HTTP in one run, as a sweep."""
    load = Workload(rate=1, count=3, output_lengths=Lengths(2, 2))
    router = ScriptedRouter(scripted_router.HELLO)
    async with serving(ScriptedOpenAI(HELLO)) as a, scripted_router.serving(router) as b:
        targets = [(a, RequestOptions()), (f"grpc://{b}", RequestOptions())]
        settings = Settings(load, targets, sweep=(50, 200), blocks=1, output=tmp_path)
        report, _ = await bench(settings)
    assert [(s["protocol"], s["model"]) for s in report["servers"]] == [
        ("openai", "scripted"), ("grpc", "demo"),
    ]  # fmt: skip
    assert [(s["label"], s["value"]) for s in report["stages"]] == [
        ("50 req/s", 50), ("200 req/s", 200),
    ]  # fmt: skip
    assert (report["workload"]["rate"], report["workload"]["sweep"]) == (None, [50, 200])
    assert report["knees"] is not None
    assert [s["figures"]["requests"]["ok"] for t in report["stages"] for s in t["servers"]] == [
        3
    ] * 4
    assert len({tuple(r.token_ids.ids) for r in router.requests}) == 3 + 3 + 3  # and the warm-up


async def test_a_signal_ends_it_early(tmp_path: Path) -> None:
    """With a report of what there is, marked so, and no handler left behind."""
    server = ScriptedOpenAI(HELLO, HELLO, [text("a"), asyncio.Event()])
    before = signal.getsignal(signal.SIGINT)

    async def end_early() -> None:
        while len(server.bodies) < 4:
            server.begun.clear()
            await server.begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    async with serving(server) as url, asyncio.TaskGroup() as group:
        group.create_task(end_early())
        load = replace(LOAD, count=0, duration_s=600.0)
        settings = Settings(load, [(url, RequestOptions())], warm_up=0, output=tmp_path)
        report, said = await bench(settings)
    figures = report["stages"][0]["servers"][0]["figures"]
    assert report["partial"] and "ended early" in said
    assert figures["requests"] == {"sent": 2, "ok": 2, "failed": 0, "interrupted": 2}
    assert json.loads((tmp_path / "report.json").read_text())["partial"]
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_server_that_does_not_answer_is_an_error(tmp_path: Path, dead_address: str) -> None:
    server = ScriptedOpenAI((503, "warming up"))
    output, blocked = tmp_path / "none", tmp_path / "file"
    blocked.write_text("")
    async with serving(server) as url:
        settings = Settings(LOAD, [(url, RequestOptions())], output=blocked / "out")
        with pytest.raises(ConfigError, match="cannot be made"):
            await bench(settings)
        assert not server.bodies  # the directory is made first
        with pytest.raises(Unavailable, match="HTTP_503: warming up"):
            await bench(replace(settings, output=tmp_path))
    for target, error, message in (
        (f"http://{dead_address}", Unavailable, dead_address),
        (dead_address, Unavailable, dead_address),
        ("ftp://x", ConfigError, "is no server"),
    ):
        with pytest.raises(error, match=message):
            await bench(replace(settings, targets=[(target, RequestOptions())], output=output))
    assert not output.exists()


async def test_errors_are_counted(tmp_path: Path) -> None:
    scripts = [HELLO, (429, "later"), [text("a")], HELLO]
    async with serving(ScriptedOpenAI(*scripts)) as url:
        load = replace(LOAD, count=6, concurrency=1)
        settings = Settings(load, [(url, RequestOptions())], warm_up=0, output=tmp_path)
        report, _ = await bench(settings)
    figures = report["stages"][0]["servers"][0]["figures"]
    assert figures["statuses"] == {"OK": 4, "HTTP_429": 1, "INCOMPLETE": 1}
    assert figures["requests"]["failed"] == 2


def test_progress_in_one_line() -> None:
    run = Run([outcome(0.1), outcome(0.3), failed("X"), outcome()])
    for one in run.outcomes[:3]:
        run.count(one)
    assert status_of(run) == "4 sent, 2 done, 1 running, 1 failed, TTFT p50 200 ms, 2 tokens"


def settings_from(*argv: str) -> Settings:
    """What the command line asks for."""
    return settings_of(cli.parser().parse_args(["bench", "serve", *argv]))


class TestOptions:
    def test_settings_are_what_the_options_say(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("other\n")
        settings = settings_from(
            *("--target", "http://a", "--against", "b:1", "--against-model", "m"),
            *("--slo", "ttft=1"),
            *("--sweep", "1,2.5", "--duration", "9", "--prompt-tokens", "5-9", "--ids", "7-9"),
            *("--against-api-key-file", str(tmp_path / "key"), "--timeout", "3", "--stop-at-eos"),
            *("--output", str(tmp_path), "--blocks", "6", "--seed", "5", "--arrivals", "constant"),
        )  # fmt: skip
        assert [url for url, _ in settings.targets] == ["http://a", "b:1"]
        first, second = (options for _, options in settings.targets)
        assert (first.model, second.model) == ("", "m")
        assert (first.timeout_s, first.ignore_eos, first.ids.first) == (3, False, 7)
        assert settings.sweep == [1, 2.5] and settings.workload.rate == 1
        assert (settings.workload.duration_s, settings.workload.seed) == (9, 5)
        assert (settings.workload.arrivals, settings.blocks) == ("constant", 6)
        assert str(settings.workload.prompt_lengths) == "5-9"
        assert settings.slo == Slo.parse("ttft=1")

    def test_a_key_is_sent_to_its_server_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BATON_API_KEY", "secret")
        (tmp_path / "key").write_text("other")
        both = ("--target", "a:1", "--against", "http://b")
        keys = [options.api_key for _, options in settings_from(*both).targets]
        assert keys == ["secret", None]
        both_keys = settings_from(*both, "--against-api-key-file", str(tmp_path / "key"))
        assert [options.api_key for _, options in both_keys.targets] == ["secret", "other"]

    @pytest.mark.parametrize(
        ("argv", "expected"),
        [
            ([], {"duration_s": 30, "rate": 1}),
            (["--count", "5"], {"duration_s": 0, "count": 5}),
            (["--trace", "x.jsonl"], {"duration_s": 0, "rate": 0}),
            (["--concurrency", "9"], {"rate": 0, "concurrency": 9}),
            (["--rate", "3"], {"rate": 3}),
            (
                ["--trace", "x", "--rate-scale", "2", "--length-scale", "0.5", "--skip", "3",
                 "--max-prompt", "7", "--max-output", "8", "--spread-ties"],
                {"scale": Scale(2, 0.5, 3, 7, 8, True)},
            ),
        ],
    )  # fmt: skip
    def test_workload(self, argv: list[str], expected: dict[str, Any]) -> None:
        workload = settings_from(*argv).workload
        assert {name: getattr(workload, name) for name in expected} == expected

    def test_warm_up_and_seed_have_defaults_of_their_own(self) -> None:
        assert (settings_from().warm_up, settings_from("--concurrency", "9").warm_up) == (4, 9)
        assert settings_from().workload.seed != settings_from().workload.seed

    def test_interference(self) -> None:
        load = settings_from("--interference", "1000,2", "--duration", "7").interference
        assert load == Interference(prompt=1000, every_s=2, periods=4)
        settings = settings_from("--interference", "--concurrency", "3", "--output-tokens", "9")
        assert settings.interference == Interference(streams=3, stream_output=9)

    @pytest.mark.parametrize(
        "argv",
        [
            "--rate 1 --concurrency 2", "--rate 0", "--rate x", "--count 0", "--sweep 1,,2",
            "--trace x --rate 2", "--interference --rate 2", "--sweep 1,2 --concurrency 2",
            "--trace x --shared-prefix 9", "--arrivals never",
        ],
    )  # fmt: skip
    def test_bad_usage(self, argv: str) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "serve", *argv.split()])
        assert end.value.code == 2

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--ids 9-7", "no range"),
            ("--slo x=1", "--slo"),
            ("--interference 0,1", "2048,6"),
            ("--prompt-tokens many", "no length"),
            ("--target nowhere", "nowhere"),
        ],
    )
    def test_bad_values_are_reported(
        self, argv: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert cli.main(["bench", "serve", *argv.split(), "--output", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("baton: error: ") and message in error

    @pytest.mark.parametrize("what", [["bench"], ["bench", "serve"]])
    def test_help(self, what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main([*what, "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0
        assert "examples:" in text and "(default: None)" not in text and "(default: ())" not in text


async def test_interference_is_a_workload(tmp_path: Path) -> None:
    """Its rounds are in the report, the table and the page; nothing is written unasked."""
    load = Interference(streams=2, stream_prompt=3, stream_output=2, prompt=9, every_s=0.1,
                        periods=1, ramp_s=0.05)  # fmt: skip
    async with serving(ScriptedOpenAI(HELLO)) as a, serving(ScriptedOpenAI(HELLO)) as b:
        targets = [(url, RequestOptions()) for url in (a, b)]
        settings = Settings(LOAD, targets, blocks=2, interference=load)
        report, _ = await bench(settings)
    assert report["stages"] == [] and report["interference"] is not None
    assert [len(one["rounds"]) for one in report["interference"]] == [2, 2]
    assert report["interference"][0]["rounds"][0]["prompts"]["sent"] == 1
    out = io.StringIO()
    show(report, Console(file=out, width=100))
    assert "share of tokens/s kept, %" in out.getvalue()
    serve.write(tmp_path, report, [])
    assert "long prompts not answered" in (tmp_path / "report.html").read_text()


def test_nothing_is_written_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings_from().output is None
    assert cli.main(["bench", "serve", "--target", dead_address, "--json"]) == 1
    assert not list(tmp_path.iterdir())
