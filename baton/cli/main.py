"""The `baton` command: one parser, one table of commands, one way to say what went wrong.

Each command imports what it alone needs when it runs, so that `baton generate` needs no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from baton.cli import (
    adapter,
    advise,
    bench,
    certs,
    chat,
    demo,
    doctor,
    explain,
    generate,
    health,
    planner,
    role,
    route,
    router,
    status,
    top,
    trace,
    up,
    workers,
)
from baton.cli.options import HelpFormatter, Parser, log_format, take_rest, use_tls
from baton.cli.process_setup import fix_for
from baton.errors import BatonError
from baton.log_format import error_line

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CLOSED_PIPE = 141  # 128 + SIGPIPE
# gRPC's C core reads these when it is loaded. Our own errors tell what it would write to stderr.
# Its newer poller passes each message through a pool of threads: five context switches instead of
# two, and up to twice the CPU time.
_GRPC_ENVIRONMENT = {
    "GRPC_VERBOSITY": "NONE",
    "GRPC_EXPERIMENTS": "-event_engine_poller_for_python",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line. Each command's namespace has `run(args) -> int`."""
    root = Parser(
        prog="baton",
        description="Serves large language models with prefill and decode on different workers.",
        epilog="first steps:\n"
        "  baton demo                       see it all once: cluster, completion, trace\n"
        "  baton up                         a cluster on this machine\n"
        "  baton generate 'class Stack:'    a completion from it\n\n"
        "`baton COMMAND --help` shows the options of a command.",
        formatter_class=HelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = root.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command"
    )
    for module in (
        *(up, demo, router, workers, planner, generate, chat, status, explain, health),
        *(role, adapter, route, doctor, top, trace, bench, advise, certs),
    ):
        module.add_commands(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 only if it did what it was asked to do."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, as `head`, has all that it wants: not an error. The
        # interpreter's last flush must not trip over it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(argv: Sequence[str] | None) -> int:
    args, rest = parser().parse_known_args(argv)
    if rest:
        take_rest(args, rest)
    for name, value in _GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        use_tls(args)
        exit_status: int = args.run(args)
        return exit_status
    except BatonError as error:
        return _fail(args, str(error) or type(error).__name__)
    except ModuleNotFoundError as error:
        if not (fix := fix_for(error, getattr(args, "extra", None))):
            raise
        return _fail(args, fix)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(args: argparse.Namespace, message: str) -> int:
    print(error_line(message, log_format(args)), file=sys.stderr)
    return 1


def _version() -> str:
    try:
        return metadata.version("baton-serving")
    except metadata.PackageNotFoundError:
        return "unknown (run from a source tree that is not installed)"
