"""`baton top`: routers, workers and links, live."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli import options
from baton.cli.options import count, seconds

_TEXT = """\
Shows what routers and workers do now: requests and goodput a second, batches, KV blocks, tokens a
second, transfers, and what went wrong lately. Goodput counts requests that ended well and, where
they had a target for their first token, met it. Keys: q quits, r shows one role's workers, s
sorts them."""
_EXAMPLES = """\
  baton top
  baton top --target 10.0.0.9:7700,10.0.0.10:7700 --interval 0.5
  baton top --once > frame.txt"""


def add_commands(commands: options.Commands) -> None:
    """Adds `top`."""
    parser = options.add_command(commands, "top", "watch the cluster live", _TEXT, _EXAMPLES)
    add = parser.add_argument
    text = "the router's address; of several, separated by commas, all are shown"
    add("--target", default=options.DEFAULT_TARGET, metavar="HOST:PORT", help=text)
    options.add_tls_options(parser)
    options.add_key_option(parser)
    add("--interval", type=seconds, default=1.0, metavar="SECONDS", help="between two looks")
    add("--once", action="store_true", help="print one frame, with rates over one interval")
    add("--width", type=count, metavar="COLUMNS", help="of --once's frame (default: 160)")
    parser.set_defaults(run=_run, extra="cli")


def _run(args: argparse.Namespace) -> int:
    from baton.local import top

    addresses = [address for address in args.target.split(",") if address.strip()]
    polling = addresses, args.interval, options.api_key(args)
    if args.once:
        print(asyncio.run(top.once(*polling, args.width)))
        return 0
    return asyncio.run(top.watch(*polling))
