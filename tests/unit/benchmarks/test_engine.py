"""The comparison of engines: adapters' answers, rounds, and a real run of Baton's engine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.engine import compare
from benchmarks.engine.adapters.protocol import Setup, Timed, answer
from benchmarks.engine.compare import ENTRIES, EngineProcess, Measured, Work, measure, works
from benchmarks.environment import ROOT, Failed, Missing, Rivals

SETUP = Setup("/nowhere", 512, 1, (min(os.sched_getaffinity(0)),), 4, 80, 64, {"dtype": "float32"})
DECODE, PROMPT = Work(2, 16, 3), Work(50)
WORKING = """
class Counting:
    def about(self):
        print("a library that prints")
        return {"version": "7", "batch": str(self.setup.max_batch)}
    def decode(self, batch, context, steps):
        if batch > self.setup.max_batch:
            raise ValueError("too large\\nwith details")
        return Timed(batch * steps / 10, "by counting")
    def prefill(self, tokens):
        return Timed(tokens / 100)

def load(setup):
    adapter = Counting()
    adapter.setup = setup
    return adapter
"""


class TestProcess:
    @staticmethod
    async def start(folder: Path, body: str) -> EngineProcess:
        program = folder / "program.py"
        head = "from benchmarks.engine.adapters.protocol import Timed, main\n"
        program.write_text(f"{head}{body}\nmain(load)\n")
        argv = [sys.executable, str(program), SETUP.to_json()]
        return await EngineProcess.start(argv, {"PYTHONPATH": str(ROOT)}, folder / "log")

    async def test_it_answers_fails_and_answers_again(self, tmp_path: Path) -> None:
        """What a library prints is no answer, and a failure does not end the process."""
        one = await self.start(tmp_path, WORKING)
        assert await one.ready(30) == {"version": "7", "batch": "4"}
        assert await one.run(DECODE, 30) == (0.6, "by counting")
        with pytest.raises(Failed, match=r"^ValueError: too large$"):
            await one.run(Work(5, 16, 3), 30)
        assert await one.run(PROMPT, 30) == (0.5, "")
        await one.close(at_once=False)
        assert "a library that prints" in (tmp_path / "log").read_text()

    @pytest.mark.parametrize(
        ("body", "error", "text"),
        [
            ("def load(setup):\n    import surely_no_such_library\n", Missing, "surely_no_such"),
            (
                "def load(setup):\n    raise MemoryError('no room')\n",
                Failed,
                "MemoryError: no room",
            ),
            (
                "import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(3)\n",
                Failed,
                r"ended with status 3 \| out of luck",
            ),
            ("import time\ntime.sleep(600)\n", Failed, r"no answer within 5 s"),
        ],
    )
    async def test_what_goes_wrong(
        self, tmp_path: Path, body: str, error: type[Exception], text: str
    ) -> None:
        one = await self.start(tmp_path, body)
        with pytest.raises(error, match=text):
            await one.ready(5 if "sleep" in body else 30)
        await one.close()


class TestProtocol:
    def test_a_setup_arrives_as_it_was_sent(self) -> None:
        assert Setup.from_json(SETUP.to_json()) == SETUP

    def test_prompts_are_the_same_for_the_same_seed_and_lie_in_the_vocabulary(self) -> None:
        prompt = SETUP.prompt(300, 3)
        assert prompt == SETUP.prompt(300, 3) != SETUP.prompt(300, 4)
        # Those of decoding sequences, and those of prompts that no cache has.
        seeds = [base + number for base in (0, 1 << 32) for number in range(40)]
        assert len({tuple(SETUP.prompt(20, seed)) for seed in seeds}) == len(seeds)
        assert len(prompt) == 300 and min(prompt) >= 10 and max(prompt) < SETUP.vocab

    def test_an_answer_is_what_the_adapter_timed(self) -> None:
        class One:
            def about(self) -> dict[str, str]:
                return {}

            def decode(self, batch: int, context: int, steps: int) -> Timed:
                return Timed(float(batch + context + steps))

            def prefill(self, tokens: int) -> Timed:
                return Timed(float(tokens), "in one piece")

        assert answer(One(), DECODE.request()) == {"seconds": 21.0, "note": ""}
        assert answer(One(), Work(4).request()) == {"seconds": 4.0, "note": "in one piece"}


ONE, MANY, LONG = works([1, 8], 512, [64])


class Scripted:
    """Records the order; `fails` maps (engine, work) to the first of its calls that fails."""

    def __init__(self, fails: dict[tuple[str, Work], int] | None = None) -> None:
        self.order: list[tuple[str, Work]] = []
        self._fails = fails or {}

    async def __call__(self, name: str, work: Work) -> tuple[float, str]:
        self.order.append((name, work))
        times = self.order.count((name, work))
        if times >= self._fails.get((name, work), 1000):
            raise Failed("it did not work")
        return work.tokens / (100.0 * times), "a way" if name == "b" else ""


class TestRounds:
    def test_rates_count_what_is_produced_or_taken_in(self) -> None:
        assert (ONE.tokens, MANY.tokens, LONG.tokens) == (48, 8 * 48, 64)
        steps = [work.steps for work in works([1, 8, 16, 32, 64], 512, [])]
        assert steps == [48, 48, 24, 12, 12]

    async def test_neighbours_in_time_and_who_begins_changes(self) -> None:
        run = Scripted()
        await measure(["a", "b", "c"], [ONE, LONG], 2, run, lambda line: None)
        assert ["".join(name for name, _ in run.order[i : i + 3]) for i in range(0, 18, 3)] == [
            "abc", "abc",  # the warm-up
            "bca", "bca",
            "cab", "cab",
        ]  # fmt: skip
        assert [work for _, work in run.order[:6]] == [ONE] * 3 + [LONG] * 3

    async def test_the_warm_up_is_not_counted(self) -> None:
        measured = await measure(["a", "b"], [ONE], 2, Scripted(), lambda line: None)
        assert measured.rates["a"][ONE] == {1: 200.0, 2: 300.0}
        assert measured.notes == {"b": {ONE: "a way"}}

    async def test_what_failed_is_not_tried_again_and_the_rest_goes_on(self) -> None:
        run = Scripted({("a", ONE): 1, ("b", LONG): 3})
        measured = await measure(["a", "b"], [ONE, LONG], 3, run, lambda line: None)
        counts = [run.order.count(key) for key in (("a", ONE), ("a", LONG), ("b", LONG))]
        assert counts == [1, 4, 3]
        failures = {"a": {ONE: "it did not work"}, "b": {LONG: "it did not work"}}
        assert measured.failures == failures
        assert measured.rates["a"] == {LONG: {1: 200.0, 2: 300.0, 3: 400.0}}
        assert measured.rates["b"][LONG] == {1: 200.0}

    def test_a_ratio_is_taken_round_by_round(self) -> None:
        """Of 30/10 and 40/20: not of the medians; the third round has no pair."""
        rates = {"ours": {ONE: {1: 30.0, 2: 40.0, 3: 20.0}}, "theirs": {ONE: {1: 10.0, 2: 20.0}}}
        measured = Measured(rates)
        assert measured.ratios("ours", "theirs", ONE) == [3.0, 2.0]
        assert measured.ratios("ours", "theirs", LONG) == []

    def test_every_pair_is_of_known_engines(self) -> None:
        assert {name for pair in compare.PAIRS for name in pair} <= ENTRIES.keys()
        assert set(compare.DEFAULT) <= ENTRIES.keys()


def options(tmp_path: Path, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    cpu = str(min(os.sched_getaffinity(0)))
    small = "--shape tiny --rounds 2 --batches 1,3 --context 40 --prompts 70 --kernels torch"
    return parser.parse_args(
        [*small.split(), "--cache", str(tmp_path / "cache"), "--cpus", cpu, *argv]
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose interpreter has no library."""
    path = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    return path


