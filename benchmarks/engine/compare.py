"""Decode steps and prompts of each engine on the same cores, no server around them.

Each engine is a process of its own; it loads the model once and then does one piece of work at a
time while the others wait. A round gives everybody the same piece of work before the next piece:
neighbours in time are compared, so that a machine that slows down favours nobody, and who begins
changes with each round. A round before the first warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from baton.bench.terminal import median_of
from baton.tables import align
from benchmarks import checkpoint, environment
from benchmarks.child import Child, Failed
from benchmarks.engine.adapters.protocol import Setup
from benchmarks.environment import Missing, Rivals, rotated, say
from benchmarks.shapes import SHAPES

SCHEMA = "baton.bench.engine/2"
ADAPTERS = "benchmarks.engine.adapters."
_READY_S, _ANSWER_S = 600.0, 900.0
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
    "baton-bf16-tp2": Entry("baton", {"dtype": "bfloat16", "tp": 2}),
    "baton-bf16-tp2-experts": Entry(
        "baton", {"dtype": "bfloat16", "tp": 2, "expert_parallel": True}
    ),
    "baton-int8": Entry("baton", _INT8),
    "baton-int4": Entry("baton", {"dtype": "bfloat16", "quantization": "int4"}),
    "baton-int8-kv8": Entry("baton", {**_INT8, "kv_dtype": "int8"}),
    "baton-float32": Entry("baton", {"dtype": "float32"}),
    "transformers-bf16": Entry("transformers_model"),
    "transformers-generate": Entry("transformers_model", {"generate": True}),
    "vllm-bf16": Entry("vllm", {"kv_gib": 2}, is_ours=False),
    "llama.cpp-bf16": Entry("llama_cpp", {"type": "bf16"}, is_ours=False),
    "llama.cpp-q8_0": Entry("llama_cpp", {"type": "q8_0"}, is_ours=False),
    "llama.cpp-q4_k_m": Entry("llama_cpp", {"type": "q4_k_m"}, is_ours=False),
}
_NOT_BY_DEFAULT = (
    *("baton-bf16-tp2", "baton-bf16-tp2-experts"),
    *("baton-int4", "baton-int8-kv8", "llama.cpp-q4_k_m"),
)
DEFAULT = tuple(name for name in ENTRIES if name not in _NOT_BY_DEFAULT)

# Whose ratio to whom is printed: the same precision on both sides.
PAIRS = (
    ("baton-bf16", "transformers-bf16"),
    ("baton-bf16", "transformers-generate"),
    ("baton-bf16", "vllm-bf16"),
    ("baton-bf16", "llama.cpp-bf16"),
    ("baton-int8", "llama.cpp-q8_0"),
    ("baton-int8-kv8", "llama.cpp-q8_0"),
    ("baton-bf16-tp2", "baton-bf16"),
    ("baton-bf16-tp2-experts", "baton-bf16-tp2"),
    ("baton-int8", "baton-bf16"),
    ("baton-int4", "baton-bf16"),
    ("baton-int4", "llama.cpp-q4_k_m"),
)


class Work(NamedTuple):
    """A piece of work: a column's head, the line that asks an adapter for it, and tokens."""

    label: str
    request: dict[str, list[int]]
    tokens: int  # that it produces (decode) or takes in (prefill)


