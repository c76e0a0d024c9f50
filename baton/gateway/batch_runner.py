"""The batch runner: a process that sends each line of each batch to its router, at low priority.

    python -m baton.gateway.batch_runner

Its standard input is a socket to the router that started it: `RunnerSettings` come first,
`RunnerReport`s go back, and the runner ends with the socket. All state is in the database, so that
a runner continues where the last one was, whatever its end. One batch of each tenant runs at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import parse_headers
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta, Raw, Struct

from baton.errors import InvalidRequest
from baton.gateway.batch_store import (
    MAX_LINES,
    WINDOW_S,
    Batch,
    BatchError,
    BatchStore,
    LineResult,
    Status,
    new_id,
)
from baton.gateway.field_errors import invalid, why_not_json

log = logging.getLogger(__name__)

SECRET_HEADER, TENANT_HEADER = "x-baton-batch-secret", "x-baton-batch-tenant"
ADMITTED_HEADER = "x-baton-admitted"  # of an answer whose request had entered
_SCAN_S = 0.5  # between two scans of the database
_RETRY_S = 1.0  # before a refused line is sent again, at least
_MAX_RETRY_S = 60.0
_REFUSALS = (401, 429)
_FAILURES = (503, 504)
_MAX_FAILURES = 3  # of a line that had begun: it may be what ends its workers
_GRACE_S = 60.0  # a batch expires before its requests do
_LINE_S = 3600.0  # longest time of a line at the router, its wait for room included
_RESTART_S = 30.0  # before a batch continues after the database could not be read or written
_CLOCK_JUMP_S = 60.0  # the wall clock was set by at least this much
_LINES_AT_ONCE = 1000  # results of a transaction that ends a batch
_MAX_ERRORS = 100  # reported of a batch's input
_LOW = Raw(b'"low"')
# Why a batch ends before its last line: its status then, and the message.
_ENDS: dict[str, tuple[Status, str]] = {
    "batch_cancelled": ("cancelled", "The batch was cancelled before this request executed."),
    "batch_expired": (
        "expired",
        "This request could not be executed before the completion window expired.",
    ),
    "disk_share_used_up": ("failed", "The tenant's share is full (--batch-disk): delete files."),
}
# A line is answered whole and waits for room, whatever its body says.
_DROPPED = ("stream", "stream_options", "ttft_target_ms", "request_id")


class RunnerSettings(Struct):
    """What the router passes to the runner."""

    folder: str  # --batch-dir
    max_bytes: int  # --batch-disk
    concurrency: int  # --batch-concurrency
    host: str  # where the router takes lines
    port: int
    secret: str  # proves to the router that a line comes from the runner
    max_line_bytes: int


class RunnerReport(Struct, omit_defaults=True):
    """What the runner reports to the router; parts that are absent have not changed."""

    batches: dict[str, int] | None = None  # number by status
    lines: dict[str, int] = {}  # new results by their kind
    log: tuple[int, str] | None = None  # level and text of a log line


class RequestLine(Struct):
    """One request of a batch's input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


class LineAnswer(Struct):
    """The router's answer to a line; without a body it could not be reached."""

    status: int = 503
    body: bytes = b""
    request_id: str = ""
    was_admitted: bool = False
    retry_after_s: float = 0.0


