"""Decode steps and prompts of each engine on the same cores, no server around them.

Each engine is a process of its own; it loads the model once and then does one piece of work at a
time while the others wait. A round gives everybody the same piece of work before the next piece:
neighbours in time are compared, so that a machine that slows down favours nobody, and who begins
changes with each round. A round before the first warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.bench.stats import percentile
from baton.bench.terminal import table
from baton.local.child import tied
from benchmarks import checkpoint, environment
from benchmarks.engine.adapters.protocol import Setup
from benchmarks.environment import PAGE, ROOT, Failed, Missing, Rivals, exit_text
from benchmarks.shapes import SHAPES

SCHEMA = "baton.bench.engine/2"
ADAPTERS = "benchmarks.engine.adapters."
_READY_S, _ANSWER_S, _END_S = 600.0, 900.0, 10.0
_SPARE_TOKENS = 16
_DECODED_TOKENS, _FEWEST_STEPS, _MOST_STEPS = 384, 12, 48


@dataclass(frozen=True)
class Entry:
    """One engine: its adapter, the adapter's options, and whose interpreter runs it."""

    adapter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = True  # the project's own interpreter; else that of the rivals


_INT8 = {"dtype": "bfloat16", "quantization": "int8"}
ENTRIES = {
    "baton-bf16": Entry("baton", {"dtype": "bfloat16"}),
    "baton-int8": Entry("baton", _INT8),
    "baton-int8-kv8": Entry("baton", {**_INT8, "kv_dtype": "int8"}),
    "baton-float32": Entry("baton", {"dtype": "float32"}),
    "transformers-bf16": Entry("transformers_model"),
    "transformers-generate": Entry("transformers_model", {"generate": True}),
    "vllm-bf16": Entry("vllm", {"kv_gib": 2}, is_ours=False),
    "llama.cpp-bf16": Entry("llama_cpp", {"type": "bf16"}, is_ours=False),
    "llama.cpp-q8_0": Entry("llama_cpp", {"type": "q8_0"}, is_ours=False),
}
DEFAULT = tuple(name for name in ENTRIES if name != "baton-int8-kv8")

# Whose ratio to whom is printed: the same precision on both sides.
PAIRS = (
    ("baton-bf16", "transformers-bf16"),
    ("baton-bf16", "transformers-generate"),
    ("baton-bf16", "vllm-bf16"),
    ("baton-bf16", "llama.cpp-bf16"),
    ("baton-int8", "llama.cpp-q8_0"),
    ("baton-int8-kv8", "llama.cpp-q8_0"),
    ("baton-int8", "baton-bf16"),
)


@dataclass(frozen=True)
class Work:
    """`steps` decode steps of `size` sequences, or without steps a prompt of `size` tokens."""

    size: int
    context: int = 0  # tokens before the first step
    steps: int = 0

    @property
    def tokens(self) -> int:
        """What it produces (decode) or takes in (prefill)."""
        return self.size * (self.steps or 1)

    @property
    def label(self) -> str:
        """A column's head."""
        return f"{'batch' if self.steps else 'prompt'} {self.size}"

    def request(self) -> dict[str, Any]:
        """The line that asks an adapter for it."""
        if not self.steps:
            return {"do": "prefill", "tokens": self.size}
        return {"do": "decode", "batch": self.size, "context": self.context, "steps": self.steps}


