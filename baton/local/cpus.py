"""Shares this machine's cores out to workers: two engines on the same core ruin each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one worker gets: `cpus` to be pinned to (empty: unpinned) and a number of threads.

    And of GPUs: `device`, and the part of its memory that is the worker's; empty: as configured.
    """

    cpus: tuple[int, ...]
    threads: int
    device: str = ""
    gpu_memory: float = 0.0


def available() -> tuple[int, ...]:
    """The cores this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def divide(cpus: Sequence[int], workers: int, threads: int = 0) -> list[Share]:
    """One share for each worker: neighbouring cores, disjoint, sizes that differ by at most one.

    With fewer cores than workers nobody is pinned and each gets one thread. `threads`, if not 0,
    is what each worker was told to use: then that many, and nobody is pinned.
    """
    if threads:
        return [Share((), threads)] * workers
    if len(cpus) < workers:
        return [Share((), 1)] * workers
    shares, begin = [], 0
    for worker in range(workers):
        size = len(cpus) // workers + (worker < len(cpus) % workers)
        shares.append(Share(tuple(cpus[begin : begin + size]), size))
        begin += size
    return shares


def share_out(workers: int, threads: int, warn: Callable[[str], None]) -> list[Share]:
    """`divide` of all cores that we may use; too many threads for them are told."""
    cores = available()
    shares = divide(cores, workers, threads)
    if warning := oversubscription(cores, shares):
        warn(f"warning: {warning}")
    return shares


def oversubscription(cpus: Sequence[int], shares: Sequence[Share]) -> str:
    """A warning when there are more threads than cores, otherwise empty."""
    threads = sum(share.threads for share in shares)
    if threads <= len(cpus):
        return ""
    return (
        f"{len(shares)} workers use {threads} threads on {len(cpus)} cores: they will slow each "
        "other down; start fewer workers or lower --threads"
    )