class BatchRunner:
    """Runs the batches of all tenants, those of a tenant one after the other.

    It writes to the database on its event loop, which has nothing urgent to do.
    """

    def __init__(self, settings: RunnerSettings, report: Callable[[RunnerReport], None]) -> None:
        self.settings = settings
        self.report = report
        self.slots = asyncio.Semaphore(settings.concurrency)  # for lines of all batches
        self._jobs: dict[str, _Job] = {}  # by the batch's id
        self._not_before: dict[str, float] = {}  # by the batch's id; of the monotonic clock
        self._clock_offset_s = _clock_offset_s()  # at the last scan
        self._reported: dict[str, int] | None = None  # batches by status

    async def run(self) -> None:
        """Runs batches until cancelled. Raises sqlite3.Error where the database does not open."""
        self.store = BatchStore(Path(self.settings.folder), self.settings.max_bytes)
        log.info("batches of %s run here", self.settings.folder)
        with contextlib.closing(self.store):
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        self._scan(group)
                        await asyncio.sleep(_SCAN_S)
                    except sqlite3.Error as error:
                        folder = self.settings.folder
                        log.error("%s cannot be read or written: %s", folder, error)
                        await asyncio.sleep(_RESTART_S)

    def _scan(self, group: asyncio.TaskGroup) -> None:
        """Starts batches that may run, and ends those that are cancelled or have no room."""
        jump_s = self._clock_jump_s()
        if (counted := self.store.count_batches()) != self._reported:
            self.report(RunnerReport(batches=counted))
            self._reported = counted
        for tenant, batch, is_full in self.store.unfinished():
            put_off(self.store, tenant, batch, jump_s)
            end = _why_ends(batch, is_full)
            job = self._jobs.get(batch.id)
            is_next = all(other.tenant != tenant for other in self._jobs.values())
            may_start = is_next or end in ("batch_cancelled", "batch_expired")
            if job:
                job.batch.expires_at = batch.expires_at
                if end and not job.end:
                    job.task.cancel()  # the next scan starts a job that ends the batch
            elif may_start and time.monotonic() >= self._not_before.get(batch.id, 0):
                job = self._jobs[batch.id] = _Job(self, tenant, batch, end)
                job.task = group.create_task(self._run(job), name=batch.id)

    async def _run(self, job: _Job) -> None:
        try:
            await job.run()
        except Exception as error:
            failed = error
            while isinstance(failed, ExceptionGroup):  # lines are tasks
                failed = failed.exceptions[0]
            text = "%s continues in %.0f s: %s"  # without a traceback of a full disk
            trace = not isinstance(failed, sqlite3.Error)
            log.error(text, job.batch.id, _RESTART_S, failed, exc_info=trace)
            self._not_before[job.batch.id] = time.monotonic() + _RESTART_S
        finally:
            del self._jobs[job.batch.id]

    def _clock_jump_s(self) -> float:
        """How far the wall clock was set ahead since the last call; 0 where it was set back."""
        offset_s = _clock_offset_s()
        jump_s, self._clock_offset_s = offset_s - self._clock_offset_s, offset_s
        if abs(jump_s) < _CLOCK_JUMP_S:
            return 0.0
        log.warning("the clock was set by %+.0f s: batches keep the time they have left", jump_s)
        return max(0.0, jump_s)

    async def post(self, tenant: str, line: RequestLine, time_s: float) -> LineAnswer:
        """Sends a line to the router as the tenant's request, and reads the answer."""
        try:
            async with asyncio.timeout(time_s + _GRACE_S):
                return await self._post(tenant, line, time_s)
        except (OSError, EOFError, TimeoutError):  # the router ends, and this process with it
            return LineAnswer()

    async def _post(self, tenant: str, line: RequestLine, time_s: float) -> LineAnswer:
        settings, body = self.settings, _low_priority(line.body)
        head = (
            f"POST {line.url} HTTP/1.1\r\nhost: {settings.host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-timeout: {max(time_s, 1.0)}\r\n{SECRET_HEADER}: {settings.secret}\r\n"
            f"{TENANT_HEADER}: {quote(tenant)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(settings.host, settings.port)
        try:
            writer.write(head.encode() + body)
            status, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            headers = parse_headers(io.BytesIO(rest))
            return LineAnswer(
                int(status.split()[1]),
                await reader.readexactly(int(headers["content-length"])),
                headers["x-request-id"] or "",
                ADMITTED_HEADER in headers,
                float(headers["retry-after"] or 0),
            )
        finally:
            writer.transport.abort()  # which cancels a request that is not answered yet


def _clock_offset_s() -> float:
    """The wall clock less the time since the machine started, which nothing sets."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def put_off(store: BatchStore, tenant: str, batch: Batch, jump_s: float) -> None:
    """Moves a batch's expiry by what the clock was set ahead, at most to a window from now on."""
    expires_at = int(min(batch.expires_at + jump_s, time.time() + WINDOW_S + 1))
    if expires_at != batch.expires_at:
        with store.changing(tenant, batch.id) as changed:
            changed.expires_at = batch.expires_at = expires_at


def _why_ends(batch: Batch, is_full: bool) -> str:
    """The key of `_ENDS`; empty where the batch may continue."""
    if batch.status == "cancelling":
        return "batch_cancelled"
    if time.time() >= batch.expires_at:
        return "batch_expired"
    return "disk_share_used_up" if is_full else ""


class _Job:
    """One batch that runs or is being ended."""

    task: asyncio.Task[None]

    def __init__(self, runner: BatchRunner, tenant: str, batch: Batch, end: str) -> None:
        """`end`: the key of `_ENDS` for a batch that ends now, else empty."""
        self.tenant = tenant
        self.batch = batch
        self.end = end
        self._runner = runner
        self._room = asyncio.Semaphore(runner.settings.concurrency)  # for this batch's lines
        self._waiting: list[LineResult] = []  # to be written

    async def run(self) -> None:
        """Runs the batch to its end. Raises sqlite3.Error where the database fails."""
        if not self.end:
            if not self.batch.in_progress_at and (problems := self._begin()):
                self._finish("failed", problems)
                return
            async with asyncio.TaskGroup() as group:
                for number, line in self._missing():
                    await self._room.acquire()
                    task = group.create_task(self._run_line(number, line))
                    task.add_done_callback(lambda _: self._room.release())
        status, message = _ENDS.get(self.end, ("completed", ""))
        if self.batch.in_progress_at and status in ("cancelled", "expired"):
            error = {"code": self.end, "message": message}
            missing = self._missing()
            while some := list(islice(missing, _LINES_AT_ONCE)):
                self._add(
                    [
                        LineResult(n, "failed", _result(line.custom_id, None, error))
                        for n, line in some
                    ]
                )
        self._finish(status, [BatchError(self.end, message)] if status == "failed" else [])

    async def _run_line(self, number: int, line: RequestLine) -> None:
        """Sends a line until its answer is not a refusal, and stores that."""
        runner, failures = self._runner, 0
        while True:
            left_s = min(self.batch.expires_at - time.time() + _GRACE_S, _LINE_S)
            async with runner.slots:
                answer = await runner.post(self.tenant, line, left_s)
            failures += answer.was_admitted and answer.status in _FAILURES
            if answer.status not in _REFUSALS + _FAILURES or failures >= _MAX_FAILURES:
                break
            wait_s = max(_RETRY_S, answer.retry_after_s) * (1 + failures)
            await asyncio.sleep(min(wait_s, _MAX_RETRY_S))
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": Raw(answer.body),
        }
        kind: Literal["completed", "failed"] = "completed" if answer.status == 200 else "failed"
        self._waiting.append(LineResult(number, kind, _result(line.custom_id, response, None)))
        await asyncio.sleep(0)  # what ends at the same time is written together
        if results := self._waiting:
            self._waiting = []
            self._add(results)

    def _add(self, results: list[LineResult]) -> None:
        self._runner.store.add_results(self.tenant, self.batch.id, results)
        self._runner.report(RunnerReport(lines=Counter(result.kind for result in results)))

    def _begin(self) -> list[BatchError]:
        """Checks the input, and makes the batch in progress where nothing is wrong with it."""
        store, max_bytes = self._runner.store, self._runner.settings.max_line_bytes
        problems: list[BatchError] = []
        seen: set[str] = set()
        for number, text in enumerate(store.lines(self.batch.input_file_id, max_bytes), 1):
            if len(text) <= max_bytes and not text.strip():
                continue
            try:
                if len(text) > max_bytes:
                    raise InvalidRequest(f"at most {max_bytes} bytes may be given")
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
                if len(problems) == _MAX_ERRORS:
                    break
        if not seen and not problems:
            problems.append(BatchError("empty_file", "the file has no requests"))
        if not problems:
            store.begin(self.tenant, self.batch.id, len(seen))
        return problems

    def _missing(self) -> Iterator[tuple[int, RequestLine]]:
        """The lines that have no result, with their numbers from 0."""
        store, max_bytes = self._runner.store, self._runner.settings.max_line_bytes
        done = store.done(self.batch)
        for number, text in enumerate(store.lines(self.batch.input_file_id, max_bytes)):
            if number not in done and text.strip():
                yield number, msgspec.json.decode(text, type=RequestLine)

    def _finish(self, status: Status, problems: list[BatchError]) -> None:
        batch = self._runner.store.finish(self.tenant, self.batch.id, status, problems)
        counts = batch.request_counts
        log.info(
            "%s of %s: %s, %d of %d requests completed, %d failed",
            batch.id, self.tenant, batch.status, counts.completed, counts.total, counts.failed,
        )  # fmt: skip