@pytest.mark.timeout(300)
async def test_baton_is_measured_and_what_is_missing_is_named(tmp_path: Path, venv: Path) -> None:
    said: list[str] = []
    names = "vllm-bf16,baton-float32"
    args = options(tmp_path, "--candidates", names, "--rivals", str(venv))
    report = json.loads(json.dumps(await compare.compare(args, said.append)))
    rates = report["tokens_per_s"]["baton-float32"]
    assert {label: len(of) for label, of in rates.items()} == {
        "batch 1": 2, "batch 3": 2, "prompt 70": 2,
    }  # fmt: skip
    assert all(rate > 0 for of in rates.values() for rate in of) and not report["failures"]
    assert report["about"]["baton-float32"]["model"] == "Model"
    reason = "not installed: No module named 'vllm'; docs/comparison.md"
    assert report["absent"]["vllm-bf16"].startswith(reason)
    assert any(reason in line for line in compare.text_of(report) if isinstance(line, str))
    assert any("round 2 of 2: prompt 70" in line for line in said)
    with pytest.raises(SystemExit, match="no candidate"):
        args = options(tmp_path, "--candidates", "vllm-bf16", "--rivals", str(venv))
        await compare.compare(args, said.append)


def test_threads_are_set_before_anything_is_imported(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    rivals = Rivals(venv=tmp_path, llama_cpp=tmp_path / "llama")
    assert compare.variables(ENTRIES["baton-bf16"], rivals, 1)["OMP_NUM_THREADS"] == "1"
    assert "LD_PRELOAD" not in compare.variables(ENTRIES["llama.cpp-bf16"], rivals, 1)
    vllm = compare.variables(ENTRIES["vllm-bf16"], rivals, 1)
    assert vllm["LD_PRELOAD"].startswith(str(tmp_path / "lib" / "libiomp5.so"))
    assert vllm["LLAMA_CPP_LIB_PATH"] == str(tmp_path / "llama")


SLOW = """
import signal, subprocess
from benchmarks.engine.adapters.protocol import main
class Slow:
    def about(self): return {}
    def decode(self, batch, context, steps):
        subprocess.run(["sleep", "60"])
def load(setup):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a library in the middle of its work does
    return Slow()
main(load)
"""
BENCH = """
import runpy, sys
from benchmarks import checkpoint
from benchmarks.engine import compare
checkpoint.directory_of = lambda shape, cache: cache
compare.ADAPTERS = ""
compare.ENTRIES["baton-float32"] = compare.Entry("slow_adapter")
sys.argv = ["benchmarks", "engine", "--shape", "tiny", "--candidates", "baton-float32"]
runpy.run_module("benchmarks", run_name="__main__")
"""


def running(folder: Path) -> dict[int, str]:
    """What runs with `folder` in its environment: command lines by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_engines_end_with_it(tmp_path: Path, signum: signal.Signals) -> None:
    """At once and without a traceback, whatever they are doing, and what they started too.

    After a SIGKILL the kernel ends the adapters.
    """
    (tmp_path / "slow_adapter.py").write_text(SLOW)
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert bench.stderr is not None
    try:
        assert any("warm-up: batch 1" in line for line in bench.stderr), "it ended"
        until(lambda: any("sleep" in line for line in running(tmp_path).values()))
        os.killpg(bench.pid, signum)  # as a terminal does
        assert bench.wait(10) == (130 if signum != signal.SIGKILL else -signum)
        assert "Traceback" not in bench.stderr.read()
        name = "slow_adapter" if signum == signal.SIGKILL else ""
        until(lambda: not any(name in line for line in running(tmp_path).values()))
    finally:
        for pid in running(tmp_path):
            os.kill(pid, signal.SIGKILL)
        bench.communicate()
