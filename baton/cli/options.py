"""Command-line options: those declared in `baton.config`, and those that commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import http.client
import os
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from baton.config import (
    HTTP_PORT,
    MAX_TTFT_TARGET_S,
    TTFT_HINT,
    ClusterConfig,
    EngineConfig,
    PlannerConfig,
    RouterConfig,
    WorkerConfig,
    check_api_key,
    options,
    split_address,
)
from baton.config.options import Option
from baton.errors import BatonError, ConfigError, DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from baton import Client

DEFAULT_TARGET = f"127.0.0.1:{RouterConfig.port}"
CONFIGS: dict[str, type[Any]] = {
    "up": ClusterConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "planner": PlannerConfig,
    "generate": EngineConfig,  # with --local
    "bench engine": EngineConfig,
    "advise": EngineConfig,
    "doctor": EngineConfig,  # with --model
}
# Accepted aliases: vLLM's names of the same options.
ALIASES = {
    "--max-model-len": "--max-context",
    "--served-model-name": "--model-name",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--gpu-memory-utilization": "--gpu-memory",
    "--max-num-seqs": "--max-batch",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-cache",
    "--enable-prefix-caching": "--prefix-cache",
    "--enable-expert-parallel": "--expert-parallel",
    "--tool-call-parser": "--tool-parser",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
    "--uvicorn-log-level": "--log-level",
}
# Hints for options of vLLM that do not exist here.
_NOT_NEEDED = "it is not needed: leave it out"
SIMILAR = {
    "--max-num-batched-tokens": "do you mean --chunk-tokens?",
    "--num-gpu-blocks-override": "do you mean --kv-blocks?",
    "--data-parallel-size": "do you mean --decode (and --prefill) of `baton up`?",
    "--pipeline-parallel-size": "there is no pipeline parallelism: use --tp",
    "--enforce-eager": "do you mean --no-graphs?",
    "--num-speculative-tokens": "do you mean --speculate TOKENS?",
    "--speculative-config": "do you mean --speculate TOKENS or --speculative-model DIR|mtp?",
    "--enable-lora": "do you mean --max-loras N?",
    "--lora-modules": "do you mean --lora NAME=DIR?",
    "--allowed-origins": "do you mean --cors-origins?",
    "--tokenizer": "the tokenizer is read from --model DIR",
    "--seed": "seeds are given with requests",
    "--trust-remote-code": "code in a model directory is never run: leave it out",
    "--enable-chunked-prefill": _NOT_NEEDED,
    "--enable-auto-tool-choice": _NOT_NEEDED,
    "--enable-reasoning": _NOT_NEEDED,
    "--disable-log-requests": _NOT_NEEDED,
    "--no-enable-log-requests": _NOT_NEEDED,
}
# How gRPC's own texts begin; a router's, of whom it cannot reach, name that first.
_NO_ANSWER = ("failed to connect", "errors resolving")
_PROBE_S = 1.0
_LOG_FORMAT = "log-format"
# What OpenSSL finds wrong with a certificate (X509_V_ERR_...).
_UNSIGNED = (2, 7, 18, 19, 20, 21)  # nobody who is trusted has signed it
_MISNAMED = (62, 64)  # for another host name or IP address

C = TypeVar("C")
Options = argparse._ArgumentGroup | argparse.ArgumentParser
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """A command's parser: usage errors are one line, without the usage, which may be forty."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists all)\n")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions and examples; adds defaults that a text does not state."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        self._action_max_length = 18  # argparse forgets that the list of commands is indented

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_stated = "default" in text or not action.option_strings
        has_default = action.default not in (None, "", argparse.SUPPRESS)
        silent = action.nargs == 0 or not has_default or action.default is False
        return text if silent or is_stated else f"{text} (default: %(default)s)"


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    text: str,
    examples: str,
    aliases: Sequence[str] = (),
) -> Any:
    """Adds a command's parser; its help has summary, explanation, options and examples."""
    parser = commands.add_parser(
        name,
        aliases=aliases,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}",
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(parser=parser, takes_model=False)
    return parser