def parse_line(text: bytes) -> RequestLine:
    """Parses a line of a batch's input. Raises InvalidRequest."""
    within = ""
    try:
        line = msgspec.json.decode(text, type=RequestLine)
        within = "body"
        _low_priority(line.body)
        return line
    except msgspec.ValidationError as error:
        raise invalid(error, within, "the line") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = why_not_json(error, text)
        raise InvalidRequest(f"the line is not JSON in UTF-8: {reason}") from error
    except RecursionError as error:
        raise InvalidRequest("the line is nested too deeply") from error


def _low_priority(body: Raw) -> bytes:
    """A line's body as it is sent."""
    members = msgspec.json.decode(body, type=dict[str, Raw])
    for name in _DROPPED:
        members.pop(name, None)
    return msgspec.json.encode({**members, "priority": _LOW})


def _result(custom_id: str, response: Any, error: Any) -> bytes:
    found = {"custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode({"id": f"batch_req_{new_id()}", **found}) + b"\n"


async def _main() -> None:
    """Runs until the router closes its end of the socket."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=0))
    settings = msgspec.json.decode(await reader.readline(), type=RunnerSettings)

    def report(found: RunnerReport) -> None:
        loop.call_soon_threadsafe(writer.write, msgspec.json.encode(found) + b"\n")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report(RunnerReport(log=(record.levelno, self.format(record))))

    handler = Handler()
    handler.setFormatter(logging.Formatter("%(message)s"))  # the router's log adds the rest
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    running = asyncio.create_task(BatchRunner(settings, report).run())
    closed = asyncio.create_task(reader.read())
    await asyncio.wait([running, closed], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    asyncio.run(_main())
