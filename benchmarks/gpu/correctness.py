"""Part "kernels": each kernel against its reference, over random shapes and fresh numbers.

Results are compared as relative norms of the difference, with a bound for each type. Memory that
results come to lie in was filled with NaN before, and so are blocks that no table names.
"""

from __future__ import annotations

import importlib
import itertools
import random
import traceback
import zlib
from collections.abc import Iterator

import torch

from benchmarks.gpu import errors
from benchmarks.gpu.device import device_of
from benchmarks.gpu.errors import Case, Error
from benchmarks.gpu.job import Cell, Doing, Event, Failed, Job, Note, Row, is_fatal, told

TABLE = "kernels against their references"
_ROOMS = ("attention_cases", "row_cases", "block_cases")
_SHAPES = (12, 4, 1)  # of each case at most: in a full run, a quick one, a dry one


def run(job: Job) -> Iterator[Event]:
    """A row for each kernel and type: the error that uses most of its bound.

    A first shape of everything, then a second one, and so on while there is time.
    """
    device_of(job)
    cases: dict[str, Case] = {}
    for room in _ROOMS:
        try:
            cases |= importlib.import_module(f"benchmarks.gpu.{room}").cases(job)
        except ImportError as error:
            yield Failed(TABLE, room, told(error))
    found: dict[str, list[Error]] = {name: [] for name in cases}
    for number, (name, case) in itertools.product(range(job.sized(*_SHAPES)), cases.items()):
        if len(found[name]) < number or job.left_s <= 0:
            continue  # it failed, or time is over
        yield Doing(TABLE, f"shape {number + 1} of {name}")
        try:
            found[name].append(_checked(name, case, number))
        except Exception as error:
            traceback.print_exc()  # to the part's log
            yield Failed(TABLE, name, told(error))
            if is_fatal(error):
                break
    yield from (Row(TABLE, name, _cells(some)) for name, some in found.items() if some)
    if job.left_s <= 0 and (late := [name for name, some in found.items() if not some]):
        yield Note(TABLE, f"left out, because its time was over, or failed: {', '.join(late)}")


def _checked(name: str, case: Case, number: int) -> Error:
    """A shape of its own for each number. Raises Wrong."""
    seed = zlib.crc32(name.encode()) + number
    torch.manual_seed(seed)
    error = case(random.Random(seed))
    error.check()
    return error


def _cells(found: list[Error]) -> dict[str, Cell]:
    worst = errors.worst(found)
    if not worst.bound:
        return {"shapes": len(found), "error": "none", "bound": "equal"}
    return {"shapes": len(found), "error": worst.whole, "bound": worst.bound}
