"""`baton bench serve` puts a server under load; `baton bench engine` measures an engine alone."""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from typing import Any

from baton.bench.request import RequestOptions
from baton.bench.workload import Interference, Lengths, Settings
from baton.cli import options
from baton.cli.process_setup import limit_cpu, with_threads
from baton.config import EngineConfig
from baton.config.options import build

_TEXT = """\
Sends requests to a Baton router (gRPC) or to any server with OpenAI's API, at given times whatever
becomes of them (--rate, --trace) or so many at once (--concurrency), and reports latencies,
throughput and goodput as tables; with --output also as report.json, and each request
(requests.jsonl). Ctrl-C ends it early, with a report of what there is."""
_EXAMPLES = """\
  baton bench serve --rate 4 --duration 30 --slo ttft=0.5,tpot=0.05
  baton bench serve --concurrency 16 --count 500 --prompt-tokens lognormal:512,0.8 --output DIR
  baton bench serve --sweep 1,2,4,8                                 where does it bend?
  baton bench serve --trace conversation_trace.jsonl --length-scale 0.05 --rate-scale 0.5 \\
        --duration 120                                              a day's shape, made small
  baton bench serve --interference                                  streams beside long prompts
  baton bench serve --target http://127.0.0.1:8000 --rate 2         any OpenAI-compatible server"""
_ENGINE_TEXT = """\
Loads a model in this process, without a cluster, and measures how fast its engine computes prompts,
one at a time, and how long a decode step takes with 1, 2, 4 and up to --max-batch sequences: what
docs/sizing.md asks for. Give a worker's options, on a machine like a worker's."""
_ENGINE_EXAMPLES = """\
  baton bench engine --model ~/models/Llama-3.1-8B-Instruct --quantization int8 --threads 8
  baton bench engine --model DIR --context 4000 --max-batch 16 --kv-cache 8GiB --json"""
_DEFAULT_DURATION_S, _INTERFERENCE_S = 30.0, 24.0
_OWN_LOAD = "it has a load of its own"
_CONFLICTS = (
    ("rate", "concurrency", "so many requests a second, or so many at a time"),
    ("trace", "rate", "a trace has its own times: --rate-scale"),
    ("sweep", "concurrency", "a sweep is of rates"),
    ("trace", "shared-prefix", "a trace's hash_ids are the prefixes"),
    *(("interference", other, _OWN_LOAD) for other in ("rate", "sweep", "trace")),
)


def add_commands(commands: options.Commands) -> None:
    """Adds `bench` with what can be benchmarked."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast a server answers, or an engine computes",
        description="Measures how fast a server answers, or an engine computes.",
        epilog="examples:\n  baton bench serve --rate 4 --duration 30\n"
        "  baton bench engine --model DIR\n\n"
        "`baton bench WHAT --help` tells more.",
        formatter_class=options.HelpFormatter,
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    serve = options.add_command(kinds, "serve", "load a server and report", _TEXT, _EXAMPLES)
    _add_server_options(serve.add_argument_group("server"))
    options.add_declared(serve, Settings)
    options.add_declared(serve, RequestOptions)
    text = (
        "instead: --concurrency streams (6), alone and beside a prompt of so many tokens every S "
        "seconds (default: 2048,6), for --duration (24) after they have started"
    )
    serve.add_argument(
        "--interference",
        nargs="?",
        const="2048,6",
        default=argparse.SUPPRESS,
        type=Interference.parse,
        metavar="TOKENS,S",
        help=text,
    )
    serve.add_argument("--json", action="store_true", help="print the report as one JSON object")
    serve.set_defaults(run=_run, extra="bench", usage_error=serve.error)
    text = "measure a model's prefill and decode rates on this machine"
    engine = options.add_command(kinds, "engine", text, _ENGINE_TEXT, _ENGINE_EXAMPLES)
    engine.add_argument(
        "--context", type=options.count, default=512, metavar="TOKENS",
        help="of each sequence that decodes",
    )  # fmt: skip
    engine.add_argument("--json", action="store_true", help="print the rates as one JSON object")
    options.add_declared(engine, EngineConfig)
    options.add_config_option(engine)
    engine.set_defaults(run=_run_engine, extra="worker")


def _add_server_options(group: options.Options) -> None:
    add = group.add_argument
    text = "HOST:PORT of a Baton router, or http://HOST:PORT of an OpenAI-compatible server"
    add("--target", default=options.DEFAULT_TARGET, metavar="URL", help=text)
    add("--model", default="", metavar="NAME", help="of --target (default: its first)")
    options.add_key_option(group)
    options.add_tls_options(group)


def _run(args: argparse.Namespace) -> int:
    given = vars(args)
    for one, other, why in _CONFLICTS:
        if one in given and other in given:
            args.usage_error(f"--{other} does not go with --{one}: {why}")
    import uvloop

    from baton.bench import serve, terminal
    from baton.bench.report import failures_of

    settings = settings_of(args)
    progress = terminal.Progress()
    report = uvloop.run(serve.run(settings, progress))
    if args.json:
        print(json.dumps(report))
    else:
        print("", *terminal.report_lines(report), sep="\n")
    if settings.output:
        print(f"report: {settings.output / 'report.json'}", file=sys.stderr)
    if report["partial"]:
        return 130
    if why := failures_of(report):
        print(f"baton: error: {why}", file=sys.stderr)
        return 1
    return 0


def _run_engine(args: argparse.Namespace) -> int:
    engine = with_threads(options.settings(EngineConfig, "bench engine", args))
    from baton.local.model_check import check_model

    check_model(engine, worker=True)
    limit_cpu(engine.threads, engine.cpus)
    from baton.bench.engine import DecodeRate, PrefillRate, measure

    def show(rate: PrefillRate | DecodeRate) -> None:
        if args.json:
            return
        if isinstance(rate, PrefillRate):
            text = f"prefill  {rate.prompt_tokens:6,} tokens  {rate.ms:9,.1f} ms"
        else:
            text = f"decode   batch {rate.batch:6,}  {rate.step_ms:9,.1f} ms a step"
        print(f"{text}  {rate.tokens_per_s:10,.0f} tokens/s", flush=True)

    found = measure(engine, args.context, show)
    if args.json:
        print(json.dumps(found))
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """What the options ask for; raises ConfigError."""
    given = vars(args)
    values: dict[str, Any] = {"seed": random.randrange(1 << 31)}  # noqa: S311
    interference: Interference | None = given.get("interference")
    if interference:
        values |= {
            "concurrency": 6, "prompt-tokens": Lengths(64, 64), "output-tokens": Lengths(200, 200)
        }  # fmt: skip
        periods = round(given.get("duration", _INTERFERENCE_S) / interference.every_s)
        interference = replace(interference, periods=max(1, periods))
    elif not (given.get("trace") or given.get("count") or given.get("duration")):
        given = given | {"duration": _DEFAULT_DURATION_S}
    values |= given
    made = build(RequestOptions, values, model=args.model, api_key=options.api_key(args))
    return build(Settings, values, target=(args.target, made), interference=interference)
