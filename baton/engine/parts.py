"""What a device's engine runs with: what building for a CPU and for a GPU have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.kv_cache import KvLayout
from baton.engine.runner import StepRunner


def do_nothing() -> None:
    """What there is to prepare on a CPU."""


@dataclass(frozen=True)
class Parts:
    """A model over its KV pool.

    lookahead: slots that decoding sequences get beforehand; see `Planner` · prepare: called
    once, before the first step.
    """

    runner: StepRunner
    layout: KvLayout
    lookahead: int = 0
    prepare: Callable[[], None] = do_nothing
