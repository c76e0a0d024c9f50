"""`baton bench serve` loads a server and measures it; `baton bench engine` measures an engine."""

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
Sends requests to a Baton router (gRPC) or any OpenAI-compatible server, at fixed arrival times
(open loop: --rate, --trace) or with a fixed number in flight (closed loop: --concurrency), and
reports latencies, throughput and goodput as tables; with --output also as report.json, with each
request in requests.jsonl. Ctrl-C ends it early, with a report of the requests so far."""
_EXAMPLES = """\
  baton bench serve --rate 4 --duration 30 --slo ttft=0.5,tpot=0.05
  baton bench serve --concurrency 16 --count 500 --prompt-tokens lognormal:512,0.8 --output DIR
  baton bench serve --sweep 1,2,4,8                                 find the highest good rate
  baton bench serve --trace conversation_trace.jsonl --length-scale 0.05 --rate-scale 0.5 \\
        --duration 120                                              a recorded load, scaled down
  baton bench serve --interference                                  streams beside long prompts
  baton bench serve --target http://127.0.0.1:8000 --rate 2         any OpenAI-compatible server"""
_ENGINE_TEXT = """\
Loads a model in this process and measures its engine: prefill speed of single prompts, and the time
of a decode step with 1, 2, 4 … --max-batch sequences. docs/sizing.md uses these figures. Give the
options of a worker, on a worker's machine."""
_ENGINE_EXAMPLES = """\
  baton bench engine --model ~/models/Llama-3.1-8B-Instruct --quantization int8 --threads 8
  baton bench engine --model DIR --context 4000 --max-batch 16 --kv-cache 8GiB --json"""
_DEFAULT_DURATION_S, _INTERFERENCE_S = 30.0, 24.0
_OWN_LOAD = "it defines its load itself"
_TRACED = "a trace has its own"
_CLOSED = "a closed loop has no arrival times"
_CONFLICTS = (
    ("rate", "concurrency", "the load is either open or closed loop"),
    ("trace", "rate", "a trace has arrival times: use --rate-scale"),
    ("sweep", "concurrency", "a sweep is of rates"),
    ("sweep", "rate", "a sweep has its own"),
    ("sweep", "rate-scale", "with --trace a sweep is of rate scales"),
    *(("concurrency", other, _CLOSED) for other in ("burstiness", "rate-scale")),
    *(("trace", other, _TRACED) for other in ("burstiness", "prompt-tokens", "output-tokens")),
    ("trace", "shared-prefix", "a trace's hash_ids are the prefixes"),
    *(
        ("interference", other, _OWN_LOAD)
        for other in ("rate", "sweep", "trace", "burstiness", "count")
    ),
    ("interference", "slo", "it reports no goodput"),
)
_NEEDS = (
    *((one, "trace") for one in ("rate-scale", "length-scale", "max-prompt", "max-output")),
    ("prefixes", "shared-prefix"),
)


def add_commands(commands: options.Commands) -> None:
    """Adds `bench serve` and `bench engine`."""
    parser = commands.add_parser(
        "bench",
        help="measure the speed of a server or an engine",
        description="Measures the speed of a server or an engine.",
        epilog="examples:\n  baton bench serve --rate 4 --duration 30\n"
        "  baton bench engine --model DIR\n\n"
        "`baton bench WHAT --help` shows the options.",
        formatter_class=options.HelpFormatter,
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    serve = options.add_command(kinds, "serve", "load a server and report", _TEXT, _EXAMPLES)
    _add_server_options(serve.add_argument_group("server"))
    options.add_declared(serve, Settings)
    options.add_declared(serve, RequestOptions)
    text = (
        "measure instead how a prompt of TOKENS every S seconds disturbs --concurrency streams "
        "(default: 2048,6; 6 streams, --duration 24)"
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
        help="context length of each decoding sequence",
    )  # fmt: skip
    engine.add_argument("--json", action="store_true", help="print the rates as one JSON object")
    options.add_declared(engine, EngineConfig)
    options.add_config_option(engine)
    engine.set_defaults(run=_run_engine, extra="worker")


def _add_server_options(group: options.Options) -> None:
    add = group.add_argument
    text = "HOST:PORT of a Baton router, or http://HOST:PORT of an OpenAI-compatible server"
    add("--target", default=options.DEFAULT_TARGET, metavar="URL", help=text)
    add("--model", default="", metavar="NAME", help="model name (default: the server's first)")
    options.add_key_option(group)
    options.add_tls_options(group)


def _run(args: argparse.Namespace) -> int:
    given = vars(args)
    for one, other, why in _CONFLICTS:
        if one in given and other in given:
            args.usage_error(f"--{other} does not go with --{one}: {why}")
    for one, other in _NEEDS:
        if one in given and other not in given:
            args.usage_error(f"--{one} needs --{other}")
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
    """Settings of the benchmark from the command line; raises ConfigError."""
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
