"""`baton generate`: streams one completion to stdout, from a cluster or an engine here."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.process_setup import limit_cpu, with_threads
from baton.config import EngineConfig, model_path
from baton.config.options import declared, numbers
from baton.errors import InvalidRequest
from baton.generation.generation_config import sampling_defaults
from baton.generation.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from baton.client import Completion

_TEXT = """\
Streams the completion to stdout as it arrives. Exit status 0 only if the request finished;
ctrl-C cancels it and exits with 130."""
_EXAMPLES = """\
  baton generate 'class Stack:' --max-tokens 100
  cat main.py | baton generate - --temperature 0.8 --seed 1
  baton generate --token-ids 1,52,311 --json
  baton generate 'class Stack:' --local            without a cluster"""

_MAX_TOKENS = ("--max-tokens", int, "TOKENS")
_LOGPROBS = ("--logprobs", int, "N", "report log-probabilities with N alternatives (with --json)")
_MODELS = "default: that of generation_config.json"
_SAMPLING_OPTIONS = (
    ("--temperature", float, "T", f"0 takes the most likely token ({_MODELS}, else 1)"),
    ("--top-k", int, "K", f"sample from the K most likely tokens ({_MODELS}, else all)"),
    ("--top-p", float, "P", f"sample from the fewest tokens that reach P ({_MODELS}, else 1)"),
    ("--min-p", float, "P", f"drop tokens below P times the most likely ({_MODELS}, else 0)"),
    ("--seed", int, "N", "makes sampling repeatable (default: a random one)"),
    ("--min-tokens", int, "TOKENS", "fewest tokens before the output may end (default: 0)"),
)
_CLUSTER_OPTIONS = (
    ("--timeout", options.seconds, "SECONDS", "deadline of the request (default: the router's)"),
    ("--ttft-target", options.ttft_target, "SECONDS",
     "refuse the request if its first token will take longer (default: the router's)"),
)  # fmt: skip
# Parsers of sampling options by their names in the SDK and SamplingParams.
SAMPLING = {
    flag[2:].replace("-", "_"): parse for flag, parse, *_ in (_MAX_TOKENS, *_SAMPLING_OPTIONS)
}
_SAMPLING = (*SAMPLING, "logprobs", "ignore_eos")
_OF_A_CLUSTER = ("timeout", "priority", "ttft_target")  # names in the SDK
_MODEL_TEXT = (
    "model or adapter (default: the router's first model); with --local a model directory "
    "(default: demo)"
)


def add_commands(commands: options.Commands) -> None:
    """Adds `generate`."""
    parser = options.add_command(commands, "generate", "complete a prompt", _TEXT, _EXAMPLES)
    add_prompt_options(parser)
    _add_options(add_sampling_options(parser, "longest completion (default: 64)"), (_LOGPROBS,))
    where = add_where_options(parser)
    where.add_argument("--local", action="store_true", help="run the engine in this process")
    where.add_argument("--json", action="store_true", help="print one JSON object at the end")
    model = {"model": _MODEL_TEXT}, {"model": where}
    options.add_declared(parser, EngineConfig, "with --local", *model)
    options.add_config_option(parser)
    parser.set_defaults(run=_run)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: str) -> options.Options:
    """Adds options of sampling and of the output's end; `asked_of` reads them."""
    group = parser.add_argument_group("sampling")
    _add_options(group, ((*_MAX_TOKENS, max_tokens), *_SAMPLING_OPTIONS))
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop string; may be repeated"
    )
    group.add_argument(
        "--structured-outputs", type=_json, metavar="JSON",
        help='constraint on the output: {"json": SCHEMA}, {"regex": "…"}, {"choice": ["…"]} or '
        '{"grammar": "…"} (default: none)',
    )  # fmt: skip
    text = "continue after an end-of-sequence token"
    group.add_argument("--ignore-eos", action="store_true", default=None, help=text)
    return group


def add_where_options(parser: argparse.ArgumentParser) -> options.Options:
    """Adds options of the router, key and deadline; `asked_of` reads them."""
    group = parser.add_argument_group("where")
    options.add_target_option(group)
    _add_options(group, _CLUSTER_OPTIONS)
    options.add_key_option(group)
    text = "priority among waiting requests (default: the tenant's)"
    group.add_argument("--priority", choices=("low", "normal", "high"), help=text)
    return group


