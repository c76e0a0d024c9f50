"""Runs batches: each line of a file is a POST to an endpoint of this process, at low priority.

The output and error files are the record of what is done. Lines are appended to them and brought to
the disk in groups; a process that begins, after whatever end of the last one, cuts half a line off
and runs the lines that are in neither. Of several processes with one folder the one that holds its
lock runs the batches, one of each tenant at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from baton.config import ApiConfig
from baton.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RetryableError,
    Unauthenticated,
    Unavailable,
)
from baton.gateway.batch_store import (
    FINISHED,
    LOCK,
    MAX_LINES,
    WINDOW_S,
    Batch,
    BatchError,
    BatchErrors,
    BatchStore,
    File,
    Status,
    new_id,
    try_lock,
)
from baton.gateway.generation import MAX_BODY_BYTES, Endpoint
from baton.net.http_errors import JSON_TYPE, Header, failure_of
from baton.net.http_server import HttpExchange
from router.generation_service import Caller, GenerationService

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the folder, and at the lock while another process has it
_RETRY_S = 1.0  # before a line that was refused runs again, at least
_MAX_RETRY_S = 60.0
_REFUSALS = (Overloaded, Unauthenticated)
_FAILURES = (Unavailable, DeadlineExceeded)
_MAX_FAILURES = 3  # of a line that had begun: it may be what ends its workers
_GRACE_S = 60.0
_TRY_S = 3600.0  # for a line, its wait for room included
_RESTART_S = 30.0  # before a batch goes on whose files could not be read or written
_STALE_PART_S = 4 * 3600.0  # longer than an upload may take: what a kill left behind of one
_JUMP_S = 60.0  # of the wall clock, which somebody set: batches get it back
_READ_BYTES = 1 << 20
_MAX_LINE_BYTES = MAX_BODY_BYTES + 4096
_MAX_ERRORS = 100  # of a batch's input that are told
_LOW = Raw(b'"low"')
# Batches that end before their last line: by the code of why, their status and what it says.
_ENDS: dict[str, tuple[Status, str]] = {
    "batch_cancelled": ("cancelled", "The batch was cancelled before this request executed."),
    "batch_expired": (
        "expired",
        "This request could not be executed before the completion window expired.",
    ),
    "disk_share_used_up": ("failed", "The tenant's share is full (--batch-disk): delete files."),
}
# A line is answered whole and waits for room, whatever its body asks for.
_DROPPED = ("stream", "stream_options", "ttft_target_ms", "request_id")

T = TypeVar("T")


class Line(Struct):
    """One request of a batch's input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


class _Done(Struct):
    """What is read of a result."""

    custom_id: str


class _LineExchange(HttpExchange):
    """A request from within this process; its answer is kept."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__(
            asyncio.Transport(),
            "POST",
            path,
            {b"content-type": b"application/json"},
            writable=asyncio.Event(),
        )
        self.status, self.answered = 0, b""
        self._body = body

    async def body(self, max_bytes: int, max_dropped_bytes: int) -> bytes | None:
        return self._body if len(self._body) <= max_bytes else None

    def answer(self, status: int, body: bytes, headers: Any = (), kind: Header = JSON_TYPE) -> None:
        self.started, self.status, self.answered = True, status, body


class _Results:
    """One of a batch's two files. `waiting` is filled anywhere, the rest is the disk thread's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()

    def read(self) -> set[str]:
        """The `custom_id`s in it. What follows the last whole line is cut."""
        done, end = set(), 0
        with self.path.open("a+b") as file:
            size = file.tell()
            file.seek(0)
            with contextlib.suppress(msgspec.DecodeError):
                for line in file:
                    found = msgspec.json.decode(line, type=_Done)
                    if not line.endswith(b"\n"):
                        break
                    done.add(found.custom_id)
                    end += len(line)
            if end < size:
                log.warning("%s: %d bytes behind its last line are cut", self.path, size - end)
                file.truncate(end)
        return done

    def flush(self) -> None:
        """Brings what waits to the disk."""
        if lines := [self.waiting.popleft() for _ in range(len(self.waiting))]:
            with self.path.open("ab") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())

    def publish(self, store: BatchStore, now: int) -> str | None:
        """Makes it a file of the tenant's; its id, or None where it is empty."""
        if not (self.path.exists() and (size := self.path.stat().st_size)):
            self.path.unlink(missing_ok=True)
            return None
        file = File(id=self.path.stem, bytes=size, created_at=now, filename=self.path.name)
        file.purpose = "batch_output"
        store.save(file)
        return file.id