def works(batches: Sequence[int], context: int, prompts: Sequence[int]) -> list[Work]:
    """Decoding in each batch size, then each prompt length.

    Steps are the same for everybody: enough to time, few enough for the slowest.
    """
    found = []
    for n in batches:
        steps = max(_FEWEST_STEPS, min(_MOST_STEPS, _DECODED_TOKENS // n))
        found.append(Work(f"batch {n}", {"decode": [n, context, steps]}, n * steps))
    return found + [Work(f"prompt {n}", {"prefill": [n]}, n) for n in prompts]


def ready(engine: Child, timeout_s: float = _READY_S) -> dict[str, str]:
    """What an adapter reports of its engine once it is loaded. Raises Missing or Failed."""
    answer = engine.answer(timeout_s)
    if "missing" in answer:
        raise Missing(answer["missing"])
    about: dict[str, str] = answer["ready"]
    return about


def run(engine: Child, work: Work) -> tuple[float, str]:
    """(seconds, note) of one piece of work. Raises Failed."""
    engine.send(work.request)
    answer = engine.answer(_ANSWER_S)
    return float(answer["seconds"]), str(answer["note"])


Run = Callable[[str, Work], tuple[float, str]]  # (seconds, note); raises Failed
ByWork = dict[str, dict[str, Any]]  # by engine and a work's label


def measure(names: Sequence[str], todo: Sequence[Work], rounds: int, run: Run) -> dict[str, ByWork]:
    """Warms everybody up with each piece of work, then measures it in `rounds` rounds.

    Work that failed is not given to the same engine again, and has fewer rounds. A ratio is of
    rates in the same round, which were measured next to each other.
    """
    rates: ByWork = {name: {work.label: {} for work in todo} for name in names}
    notes: ByWork = {}
    failures: ByWork = {}
    for round_ in range(rounds + 1):
        which = f"round {round_} of {rounds}" if round_ else "warm-up"
        for work in todo:
            for name in rotated(names, round_):
                if work.label in failures.get(name, ()):
                    continue
                say(f"{which}: {work.label}, {name}")
                try:
                    seconds, note = run(name, work)
                except Failed as failure:
                    failures.setdefault(name, {})[work.label] = str(failure)
                    continue
                if round_:
                    rates[name][work.label][round_] = work.tokens / seconds
                if note:
                    notes.setdefault(name, {})[work.label] = note
    return {
        "tokens_per_s": {
            n: {w: list(r.values()) for w, r in of.items()} for n, of in rates.items()
        },
        "notes": notes,
        "failures": failures,
        "ratios": {
            f"{a} / {b}": {
                label: [rate / rates[b][label][n] for n, rate in of.items() if n in rates[b][label]]
                for label, of in rates[a].items()
            }
            for a, b in PAIRS
            if a in rates and b in rates
        },
    }


def setup_of(args: argparse.Namespace, entry: Entry, directory: Path) -> Setup:
    """What an engine's adapter is given."""
    of_adapter = {"baton": {"kernels": args.kernels}, "llama_cpp": {"shape": args.shape}}
    return Setup(
        directory=str(directory),
        vocab=SHAPES[args.shape].vocab,
        threads=args.threads or len(args.cpus),
        cpus=args.cpus,
        max_batch=max(args.batches, default=1),
        max_context=args.context + _MOST_STEPS + _SPARE_TOKENS,
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


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The report; raises SystemExit when no engine can be started."""
    rivals, shape = Rivals(args.rivals, args.llama_cpp), SHAPES[args.shape]
    directory = checkpoint.directory_of(shape, args.cache)
    machine = environment.machine(args.cpus, args.threads or len(args.cpus))
    engines: dict[str, Child] = {}
    about: dict[str, dict[str, str]] = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs, ExitStack() as running:
        for name in args.candidates:
            say(f"starting {name}")
            entry = ENTRIES[name]
            python = sys.executable if entry.is_ours else rivals.python
            setup = setup_of(args, entry, directory)
            argv = [python, "-m", f"{ADAPTERS}{entry.adapter}", json.dumps(asdict(setup))]
            env, log = variables(entry, rivals, setup.threads), Path(logs) / f"{name}.log"
            try:
                engines[name] = running.enter_context(Child(argv, log, env))
                about[name] = ready(engines[name])
            except Missing as reason:
                absent[name] = f"not installed: {reason}; {environment.PAGE} tells how"
            except (Failed, OSError) as failure:
                absent[name] = f"does not start: {failure}"
        for name, why in absent.items():
            say(f"{name}: {why}")
        if not about:
            raise SystemExit("no candidate could be started")
        todo = works(args.batches, args.context, args.prompts)
        measured = measure(
            list(about), todo, args.rounds, lambda name, one: run(engines[name], one)
        )
    return {
        "schema": SCHEMA,
        "machine": machine,
        "shape": {"name": args.shape, **shape.config()},
        "context": args.context,
        "about": about,
        "absent": absent,
        **measured,
    }


def text_of(report: Mapping[str, Any]) -> Iterator[str]:
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
        found = report[part]
        rows = [
            [n, *(median_of(values, form) for values in of.values())] for n, of in found.items()
        ]
        if rows:
            yield from ("", *align([[title, *next(iter(found.values()))], *rows]))
    for part, which in (("failures", "failed: "), ("notes", "")):
        for name, of in report[part].items():
            yield f"{name}: " + "; ".join(f"{label}: {which}{text}" for label, text in of.items())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def add_options(parser: argparse.ArgumentParser) -> None:
    environment.add_options(parser)
    add = parser.add_argument
    add("--threads", type=int, default=0, metavar="N", help="default: a core each")
    text = f"of {', '.join(ENTRIES)} (default: all but {', '.join(_NOT_BY_DEFAULT)})"
    names = environment.names(ENTRIES)
    add("--candidates", type=names, default=DEFAULT, metavar="NAME,...", help=text)
    add("--rounds", type=int, default=5, metavar="N", help="default: 5")
    add("--batches", type=_sizes, default=(1, 8, 32), metavar="N,N,...")
    add("--context", type=int, default=512, metavar="TOKENS")
    add("--prompts", type=_sizes, default=(512, 2048), metavar="TOKENS,...")
    add("--kernels", choices=("auto", "native", "torch"), default="auto", help="Baton's")


def main(args: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    report = compare(args)
    print(*text_of(report), sep="\n")
    environment.write(args.json, report)
    return 0
