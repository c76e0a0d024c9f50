"""`python -m benchmarks engine`: starts the candidates, measures them in rounds, prints it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, machine
from benchmarks.candidates.answering import Setup
from benchmarks.engine import table
from benchmarks.engine.candidates import DEFAULT, ENTRIES, PAGE, PAIRS, Entry, Rivals
from benchmarks.engine.conversation import Conversation, Failed, Missing
from benchmarks.engine.work import Work, measure, works
from benchmarks.shapes import SHAPES, Shape

_READY_S, _ANSWER_S = 600.0, 900.0
_SPARE_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """What is measured, with what."""

    shape: Shape
    candidates: Sequence[str]
    rivals: Rivals
    cache: Path
    cpus: tuple[int, ...]
    threads: int
    rounds: int
    batches: Sequence[int]
    context: int
    prompts: Sequence[int]
    kernels: str = "auto"

    @property
    def works(self) -> list[Work]:
        """All that is asked of each candidate."""
        return works(self.batches, self.context, self.prompts)

    def setup(self, entry: Entry, directory: Path) -> Setup:
        """What a candidate is told."""
        options = dict(entry.options)
        if entry.module.endswith("baton_engine"):
            options["kernels"] = self.kernels
        if entry.module.endswith("llama_cpp_decode"):
            options["shape"] = self.shape.name
        steps = max((work.steps for work in self.works), default=0)
        return Setup(
            directory=str(directory),
            vocab=self.shape.vocab,
            threads=self.threads,
            cpus=self.cpus,
            max_batch=max(self.batches, default=1),
            max_context=self.context + steps + _SPARE_TOKENS,
            max_prefill=max(self.prompts, default=1) + _SPARE_TOKENS,
            options=options,
        )


def run(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The report; raises SystemExit when no candidate can be started."""
    say(f"model of shape {settings.shape.name} in {settings.cache}")
    directory = checkpoint.directory_of(settings.shape, settings.cache)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        there: dict[str, Conversation] = {}
        about: dict[str, dict[str, str]] = {}
        absent: dict[str, str] = {}
        for name in settings.candidates:
            say(f"starting {name}")
            try:
                one = _start(settings, ENTRIES[name], directory, logs / f"{name}.log")
                stack.enter_context(one)
                about[name] = one.ready(_READY_S)
                there[name] = one
            except Missing as reason:
                absent[name] = f"not installed: {reason}; {PAGE} tells how"
            except (Failed, OSError) as failure:
                absent[name] = f"does not start: {failure}"
        for name, reason_told in absent.items():
            say(f"{name}: {reason_told}")
        if not there:
            raise SystemExit("no candidate could be started")
        measured = measure(
            list(there),
            settings.works,
            settings.rounds,
            lambda name, work: there[name].ask(work.request(), _ANSWER_S),
            say,
        )
    return {
        "schema": table.SCHEMA,
        "machine": machine.about(settings.cpus, settings.threads),
        "shape": {"name": settings.shape.name, **settings.shape.config()},
        "context": settings.context,
        "about": about,
        "absent": absent,
        **table.json_of(measured, settings.works, PAIRS),
        "text": list(table.text_of(measured, settings.works, PAIRS)),
    }


def _start(settings: Settings, entry: Entry, directory: Path, log: Path) -> Conversation:
    rivals = settings.rivals
    python = sys.executable if entry.is_ours else rivals.python
    argv = [python, "-m", entry.module, settings.setup(entry, directory).to_json()]
    return Conversation(argv, environment(settings, entry), log)


def environment(settings: Settings, entry: Entry) -> Mapping[str, str]:
    """Threads are told before any library is imported; later is too late for most."""
    threads = str(settings.threads)
    found = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    if not entry.is_ours:
        found |= settings.rivals.environment()
    if entry.module.endswith("vllm_engine") and settings.rivals.preload:
        found["LD_PRELOAD"] = ":".join(settings.rivals.preload)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its command line."""
    parser.add_argument(
        "--candidates",
        type=_names,
        default=DEFAULT,
        metavar="NAME,...",
        help=f"of {', '.join(ENTRIES)} (default: all but baton-int8-kv8)",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--batches", type=_sizes, default=(1, 8, 32), metavar="N,N,...")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--prompts", type=_sizes, default=(512, 2048), metavar="TOKENS,...")
    parser.add_argument(
        "--kernels", choices=("auto", "native", "torch"), default="auto", help="Baton's"
    )


def main(args: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    settings = Settings(
        shape=SHAPES[args.shape],
        candidates=args.candidates,
        rivals=Rivals(args.rivals, args.llama_cpp),
        cache=args.cache,
        cpus=args.cpus,
        threads=args.threads or len(args.cpus),
        rounds=args.rounds,
        batches=args.batches,
        context=args.context,
        prompts=args.prompts,
        kernels=args.kernels,
    )
    report = run(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print("\n".join(head_of(report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def head_of(report: Mapping[str, Any]) -> list[str]:
    """The table with what it was measured on."""
    shape, told = report["shape"], report["machine"]
    return [
        f"shape {shape['name']}, context {report['context']}, {told['threads']} threads on cores "
        f"{told['cpus']} of {told['processor']}, load before {told['load_before']}",
        *(f"{name}: {', '.join(about.values())}" for name, about in report["about"].items()),
        *(f"{name}: {reason}" for name, reason in report["absent"].items()),
        "",
        *report["text"],
    ]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ENTRIES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(ENTRIES)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
