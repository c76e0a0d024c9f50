"""Clusters for the experiments, and the options that describe them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baton.config import ClusterConfig, EngineConfig
from baton.local.cluster import LocalCluster

TINY = Path(__file__).with_name("tiny.json")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the module's text as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_options(
    options: argparse.ArgumentParser,
    prefill: int,
    decode: int,
    simulate: str = "",
    kv_blocks: int = 4096,
    chunk_tokens: int = 256,
) -> None:
    """How many workers there are and what runs on them."""
    options.add_argument("--prefill", type=int, default=prefill, help="prefill workers")
    options.add_argument("--decode", type=int, default=decode, help="decode workers")
    options.add_argument(
        "--simulate",
        default=simulate,
        metavar="TOKENS_PER_S,STEP_MS[,MS_PER_SEQUENCE]",
        help="simulated engines of this speed"
        + (f" (default: {simulate})" if simulate else " (default: the demo model, computed)"),
    )
    options.add_argument(
        "--kv-blocks", type=int, default=kv_blocks, help="of 16 tokens, each worker"
    )
    options.add_argument(
        "--chunk-tokens", type=int, default=chunk_tokens, help="in one engine step"
    )


def cluster(
    args: argparse.Namespace,
    router: Sequence[str] = (),
    programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> LocalCluster:
    """The cluster that the options ask for; `router` are more of its router's options."""
    engine = EngineConfig(
        model=str(TINY) if args.simulate else "demo",
        random_weights=bool(args.simulate),
        simulate=args.simulate,
        kv_blocks=args.kv_blocks,
        chunk_tokens=args.chunk_tokens,
    )
    config = ClusterConfig(engine=engine, port=0, prefill=args.prefill, decode=args.decode)
    return LocalCluster(config, extra_args={"router": router}, programs=programs)


def setting(args: argparse.Namespace) -> str:
    """What was measured, for the head of a report."""
    engine = f"simulated engines ({args.simulate})" if args.simulate else "the demo model"
    return (
        f"{args.prefill} prefill and {args.decode} decode workers of {engine}, "
        f"{args.kv_blocks} KV blocks and chunks of {args.chunk_tokens} tokens each"
    )
