"""`baton bench serve`: puts a server under load, and reports how it was served."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.bench.request import RequestOptions
from baton.bench.trace import Scale
from baton.bench.workload import Interference, Lengths, Workload
from baton.cli import options
from baton.cli.generate import api_key_of
from baton.cli.options import argument, count, positive, seconds
from baton.slo import Slo

if TYPE_CHECKING:
    from baton.bench.serve import Settings

_TEXT = """\
Sends requests to a Baton router (gRPC) or to any server with OpenAI's API, at given times whatever
becomes of them (--rate, --trace) or so many at once (--concurrency), and reports latencies,
throughput and goodput as tables; with --output also as report.json, as a page with plots
(report.html), and each request (requests.jsonl). Ctrl-C ends it early, with a report of what there
is."""
_EXAMPLES = """\
  baton bench serve --rate 4 --duration 30 --slo ttft=0.5,tpot=0.05
  baton bench serve --concurrency 16 --count 500 --prompt-tokens lognormal:512,0.8 --output DIR
  baton bench serve --sweep 1,2,4,8                                 where does it bend?
  baton bench serve --trace conversation_trace.jsonl --length-scale 0.05 --rate-scale 0.5 \\
        --duration 120                                              a day's shape, made small
  baton bench serve --interference                                  streams beside long prompts
  baton bench serve --target http://127.0.0.1:7780 --against http://127.0.0.1:8000 --rate 2
                                                                    two servers, in turns"""
_DEFAULT_DURATION_S, _INTERFERENCE_S = 30.0, 24.0


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
    _add_server_options(serve.add_argument_group("servers").add_argument)
    _add_load_options(serve.add_argument_group("load"))
    _add_trace_options(serve.add_argument_group("trace").add_argument)
    _add_prompt_options(serve.add_argument_group("prompts").add_argument)
    _add_measure_options(serve.add_argument_group("measuring").add_argument)
    serve.set_defaults(run=_run, extra="bench", usage_error=serve.error)


def _add_server_options(add: Any) -> None:
    text = "HOST:PORT of a Baton router, or http://HOST:PORT of an OpenAI-compatible server"
    add("--target", default=options.DEFAULT_TARGET, metavar="URL", help=text)
    text = "a second server: both get the same requests, in turns"
    add("--against", metavar="URL", help=text)
    add("--model", default="", metavar="NAME", help="of --target (default: its first)")
    add("--against-model", default="", metavar="NAME", help="of --against (default: its first)")
    text = "key for --target (default: the variable BATON_API_KEY, if set)"
    add("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "key for --against (default: none)"
    add("--against-api-key-file", type=Path, metavar="FILE", help=text)
    text = "a connection for each request: for servers that close them without saying so"
    add("--no-keep-alive", action="store_true", help=text)
    add("--timeout", type=seconds, default=120.0, metavar="S", help="of a request")


def _add_load_options(group: argparse._ArgumentGroup) -> None:
    how, add = group.add_mutually_exclusive_group().add_argument, group.add_argument
    how("--rate", type=positive, metavar="R", help="requests a second (default: 1)")
    text = "requests at a time, without a rate (default: an open loop)"
    how("--concurrency", type=count, default=0, metavar="N", help=text)
    text = "these rates one after the other, of a trace these --rate-scales (default: one rate)"
    add("--sweep", type=_rates, default=(), metavar="R,R,...", help=text)
    text = "how requests follow each other"
    add("--arrivals", choices=("poisson", "constant", "bursty"), default="poisson", help=text)
    text = "of bursty arrivals: shape of gamma-distributed gaps, 1 is Poisson, less is burstier"
    add("--burstiness", type=positive, default=0.25, metavar="B", help=text)
    text = "begin requests for so long (default: 30, unless --count or --trace)"
    add("--duration", type=seconds, metavar="S", help=text)
    text = "send so many requests (default: as many as arrive)"
    add("--count", type=count, default=0, metavar="N", help=text)
    text = (
        "same seed, same requests (default: another each time, so that no cache remembers the "
        "prompts)"
    )
    add("--seed", type=int, metavar="N", help=text)
    text = (
        "instead: --concurrency streams (6), alone and beside a prompt of so many tokens every S "
        "seconds (default: 2048,6), for --duration (24) after they have started"
    )
    example = "2048,6"
    add("--interference", nargs="?", const=example, type=_every, metavar="TOKENS,S", help=text)


def _add_trace_options(add: Any) -> None:
    text = "replay a Mooncake JSONL or an Azure CSV trace"
    add("--trace", type=Path, metavar="FILE", help=text)
    text = "so many times as many requests a second"
    add("--rate-scale", type=positive, default=1.0, metavar="X", help=text)
    text = "prompts and outputs so many times as long"
    add("--length-scale", type=positive, default=1.0, metavar="X", help=text)
    text = "leave out so many rows first (default: none)"
    add("--skip", type=int, default=0, metavar="N", help=text)
    text = "cut prompts to so many tokens (default: not cut)"
    add("--max-prompt", type=int, default=0, metavar="N", help=text)
    text = "cut outputs to so many tokens (default: not cut)"
    add("--max-output", type=int, default=0, metavar="N", help=text)
    text = "spread requests of one time evenly up to the next: some traces' clocks are coarse"
    add("--spread-ties", action="store_true", help=text)


def _add_prompt_options(add: Any) -> None:
    for option, default, beside in (("--prompt-tokens", 256, 64), ("--output-tokens", 64, 200)):
        text = (
            "tokens: 512, 100-200 or lognormal:MEDIAN,SIGMA[,MOST]; not for traces "
            f"(default: {default}; {beside} with --interference)"
        )
        add(option, type=argument(Lengths.parse), metavar="LENGTHS", help=text)
    text = "put before each prompt; traces tell what is shared (default: none)"
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help=text)
    add("--prefixes", type=count, default=1, metavar="N", help="different shared prefixes")
    text = "token ids; text or a chat message of as many words"
    add("--prompt-as", choices=("ids", "text", "chat"), default="ids", help=text)
    text = "token ids in prompts"
    add("--ids", type=_ids, default="1000-4000", metavar="FIRST-END", help=text)
    text = "let answers end before their length: for servers that do not know ignore_eos"
    add("--stop-at-eos", action="store_true", help=text)


def _add_measure_options(add: Any) -> None:
    text = "what is good, in seconds: ttft=0.5,tpot=0.05,e2e=10 (default: no goodput)"
    add("--slo", type=argument(Slo.parse), metavar="LIMITS", help=text)
    text = "requests before, not measured (default: 4, or --concurrency if that is more)"
    add("--warm-up", type=int, metavar="N", help=text)
    add("--blocks", type=count, default=4, metavar="N", help="turns of each server with --against")
    text = "write report.json, report.html and requests.jsonl there (default: no files)"
    add("--output", type=Path, metavar="DIR", help=text)
    add("--json", action="store_true", help="print the report as one JSON object")


def _rates(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]


def _every(text: str) -> tuple[int, float]:
    """Tokens of long prompts, and seconds from one to the next."""
    tokens, _, every = text.partition(",")
    return count(tokens), seconds(every or "6")


def _ids(text: str) -> range:
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text} is no range: write FIRST-END, as in 1000-4000")
    return range(int(first), int(end))


def _run(args: argparse.Namespace) -> int:
    if args.trace and args.rate:
        args.usage_error("a trace has its own times: --rate-scale instead of --rate")
    if args.sweep and args.concurrency:
        args.usage_error("--sweep is of rates: it does not go with --concurrency")
    if args.trace and args.shared_prefix:
        args.usage_error("--shared-prefix does not go with --trace: its hash_ids are the prefixes")
    if args.interference and (args.trace or args.rate or args.sweep):
        args.usage_error("--interference has a load of its own: no --rate, --sweep or --trace")
    import uvloop
    from rich.console import Console

    from baton.bench import serve, terminal

    settings = settings_of(args)
    progress = terminal.Progress(Console(stderr=True))
    report = uvloop.run(serve.run(settings, progress))
    if args.json:
        print(json.dumps(report))
    else:
        print()
        terminal.show(report, Console(highlight=False))
    if settings.output:
        print(f"report: {settings.output / 'report.html'}", file=sys.stderr)
    if report["partial"]:
        return 130
    answered = [
        s["figures"]["requests"]["ok"] for stage in report["stages"] for s in stage["servers"]
    ] + [r["alone"]["tokens_per_s"] for one in report["interference"] or () for r in one["rounds"]]
    return 0 if all(answered) else 1


def settings_of(args: argparse.Namespace) -> Settings:
    """What the options ask for; raises ConfigError."""
    from baton.bench.serve import Settings

    key = api_key_of(args.api_key_file, os.environ.get("BATON_API_KEY"))
    made = RequestOptions(
        model=args.model,
        prompt_form=args.prompt_as,
        ids=args.ids,
        ignore_eos=not args.stop_at_eos,
        timeout_s=args.timeout,
        api_key=key,
        keep_alive=not args.no_keep_alive,
    )
    targets = [(args.target, made)]
    if args.against:
        key = api_key_of(args.against_api_key_file, None)
        targets.append((args.against, replace(made, model=args.against_model, api_key=key)))
    workload, beside = _workload(args), None
    if args.interference:
        tokens, every_s = args.interference
        periods = round((args.duration or _INTERFERENCE_S) / every_s)
        beside = Interference(tokens, every_s=every_s, periods=max(1, periods))
    return Settings(
        workload=workload,
        targets=targets,
        sweep=args.sweep,
        slo=args.slo,
        warm_up=max(4, workload.concurrency) if args.warm_up is None else args.warm_up,
        blocks=args.blocks,
        interference=beside,
        output=args.output,
    )


def _workload(args: argparse.Namespace) -> Workload:
    prompt, output, streams = (64, 200, 6) if args.interference else (256, 64, 0)
    scale = args.rate_scale, args.length_scale, args.skip, args.max_prompt, args.max_output
    concurrency = args.concurrency or streams
    ends_itself = args.count or args.trace or args.interference
    return Workload(
        rate=0.0 if args.trace or concurrency else args.rate or (args.sweep or (1.0,))[0],
        concurrency=concurrency,
        arrivals=args.arrivals,
        burstiness=args.burstiness,
        count=args.count,
        duration_s=args.duration or (0.0 if ends_itself else _DEFAULT_DURATION_S),
        prompt_lengths=args.prompt_tokens or Lengths(prompt, prompt),
        output_lengths=args.output_tokens or Lengths(output, output),
        shared_prefix=args.shared_prefix,
        prefixes=args.prefixes,
        trace=args.trace,
        scale=Scale(*scale, args.spread_ties),
        seed=random.randrange(1 << 31) if args.seed is None else args.seed,  # noqa: S311
    )
