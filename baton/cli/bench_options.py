"""The options of `baton bench serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.cli import options
from baton.cli.options import seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    _add_server_options(parser.add_argument_group("servers"))
    _add_load_options(parser.add_argument_group("load"))
    _add_trace_options(parser.add_argument_group("trace"))
    _add_prompt_options(parser.add_argument_group("prompts"))
    _add_measure_options(parser.add_argument_group("measuring"))


def _add_server_options(group: options.Options) -> None:
    group.add_argument(
        "--target",
        default=options.DEFAULT_TARGET,
        metavar="URL",
        help="HOST:PORT of a Baton router, or http://HOST:PORT of an OpenAI-compatible server",
    )
    group.add_argument(
        "--against", metavar="URL", help="a second server: both get the same requests, in turns"
    )
    for of, whose in (("", "--target"), ("against-", "--against")):
        group.add_argument(
            f"--{of}model", default="", metavar="NAME", help=f"of {whose} (default: its first)"
        )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="key for --target (default: the variable BATON_API_KEY, if set)",
    )
    group.add_argument(
        "--against-api-key-file",
        type=Path,
        metavar="FILE",
        help="key for --against (default: none)",
    )
    group.add_argument(
        "--no-keep-alive",
        action="store_true",
        help="a connection for each request: for servers that close them without saying so",
    )
    group.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="of a request")


def _add_load_options(group: options.Options) -> None:
    how = group.add_mutually_exclusive_group()
    how.add_argument("--rate", type=_positive, metavar="R", help="requests a second (default: 1)")
    how.add_argument(
        "--concurrency",
        type=_count,
        default=0,
        metavar="N",
        help="requests at a time, without a rate (default: an open loop)",
    )
    group.add_argument(
        "--sweep",
        type=_rates,
        default=(),
        metavar="R,R,...",
        help="these rates one after the other, of a trace these --rate-scales (default: one rate)",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "bursty"),
        default="poisson",
        help="how requests follow each other",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=0.25,
        metavar="B",
        help="of bursty arrivals: shape of gamma-distributed gaps, 1 is Poisson, less is burstier",
    )
    group.add_argument(
        "--duration", type=seconds, metavar="S", help="begin requests for so long (default: 30, "
        "unless --count or --trace)"
    )  # fmt: skip
    group.add_argument(
        "--count",
        type=_count,
        default=0,
        metavar="N",
        help="send so many requests (default: as many as arrive)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="same seed, same requests (default: another each time, so that no "
        "cache remembers the prompts)",
    )


def _add_trace_options(group: options.Options) -> None:
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a Mooncake JSONL or an Azure CSV trace"
    )
    for option, text in (
        ("--rate-scale", "so many times as many requests a second"),
        ("--length-scale", "prompts and outputs so many times as long"),
    ):
        group.add_argument(option, type=_positive, default=1.0, metavar="X", help=text)
    for option, text in (
        ("--skip", "leave out so many rows first (default: none)"),
        ("--max-prompt", "cut prompts to so many tokens (default: not cut)"),
        ("--max-output", "cut outputs to so many tokens (default: not cut)"),
    ):
        group.add_argument(option, type=int, default=0, metavar="N", help=text)
    group.add_argument(
        "--spread-ties",
        action="store_true",
        help="spread requests of one time evenly up to the next: some traces' clocks are coarse",
    )


def _add_prompt_options(group: options.Options) -> None:
    for option, default in (("--prompt-tokens", "256"), ("--output-tokens", "64")):
        group.add_argument(
            option,
            default=default,
            metavar="LENGTHS",
            help="tokens: 512, 100-200 or lognormal:MEDIAN,SIGMA[,MOST]; not for traces",
        )
    group.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="put before each prompt; traces tell what is shared (default: none)",
    )
    group.add_argument(
        "--prefixes", type=_count, default=1, metavar="N", help="different shared prefixes"
    )
    group.add_argument(
        "--prompt-as",
        choices=("ids", "text", "chat"),
        default="ids",
        help="token ids; text or a chat message of as many words",
    )
    group.add_argument(
        "--ids", default="1000-4000", metavar="FIRST-END", help="token ids in prompts"
    )
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end before their length: for servers that do not know ignore_eos",
    )


def _add_measure_options(group: options.Options) -> None:
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help="what is good, in seconds: ttft=0.5,tpot=0.05,e2e=10 (default: no goodput)",
    )
    group.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="requests before, not measured (default: 4, or --concurrency if that is more)",
    )
    group.add_argument(
        "--blocks", type=_count, default=4, metavar="N", help="turns of each server with --against"
    )
    group.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for the report (default: baton-bench-TIME in this directory)",
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]
