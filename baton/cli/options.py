"""Options that several commands share, each written once, with the defaults of `baton.config`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from baton.cli.values import cores, device, share, size
from baton.config import (
    DTYPES,
    KERNELS,
    KV_DTYPES,
    QUANTIZATIONS,
    TRANSPORTS,
    EngineConfig,
    RegistryConfig,
    RouterConfig,
    WorkerConfig,
)
from baton.errors import DeadlineExceeded, Unavailable

DEFAULT_TARGET = f"127.0.0.1:{RouterConfig.port}"
_NOBODY_THERE = ("failed to connect", "errors resolving")
_ENGINE, _REGISTRY = EngineConfig(), RegistryConfig()

C = TypeVar("C")
Options = argparse._ArgumentGroup | argparse.ArgumentParser
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions and examples; adds defaults that the text does not tell."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        self._action_max_length = 18  # argparse forgets that the list of commands is indented

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_told = "default" in text or not action.option_strings
        has_default = action.default not in (None, "", argparse.SUPPRESS)
        silent = action.nargs == 0 or not has_default or action.default is False
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


class _RandomWeights(argparse.Action):
    """`--random-weights CONFIG` names the model and says that its weights are made up."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.model = values
        namespace.random_weights = True


def add_model_options(
    group: Options,
    model: str | None = _ENGINE.model,
    metavar: str = "DIR",
    text: str = "Hugging Face model directory, or 'demo' for the built-in one",
) -> None:
    """Which model, real or with made-up weights; the router needs no more of an engine."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("--model", default=model, metavar=metavar, help=text)
    either.add_argument(
        "--random-weights",
        action=_RandomWeights,
        default=False,
        metavar="CONFIG",
        help="for benchmarks: make weights up for this config.json or directory; where there is "
        "no tokenizer beside it, prompts are token ids only",
    )


def add_model_name_option(group: Options) -> None:
    """What requests call the model."""
    group.add_argument(
        "--model-name",
        default="",
        metavar="NAME",
        help="name that requests use (default: the model directory's)",
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
def calling(target: str, timeout_s: float | None) -> Iterator[None]:
    """Says in our words what gRPC says of a router that is not there or takes too long."""
    try:
        yield
    except Unavailable as error:
        if not any(sign in str(error) for sign in _NOBODY_THERE):
            raise
        raise Unavailable(
            f"no router answers at {target}: start one with `baton up`, or name one with --target",
            error.retry_after_s,
        ) from error
    except DeadlineExceeded as error:
        if timeout_s is None:
            raise
        raise DeadlineExceeded(f"not finished within --timeout {timeout_s:g} s") from error


def add_compute_options(group: Options) -> None:
    """In which precision and where an engine computes."""
    group.add_argument("--dtype", choices=DTYPES, default=_ENGINE.dtype, help="of weights and KV")
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=_ENGINE.quantization,
        help="weights and what they are multiplied with in 8 bits, faster and a little less exact: "
        "int8 anywhere, fp8 on a GPU that computes with it (default: none)",
    )
    group.add_argument(
        "--device",
        type=device,
        default=_ENGINE.device,
        metavar="auto|cpu|cuda|cuda:N",
        help="where it runs; auto is a GPU where torch sees one, cuda the first, cuda:N the Nth "
        "from 0; `baton up` spreads its workers over all GPUs unless told a number (default: auto)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=_ENGINE.kernels,
        help="on a CPU native, compiled on first use by g++, or torch, which needs nothing; on a "
        "GPU triton, or torch, which is slow (default: the first where it can be had)",
    )
    group.add_argument(
        "--speculate",
        type=int,
        default=_ENGINE.speculate,
        metavar="TOKENS",
        help="draft up to so many tokens a step from the text so far and check them at once: the "
        "same tokens, sooner where texts repeat themselves (default: 0, none)",
    )
    group.add_argument(
        "--threads",
        type=int,
        default=_ENGINE.threads,
        metavar="N",
        help="CPU threads of an engine (default: as many as its --cpus, else torch's choice)",
    )
    _add_gpu_options(group)


def _add_gpu_options(group: Options) -> None:
    group.add_argument(
        "--gpu-memory",
        type=share,
        default=_ENGINE.gpu_memory,
        metavar="SHARE",
        help="of a GPU's memory, for weights, activations, graphs and KV; `baton up` divides it "
        "among the workers of a GPU",
    )
    for option, text in (
        ("--no-graphs", "on a GPU: start each kernel of a decode step anew, without CUDA graphs"),
        ("--no-overlap", "on a GPU: prepare a step only when the one before it is done"),
    ):
        name = option.removeprefix("--no-")
        group.add_argument(option, dest=name, action="store_false", help=text)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How an engine runs a model: the fields of EngineConfig, and `cpus`."""
    group = parser.add_argument_group("engine")
    add_model_options(group)
    add_compute_options(group)
    add_simulate_option(group)
    memory = parser.add_argument_group("KV cache and batch")
    _add_memory_options(memory)


