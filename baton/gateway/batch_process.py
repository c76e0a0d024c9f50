"""Keeps one batch runner for each `--batch-dir`, as a child process of one of its routers.

The router that has the folder's lock starts the runner (`baton.gateway.batch_runner`), and starts
it again when it ends. The runner has the lock, too: another router runs batches once both are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import msgspec

from baton.config import ApiConfig
from baton.errors import Unauthenticated
from baton.gateway.batch_runner import SECRET_HEADER, TENANT_HEADER, RunnerReport, RunnerSettings
from baton.gateway.batch_store import lock_file, try_lock
from baton.gateway.endpoint import MAX_BODY_BYTES, Endpoint
from baton.gateway.headers import caller_of, id_headers
from baton.net import http_server, tasks
from baton.net.backoff import Backoff
from baton.net.http_server import HttpExchange
from router.generation_service import GenerationService

log = logging.getLogger(__name__)

_LOCK_S = 1.0  # between two tries to get the lock
_MAX_REPORT_BYTES = 1 << 20
_EXIT_S = 5.0  # for the runner to end by itself
_MAX_BACKOFF_S = 30.0
_SPARE_CONNECTIONS = 16


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    config: ApiConfig,
    service: GenerationService,
    endpoints: Mapping[str, Endpoint[Any]],
) -> AsyncIterator[None]:
    """Batches of the folder run while inside, here or under another router.

    Lines come back as HTTP requests at a port of their own, on the loopback interface. They name
    their tenant, whose key is stored nowhere; a secret shows that they are the runner's.
    """
    secret = secrets.token_hex(32)

    async def answer(exchange: HttpExchange) -> None:
        given = exchange.headers.get(SECRET_HEADER.encode(), b"")
        if not hmac.compare_digest(given, secret.encode()):
            raise Unauthenticated("this port is for the router's own batch runner")
        tenant = unquote(exchange.headers[TENANT_HEADER.encode()].decode())
        exchange.answer_headers = id_headers(exchange)
        caller = replace(caller_of(exchange), tenant=tenant)
        await endpoints[exchange.path](service, exchange, caller)

    listener = http_server.listen("127.0.0.1", 0, "lines of batches", "--batch-dir")
    host, port = listener.getsockname()
    settings = RunnerSettings(
        str(folder), config.batch_disk, config.batch_concurrency, host, port, secret,
        MAX_BODY_BYTES + 4096,
    )  # fmt: skip
    connections = config.batch_concurrency + _SPARE_CONNECTIONS
    async with (
        http_server.serving(answer, listener, connections, plain=True),
        tasks.running(_keep_runner(settings, service), "batches"),
    ):
        yield


async def _keep_runner(settings: RunnerSettings, service: GenerationService) -> None:
    """Runs the runner while this process has the folder's lock; until cancelled."""

    def on_report(report: RunnerReport) -> None:
        service.batch_lines.update(report.lines)
        if report.batches is not None:
            service.batches.clear()
            service.batches.update(report.batches)
        if report.log is not None:
            log.log(report.log[0], "%s", report.log[1])

    backoff = Backoff(1.0, _MAX_BACKOFF_S)
    with lock_file(Path(settings.folder)) as lock:
        while not try_lock(lock):  # noqa: ASYNC110 - a lock has no event
            await asyncio.sleep(_LOCK_S)
        try:
            while True:
                try:
                    await run_runner(settings, lock, on_report)
                except OSError as error:
                    log.error("the batch runner cannot be started: %s", error)
                await backoff.wait()
        finally:
            service.batches.clear()


async def run_runner(
    settings: RunnerSettings, lock: BinaryIO, on_report: Callable[[RunnerReport], None]
) -> None:
    """Runs the runner as a process; returns, and logs it, when that ends."""
    ours, theirs = socket.socketpair()  # `ours` closes when it is dropped, or with its stream
    with theirs:
        process = subprocess.Popen(  # noqa: ASYNC220 - in this thread: it takes 2 ms, once
            [sys.executable, "-m", "baton.gateway.batch_runner"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # ctrl-C is the router's
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_REPORT_BYTES)
    try:
        writer.write(msgspec.json.encode(settings) + b"\n")
        async for line in reader:
            on_report(msgspec.json.decode(line, type=RunnerReport))
    except OSError:
        pass  # it ended before it had read all
    finally:
        writer.transport.abort()  # which ends it
        status = await asyncio.to_thread(_wait, process)
    log.error("the batch runner ended with status %d: it is started again", status)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