def take_rest(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Handles arguments that the parser left: a model, as in `vllm serve MODEL`, else an error.

    An error exits the process with the nearest known option.
    """
    parser: argparse.ArgumentParser = args.parser
    flags = parser._option_string_actions
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = SIMILAR.get(flag, "")
        if near := difflib.get_close_matches(flag, flags, 1, 0.7):
            hint = hint or f"do you mean {near[0]}?"
        text = f"there is no option {flag}" + (f": {hint}" if hint else "")
    elif len(rest) == 1 and args.takes_model and not {"model", "random-weights"} & set(vars(args)):
        is_many = isinstance(flags["--model"], argparse._AppendAction)
        vars(args)["model"] = [rest[0]] if is_many else rest[0]
        return
    else:
        text = f"unrecognized arguments: {' '.join(rest)}"
    parser.error(text)


def add_declared(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    group: str = "",
    texts: Mapping[str, str] | None = None,
    places: Mapping[str, Options] | None = None,
) -> None:
    """Adds the options of a settings class, in its groups or in one.

    By keys of options, `texts` replace helps, and `places` the groups that they are shown in.
    The namespace gets only options that are given, under their keys.
    """
    declared = options.declared(cls).values()
    if any(one.key == _LOG_FORMAT for one in declared):
        parser.set_defaults(has_log=True)
    titles = [group or cls.GROUP, *(group or one.group for one in declared)]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles)}
    for one in declared:
        place = (places or {}).get(one.key, groups[group or one.group])
        _add(place, one, (texts or {}).get(one.key, one.help))


def _add(group: Any, one: Option, text: str) -> None:
    is_stated = "default" in text or one.default in (None, "", ()) or one.sets
    default = one.default
    if one.is_switch:
        default = "yes" if default else "no"
    elif isinstance(default, float):
        default = f"{default:g}"
    text = (text if is_stated else f"{text} (default: {default})").replace("%", "%%")
    kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if not one.is_switch:
        kind = {"action": "append" if one.many else "store", "type": one.read}
        kind |= {"choices": one.choices} if one.choices else {"metavar": one.metavar or None}
    kind |= {"dest": one.key, "default": argparse.SUPPRESS}
    group.add_argument(one.flag, help=text, **kind)
    for alias, flag in ALIASES.items():
        if flag == one.flag:
            group.add_argument(alias, help=argparse.SUPPRESS, **kind)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Adds --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with options by name, as max-batch = 32; the command line and environment "
        f"variables, as {options.PREFIX}MAX_BATCH=32, take precedence (default: none)",
    )


def settings(cls: type[C], command: str, args: argparse.Namespace, **given: Any) -> C:
    """A command's settings, from the command line, the environment and the file of `--config`.

    `--config` with a JSON object replaces file and environment: `baton up` starts its processes so.
    Raises ConfigError.
    """
    mine = options.declared(CONFIGS[command])
    line = {key: vars(args)[key] for key in mine if key in vars(args)}
    line = {key: tuple(value) if mine[key].many else value for key, value in line.items()}
    return options.build(cls, _read(mine, args.config) | line, **given)


def log_format(args: argparse.Namespace) -> str:
    """The format of the command's log, also where its settings are wrong; "text" without a log."""
    if not vars(args).get("has_log"):
        return "text"
    if given := vars(args).get(_LOG_FORMAT):
        return str(given)
    mine = {_LOG_FORMAT: options.declared(RouterConfig)[_LOG_FORMAT]}
    try:
        return str(_read(mine, args.config).get(_LOG_FORMAT, "text"))
    except ConfigError:
        return os.environ.get(f"{options.PREFIX}LOG_FORMAT", "text")


def service_values() -> options.Values:
    """Options, by key, of the service in whose container this command runs."""
    return _read(options.declared(RouterConfig) | options.declared(WorkerConfig), "")


def _read(mine: Mapping[str, Option], config: str) -> options.Values:
    known = {"config", *(flag.removeprefix("--") for flag in _TLS_OPTIONS)}
    known = known.union(*map(options.declared, CONFIGS.values()))
    source = config or os.environ.get(f"{options.PREFIX}CONFIG", "")
    return options.read(mine, known, os.environ, source)


def positive(text: str, error: str = "{!r} is no number above 0") -> float:
    """Parses a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(error.format(text))
    return value


def seconds(text: str) -> float:
    """Parses seconds above 0."""
    return positive(text, "{!r} is no time: write seconds above 0")


def ttft_target(text: str) -> float:
    """Parses a target for the time to first token, in seconds."""
    if (value := seconds(text)) > MAX_TTFT_TARGET_S:
        raise ConfigError(f"{text} is over {MAX_TTFT_TARGET_S} s: {TTFT_HINT}")
    return value


def count(text: str) -> int:
    """Parses a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{text!r} is no number of things: write 1 or more")
    return int(text)


_TARGET_TEXT = "router's address; several, separated by commas, are tried in turn"


def add_target_option(group: Options, text: str = _TARGET_TEXT) -> None:
    """Adds --target and the TLS options."""
    group.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help=text)
    add_tls_options(group)


_TLS_OPTIONS = {
    "--tls-ca": ("FILE", "PEM file with the CA of the router's certificate; turns on TLS"),
    "--tls-cert": ("FILE", "PEM file with a client certificate, if the server asks for one"),
    "--tls-key": ("FILE", "PEM file with the private key of --tls-cert"),
    "--tls-name": ("NAME", "name in the server's certificate, as worker.baton (default: its host)"),
}


def add_tls_options(group: Options) -> None:
    """Adds the TLS options of a client, whose defaults come from the environment."""
    for flag, (metavar, text) in _TLS_OPTIONS.items():
        variable = options.PREFIX + flag.strip("-").upper().replace("-", "_")
        default = os.environ.get(variable, "")
        if flag == "--tls-ca":
            default = default or os.environ.get(f"{options.PREFIX}TLS_CLIENT_CA", "")
        group.add_argument(flag, default=default, metavar=metavar, help=text)