def add_simulate_option(group: Options) -> None:
    """How fast an engine is that only pretends to compute."""
    group.add_argument(
        "--simulate",
        default=_ENGINE.simulate,
        metavar="TOKENS_PER_S,STEP_MS",
        help="try routing and failures with many workers and no GPU: compute nothing, take as long "
        "as a model of this prefill rate and decode step (a third number: ms more per sequence "
        "in it); blocks, caches and transfers are real, the tokens mean nothing",
    )


def _add_memory_options(group: Options) -> None:
    group.add_argument(
        "--kv-cache",
        type=size,
        dest="kv_cache_bytes",
        default=_ENGINE.kv_cache_bytes,
        metavar="SIZE",
        help="memory for KV blocks, as 512MiB or 2GiB (default: 512MiB on a CPU; on a GPU what "
        "--gpu-memory leaves)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=_ENGINE.kv_dtype,
        help="8 bits: half the memory and transfer, a little less exact; fp8 on a GPU that knows "
        "it (default: as --dtype)",
    )
    for option, unit, text in (
        ("--kv-blocks", "blocks", "size of the KV cache instead (default: what fits --kv-cache)"),
        ("--block-size", "tokens", "in one KV block"),
        ("--max-context", "tokens", "of prompt and output together (default: the model's)"),
        ("--max-batch", "sequences", "in one engine step"),
        ("--chunk-tokens", "tokens", "of prompts and drafts in one engine step, at most"),
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


def add_cpus_option(parser: Options) -> None:
    """Which cores an engine may use."""
    parser.add_argument(
        "--cpus",
        type=cores,
        default=_ENGINE.cpus,
        metavar="0,1",
        help="pin the threads that compute to these cores (default: not pinned)",
    )


def add_nice_option(parser: Options) -> None:
    """Who goes first on a core that others use, too."""
    parser.add_argument(
        "--nice",
        type=int,
        default=_ENGINE.nice,
        metavar="N",
        help="from 0 to 19: how far the threads that compute stand back for others on their "
        "cores; `baton up` sets it for prefill workers (default: 0)",
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
    add_etcd_access_options(group)


def add_etcd_access_options(group: Options) -> None:
    """How etcd knows us and we know it."""
    group.add_argument("--etcd-user", default="", metavar="NAME", help="user of etcd")
    for option, text in (
        ("--etcd-password-file", "file with the user's password"),
        ("--etcd-ca", "PEM file with the authority that signed etcd's certificate"),
        ("--etcd-cert", "PEM file with our certificate"),
        ("--etcd-key", "PEM file with our certificate's key"),
    ):
        group.add_argument(option, type=Path, metavar="FILE", help=text)


def registry_config(args: argparse.Namespace) -> RegistryConfig:
    """What `add_registry_options` asked for."""
    return filled(
        RegistryConfig,
        args,
        user=args.etcd_user,
        password_file=args.etcd_password_file,
        ca_file=args.etcd_ca,
        cert_file=args.etcd_cert,
        key_file=args.etcd_key,
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
