"""What a part of the run is told, and what it tells: plain values that travel as JSON. No torch."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias, TypeVar

from benchmarks.shapes import GPU_SHAPES, Shape

Cell: TypeAlias = float | int | str | None
T = TypeVar("T")


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, as measured: copies count bytes read and written."""

    copy_bytes_per_s: float
    matmul_flops: float


@dataclass(frozen=True)
class Job:
    """One part's work. It begins nothing new once `seconds` have passed since it was made.

    smoke: tiny sizes on the CPU, kernels interpreted: the figures mean nothing.
    """

    part: str
    device: str
    seconds: float
    shapes: tuple[str, ...] = ("8B", "1B")
    smoke: bool = False
    quick: bool = False
    ceilings: Ceilings | None = None
    began: float = field(default_factory=time.monotonic, compare=False)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """As `to_json` wrote it; its time begins now."""
        values = json.loads(text)
        ceilings = values.pop("ceilings")
        shapes = tuple(values.pop("shapes"))
        return cls(**values, shapes=shapes, ceilings=Ceilings(**ceilings) if ceilings else None)

    def to_json(self) -> str:
        """One argument of a command line."""
        values = asdict(self)
        del values["began"]
        return json.dumps(values)

    @property
    def left_s(self) -> float:
        """Seconds until nothing new begins; negative afterwards."""
        return self.began + self.seconds - time.monotonic()

    @property
    def models(self) -> list[Shape]:
        """The shapes of its models."""
        return [GPU_SHAPES[name] for name in (("smoke",) if self.smoke else self.shapes)]

    def sized(self, full: T, quick: T, smoke: T) -> T:
        """The value that fits this run."""
        return smoke if self.smoke else quick if self.quick else full


@dataclass(frozen=True)
class Row:
    """One line of a table; numbers are formatted by their column's name."""

    table: str
    name: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Failed:
    """Something that should have worked did not: the run's exit status is 1."""

    table: str
    name: str
    error: str


@dataclass(frozen=True)
class Note:
    """A plain sentence: what was left out, and why."""

    table: str
    text: str


@dataclass(frozen=True)
class Doing:
    """What is measured now: shown while it lasts, and not kept."""

    table: str
    name: str


Event: TypeAlias = Row | Failed | Note | Doing
_KINDS: dict[str, type[Row | Failed | Note | Doing]] = {
    "row": Row, "failed": Failed, "note": Note, "doing": Doing,
}  # fmt: skip


def to_line(event: Event) -> str:
    """An event as one line of JSON."""
    return json.dumps({type(event).__name__.lower(): asdict(event)})


def from_line(line: str) -> Event:
    """The event that `to_line` wrote."""
    ((kind, values),) = json.loads(line).items()
    return _KINDS[kind](**values)


def attempt(table: str, name: str, measure: Callable[[], Mapping[str, Cell]]) -> Event:
    """The row that `measure` gives, or its failure.

    Raises what leaves the device unusable: everything after it would fail for no reason of its own.
    """
    try:
        return Row(table, name, measure())
    except Exception as error:
        if is_fatal(error):
            raise Unusable(f"{name}: {told(error)}") from error
        traceback.print_exc()  # to the part's log
        return Failed(table, name, told(error))


class Unusable(Exception):
    """The device takes no more work from this process."""


# As CUDA's runtime API documents them: "the process must be terminated and relaunched". All other
# errors, as of a launch that was refused or a product that cuBLAS does not have, pass.
_FATAL = (
    "illegal memory access", "illegal instruction", "misaligned address", "address space",
    "invalid program counter", "hardware stack error", "device-side assert", "launch failure",
    "the launch timed out", "uncorrectable",
)  # fmt: skip


def is_fatal(error: Exception) -> bool:
    """Whether CUDA refuses every further call of this process after this error.

    Torch and Triton both tell in CUDA's words.
    """
    text = str(error)
    return "CUDA" in text and any(words in text for words in _FATAL)


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def guarded(table: str, name: str, events: Callable[[], Iterator[Event]]) -> Iterator[Event]:
    """Events, and what ends them early as a failure; raises as `attempt` does."""
    try:
        yield from events()
    except Exception as error:
        if isinstance(error, Unusable) or is_fatal(error):
            raise
        traceback.print_exc()
        yield Failed(table, name, told(error))


Case: TypeAlias = tuple[str, Callable[[], Mapping[str, Cell]]]


def in_time(job: Job, table: str, cases: Sequence[Case]) -> Iterator[Event]:
    """Attempts the cases in their order while there is time; a note names those left out."""
    for at, (name, measure) in enumerate(cases):
        if job.left_s <= 0:
            left_out = ", ".join(one for one, _ in cases[at:])
            yield Note(table, f"left out, because its time was over: {left_out}")
            return
        yield Doing(table, name)
        yield attempt(table, name, measure)