def asked_of(args: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_sampling_options` and `add_where_options` as options of the SDK."""
    names = ("stop", *_OF_A_CLUSTER, "structured_outputs")
    return {**_sampling(args), **{name: getattr(args, name) for name in names}}


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds PROMPT and its forms; the namespace also gets `usage_error`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT|-", help="text; - reads it from stdin")
    add, ids = parser.add_argument_group("prompt").add_argument, numbers
    add("--token-ids", type=ids, metavar="1,2,3", help="token ids instead of text")
    add("--chat", action="store_true", help="send PROMPT as a user's message to a chat model")
    parser.set_defaults(usage_error=parser.error)


def prompt_of(args: argparse.Namespace) -> Any:
    """The prompt of `add_prompt_options`; exits on a usage error.

    Raises InvalidRequest if stdin is not text.
    """
    if (args.prompt is None) == (args.token_ids is None):
        args.usage_error("give either PROMPT (or - for stdin) or --token-ids")
    if args.chat and args.token_ids is not None:
        args.usage_error("--chat takes PROMPT, not --token-ids")
    if args.token_ids is not None:
        return list(args.token_ids)
    text = _from_stdin() if args.prompt == "-" else args.prompt
    return [{"role": "user", "content": text}] if args.chat else text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error


def _from_stdin() -> str:
    if sys.stdin.isatty():
        print("baton: type the prompt, then ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not text: {error}") from error


def _add_options(group: options.Options, rows: Iterable[tuple[str, Any, str, str]]) -> None:
    for flag, parse, metavar, text in rows:
        group.add_argument(flag, type=parse, metavar=metavar, help=text)


def _run(args: argparse.Namespace) -> int:
    _check_usage(args)
    prompt = prompt_of(args)
    shown: list[str] = []

    def show(text: str) -> None:
        if text and not args.json:
            shown.append(text)
            print(text, end="", flush=True)

    try:
        completion = (_run_local if args.local else _run_remote)(args, prompt, show)
    finally:
        if shown:  # further output starts on a new line
            print(flush=True)
    if args.json:
        print(json.dumps(completion.to_dict(), ensure_ascii=False))
    elif not completion.text:
        count = len(completion.token_ids)
        print(f"baton: {count} tokens without text: --json shows them", file=sys.stderr)
    return 0 if completion.finish_reason else 1


def _check_usage(args: argparse.Namespace) -> None:
    for name in (*_OF_A_CLUSTER, "api_key_file"):
        if args.local and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            args.usage_error(f"{option} is for a cluster; it does not go with --local")
    if args.local:
        return
    given = [name for name in declared(EngineConfig) if name in args and name != "model"]
    if args.config:
        given.append("config")
    for name in given:
        args.usage_error(f"--{name} needs --local: a cluster has loaded its model")


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(args, name, None) for name in _SAMPLING}
    return {name: value for name, value in asked.items() if value is not None}


def _run_remote(args: argparse.Namespace, prompt: Any, show: Callable[[str], None]) -> Completion:
    asked: dict[str, Any] = {"model": getattr(args, "model", None), **asked_of(args)}
    with options.connected(args) as client, client.stream(prompt, **asked) as stream:
        for delta in stream:
            show(delta.text)
        return stream.completion


def _run_local(args: argparse.Namespace, prompt: Any, show: Callable[[str], None]) -> Completion:
    engine = with_threads(options.settings(EngineConfig, "generate", args))
    args.extra = "worker"  # the extra to install if a library is missing
    from baton.local.model_check import check_model

    check_model(engine)
    limit_cpu(engine.threads, engine.cpus)
    from baton.client.request import generate_request
    from baton.local.single import SingleProcess

    asked = {"seed": secrets.randbits(64), **sampling_defaults(model_path(engine.model))}
    params, cut = SamplingParams(**{**asked, **_sampling(args)}), args.max_tokens is None
    if args.structured_outputs is not None:
        message = generate_request("", {"structured_outputs": args.structured_outputs})
        output = StructuredOutput.from_proto(message.sampling.structured_output)
        params = replace(params, structured_output=output)
    with SingleProcess(engine) as process:
        return process.generate(prompt, params, args.stop or (), show, cut)
