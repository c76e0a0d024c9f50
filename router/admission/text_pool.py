"""Long texts and chats are rendered and tokenized by a few processes, not on the event loop.

Rendering is Python: on a thread it would hold up every stream of the router. A process starts with
the first text that needs it, and is killed with a text that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import ContextOverflow, InternalError, InvalidRequest, Overloaded, Unavailable
from router.admission.fair_queue import FairQueue, Flow, PendingPrompt
from router.admission.text_process import ANSWER, FAILURE, HEAD, IDS, MEMORY_BYTES

MAX_WAITING = 256  # texts; one more is refused, or one of the tenant that has most of them
_RETRY_S = 1.0
_EXIT_S = 5.0  # from the end of a process's connection to its own
# CPU time that a text may take: several times what the slowest template and tokenizer need.
_LEAST_CPU_S = 4
_BYTES_A_CPU_SECOND = 1 << 18
_WALL_PER_CPU = 15  # as long may it take on a busy machine, with the start of its process
# One text is one thread's work; the cores are for all of them, and for workers.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Text:
    """A text or a chat to tokenize: `data` is UTF-8 or a serialized Chat."""

    field: str  # of the request: "text" or "chat"
    data: bytes
    suffix: bytes = b""
    max_tokens: int = 0
    add_special_tokens: bool = False
    salt: str = ""  # keeps apart what the processes remember

    @property
    def cpu_s(self) -> int:
        """CPU time that it may take, whole seconds."""
        return _LEAST_CPU_S + len(self.data) // _BYTES_A_CPU_SECOND

    @property
    def job(self) -> bytes:
        """As `text_process` takes it."""
        head = {
            "field": self.field,
            "text_bytes": len(self.data),
            "max_tokens": self.max_tokens,
            "add_special_tokens": self.add_special_tokens,
            "salt": self.salt,
            "cpu_s": self.cpu_s,
        }
        text = json.dumps(head).encode()
        lengths = HEAD.pack(len(text), len(self.data) + len(self.suffix))
        return b"".join((lengths, text, self.data, self.suffix))


@dataclass(eq=False)
class _Waiting:
    text: Text
    pending: PendingPrompt
    ids: asyncio.Future[array[int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class TextPool:
    """The processes, and what waits for them, fair over tenants. Event-loop thread only."""

    def __init__(self, arguments: Sequence[str], processes: int) -> None:
        """`arguments` are those of `text_process.main`."""
        self._command = [sys.executable, "-m", "router.admission.text_process", *arguments]
        self._processes = processes
        self._queue = FairQueue()
        self._waiting: list[_Waiting] = []
        self._idle: list[_Process] = []  # the one that was used last is last: its cache is warm
        self._running: dict[asyncio.Task[None], _Waiting] = {}
        self._ending: set[asyncio.Future[int]] = set()  # of processes that were killed

    async def encode(self, text: Text, flow: Flow) -> array[int]:
        """Token ids. Raises InvalidRequest as the tokenizer does, or for what takes too long.

        Overloaded while too much waits, and InternalError where a process ends by itself.
        """
        self._make_room(flow.tenant)
        seconds = len(text.data) / _BYTES_A_CPU_SECOND
        waiting = _Waiting(text, self._queue.add(flow, seconds))
        self._waiting.append(waiting)
        self._start_next()
        try:
            return await waiting.ids
        finally:
            if waiting in self._waiting:
                self._drop(waiting)

    async def close(self) -> None:
        """Kills the processes; what runs or waits is cancelled."""
        for waiting in (*self._waiting, *self._running.values()):
            waiting.ids.cancel()
        for task in self._running:
            task.cancel()  # which kills its process
        if self._running:
            await asyncio.wait(self._running)
        while self._idle:
            self._kill(self._idle.pop())
        if self._ending:
            await asyncio.wait(self._ending, timeout=_EXIT_S)

    def _make_room(self, tenant: str) -> None:
        """Where too many wait, the newest of the tenant with the most is refused."""
        if len(self._waiting) < MAX_WAITING:
            return
        refusal = Overloaded(f"{MAX_WAITING} long texts wait to be tokenized", _RETRY_S)
        counts = Counter(waiting.pending.flow.tenant for waiting in self._waiting)
        most, count = counts.most_common(1)[0]
        if counts[tenant] + 1 >= count:
            raise refusal
        newest = [waiting for waiting in self._waiting if waiting.pending.flow.tenant == most][-1]
        self._drop(newest)
        if not newest.ids.done():
            newest.ids.set_exception(refusal)

    def _kill(self, process: _Process) -> None:
        """Its end is not waited for: that takes a while where it had much memory."""
        end = process.kill()
        self._ending.add(end)
        end.add_done_callback(self._ending.discard)

    def _drop(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        self._queue.remove(waiting.pending)

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._processes:
            first = min(self._waiting, key=lambda waiting: waiting.pending.virtual_finish)
            if first.ids.done():  # its caller is leaving
                self._drop(first)
                continue
            self._waiting.remove(first)
            task = asyncio.create_task(self._run(first), name="text")
            self._running[task] = first
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        waiting = self._running.pop(task)
        self._queue.remove(waiting.pending, computed=True)
        # It has no answer where its caller has left, or the pool is closed.
        error = None if task.cancelled() else task.exception()
        if not waiting.ids.done() and error is not None:
            waiting.ids.set_exception(error)
        if not task.cancelled():
            self._start_next()

    async def _run(self, waiting: _Waiting) -> None:
        """Goes on when its caller has left: a process that is killed costs more than the rest."""
        text, process = waiting.text, None
        while self._idle and process is None:
            process = self._idle.pop()
            if process.has_ended:
                self._kill(process)
                process = None
        process = process or _Process(self._command)
        try:
            try:
                async with asyncio.timeout(text.cpu_s * _WALL_PER_CPU):
                    kind, answer = await process.ask(text.job)
            except TimeoutError:
                what = f"no process has tokenized it in {text.cpu_s * _WALL_PER_CPU} s"
                raise InternalError(f"{what}: the machine is too busy") from None
            except (EOFError, OSError):
                raise _why_ended(await process.ended(), text) from None
        except BaseException:
            self._kill(process)
            raise
        self._idle.append(process)
        if not waiting.ids.done():
            waiting.ids.set_result(_ids(kind, answer))


def _ids(kind: bytes, answer: bytes) -> array[int]:
    """What an answer holds. Raises InvalidRequest and InternalError."""
    if kind == IDS:
        ids = array("I")
        ids.frombytes(answer)
        return ids
    if kind == FAILURE:
        raise InternalError(f"it cannot be tokenized: {answer.decode()}")
    text, where, most = json.loads(answer)
    raise InvalidRequest(text, where) if most is None else ContextOverflow(text, where, most)


def _why_ended(status: int, text: Text) -> Exception:
    if status == -signal.SIGXCPU:
        return InvalidRequest(
            f"to render and tokenize it takes over {text.cpu_s} s of CPU time: its process was "
            "ended: shorten it, or look at the model's chat template",
            text.field,
        )
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return InternalError(
        f"the process that tokenized it ended ({how}): the router's log may say why, or it needed "
        f"over {MEMORY_BYTES >> 20} MiB"
    )


class _Process:
    """One process, in a session of its own, so that ctrl-C is the router's alone."""

    def __init__(self, command: list[str]) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                # In this thread: it takes 2 ms, once.
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **_ENVIRONMENT},
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            reason = f"no process could be started to tokenize it: {error}"
            raise Unavailable(reason, _RETRY_S) from error
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, job: bytes) -> tuple[bytes, bytes]:
        """Kind and bytes of the answer. Raises EOFError or OSError where it has ended."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
        reader, writer = self._streams
        writer.write(job)
        await writer.drain()
        kind, size = ANSWER.unpack(await reader.readexactly(ANSWER.size))
        return kind, await reader.readexactly(size)

    async def ended(self) -> int:
        """The exit status, as `subprocess` has it, of a process that has closed its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, _EXIT_S)
        return -signal.SIGKILL  # which comes next

    def kill(self) -> asyncio.Future[int]:
        """Done when it has ended."""
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()
        self._process.kill()
        return asyncio.get_running_loop().run_in_executor(None, self._process.wait)
