"""The live screen of `baton top`: draws a frame at each answer and each key, until it is left.

Whatever ends it, the terminal is given back as it was found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from baton.errors import ConfigError, Unavailable
from baton.local.top.frame import Look, frame
from baton.local.top.poll import Poller, polling
from baton.local.top.view import View, view_of

_PLAIN_WIDTH = 160  # where there is no terminal; nothing is left out for want of height
_PLAIN_HEIGHT = 10_000
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")  # of arrows and their like
_DRAW_S = 0.05  # at least between two frames: routers answer at about the same time


async def watch(addresses: Sequence[str], interval_s: float) -> int:
    """The live screen until q; the exit status. Raises ConfigError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`baton top` draws on a terminal: --once prints one frame anywhere")
    screen = Screen(Look(interval_s))
    async with polling(addresses, interval_s, screen.changed.set) as pollers:
        with screen.open():
            await screen.run(pollers)
    return 0


async def once(addresses: Sequence[str], interval_s: float, width: int | None) -> str:
    """One frame as text, with rates over one interval. Raises Unavailable when nobody answers."""
    answers = asyncio.Event()
    async with polling(addresses, interval_s, answers.set) as pollers:
        for _ in range(2):
            await _all_told(pollers, answers)
        view = _view(pollers)
    if not view.answered:
        why = "; ".join(f"{router.address}: {router.failure}" for router in view.routers)
        raise Unavailable(f"no router answers: {why}")
    console = Console(width=width or _PLAIN_WIDTH, height=_PLAIN_HEIGHT, color_system=None)
    with console.capture() as captured:
        console.print(frame(view, Look(interval_s, keys=False), console.width, _PLAIN_HEIGHT))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Screen:
    """What is drawn, and how it is looked at."""

    def __init__(self, look: Look) -> None:
        self.changed = asyncio.Event()
        self._look = look
        self._frozen: View | None = None
        self._left = False
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """The alternate screen and keys without Enter, while the block runs."""
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        try:
            _take_keys(stdin)
            loop.add_reader(stdin, self._read, stdin)
            loop.add_signal_handler(signal.SIGWINCH, self.changed.set)
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._leave)
            with self._live:
                yield
        finally:
            loop.remove_reader(stdin)
            for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
            with contextlib.suppress(termios.error, OSError):  # the terminal is gone
                termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    async def run(self, pollers: Sequence[Poller]) -> None:
        """Draws whenever there is something new, until somebody leaves."""
        while not self._left:
            self.changed.clear()
            self._draw(pollers)
            with contextlib.suppress(TimeoutError):  # the clock goes on, and so does a silence
                async with asyncio.timeout(self._look.interval_s):
                    await self.changed.wait()
            await asyncio.sleep(_DRAW_S)

    def press(self, key: str) -> None:
        """What a key does; others do nothing."""
        if key in ("q", "Q", "\x04"):
            self._left = True
        elif key in ("p", " "):
            paused = not self._look.paused
            self._look, self._frozen = replace(self._look, paused=paused), None
        elif key == "r":
            self._look = self._look.next_role()
        elif key == "s":
            self._look = self._look.next_sort()
        self.changed.set()

    def _draw(self, pollers: Sequence[Poller]) -> None:
        view = self._frozen or _view(pollers)
        if self._look.paused:
            self._frozen = view
        width, height = self._console.size
        self._live.update(frame(view, self._look, width, height), refresh=True)

    def _read(self, stdin: int) -> None:
        try:
            pressed = os.read(stdin, 64)
        except OSError:
            pressed = b""
        if not pressed:  # the terminal is gone
            self._leave()
        for key in _SEQUENCE.sub(b"", pressed).decode(errors="replace"):
            self.press(key)

    def _leave(self) -> None:
        self._left = True
        self.changed.set()


async def _all_told(pollers: Sequence[Poller], answers: asyncio.Event) -> None:
    """Returns when each has had one more answer, or failed to get one."""
    asked = [poller.asked for poller in pollers]
    while any(poller.asked == before for poller, before in zip(pollers, asked, strict=True)):
        answers.clear()
        await answers.wait()


def _view(pollers: Sequence[Poller]) -> View:
    return view_of([poller.watched for poller in pollers], time.monotonic(), time.time())


def _take_keys(stdin: int) -> None:
    """Keys at once and unseen. Ctrl-C still interrupts; ctrl-Z would leave the screen half-way."""
    tty.setcbreak(stdin)
    mode = termios.tcgetattr(stdin)
    mode[6][termios.VSUSP] = b"\x00"
    termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
