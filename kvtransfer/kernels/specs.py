"""How the kernels are compiled without a GPU, as `python -m baton.engine.ops.triton check` reads
it.

Plain data with the fields that the checker knows: nothing of `kvtransfer` imports an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.kernels.blocks import TILE, WARPS, move_blocks


@dataclass(frozen=True)
class Case:
    """One way in which a kernel is compiled; fields as in the checker."""

    name: str
    fn: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = WARPS
    num_stages: int = 2
    least: int = 80
    aligned: Sequence[str] = ()


@dataclass(frozen=True)
class Spec:
    """A kernel and its cases; nothing of it is tuned."""

    name: str
    cases: Sequence[Case]
    candidates: Callable[[Any], Sequence[Any]] = lambda key: ()
    shapes: Sequence[Any] = ()
    inputs: Any = None


_TYPES = {
    "source": "*i32",
    "target": "*i32",
    "source_ids": "*i32",
    "target_ids": "*i32",
    "sums": "*i64",
    "first_word": "i64",
    "num_blocks": "i32",
    "tail_tokens": "i32",
}
_USES = {  # FROM_POOL, TO_POOL, WRITES
    "gather": (True, False, True),
    "scatter": (False, True, True),
    "copy": (True, True, True),
    "checksum": (True, False, False),
}
_POOLS = {  # ROWS (layers, K and V, heads), words of a slot; blocks of 16 tokens
    "bf16 128": (32 * 2 * 8, 64),
    "int8 64": (24 * 2 * 2, 17),
}


def _case(use: str, pool: str) -> Case:
    from_pool, to_pool, writes = _USES[use]
    rows, slot_words = _POOLS[pool]
    constexprs = {
        "ROWS": rows,
        "ROW_WORDS": 16 * slot_words,
        "SLOT_WORDS": slot_words,
        "FROM_POOL": from_pool,
        "TO_POOL": to_pool,
        "WRITES": writes,
        "TILE": TILE,
    }
    return Case(f"{use} {pool}", move_blocks, _TYPES, constexprs)


SPECS = (Spec("move_blocks", [_case(use, pool) for use in _USES for pool in _POOLS]),)
