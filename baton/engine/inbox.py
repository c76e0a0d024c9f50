"""Work that any thread may submit, and one thread runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.engine.runner import RunnerFailed
from baton.errors import Unavailable

T = TypeVar("T")


class Inbox:
    """Takes work from any thread; one thread runs it in order, until it closes the inbox."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = ""  # why no more work is taken

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues `work`; its future fails with Unavailable once the inbox is closed."""
        future: Future[T] = Future()
        # It cannot be cancelled from here on: a caller that hangs up must not undo a release.
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed:
                self._jobs.put((work, future))
                return future
        future.set_exception(Unavailable(self._closed))
        return future

    def run_all(self, *, wait: bool = False) -> None:
        """Runs all work that is queued; with `wait`, sleeps until there is some.

        Raises RunnerFailed if work did.
        """
        while True:
            try:
                work, future = self._jobs.get(wait)
            except queue.Empty:
                return
            wait = False
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, RunnerFailed):
                    raise

    def close(self, reason: str) -> None:
        """Takes no more work; work that has not run fails with Unavailable."""
        with self._lock:
            self._closed = reason
        while True:
            try:
                _, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            future.set_exception(Unavailable(reason))
