"""Options that several commands share, each written once, with the defaults of `baton.config`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from baton.config import (
    DEVICES,
    DTYPES,
    TRANSPORTS,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    WorkerConfig,
)
from baton.errors import Unavailable

LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_TARGET = f"127.0.0.1:{RouterConfig.port}"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ENGINE, _REGISTRY = EngineConfig(), RegistryConfig()

C = TypeVar("C")
Options = argparse._ArgumentGroup | argparse.ArgumentParser
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions and examples; adds defaults that the text does not tell."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_told = "default" in text or not action.option_strings
        silent = action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS)
        return text if silent or is_told else f"{text} (default: %(default)s)"


def add_command(commands: Commands, name: str, summary: str, text: str, examples: str) -> Any:
    """A command's parser with help in our form: summary, explanation, options, examples."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}",
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
    )


def filled(cls: type[C], args: argparse.Namespace, **given: Any) -> C:
    """The dataclass `cls` from `given`, then from options of the same names as its fields."""
    values = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if hasattr(args, field.name)
    }
    return cls(**{**values, **given})


def size(text: str) -> int:
    """Bytes from "512MiB", "2GiB" or "1048576"."""
    match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512MiB, 2GiB or bytes")
    return int(match[1]) * _UNITS[match[2]]


def numbers(text: str) -> list[int]:
    """Whole numbers from "1,2,3"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write 1,2,3")
    return values


def add_model_options(group: Options) -> None:
    """Which model; the router needs no more of the engine's options."""
    group.add_argument(
        "--model",
        default=_ENGINE.model,
        metavar="DIR",
        help="Hugging Face model directory, or 'demo' for the built-in one",
    )


def add_target_option(group: Options) -> None:
    """Which router to call."""
    group.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help="the router's address; more, separated by commas, are tried in turn",
    )


@contextlib.contextmanager
def calling(target: str) -> Iterator[None]:
    """Adds the mend to Unavailable when nothing listens at `target`."""
    try:
        yield
    except Unavailable as error:
        if "failed to connect" not in str(error):
            raise
        raise Unavailable(
            f"no router answers at {target}: start one with `baton up`, or name one with --target",
            error.retry_after_s,
        ) from error


def add_compute_options(group: Options) -> None:
    """In which precision and where an engine computes."""
    group.add_argument("--dtype", choices=DTYPES, default=_ENGINE.dtype, help="of weights and KV")
    group.add_argument("--device", choices=DEVICES, default=_ENGINE.device, help="where it runs")
    group.add_argument(
        "--threads",
        type=int,
        default=_ENGINE.threads,
        metavar="N",
        help="CPU threads of an engine (default: as many as its --cpus, else torch's choice)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How an engine runs a model: the fields of EngineConfig, and `cpus`."""
    group = parser.add_argument_group("engine")
    add_model_options(group)
    add_compute_options(group)
    group.add_argument(
        "--random-weights",
        action="store_true",
        help="make weights up from config.json, for benchmarks",
    )
    memory = parser.add_argument_group("KV cache and batch")
    _add_memory_options(memory)


def _add_memory_options(group: Options) -> None:
    group.add_argument(
        "--kv-cache",
        type=size,
        dest="kv_cache_bytes",
        default=_ENGINE.kv_cache_bytes,
        metavar="SIZE",
        help="memory for KV blocks, as 512MiB or 2GiB (default: 512MiB)",
    )
    for option, unit, text in (
        ("--kv-blocks", "blocks", "size of the KV cache instead (default: what fits --kv-cache)"),
        ("--block-size", "tokens", "in one KV block"),
        ("--max-context", "tokens", "of prompt and output together (default: the model's)"),
        ("--max-batch", "sequences", "in one engine step"),
        ("--chunk-tokens", "tokens", "computed in one engine step at most"),
    ):
        name = option.strip("-").replace("-", "_")
        default = getattr(_ENGINE, name)
        group.add_argument(option, type=int, default=default, metavar=unit.upper(), help=text)
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute each prompt from its first token",
    )


def add_cpus_option(parser: argparse.ArgumentParser) -> None:
    """Which cores a process that runs an engine may use."""
    parser.add_argument(
        "--cpus",
        type=numbers,
        metavar="0,1",
        help="pin the process to these cores (default: not pinned)",
    )


def add_registry_options(parser: argparse.ArgumentParser) -> None:
    """Where members are kept: the fields of RegistryConfig."""
    group = parser.add_argument_group("registry")
    group.add_argument(
        "--etcd",
        default=_REGISTRY.etcd,
        metavar="HOST:PORT",
        help="etcd's address, several separated by commas; https:// in front for TLS",
    )
    group.add_argument(
        "--cluster",
        default=_REGISTRY.cluster,
        metavar="NAME",
        help="keeps clusters on one etcd apart",
    )
    group.add_argument(
        "--lease-ttl",
        type=int,
        dest="lease_ttl_s",
        default=_REGISTRY.lease_ttl_s,
        metavar="SECONDS",
        help="until a member that went silent counts as gone",
    )
    group.add_argument("--etcd-user", dest="user", default="", metavar="NAME", help="user of etcd")
    for option, field, text in (
        ("--etcd-password-file", "password_file", "file with the user's password"),
        ("--etcd-ca", "ca_file", "PEM file with the authority that signed etcd's certificate"),
        ("--etcd-cert", "cert_file", "PEM file with our certificate"),
        ("--etcd-key", "key_file", "PEM file with our certificate's key"),
    ):
        group.add_argument(option, type=Path, dest=field, metavar="FILE", help=text)


def add_telemetry_options(parser: argparse.ArgumentParser, log_level: str = "info") -> None:
    """Where spans go and how much is logged."""
    group = parser.add_argument_group("telemetry")
    group.add_argument(
        "--otlp", metavar="URL", help="export traces to this OTLP/gRPC address, as http://HOST:4317"
    )
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default=log_level, help="of log lines on stderr"
    )


def add_transport_option(group: Options) -> None:
    """How KV blocks travel."""
    group.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default=WorkerConfig.transport,
        help="how KV blocks travel; auto takes the fastest that both workers can use",
    )


def add_drain_option(group: Options, default: float) -> None:
    """How long running requests get."""
    group.add_argument(
        "--drain-timeout",
        type=float,
        dest="drain_s",
        default=default,
        metavar="SECONDS",
        help="for running requests to end after SIGTERM",
    )
