"""`baton top`: routers, workers and links, live."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli import options
from baton.cli.options import count, seconds

_TEXT = """\
Shows routers and workers live: requests and goodput per second, batches, KV blocks, tokens per
second, transfers, recent failures. Goodput counts requests that succeeded and met their target for
the first token, if any. Keys: q quits, r selects a role's workers, s changes their order."""
_EXAMPLES = """\
  baton top
  baton top --target 10.0.0.9:7700,10.0.0.10:7700 --interval 0.5
  baton top --once > frame.txt"""


def add_commands(commands: options.Commands) -> None:
    """Adds `top`."""
    parser = options.add_command(commands, "top", "watch the cluster live", _TEXT, _EXAMPLES)
    add = parser.add_argument
    text = "router's address; several, separated by commas, are all shown"
    add("--target", default=options.DEFAULT_TARGET, metavar="HOST:PORT", help=text)
    options.add_tls_options(parser)
    options.add_key_option(parser)
    add("--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between two polls")
    add("--once", action="store_true", help="print one frame, with rates over one interval")
    add("--width", type=count, metavar="COLUMNS", help="width of --once's frame (default: 160)")
    parser.set_defaults(run=_run, extra="cli")


def _run(args: argparse.Namespace) -> int:
    from baton.local import top

    if args.width and not args.once:
        args.parser.error("--width is for --once: otherwise the terminal has a width")
    addresses = [address for one in args.target.split(",") if (address := one.strip())]
    polling = addresses, args.interval, options.api_key(args)
    if args.once:
        print(asyncio.run(top.once(*polling, args.width)))
        return 0
    return asyncio.run(top.watch(*polling))
