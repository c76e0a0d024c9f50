"""Async scheduling: the next decode step is launched before it is planned, and why that is safe.

While step n runs, the host knows all of step n + 1 but its tokens, which step n leaves on the
device. So step n + 1 is launched before step n is waited for, and the device finds its next work
queued while the host publishes, admits and plans. When the plan comes, each of its sequences that
was launched exactly as planned takes its token from that launch; all others are computed as usual.

A newcomer would need a launch of its own. So the planner names it beside the plan
(`Plan.joining`): it is part of the next async launch, and found there by the next plan. Without an
async launch it is computed at once.

Safety. A row of an async launch differs from a planned one only in that its sequence may end, be
cancelled, preempted or halted meanwhile. Its token is then dropped, and its KV was written into the
slot behind the sequence's computed ones, in a block that the sequence held at the launch.

- *The slot is private.* Blocks are shared when they are full of computed tokens, and a sequence
  writes only behind those. A block is published when a later step of the sequence has filled it,
  and that step, planned or async, has written the slot.
- *The block's next owner on this engine* comes later on the same stream: chunks, decode steps and
  `scrub` run behind the row, and overwrite what it wrote before anything reads it.
- *An owner outside* (a prefill worker writes through another stream or process) gets blocks by
  `SequenceTable.reserve` alone, which calls `wait_for_writes`: it waits for async rows and zeroing
  that may still write there, and drops rows that did. Blocks that are sent out were computed by
  steps that were waited for.
- *What a row reads may be another sequence's by then.* Then its token is dropped.
- *A row that is used computed what its plan asks for:* the same sequence object (so the same
  settings and salt), the same position, the same blocks up to it, and the token at that position is
  the one that the step before sampled. Penalties, biases, minimum lengths and logprobs need the
  host, and proposed tokens take several rows: such work is neither launched nor used async.
- *Preempted and back at once,* a sequence may find its cached blocks again and match all that:
  nothing has run in between but what `wait_for_writes` and `scrub` know of.
- *At its limit:* `Sequence.tokens_left` excludes sequences that cannot take one more token. Rows
  are wasted by what the host cannot know: stop tokens and cancels.
- *Failures.* An async launch that raises is dropped, and its plan computed when it comes. One that
  fails on the device raises where it is waited for: in the run whose plan it is. A run that raises
  first waits for the whole stream and drops the async launch, so the next starts with none.
- *The engine may end with a row on the stream.* Another engine over the same pool has other
  sequences and uses none of its rows; `wait_for_writes` still covers it, and is called before the
  pool is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.backends.gpu.device import Event
from baton.engine.planner import Plan, Work
from baton.engine.sequence import Sequence

_WEIGHT = 0.1  # of the last plan, in the share of plans that changed the batch
# An async launch saves the host's share of a step, a tenth or so, and costs a second launch, nearly
# a whole step, where a plan has other sequences: it pays while that is at most every tenth step.
_MOST_CHANGES = 0.16

KNOWN = -1  # the source of a row whose token the host knew


class Row(NamedTuple):
    """One row of a launch: its index, its position, its sequence's blocks at the launch."""

    at: int
    start: int
    blocks: list[int]


@dataclass
class Launch:
    """A decode step on the stream.

    sources: of an async one, which row of the launch before gives each token, or KNOWN.
    """

    rows: dict[Sequence, Row]  # those whose tokens may be used
    count: int  # rows launched
    slot: int  # whose pinned memory it reads and writes
    event: Event
    sources: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # its input tokens, once the host knows them
    end: int = 0  # of `Writes`: those before it have ended when this launch has

    def feed(self, tokens: list[int]) -> None:
        """Takes in what the launch before sampled."""
        known = zip(self.sources, self.fed, strict=True)
        self.fed = [token if at == KNOWN else tokens[at] for at, token in known]

    def rows_for(self, plan: list[Work]) -> dict[Sequence, int]:
        """Which row has computed each work; works without one are left out."""
        return {
            work.sequence: row.at
            for work in plan
            if (row := self.rows.get(work.sequence)) is not None and self._fits(row, work)
        }

    def drop_writers_of(self, blocks: set[int], block_size: int) -> None:
        """Drops rows that wrote into these blocks, because others write there now."""
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


class BatchStability:
    """How often plans have work that an async launch has not, or would not have had."""

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
        """Whether async launches pay."""
        return self._changes < _MOST_CHANGES


class Writes:
    """Writes that have not been waited for, with the blocks they go to; oldest first."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Event, set[int]]] = deque()
        self._ended = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def end(self) -> int:
        """The number of writes added so far."""
        return self._ended + len(self._pending)

    def add(self, event: Event, blocks: Iterable[int]) -> None:
        """What lies before `event` on the stream writes into these blocks."""
        self._pending.append((event, set(blocks)))

    def wait(self, blocks: set[int] | None) -> None:
        """Waits until nothing writes into these blocks any more; None is all of them.

        Failures are not raised here: they belong to the run that is waited for.
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
        """The first `end` writes, or None for all, or something behind them was waited for."""
        while self._pending and (end is None or self._ended < end):
            self._pending.popleft()
            self._ended += 1
