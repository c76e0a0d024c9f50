"""`baton top` on a terminal: what it draws as routers answer, what keys do, and what it leaves."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton import cli
from tests.waiting import eventually

from .statuses import DECODE, Router, pair, status, worker

ROOT = Path(__file__).parents[3]
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
PATIENCE_S = 40.0
STYLE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    fleet = status(worker("pre0"), worker("dec0", DECODE), pair("pre0", "dec0"))
    async with Router(fleet) as serving:
        yield serving


class Terminal:
    """A terminal of 120 columns with `baton top` in it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.mode = termios.tcgetattr(self.slave)
        self.shown = b""
        self.process: asyncio.subprocess.Process

    async def start(self, *argv: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", "top", "--interval", "0.1", *argv),
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.shown += os.read(self.master, 65536)

    def press(self, keys: str) -> None:
        """Keys; from now on only what is drawn after them counts."""
        self.shown = b""
        os.write(self.master, keys.encode())

    async def shows(self, text: str) -> str:
        """One picture, once it has the text."""

        async def look() -> str:
            return STYLE.sub(b"", self.shown.rpartition(b"baton top")[2]).decode(errors="replace")

        missing = f"{text!r} is not shown"
        return await eventually(look, lambda seen: text in seen, missing, PATIENCE_S)

    async def ended(self) -> int:
        """The exit status, and the terminal is as it was."""
        async with asyncio.timeout(PATIENCE_S):
            exit_status = await self.process.wait()
        os.set_blocking(self.master, False)
        with contextlib.suppress(OSError):
            while more := os.read(self.master, 65536):
                self.shown += more
        assert LEAVE in self.shown
        assert termios.tcgetattr(self.slave) == self.mode
        return exit_status

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
async def top(router: Router) -> AsyncIterator[Terminal]:
    terminal = Terminal()
    await terminal.start("--target", router.address)
    yield terminal
    await terminal.close()


async def test_it_follows_routers_and_keys(top: Terminal, router: Router) -> None:
    seen = await top.shows("pre0")
    assert ENTER in top.shown
    assert "SERVING" in seen and "dec0" in seen
    router.status.router.queued = 4321
    await top.shows("4321")
    top.press("p")
    await top.shows("PAUSED")
    router.status.router.queued = 8765
    top.press("r")  # a frame more, of what was frozen
    seen = await top.shows("role: prefill")
    assert "4321" in seen and "8765" not in seen
    top.press("p")
    await top.shows("8765")
    top.press("\x1b[A")  # an arrow is no key of ours
    top.press("s")
    await top.shows("sort: queue")

    await router.__aexit__()
    seen = await top.shows("does not answer for")
    assert "NO ANSWER" in seen and "pre0" in seen and "what follows is old" in seen
    router.status = status(worker("new0"), incarnation="r1")
    await router.__aenter__()
    seen = await top.shows("new0")
    assert "NO ANSWER" not in seen and "pre0" not in seen
    top.press("q")
    assert await top.ended() == 0


@pytest.mark.parametrize(("how", "exit_status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_however_it_ends_the_terminal_is_as_it_was(
    top: Terminal, how: signal.Signals, exit_status: int
) -> None:
    await top.shows("SERVING")
    assert termios.tcgetattr(top.slave) != top.mode  # keys come without Enter
    top.process.send_signal(how)
    assert await top.ended() == exit_status


async def test_one_frame_for_pipes(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["top", "--once", "--interval", "0.1", "--width", "100", "--target", router.address]
    assert await asyncio.to_thread(cli.main, argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("baton top  cluster default, model demo")
    assert "\x1b" not in text and "quit" not in text
    row = next(line for line in text.splitlines() if line.startswith("127.0.0.1:"))
    assert row.split()[2:7] == ["0", "0", "0", "0", "-"]  # rates, from two answers
