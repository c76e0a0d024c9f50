"""What others ask of the engine thread: pieces of work, each with a future that always ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.errors import Unavailable

T = TypeVar("T")


class Inbox:
    """Takes work from any thread; one thread runs it, in order, until it closes the inbox."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = ""  # why nothing is taken any more

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The future of `work`, which fails with Unavailable when the inbox is closed."""
        future: Future[T] = Future()
        # From here on it cannot be cancelled: a caller that hung up must not take back a release.
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed:
                self._jobs.put((work, future))
                return future
        future.set_exception(Unavailable(self._closed))
        return future

    def wait_and_run(self) -> None:
        """Runs one piece of work; sleeps until there is one."""
        self._run(*self._jobs.get())

    def run_all(self) -> None:
        """Runs what is there now."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            self._run(*job)

    def close(self, reason: str) -> None:
        """Takes no more work; what was not run fails with Unavailable."""
        with self._lock:
            self._closed = reason
        while True:
            try:
                _, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            future.set_exception(Unavailable(reason))

    def _run(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