class BatchRunner:
    """Runs the batches of all tenants, those of a tenant one after the other."""

    def __init__(
        self,
        folder: Path,
        config: ApiConfig,
        service: GenerationService,
        endpoints: Mapping[str, Endpoint[Any]],
    ) -> None:
        self._folder = folder
        self._config = config
        self.service = service
        self.endpoints = endpoints
        self.concurrency = config.batch_concurrency  # of all batches together
        self.slots = asyncio.Semaphore(self.concurrency)
        self.wake = asyncio.Event()  # a batch was created or cancelled here
        self._disk = ThreadPoolExecutor(1, "batches")  # one: writes end before what follows them
        self._finished: dict[str, Status] = {}  # of batches, which are not read again
        self._jobs: dict[str, _Job] = {}
        self._not_before: dict[str, float] = {}  # by a batch's id; of the loop's clock
        self._parts: dict[Path, float] = {}  # uploads, by when they were seen first
        self._clocks = time.time(), _elapsed_s()  # of the last look

    async def on_disk(self, work: Callable[..., T], *args: Any) -> T:
        """Runs it on the thread that alone writes what this runner writes."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)

    async def run(self) -> None:
        """Runs batches while no other process does; until cancelled."""
        with (self._folder / LOCK).open("ab") as lock:
            try:
                while not try_lock(lock):  # noqa: ASYNC110 - a lock tells nobody that it is free
                    await asyncio.sleep(_LOOK_S)
                log.info("batches of %s run here", self._folder)
                async with asyncio.TaskGroup() as group:
                    while True:
                        self.wake.clear()
                        await self._look(group)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(_LOOK_S):
                                await self.wake.wait()
            finally:
                self.service.batches.clear()
                await asyncio.to_thread(self._disk.shutdown)  # before another process may write

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Starts what may run, and tells what runs that it is cancelled or has no room."""
        try:
            unfinished, counts = await self.on_disk(self._scan)
        except Exception as error:
            # Nobody needs to see where in our code a disk was full.
            trace = not isinstance(error, OSError)
            log.error("%s cannot be read or written: %s", self._folder, error, exc_info=trace)
            await asyncio.sleep(_RESTART_S)
            return
        self.service.batches.clear()
        self.service.batches.update(counts)
        for store, batch, end in unfinished:
            job = self._jobs.get(batch.id)
            is_next = all(other.tenant != store.tenant for other in self._jobs.values())
            may_start = is_next or end in ("batch_cancelled", "batch_expired")
            if job and end and not job.end:
                job.task.cancel()  # and with the next look a job begins that ends it
            elif not job and may_start and time.monotonic() >= self._not_before.get(batch.id, 0):
                job = self._jobs[batch.id] = _Job(self, store, batch, end)
                job.task = group.create_task(self._run(job), name=batch.id)

    async def _run(self, job: _Job) -> None:
        try:
            await job.run()
        except Exception as error:
            failed = error
            while isinstance(failed, ExceptionGroup):  # its lines are tasks
                failed = failed.exceptions[0]
            trace = not isinstance(failed, OSError)
            text = "%s goes on in %.0f s: %s"
            log.error(text, job.batch.id, _RESTART_S, failed, exc_info=trace)
            self._not_before[job.batch.id] = time.monotonic() + _RESTART_S
        finally:
            del self._jobs[job.batch.id]
            self.wake.set()

    def _scan(self) -> tuple[list[tuple[BatchStore, Batch, str]], Counter[str]]:
        """Saves how far batches are. What has not finished, and why it must end; all by status."""
        jump_s, now = self._jump_s(), time.time()
        for job in tuple(self._jobs.values()):
            job.save_progress(jump_s)
        self._remove_stale_parts()
        finished, unfinished = {}, []
        counts: Counter[str] = Counter()
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            store = BatchStore(folder, self._config.batch_disk)
            running = []
            for batch_id in store.batch_ids():
                if not (status := self._finished.get(batch_id)):
                    batch = store.batch(batch_id)
                    status = batch.status
                counts[status] += 1
                if status in FINISHED:
                    finished[batch_id] = status
                else:
                    if batch_id not in self._jobs and shift(batch, jump_s, now):
                        store.save(batch)
                    running.append(batch)
            is_full = bool(running) and store.is_full
            unfinished += [(store, batch, _why_ends(batch, now, is_full)) for batch in running]
        self._finished = finished
        return unfinished, counts

    def _jump_s(self) -> float:
        """How far the wall clock was set ahead since the last call; below 0, back."""
        wall, elapsed = self._clocks
        self._clocks = time.time(), _elapsed_s()
        jump_s = (self._clocks[0] - wall) - (self._clocks[1] - elapsed)
        if abs(jump_s) < _JUMP_S:
            return 0.0
        log.warning("the clock was set by %+.0f s: batches keep the time that they have", jump_s)
        return jump_s

    def _remove_stale_parts(self) -> None:
        seen, now = self._parts, time.monotonic()
        self._parts = {part: seen.get(part, now) for part in self._folder.glob("*/*.part")}
        for part, since in self._parts.items():
            if since < now - _STALE_PART_S:
                part.unlink(missing_ok=True)


