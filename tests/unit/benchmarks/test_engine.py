"""The comparison of engines: adapters' answers, rounds, and a real run of Baton's engine."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from benchmarks import child
from benchmarks.child import ROOT, Child, Failed
from benchmarks.engine import compare
from benchmarks.engine.adapters.protocol import Setup
from benchmarks.engine.adapters.transformers_model import Transformers
from benchmarks.engine.compare import Work, measure, works
from benchmarks.environment import Missing
from benchmarks.shapes import SHAPES
from tests.waiting import WAIT_S

SETUP = Setup("/nowhere", 512, 1, (min(os.sched_getaffinity(0)),), 4, 80, 64, {"dtype": "float32"})
WORKING = """
class Counting(Adapter):
    def about(self):
        print("a library that prints", flush=True)
        return {"version": "7", "batch": str(self.setup.max_batch), **self.setup.options}
    def decode(self, batch, context, steps):
        if batch > self.setup.max_batch:
            raise ValueError("too large\\nwith details")
        return batch * steps / 10, "by counting"
    def prefill(self, tokens):
        return tokens / 100, ""

load = Counting
"""


def start(folder, body):
    """An adapter of such a text, as a process."""
    program = folder / "program.py"
    head = "from benchmarks.engine.adapters.protocol import Adapter, main\n"
    program.write_text(f"{head}{body}\nmain(load)\n")
    argv = [sys.executable, str(program), json.dumps(asdict(SETUP))]
    return Child(argv, folder / "log", {"PYTHONPATH": str(ROOT)})


def test_an_adapter_answers_fails_and_answers_again(tmp_path):
    """What a library prints is no answer, and a failure does not end the process."""
    decode, prompt, too_large = (
        Work("", request, 1)
        for request in ({"decode": [2, 16, 3]}, {"prefill": [50]}, {"decode": [5, 16, 3]})
    )
    with start(tmp_path, WORKING) as one:
        assert compare.ready(one, 30) == {"version": "7", "batch": "4", "dtype": "float32"}
        assert compare.run(one, decode) == (0.6, "by counting")
        with pytest.raises(Failed, match=r"^ValueError: too large$"):
            compare.run(one, too_large)
        assert compare.run(one, prompt) == (0.5, "")
    assert "a library that prints" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("def load(setup):\n    import surely_no_such_library\n", Missing, "surely_no_such"),
        ("def load(setup):\n    raise MemoryError('no room')\n", Failed, "MemoryError: no room"),
        (
            "import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(3)\n",
            Failed,
            r"ended with status 3 \| out of luck",
        ),
        ("import time\ntime.sleep(600)\n", Failed, r"no answer within 0.5 s"),
    ],
)
def test_an_adapter_that_does_not_start_is_missing_or_failed(tmp_path, body, error, text):
    with start(tmp_path, body) as one:
        with pytest.raises(error, match=text):
            compare.ready(one, 0.5 if "sleep" in body else WAIT_S)
        with pytest.raises(Failed, match="it ended with status"):
            compare.run(one, Work("", {"prefill": [50]}, 1))


def test_what_hangs_is_not_waited_for_in_the_middle_of_an_answer_or_at_its_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(child, "_ENDING_S", 0.5)
    half = "import os, time\nos.write(1, b'[1]\\n{')\ntime.sleep(1000)\n"
    with start(tmp_path, half) as one:
        assert one.read(WAIT_S) == [1]
        os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(Failed, match="no answer within"):
            one.answer(0.2)
    with start(tmp_path, "import os, time\nos.close(1)\ntime.sleep(1000)\n") as one:
        with pytest.raises(EOFError):
            one.read(WAIT_S)
        assert one.wait() == -signal.SIGKILL
    # As a driver does: it holds on to a process that was killed.
    with start(tmp_path, "import time\ntime.sleep(1000)\n") as one:
        held = one._process
        monkeypatch.setattr(held, "wait", lambda timeout=None: over(held, timeout))
        began = time.monotonic()
    assert time.monotonic() - began < WAIT_S
    monkeypatch.undo()
    assert held.wait() == -signal.SIGKILL


def over(process, timeout):
    assert timeout is not None, "it would be waited for without end"
    raise subprocess.TimeoutExpired(process.args, timeout)


def test_prompts_differ_by_seed_and_lie_in_the_vocabulary():
    # Seeds of decoding sequences, and of prompts that no cache has.
    seeds = [base + number for base in (0, 1 << 32) for number in range(40)]
    first, again = ([SETUP.prompt(300, seed) for seed in seeds] for _ in range(2))
    assert first == again and len(set(map(tuple, first))) == len(seeds)
    assert all(len(one) == 300 and min(one) >= 10 and max(one) < SETUP.vocab for one in first)


ONE, MANY, LONG = works([1, 8], 512, [64])


class Scripted:
    """Records the order; `fails` maps (engine, label) to the first of its calls that fails."""

    def __init__(self, fails=None):
        self.order = []
        self._fails = fails or {}

    def __call__(self, name, work):
        self.order.append((name, work.label))
        times = self.order.count((name, work.label))
        if times >= self._fails.get((name, work.label), 1000):
            raise Failed("it did not work")
        return work.tokens / (100.0 * times), "a way" if name == "baton-int8" else ""


def test_neighbours_in_time_are_compared_and_who_begins_changes():
    run = Scripted()
    measure(["a", "b", "c"], [ONE, LONG], 2, run)
    warm_up, *rounds = ("".join(name for name, _ in run.order[i : i + 6]) for i in (0, 6, 12))
    assert warm_up == "abcabc" and rounds == ["bcabca", "cabcab"]
    assert [label for _, label in run.order[:6]] == [ONE.label] * 3 + [LONG.label] * 3
    assert (ONE.tokens, MANY.tokens, LONG.tokens) == (48, 8 * 48, 64)
    steps = [work.request["decode"][2] for work in works([1, 8, 16, 32, 64], 512, [])]
    assert steps == [48, 48, 24, 12, 12]


def test_failed_work_is_not_tried_again_and_ratios_are_of_the_same_round():
    """The warm-up, whose rate would be 100, does not count."""
    int8, bf16 = "baton-int8", "baton-bf16"
    run = Scripted({(int8, "batch 1"): 1, (bf16, "prompt 64"): 3})
    found = measure([int8, bf16], [ONE, LONG], 3, run)
    asked = ((int8, "batch 1"), (int8, "prompt 64"), (bf16, "prompt 64"))
    counts = [run.order.count(key) for key in asked]
    assert counts == [1, 4, 3]
    failure = "it did not work"
    assert found["failures"] == {int8: {"batch 1": failure}, bf16: {"prompt 64": failure}}
    assert found["tokens_per_s"] == {
        int8: {"batch 1": [], "prompt 64": [200.0, 300.0, 400.0]},
        bf16: {"batch 1": [200.0, 300.0, 400.0], "prompt 64": [200.0]},
    }
    assert found["ratios"] == {f"{int8} / {bf16}": {"batch 1": [], "prompt 64": [1.0]}}
    assert found["notes"] == {int8: {"prompt 64": "a way"}}


def options(tmp_path, *argv):
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    cpu = str(min(os.sched_getaffinity(0)))
    small = "--shape tiny --rounds 2 --batches 1,3 --context 40 --prompts 70 --kernels torch"
    return parser.parse_args(
        [*small.split(), "--cache", str(tmp_path / "cache"), "--cpus", cpu, *argv]
    )


def test_baton_is_measured_and_what_is_missing_is_named(tmp_path, capsys):
    python = tmp_path / "venv" / "bin" / "python"  # one that has no library
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    rivals = ("--rivals", str(tmp_path / "venv"))
    args = options(tmp_path, "--candidates", "vllm-bf16,baton-float32", *rivals)
    report = json.loads(json.dumps(compare.compare(args)))
    rates = report["tokens_per_s"]["baton-float32"]
    assert {label: len(of) for label, of in rates.items()} == {
        "batch 1": 2, "batch 3": 2, "prompt 70": 2,
    }  # fmt: skip
    assert all(rate > 0 for of in rates.values() for rate in of) and not report["failures"]
    assert report["about"]["baton-float32"]["model"] == "DecoderModel"
    reason = "not installed: No module named 'vllm'; docs/comparison.md"
    assert report["absent"]["vllm-bf16"].startswith(reason)
    assert any(reason in line for line in compare.text_of(report) if isinstance(line, str))
    assert "round 2 of 2: prompt 70" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no candidate"):
        compare.compare(options(tmp_path, "--candidates", "vllm-bf16", *rivals))


@pytest.mark.parametrize("generate", [False, True])
def test_transformers_is_measured_with_random_weights(generate):
    options = {"config": SHAPES["tiny"].config(), "generate": generate}
    adapter = Transformers(Setup("", 512, 1, (), 0, 0, 0, options))
    for seconds, how in (adapter.decode(2, 20, 3), adapter.prefill(30)):
        assert seconds > 0 and how.split()[0] in ("sdpa", "eager")
