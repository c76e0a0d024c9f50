"""How well the generator kept time: its own slowness must not be taken for the server's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.spread import percentile

_CHECK_S = 0.01
_LATE_MS, _BUSY = 10.0, 0.85  # beyond these its figures are in doubt


@dataclass
class Lag:
    """What was measured; lists are seconds.

    `late_s`: from a request's time, or the end of the one before it in a closed loop, to its send.
    `loop_late_s`: how late a timer of the event loop fired, every 10 ms.
    """

    late_s: list[float] = field(default_factory=list)
    loop_late_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        """Of one core, while it ran."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def add(self, other: Lag) -> None:
        """Takes another run's measurements in."""
        self.late_s += other.late_s
        self.loop_late_s += other.loop_late_s
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s

    def complaints(self) -> list[str]:
        """Why the generator may have been the bottleneck; empty if it was not."""
        found = []
        late_ms, loop_ms = (percentile(s, 99) * 1e3 for s in (self.late_s, self.loop_late_s))
        if late_ms > _LATE_MS:
            found.append(f"requests were sent late (p99 {late_ms:.1f} ms)")
        if loop_ms > _LATE_MS:
            found.append(f"its event loop was late (p99 {loop_ms:.1f} ms)")
        if self.cpu_share > _BUSY:
            found.append(f"it kept a core busy ({self.cpu_share:.0%})")
        return found

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measures the event loop and the processor time as long as the block runs."""
        began, cpu = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.monotonic() - began

    async def _watch(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                due = time.monotonic() + _CHECK_S
                await asyncio.sleep(_CHECK_S)
                self.loop_late_s.append(time.monotonic() - due)