def add_key_option(group: Options) -> None:
    """Adds --api-key-file; `api_key` reads it."""
    text = "file with the API key (default: the variable BATON_API_KEY, if set)"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=text)


def api_key(args: argparse.Namespace) -> str | None:
    """The API key of a command with `add_key_option`. Raises ConfigError."""
    return api_key_of(args.api_key_file, os.environ.get("BATON_API_KEY"))


def api_key_of(path: Path | None, default: str | None) -> str | None:
    """The key in the file, else a non-empty default, that of the variable.

    Raises ConfigError, without the key.
    """
    if path is None:
        if not default:
            return None
        key, source = default, "BATON_API_KEY"
    else:
        try:
            key, source = path.read_text().strip(), f"the key in --api-key-file {path}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read") from error
    check_api_key(key, source)
    return key


def use_tls(args: argparse.Namespace) -> None:
    """Uses a command's TLS options for this process's connections. Raises ConfigError."""
    cert, key, ca = (getattr(args, f"tls_{part}", "") for part in ("cert", "key", "ca"))
    if not (cert or key or ca):
        return
    from baton.net import tls

    if credentials := tls.of_caller(cert, key, ca, args.tls_name):
        tls.use(credentials)


def add_timeout_option(parser: argparse.ArgumentParser) -> None:
    """Adds --timeout of commands that query a router."""
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="for its answer"
    )


def add_question_options(parser: argparse.ArgumentParser, json: bool = True) -> None:
    """Adds the options of commands that query a router; see `connected`."""
    add_target_option(parser)
    add_timeout_option(parser)
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_key_option(parser)


@contextlib.contextmanager
def connected(args: argparse.Namespace) -> Iterator[Client]:
    """A client for the target, key and time-out of a command. Raises ConfigError."""
    from baton import Client

    with calling(args.target, args.timeout), Client(args.target, api_key=api_key(args)) as client:
        yield client


@contextlib.contextmanager
def calling(target: str, timeout_s: float | None, what: str = "router") -> Iterator[None]:
    """Replaces gRPC's errors about unreachable or slow routers by ones that name the remedy."""
    try:
        yield
    except Unavailable as error:
        if not str(error).startswith(_NO_ANSWER):
            raise
        if hint := _http_hint(target) or _tls_hint(target):
            raise Unavailable(hint) from error
        raise Unavailable(
            f"no {what} answers at {target}: start one with `baton up`, or name one with --target",
            error.retry_after_s,
        ) from error
    except DeadlineExceeded as error:
        if timeout_s is None:
            raise
        why = f": {error.__cause__}" if isinstance(error.__cause__, BatonError) else ""
        raise DeadlineExceeded(f"not finished within --timeout {timeout_s:g} s{why}") from error


def _tls_hint(target: str) -> str:
    """The mistake in calling a `target` that uses TLS; empty if there is none."""
    from baton.net import tls

    ours = tls.current()
    context = ssl.create_default_context(cafile=ours.ca_file)
    if ours.ca_file is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # as gRPC does
    for address in target.split(","):
        with contextlib.suppress(ConfigError, OSError):
            host, port = split_address(address.strip())
            host = host.strip("[]")
            try:
                with (
                    socket.create_connection((host, port), _PROBE_S) as connection,
                    context.wrap_socket(
                        connection, server_hostname=ours.server_name or host
                    ) as encrypted,
                ):
                    if encrypted.selected_alpn_protocol() is None:
                        return _speaks_http(address.strip(), host, port)
                    if ours.ca_file is None:
                        return f"{address.strip()} uses TLS: name its CA with --tls-ca"
                    if ours.cert_file is None:
                        return f"{address.strip()} needs a certificate: --tls-cert and --tls-key"
            except ssl.SSLCertVerificationError as error:
                why = error.verify_message
                if error.verify_code in _UNSIGNED:
                    return f"--tls-ca did not sign the certificate of {address.strip()}: {why}"
                wrong = f"{address.strip()} has a certificate that cannot be used: {why}"
                misnamed = error.verify_code in _MISNAMED
                return wrong + (" (name another with --tls-name)" if misnamed else "")
    return ""


def _http_hint(target: str) -> str:
    """A hint if `target` is a router's HTTP port; else empty."""
    for address in target.split(","):
        try:
            host, port = split_address(address.strip().removeprefix("http://").rstrip("/"))
            connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=_PROBE_S)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                connection.getresponse()
        except (ConfigError, OSError, http.client.HTTPException):
            continue
        return _speaks_http(address.strip(), host, port)
    return ""


def _speaks_http(address: str, host: str, port: int) -> str:
    behind = port - HTTP_PORT
    likely = RouterConfig.port + (behind if 0 <= behind < HTTP_PORT - RouterConfig.port else 0)
    return (
        f"{address} speaks HTTP, and this command speaks gRPC: name the router's "
        f"--port instead of its --http-port, by default --target {host}:{likely}"
    )
