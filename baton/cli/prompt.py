"""The prompt of a command: text, stdin, token ids or a chat message."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from baton.cli.values import numbers
from baton.errors import InvalidRequest


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """PROMPT and what it is; the parser's namespace has `usage_error` too."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT|-", help="text; - reads it from stdin")
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--token-ids", type=numbers, metavar="1,2,3", help="token ids instead of text"
    )
    group.add_argument(
        "--chat", action="store_true", help="send PROMPT as a user's message to a chat model"
    )
    parser.set_defaults(usage_error=parser.error)


def prompt_of(args: argparse.Namespace) -> Any:
    """What `add_prompt_options` asked for; ends the program on bad usage.

    Raises InvalidRequest when stdin is not text.
    """
    if (args.prompt is None) == (args.token_ids is None):
        args.usage_error("give either PROMPT (or - for stdin) or --token-ids")
    if args.chat and args.token_ids is not None:
        args.usage_error("--chat takes PROMPT, not --token-ids")
    if args.token_ids is not None:
        return args.token_ids
    text = _from_stdin() if args.prompt == "-" else args.prompt
    return [{"role": "user", "content": text}] if args.chat else text


def _from_stdin() -> str:
    if sys.stdin.isatty():
        print("baton: the prompt is read from here; ctrl-D ends it", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not text: {error}") from error
