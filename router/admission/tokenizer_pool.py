"""A pool of processes that render and tokenize long texts and chats.

Rendering is Python code: on a thread it would delay every stream of the router. A process starts
when a text needs it, and is killed if the text takes too long.
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
from router.admission.tokenizer_process import ANSWER, FAILURE, HEAD, IDS, MEMORY_BYTES
from router.queueing.fair_queue import FairQueue
from router.request import PendingPrompt, TenantShare

MAX_WAITING = 256  # texts; then one is refused, or one of the tenant with the most
_RETRY_S = 1.0
_EXIT_S = 5.0  # from the end of a process's connection to its exit
# CPU time limit of a text: several times what the slowest template and tokenizer need.
_MIN_CPU_S = 4
_BYTES_A_CPU_SECOND = 1 << 18
_WALL_PER_CPU = 15  # wall time per CPU time on a busy machine, process start included
# Each text uses one thread: the other cores are for other texts and for workers.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Text:
    """A text or a chat to tokenize: `data` is UTF-8 or a serialized Chat."""

    field: str  # the request's: "text" or "chat"
    data: bytes
    suffix: bytes = b""
    max_tokens: int = 0
    add_special_tokens: bool = False
    salt: str = ""  # separates the processes' cached token ids

    @property
    def cpu_s(self) -> int:
        """CPU time limit in whole seconds."""
        return _MIN_CPU_S + len(self.data) // _BYTES_A_CPU_SECOND

    @property
    def job(self) -> bytes:
        """The message for `tokenizer_process`."""
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


class TokenizerPool:
    """The processes and the texts that wait for them in fair order. Event-loop thread only."""

    def __init__(self, arguments: Sequence[str], processes: int) -> None:
        """`arguments`: those of `tokenizer_process.main`; `processes`: their maximum number."""
        self._command = [sys.executable, "-m", "router.admission.tokenizer_process", *arguments]
        self._processes = processes
        self._queue = FairQueue()
        self._waiting: list[_Waiting] = []
        self._idle: list[_Process] = []  # the last one was used last: its cache is warm
        self._running: dict[asyncio.Task[None], _Waiting] = {}
        self._ending: set[asyncio.Future[int]] = set()  # exits of killed processes

    async def encode(self, text: Text, owner: TenantShare) -> array[int]:
        """Token ids. Raises InvalidRequest as the tokenizer does, or if it takes too long.

        Raises Overloaded while too many texts wait, InternalError if a process ends unexpectedly.
        """
        self._make_room(owner.tenant)
        seconds = len(text.data) / _BYTES_A_CPU_SECOND
        waiting = _Waiting(text, self._queue.add(owner, seconds))
        self._waiting.append(waiting)
        self._start_next()
        try:
            return await waiting.ids
        finally:
            if waiting in self._waiting:
                self._drop(waiting)

    async def close(self) -> None:
        """Kills the processes and cancels all texts."""
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
        """If too many texts wait, refuses the newest of the tenant with the most."""
        if len(self._waiting) < MAX_WAITING:
            return
        refusal = Overloaded(f"{MAX_WAITING} long texts wait to be tokenized", _RETRY_S)
        counts = Counter(waiting.pending.owner.tenant for waiting in self._waiting)
        most, count = counts.most_common(1)[0]
        if counts[tenant] + 1 >= count:
            raise refusal
        newest = [waiting for waiting in self._waiting if waiting.pending.owner.tenant == most][-1]
        self._drop(newest)
        if not newest.ids.done():
            newest.ids.set_exception(refusal)

    def _kill(self, process: _Process) -> None:
        """Kills a process without waiting for its exit, which takes a while with much memory."""
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
        # There is no result if its caller has left or the pool is closed.
        error = None if task.cancelled() else task.exception()
        if not waiting.ids.done() and error is not None:
            waiting.ids.set_exception(error)
        if not task.cancelled():
            self._start_next()

    async def _run(self, waiting: _Waiting) -> None:
        """Continues if the caller leaves: killing the process would cost more than the rest."""
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
    """The token ids of an answer. Raises InvalidRequest or InternalError."""
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
            f"rendering and tokenizing it takes over {text.cpu_s} s of CPU time, and its process "
            "was ended: shorten it, or look at the model's chat template",
            text.field,
        )
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return InternalError(
        f"the process that tokenized it ended ({how}): the router's log may say why, or it needed "
        f"over {MEMORY_BYTES >> 20} MiB"
    )


class _Process:
    """One process, in its own session, so that ctrl-C reaches the router only."""

    def __init__(self, command: list[str]) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                # Blocks the event loop for 2 ms, once.
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
        """Kind and bytes of the answer. Raises EOFError or OSError if the process has ended."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
        reader, writer = self._streams
        writer.write(job)
        await writer.drain()
        kind, size = ANSWER.unpack(await reader.readexactly(ANSWER.size))
        return kind, await reader.readexactly(size)

    async def ended(self) -> int:
        """The exit status, as in `subprocess`, of a process that has closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, _EXIT_S)
        return -signal.SIGKILL  # the caller kills it next

    def kill(self) -> asyncio.Future[int]:
        """Kills the process; the future is done when it has exited."""
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()
        self._process.kill()
        return asyncio.get_running_loop().run_in_executor(None, self._process.wait)
