"""The step that is on the lane before anybody planned it, and why nobody is harmed by it.

While step n runs, the host knows all of step n + 1 but its tokens, which step n leaves on the
device. So step n + 1 is launched before step n is waited for, and the device finds its next work
waiting while the host publishes, admits and plans. When the plan comes, whoever is in it just as
it was launched takes its token from there; all others are computed as if there had been nothing.

A sequence that comes meanwhile would need a launch of its own. So the planner leaves it out of its
plan, and names it beside (`Plan.joining`): it is part of the launch behind, the first that it can
be part of, and is found there by the next plan. Where nothing is ahead, it is taken in at once.

Why that is safe. A row launched ahead differs from a planned one in this alone: its sequence may
end, be cancelled, preempted or halted meanwhile. It then draws a token that nobody takes, and
writes one token's KV into the slot behind the computed ones, in a block that its sequence held at
the launch.

- *That slot is nobody's.* Blocks are shared when they are full of computed tokens, and a sequence
  writes only behind those: the block is its own. It is published when a later step of the sequence
  has filled it, and that step, planned or taken from here, has written the slot.
- *Whoever gets the block next on this engine comes later on the same lane:* chunks, decode steps
  and `scrub` run behind the row, and overwrite what it wrote before anything reads it.
- *Whoever gets it outside does not:* a prefill worker writes through another stream, or from
  another process. Blocks go out through one door, `Admissions.reserve`, which calls `settle` with
  them: it waits for what may still write there (rows launched ahead, and zeroes), and forgets rows
  that wrote there. Blocks whose content leaves are computed by steps that were waited for.
- *What it reads may be another's by then.* Then its token is nobody's, and is not looked at.
- *A row that is taken computed what its plan asks for:* the same sequence object (so the same
  settings and salt), the same position, the same blocks up to it, and the token at that position
  is the one that the step before drew. Penalties, biases, minimum lengths and logprobs need the
  host, and drafts make several rows of one: such work neither goes ahead nor takes anything.
- *Preempted and back at once,* a sequence may find its cached blocks again and fit by all that:
  nothing has run in between but what `settle` and `scrub` know of.
- *Parked or at its limit:* `Sequence.tokens_left` counts what is left, and nobody goes ahead who
  cannot take one more token. Rows are wasted by what the host cannot know: stop tokens and cancels.
- *Failures.* A launch ahead that raises is forgotten, and its plan computed when it comes, which
  may raise in its turn. One that fails on the device raises where it is waited for: in the run
  whose plan it is, not in the one that launched it. A run that raises first waits for all that is
  on the lane and forgets it, so the next one starts with nothing.
- *The engine may end with a row on the lane.* Another engine over the same pool has other
  sequences and takes none; `settle` knows of the row still. Who frees the pool settles it first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.backends.gpu.device import Mark
from baton.engine.planner import Plan, Work
from baton.engine.sequence import Sequence

log = logging.getLogger(__name__)
_WEIGHT = 0.1  # of the last plan, among those that changed or did not
# Going ahead saves the host's share of a step, a tenth or so, and costs a second launch, nearly a
# whole step, where a plan has others: it pays while that is every tenth step or more rarely.
_MOST_CHANGES = 0.16


KNOWN = -1  # the source of a row whose token the host knew


class Row(NamedTuple):
    """One row of a launch: which it is, at what position, by which blocks."""

    at: int
    start: int
    blocks: list[int]


@dataclass
class Launch:
    """A decode step on the lane.

    sources: of one ahead, which row of the launch before feeds each, or KNOWN.
    """

    rows: dict[Sequence, Row]  # those that are worth anything
    count: int  # how many there are
    slot: int  # whose pinned memory it reads and writes
    mark: Mark
    sources: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # the tokens it took, once the host knows them
    end: int = 0  # of `Writes`, behind what has ended when this has

    def feed(self, tokens: list[int]) -> None:
        """The launch before drew these."""
        known = zip(self.sources, self.fed, strict=True)
        self.fed = [token if at == KNOWN else tokens[at] for at, token in known]

    def taken_by(self, plan: list[Work]) -> dict[Sequence, int]:
        """Which row has what each work asks for; works without one are left out."""
        return {
            work.sequence: row.at
            for work in plan
            if (row := self.rows.get(work.sequence)) is not None and self._fits(row, work)
        }

    def forget(self, blocks: set[int], block_size: int) -> None:
        """Others write into these blocks: rows that wrote there are worth nothing."""
        self.rows = {
            sequence: row
            for sequence, row in self.rows.items()
            if row.blocks[row.start // block_size] not in blocks
        }

    def _fits(self, row: Row, work: Work) -> bool:
        if work.count > 1 or work.start != row.start or not work.samples:
            return False
        blocks = work.sequence.block_ids
        if len(blocks) > len(row.blocks):  # it got more meanwhile
            blocks = blocks[: len(row.blocks)]
        return work.sequence.tokens[row.start] == self.fed[row.at] and blocks == row.blocks


class Pace:
    """How often plans have work that is not launched ahead, or would not have been."""

    def __init__(self) -> None:
        self._changes = 0.0
        self._before: set[Sequence] = set()

    def observe(self, plan: Plan) -> None:
        """Takes in a plan."""
        known, self._before = self._before, {item.sequence for item in (*plan.work, *plan.joining)}
        changed = any(item.count > 1 or item.sequence not in known for item in plan.work)
        self._changes += (changed - self._changes) * _WEIGHT

    @property
    def steady(self) -> bool:
        """Whether going ahead pays."""
        return self._changes < _MOST_CHANGES


class Writes:
    """What nobody has waited for yet, and the blocks that it writes into; oldest first."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Mark, set[int]]] = deque()
        self._ended = 0

    @property
    def end(self) -> int:
        """The place behind all that was added so far."""
        return self._ended + len(self._pending)

    def add(self, mark: Mark, blocks: Iterable[int]) -> None:
        """What lies before `mark` writes there."""
        self._pending.append((mark, set(blocks)))

    def settle(self, blocks: set[int] | None) -> None:
        """Waits until nothing writes into these blocks any more; None is all of them.

        What it waits for may have failed, which is its own run's to tell: it has ended.
        """
        last = max(
            (i for i, (_, some) in enumerate(self._pending) if blocks is None or some & blocks),
            default=-1,
        )
        if last >= 0:
            with suppress(Exception):
                self._pending[last][0].wait()
        self.ended(self._ended + last + 1)

    def ended(self, end: int | None = None) -> None:
        """What lies before that place was waited for, or whatever lies behind it; None is all."""
        while self._pending and (end is None or self._ended < end):
            self._pending.popleft()
            self._ended += 1

    def __len__(self) -> int:
        return len(self._pending)