def works(batches: Sequence[int], context: int, prompts: Sequence[int]) -> list[Work]:
    """Decoding in each batch size, then each prompt length.

    Steps are the same for everybody: enough to time, few enough for the slowest.
    """
    steps = {n: max(_FEWEST_STEPS, min(_MOST_STEPS, _DECODED_TOKENS // n)) for n in batches}
    return [*(Work(n, context, steps[n]) for n in batches), *map(Work, prompts)]


class EngineProcess:
    """An adapter's process. What it prints beside its answers goes to `log`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], log: Path) -> EngineProcess:
        """Starts it in a process group of its own: ctrl-C is ours, its children end with it."""
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *tied(argv),
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )
        return cls(process, log)

    async def ready(self, timeout_s: float = _READY_S) -> dict[str, str]:
        """What it reports of itself once it is loaded. Raises Missing or Failed."""
        answer = await self._read(timeout_s)
        if "missing" in answer:
            raise Missing(answer["missing"])
        about: dict[str, str] = answer["ready"]
        return about

    async def run(self, work: Work, timeout_s: float = _ANSWER_S) -> tuple[float, str]:
        """(seconds, note) of one piece of work. Raises Failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work.request()).encode() + b"\n")
        answer = await self._read(timeout_s)
        return float(answer["seconds"]), str(answer.get("note", ""))

    async def close(self, at_once: bool = True) -> None:
        """Ends the process and what it started; not `at_once`: first by the end of its input."""
        if not at_once and self._process.stdin:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line; a process that ended or is silent has failed, and is ended."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            await self.close()
            raise Failed(f"no answer within {timeout_s:g} s") from None
        if not line:
            raise Failed(exit_text(await self._process.wait(), self._log))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer


@dataclass
class Measured:
    """Tokens per second of each engine and work, by round; what failed has fewer rounds."""

    rates: dict[str, dict[Work, dict[int, float]]] = field(default_factory=dict)
    notes: dict[str, dict[Work, str]] = field(default_factory=dict)
    failures: dict[str, dict[Work, str]] = field(default_factory=dict)

    def values(self, name: str, work: Work) -> list[float]:
        """Tokens a second in each round."""
        return list(self.rates[name].get(work, {}).values())

    def ratios(self, first: str, second: str, work: Work) -> list[float]:
        """One's rate over the other's, round by round: they were measured next to each other."""
        a, b = self.rates[first].get(work, {}), self.rates[second].get(work, {})
        return [a[round_] / b[round_] for round_ in a if round_ in b]


Run = Callable[[str, Work], Awaitable[tuple[float, str]]]  # (seconds, note); raises Failed


async def measure(
    names: Sequence[str], todo: Sequence[Work], rounds: int, run: Run, say: Callable[[str], None]
) -> Measured:
    """Warms everybody up with each piece of work, then measures it in `rounds` rounds.

    Work that failed is not given to the same engine again.
    """
    measured = Measured({name: {} for name in names})
    for round_ in range(rounds + 1):
        began = round_ % len(names)
        which = f"round {round_} of {rounds}" if round_ else "warm-up"
        for work in todo:
            for name in [*names[began:], *names[:began]]:
                if work in measured.failures.get(name, ()):
                    continue
                say(f"{which}: {work.label}, {name}")
                try:
                    seconds, note = await run(name, work)
                except Failed as failure:
                    measured.failures.setdefault(name, {})[work] = str(failure)
                    continue
                if round_:
                    measured.rates[name].setdefault(work, {})[round_] = work.tokens / seconds
                if note:
                    measured.notes.setdefault(name, {})[work] = note
    return measured


def setup_of(args: argparse.Namespace, entry: Entry, directory: Path) -> Setup:
    """What an engine's adapter is given."""
    of_adapter = {"baton": {"kernels": args.kernels}, "llama_cpp": {"shape": args.shape}}
    steps = max((work.steps for work in works(args.batches, args.context, ())), default=0)
    return Setup(
        directory=str(directory),
        vocab=SHAPES[args.shape].vocab,
        threads=args.threads or len(args.cpus),
        cpus=args.cpus,
        max_batch=max(args.batches, default=1),
        max_context=args.context + steps + _SPARE_TOKENS,
        max_prefill=max(args.prompts, default=1) + _SPARE_TOKENS,
        options={**entry.options, **of_adapter.get(entry.adapter, {})},
    )


def variables(entry: Entry, rivals: Rivals, threads: int) -> dict[str, str]:
    """Threads are set before any library is imported; later is too late for most."""
    found = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    if not entry.is_ours and rivals.llama_cpp:
        found["LLAMA_CPP_LIB_PATH"] = str(rivals.llama_cpp)
    if entry.adapter == "vllm" and rivals.preload:
        found["LD_PRELOAD"] = rivals.preload
    return found


async def compare(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The report; raises SystemExit when no engine can be started."""
    rivals, todo = (
        Rivals(args.rivals, args.llama_cpp),
        works(args.batches, args.context, args.prompts),
    )
    directory = checkpoint.directory_of(SHAPES[args.shape], args.cache)
    about: dict[str, dict[str, str]] = {}
    absent: dict[str, str] = {}
    machine = environment.machine(args.cpus, args.threads or len(args.cpus))
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        engines: dict[str, EngineProcess] = {}
        at_once = True
        try:
            for name in args.candidates:
                say(f"starting {name}")
                entry = ENTRIES[name]
                python = sys.executable if entry.is_ours else rivals.python
                setup = setup_of(args, entry, directory)
                argv = [
                    python,
                    "-m",
                    f"{ADAPTERS}{entry.adapter}",
                    setup.to_json(),
                ]
                env, log = variables(entry, rivals, setup.threads), Path(logs) / f"{name}.log"
                try:
                    engines[name] = await EngineProcess.start(argv, env, log)
                    about[name] = await engines[name].ready()
                except Missing as reason:
                    absent[name] = f"not installed: {reason}; {PAGE} tells how"
                except (Failed, OSError) as failure:
                    absent[name] = f"does not start: {failure}"
            for name, why in absent.items():
                say(f"{name}: {why}")
            if not about:
                raise SystemExit("no candidate could be started")
            measured = await measure(
                list(about), todo, args.rounds, lambda name, work: engines[name].run(work), say
            )
            at_once = False
        finally:
            await asyncio.gather(*(engine.close(at_once) for engine in engines.values()))
    return {
        "schema": SCHEMA,
        "machine": machine,
        "shape": {"name": args.shape, **SHAPES[args.shape].config()},
        "context": args.context,
        "about": about,
        "absent": absent,
        "tokens_per_s": {
            name: {work.label: measured.values(name, work) for work in todo} for name in about
        },
        "notes": {n: {w.label: text for w, text in of.items()} for n, of in measured.notes.items()},
        "failures": {
            n: {w.label: text for w, text in of.items()} for n, of in measured.failures.items()
        },
        "ratios": {
            f"{a} / {b}": {work.label: measured.ratios(a, b, work) for work in todo}
            for a, b in PAIRS
            if a in about and b in about
        },
    }


def text_of(report: Mapping[str, Any]) -> Iterator[Any]:
    """What it was measured on, then rates and ratios: medians with their extremes."""
    machine = report["machine"]
    yield (
        f"shape {report['shape']['name']}, context {report['context']}, "
        f"{machine['threads']} threads on cores {machine['cpus']} of {machine['processor']}, "
        f"load before {machine['load_before']}"
    )
    yield from (f"{name}: {', '.join(about.values())}" for name, about in report["about"].items())
    yield from (f"{name}: {why}" for name, why in report["absent"].items())
    for title, part, form in (
        ("tokens/s: median (min-max)", "tokens_per_s", ".0f"),
        ("ratio within a round", "ratios", ".2f"),
    ):
        labels = list(next(iter(report[part].values()), {}))
        rows = [
            [n, *(_cell(of[label], form) for label in labels)] for n, of in report[part].items()
        ]
        yield from ("", table(title, labels, rows)) if rows else ()
    for part, which in (("failures", "failed: "), ("notes", "")):
        for name, of in report[part].items():
            yield f"{name}: " + "; ".join(f"{label}: {which}{text}" for label, text in of.items())


def _cell(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{percentile(values, 50):{form}} ({min(values):{form}}-{max(values):{form}})"


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    environment.add_options(parser)
    add = parser.add_argument
    add("--threads", type=int, default=0, metavar="N", help="default: a core each")
    text = f"of {', '.join(ENTRIES)} (default: all but baton-int8-kv8)"
    names = environment.names(ENTRIES)
    add("--candidates", type=names, default=DEFAULT, metavar="NAME,...", help=text)
    add("--rounds", type=int, default=5, metavar="N", help="default: 5")
    add("--batches", type=_sizes, default=(1, 8, 32), metavar="N,N,...")
    add("--context", type=int, default=512, metavar="TOKENS")
    add("--prompts", type=_sizes, default=(512, 2048), metavar="TOKENS,...")
    add("--kernels", choices=("auto", "native", "torch"), default="auto", help="Baton's")


def main(args: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    report = asyncio.run(compare(args, lambda line: print(line, file=sys.stderr, flush=True)))
    console = Console(width=200 if not sys.stdout.isatty() else None, highlight=False, markup=False)
    for part in text_of(report):
        console.print(part)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
