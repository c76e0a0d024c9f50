"""`baton generate`: one completion, streamed to stdout, from a cluster or from this process."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.services import limit_cpu
from baton.cli.values import numbers, seconds
from baton.config import EngineConfig
from baton.errors import InvalidRequest
from baton.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.client import Completion

_TEXT = """\
Streams the completion to stdout as it arrives. Exit status 0 only if the request finished;
ctrl-C cancels it and exits with 130."""
_EXAMPLES = """\
  baton generate 'class Stack:' --max-tokens 100
  cat main.py | baton generate - --temperature 0.8 --seed 1
  baton generate --token-ids 1,52,311 --json
  baton generate 'class Stack:' --local            without a cluster: the same tokens"""

# Asked for by an option, by these names in both the SDK's options and SamplingParams.
_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("min_tokens", "ignore_eos", "logprobs"),
)


def add_commands(commands: options.Commands) -> None:
    """Adds `generate`."""
    parser = options.add_command(commands, "generate", "complete a prompt", _TEXT, _EXAMPLES)
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    where = parser.add_argument_group("where")
    options.add_target_option(where)
    where.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="for the whole request (default: none)",
    )
    options.add_model_options(
        where, None, "NAME", "model's name; with --local its directory (default: demo)"
    )
    where.add_argument("--local", action="store_true", help="run the engine in this process")
    where.add_argument("--json", action="store_true", help="print one JSON object at the end")
    engine = parser.add_argument_group("with --local")
    options.add_compute_options(engine)
    options.add_cpus_option(engine)
    parser.set_defaults(run=_run, usage_error=parser.error)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT|-", help="text; - reads it from stdin")
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--token-ids", type=numbers, metavar="1,2,3", help="token ids instead of text"
    )
    group.add_argument(
        "--chat", action="store_true", help="send PROMPT as a user's message to a chat model"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for option, kind, unit, text in (
        ("--max-tokens", int, "TOKENS", "in the completion (default: 64)"),
        ("--temperature", float, "T", "0 takes the most likely token (default: 0)"),
        ("--top-k", int, "K", "sample from the K most likely tokens (default: all)"),
        ("--top-p", float, "P", "sample from the fewest tokens that reach P (default: 1)"),
        ("--min-p", float, "P", "drop tokens below P times the most likely (default: 0)"),
        ("--seed", int, "N", "makes sampling repeatable (default: a random one)"),
        ("--min-tokens", int, "TOKENS", "before an end of sequence counts (default: 0)"),
        ("--logprobs", int, "N", "report log-probabilities with N alternatives (with --json)"),
    ):
        group.add_argument(option, type=kind, metavar=unit, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends it; may be repeated")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on after the end of sequence"
    )


def _run(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    output = _Output(is_shown=not args.json)
    try:
        completion = (_run_local if args.local else _run_remote)(args, prompt, output)
    finally:
        output.end_line()
    if args.json:
        print(json.dumps(completion.to_dict(), ensure_ascii=False))
    elif not completion.text:
        count = len(completion.token_ids)
        print(f"baton: no text, but {count} tokens: --json shows them", file=sys.stderr)
    return 0 if completion.finish_reason else 1


def _prompt(args: argparse.Namespace) -> Any:
    """What to complete: text, token ids or chat messages; ends the program on bad usage."""
    if (args.prompt is None) == (args.token_ids is None):
        args.usage_error("give either PROMPT (or - for stdin) or --token-ids")
    if args.chat and args.token_ids is not None:
        args.usage_error("--chat takes PROMPT, not --token-ids")
    if args.local and args.timeout is not None:
        args.usage_error("--timeout is for a cluster; it does not go with --local")
    if args.random_weights and not args.local:
        args.usage_error("--random-weights goes with --local: a cluster has its own model")
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


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that were asked for."""
    asked = {name: getattr(args, name) for name in _SAMPLING}
    return {name: value for name, value in asked.items() if value is not None}


def _run_remote(args: argparse.Namespace, prompt: Any, output: _Output) -> Completion:
    from baton import Client

    asked = {"model": args.model, "stop": args.stop, "timeout": args.timeout, **_sampling(args)}
    with (
        options.calling(args.target, args.timeout),
        Client(args.target) as client,
        client.stream(prompt, **asked) as stream,
    ):
        for delta in stream:
            output.show(delta.text)
        return stream.completion


def _run_local(args: argparse.Namespace, prompt: Any, output: _Output) -> Completion:
    threads = args.threads or len(args.cpus or ())
    engine = options.filled(EngineConfig, args, model=args.model or "demo", threads=threads)
    limit_cpu(threads, args.cpus)
    from baton.local.single import run_local

    return run_local(
        engine, prompt, SamplingParams(**_sampling(args)), args.stop or [], output.show
    )


class _Output:
    """The text on stdout, each part flushed as it comes; nothing when it is not to be shown."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._has_begun = False

    def show(self, text: str) -> None:
        if text and self._is_shown:
            self._has_begun = True
            print(text, end="", flush=True)

    def end_line(self) -> None:
        """So that whatever comes next begins on a line of its own."""
        if self._has_begun:
            print(flush=True)
