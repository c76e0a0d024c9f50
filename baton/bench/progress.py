"""How a run goes, while it goes: one line that is rewritten, or plain lines in a log."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from baton.bench.generator import Run
from baton.bench.spread import percentile

_REWRITE_S, _LOG_S = 0.5, 5.0


class Progress:
    """Writes to `out`, which may be a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._is_terminal:
            self._out.write("\r\x1b[K")
        print(text, file=self._out, flush=True)

    @asynccontextmanager
    async def of(self, what: str, run: Run) -> AsyncIterator[None]:
        """Tells of `run` as long as the block lasts."""
        telling = asyncio.create_task(self._tell(what, run))
        try:
            yield
        finally:
            telling.cancel()
            if self._is_terminal:
                self._out.write("\r\x1b[K")
                self._out.flush()

    async def _tell(self, what: str, run: Run) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            elapsed_s, step_s = 0.0, _REWRITE_S if self._is_terminal else _LOG_S
            while True:
                await asyncio.sleep(step_s)
                elapsed_s += step_s
                line = f"{what}, {elapsed_s:.0f} s: {status_of(run)}"
                if self._is_terminal:
                    width = shutil.get_terminal_size().columns - 1
                    self._out.write(f"\r\x1b[K{line[:width]}")
                    self._out.flush()
                else:
                    print(line, file=self._out, flush=True)


def status_of(run: Run) -> str:
    """A run in one line."""
    tally = run.tally
    parts = [
        f"{len(run.outcomes)} sent",
        f"{tally.ok} done",
        f"{len(run.outcomes) - tally.ok - tally.failed} running",
    ]
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    if tally.recent_ttfts_s:
        parts.append(f"TTFT p50 {percentile(tally.recent_ttfts_s, 50) * 1e3:.0f} ms")
    return ", ".join([*parts, f"{tally.output_tokens} tokens"])
