"""`baton bench serve`: loads a server, and says how it was served."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.bench_options import add_options
from baton.cli.generate import api_key_of
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.serve import Settings
    from baton.bench.workload import Workload

_TEXT = """\
Sends requests to a Baton router (gRPC) or to any server with OpenAI's API, at given times whatever
becomes of them (--rate, --trace) or so many at once (--concurrency), and reports latencies,
throughput and goodput: as a table, as report.json, as a page with plots (report.html), and each
request (requests.jsonl). Ctrl-C ends it early, with a report of what there is."""
_EXAMPLES = """\
  baton bench serve --rate 4 --duration 30 --slo ttft=0.5,tpot=0.05
  baton bench serve --concurrency 16 --count 500 --prompt-tokens lognormal:512,0.8
  baton bench serve --sweep 1,2,4,8                                 where does it bend?
  baton bench serve --trace conversation_trace.jsonl --length-scale 0.05 --rate-scale 0.5 \\
        --duration 120                                              a day's shape, made small
  baton bench serve --target http://127.0.0.1:7780 --against http://127.0.0.1:8000 --rate 2
                                                                    two servers, in turns"""
_DEFAULT_DURATION_S = 30.0


def add_commands(commands: options.Commands) -> None:
    """Adds `bench` with what can be benchmarked."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast a server answers",
        description="Measures how fast a server answers.",
        epilog="examples:\n  baton bench serve --rate 4 --duration 30\n\n"
        "`baton bench WHAT --help` tells more.",
        formatter_class=options.HelpFormatter,
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    serve = options.add_command(kinds, "serve", "load a server and report", _TEXT, _EXAMPLES)
    add_options(serve)
    serve.set_defaults(run=_run, extra="bench", usage_error=serve.error)


def _run(args: argparse.Namespace) -> int:
    _check_usage(args)
    import uvloop

    from baton.bench import serve, terminal
    from baton.bench.progress import Progress

    settings = settings_of(args)
    report = uvloop.run(serve.run(settings, Progress(sys.stderr)))
    print(json.dumps(report) if args.json else f"\n{terminal.text_of(report)}")
    print(f"report: {settings.output / 'report.html'}", file=sys.stderr)
    if report["partial"]:
        return 130
    any_ok = (
        s["figures"]["requests"]["ok"] for stage in report["stages"] for s in stage["servers"]
    )
    return 0 if all(any_ok) else 1


def _check_usage(args: argparse.Namespace) -> None:
    """Ends the program when options contradict each other."""
    if args.trace and args.rate:
        args.usage_error("a trace has its own times: --rate-scale instead of --rate")
    if args.sweep and args.concurrency:
        args.usage_error("--sweep is of rates: it does not go with --concurrency")
    if args.trace and args.shared_prefix:
        args.usage_error(
            "--shared-prefix does not go with --trace: its hash_ids tell what is shared"
        )


def settings_of(args: argparse.Namespace) -> Settings:
    """What the options ask for; raises ConfigError."""
    from baton.bench.serve import Settings
    from baton.bench.slo import Slo

    workload = _workload(args)
    key = api_key_of(args.api_key_file, os.environ.get("BATON_API_KEY"))
    targets = [(args.target, _asking(args, args.model, key))]
    if args.against:
        key = api_key_of(args.against_api_key_file, None)
        targets.append((args.against, _asking(args, args.against_model, key)))
    warm_up = max(4, args.concurrency) if args.warm_up is None else args.warm_up
    return Settings(
        workload=workload,
        targets=targets,
        sweep=args.sweep,
        slo=Slo.parse(args.slo) if args.slo else None,
        warm_up=warm_up,
        blocks=args.blocks,
        output=args.output or Path(f"baton-bench-{datetime.now():%Y%m%d-%H%M%S}"),
    )


def _workload(args: argparse.Namespace) -> Workload:
    from baton.bench.lengths import Lengths
    from baton.bench.trace import Scale
    from baton.bench.workload import Workload

    ends_itself = args.count or args.trace
    rate = 0.0 if args.trace or args.concurrency else args.rate or (args.sweep or (1.0,))[0]
    return Workload(
        rate=rate,
        concurrency=args.concurrency,
        arrivals=args.arrivals,
        burstiness=args.burstiness,
        count=args.count,
        duration_s=args.duration or (0.0 if ends_itself else _DEFAULT_DURATION_S),
        prompt_lengths=Lengths.parse(args.prompt_tokens),
        output_lengths=Lengths.parse(args.output_tokens),
        shared_prefix=args.shared_prefix,
        prefixes=args.prefixes,
        trace=args.trace,
        scale=options.filled(Scale, args, rate=args.rate_scale, length=args.length_scale),
        seed=random.randrange(1 << 31) if args.seed is None else args.seed,  # noqa: S311
    )


def _asking(args: argparse.Namespace, model: str, api_key: str | None) -> Any:
    from baton.bench.demand import IdRange
    from baton.bench.server import Asking

    first, _, end = args.ids.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise ConfigError(f"--ids {args.ids} is no range: write FIRST-END, as in 1000-4000")
    return Asking(
        model=model,
        prompt_form=args.prompt_as,
        ids=IdRange(int(first), int(end)),
        ignore_eos=not args.stop_at_eos,
        timeout_s=args.timeout,
        api_key=api_key,
        keep_alive=not args.no_keep_alive,
    )