def _elapsed_s() -> float:
    """Time that passes, a suspended machine's too, whatever the wall clock is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shift(batch: Batch, jump_s: float, now: float) -> bool:
    """Puts off a batch's expiry by what the wall clock jumped ahead, and no further than a window.

    Whether that changed it.
    """
    before = batch.expires_at
    batch.expires_at = int(min(before + max(0.0, jump_s), now + WINDOW_S + 1))
    return batch.expires_at != before


def _why_ends(batch: Batch, now: float, is_full: bool) -> str:
    """Of `_ENDS`; empty where it may go on."""
    if batch.status == "cancelling":
        return "batch_cancelled"
    if now >= batch.expires_at:
        return "batch_expired"
    return "disk_share_used_up" if is_full else ""


class _Job:
    """One batch that runs."""

    task: asyncio.Task[None]

    def __init__(self, runner: BatchRunner, store: BatchStore, batch: Batch, end: str) -> None:
        """`end`, of `_ENDS`, is why it ends now, if it does."""
        self.tenant = store.tenant
        self.batch = batch
        self._runner = runner
        self._store = store
        self._input = store.content(batch.input_file_id)
        number = batch.id.removeprefix("batch_")
        self._output = _Results(store.content(f"file-{number}-output"))
        self._errors = _Results(store.content(f"file-{number}-errors"))
        self._room = asyncio.Semaphore(runner.concurrency)  # for lines in memory
        self.end = end
        self._saved = ""

    async def run(self) -> None:
        """Runs it to its end. Raises OSError where a file cannot be read or written."""
        on_disk = self._runner.on_disk
        if problems := await on_disk(self._begin):
            await on_disk(self._end, "failed", problems)
            return
        if not self.end:
            done = await on_disk(self._resume)
            async with asyncio.TaskGroup() as group:
                await self._run_lines(done, group)
        await on_disk(self._finish)

    async def _run_lines(self, done: set[str], group: asyncio.TaskGroup) -> None:
        lines = self._lines(done)
        while some := await self._runner.on_disk(next, lines, None):
            for line in some:
                await self._room.acquire()
                task = group.create_task(self._run_line(line))
                task.add_done_callback(lambda _: self._room.release())

    async def _run_line(self, line: Line) -> None:
        """Runs a line until it has a result that is not a refusal."""
        failures = 0
        while True:
            exchange = _LineExchange(line.url, _low_priority(line.body))
            # The batch expires before a request of it does.
            left_s = min(self.batch.expires_at - time.time() + _GRACE_S, _TRY_S)
            caller = Caller(tenant=self.tenant, time_left_s=left_s)
            wait_s = _RETRY_S
            async with self._runner.slots:
                try:
                    endpoint = self._runner.endpoints[line.url]
                    await endpoint(self._runner.service, exchange, caller)
                    break
                except Exception as error:
                    began = b"x-request-id" in exchange.answer_headers
                    failures += began and isinstance(error, _FAILURES)
                    again = isinstance(error, _REFUSALS + _FAILURES)
                    if not again or failures >= _MAX_FAILURES:
                        failure = failure_of(error)
                        exchange.answer(failure.status, failure.body)
                        break
                    if isinstance(error, RetryableError):
                        wait_s = max(wait_s, error.retry_after_s)
            await asyncio.sleep(min(wait_s * (1 + failures), _MAX_RETRY_S))
        request_id = exchange.answer_headers.get(b"x-request-id", b"").decode()
        body = Raw(exchange.answered)
        response = {"status_code": exchange.status, "request_id": request_id, "body": body}
        result = "completed" if exchange.status == 200 else "failed"
        results = self._output if exchange.status == 200 else self._errors
        results.waiting.append(_result(line.custom_id, response, None))
        await self._runner.on_disk(results.flush)
        counts = self.batch.request_counts
        setattr(counts, result, getattr(counts, result) + 1)
        self._runner.service.batch_lines[result] += 1

    # From here on: for the disk thread.

    def save_progress(self, jump_s: float) -> None:
        """The counts, for whoever asks; the clock may have jumped."""
        counts = str(self.batch.request_counts)
        jumped = shift(self.batch, jump_s, time.time())
        if self.batch.status == "in_progress" and (jumped or counts != self._saved):
            self._store.save(self.batch)
            self._saved = counts

    def _begin(self) -> list[BatchError]:
        """What is wrong with the input; if nothing, the batch is in progress."""
        if not self._input.exists():
            return [BatchError("file_missing", "the input file is gone")]
        if self.batch.in_progress_at or self.end:
            return []
        problems: list[BatchError] = []
        seen: set[str] = set()
        with self._input.open("rb") as file:
            texts = iter(partial(file.readline, _MAX_LINE_BYTES + 1), b"")
            for number, text in enumerate(texts, 1):
                too_long = len(text) > _MAX_LINE_BYTES
                if text.isspace() and not too_long:
                    continue
                try:
                    if too_long:
                        raise InvalidRequest(f"at most {_MAX_LINE_BYTES} bytes may be given")
                    line = parse_line(text)
                    if line.url != self.batch.endpoint:
                        raise InvalidRequest(f"the batch is for {self.batch.endpoint}", "url")
                    if line.custom_id in seen:
                        raise InvalidRequest("an earlier line has this custom_id", "custom_id")
                    if len(seen) == MAX_LINES:
                        raise InvalidRequest(f"at most {MAX_LINES} lines may be given")
                    seen.add(line.custom_id)
                except InvalidRequest as error:
                    problem = BatchError("invalid_line", str(error), number, error.field or None)
                    problems.append(problem)
                if too_long or len(problems) == _MAX_ERRORS:
                    break  # what follows has no number, or is too much to tell
        if not seen and not problems:
            problems.append(BatchError("empty_file", "the file has no requests"))
        if not problems:
            self.batch.status, self.batch.in_progress_at = "in_progress", int(time.time())
            self.batch.request_counts.total = len(seen)
            self._store.save(self.batch)
        return problems

    def _resume(self) -> set[str]:
        """The lines that have results."""
        done, failed = self._output.read(), self._errors.read()
        counts = self.batch.request_counts
        counts.completed, counts.failed = len(done), len(failed)
        return done | failed

    def _lines(self, done: set[str]) -> Iterator[list[Line]]:
        """The others, some at a time."""
        with self._input.open("rb") as file:
            while texts := file.readlines(_READ_BYTES):
                lines = [msgspec.json.decode(text, type=Line) for text in texts if text.strip()]
                if missing := [line for line in lines if line.custom_id not in done]:
                    yield missing

    def _finish(self) -> None:
        """Gives every line a result if there is room, and publishes them."""
        code = self.end
        status, message = _ENDS.get(code, ("completed", ""))
        if self.batch.in_progress_at:
            done = self._resume()
            error = {"code": code, "message": message}
            for lines in self._lines(done) if status in ("cancelled", "expired") else ():
                self._errors.waiting.extend(_result(line.custom_id, None, error) for line in lines)
                self.batch.request_counts.failed += len(lines)
                self._errors.flush()
        self._end(status, [BatchError(code, message)] if status == "failed" else [])

    def _end(self, status: Status, problems: list[BatchError]) -> None:
        batch, now = self.batch, int(time.time())
        if batch.in_progress_at:
            batch.finalizing_at = now
            batch.output_file_id = self._output.publish(self._store, now)
            batch.error_file_id = self._errors.publish(self._store, now)
        batch.errors = BatchErrors(problems) if problems else None
        batch.status = status
        setattr(batch, f"{status}_at", now)
        self._store.save(batch)
        counts = batch.request_counts
        log.info(
            "%s of %s: %s, %d of %d requests completed, %d failed",
            batch.id, self.tenant, batch.status, counts.completed, counts.total, counts.failed,
        )  # fmt: skip


def parse_line(text: bytes) -> Line:
    """A line of a batch's input. Raises InvalidRequest."""
    try:
        line = msgspec.json.decode(text, type=Line)
        _low_priority(line.body)
        return line
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(str(error)) from error


def _low_priority(body: Raw) -> bytes:
    """A line's body as it is run."""
    members = msgspec.json.decode(body, type=dict[str, Raw])
    for name in _DROPPED:
        members.pop(name, None)
    return msgspec.json.encode({**members, "priority": _LOW})


def _result(custom_id: str, response: Any, error: Any) -> bytes:
    found = {"custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode({"id": f"batch_req_{new_id()}", **found}) + b"\n"
