"""A device that is always late: work runs when the host waits for it, or by chance."""

import random
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

import torch

from baton.engine.backends.gpu.device import Stream, Work

T = TypeVar("T")


class LazyStream(Stream):
    """Keeps work back, so that a host that does not wait sees what was there before."""

    def __init__(self, seed=None):
        self._dice = None if seed is None else random.Random(seed)
        self._waiting: deque[Work] = deque()
        self._done = 0
        self._recorded = 0
        self._waited = 0
        self._failures: dict[int, Exception] = {}  # by the number of the work
        self.fails_in: int | None = None  # so many works from now one fails on the device

    @property
    def pending(self):
        """Work that has not run."""
        return len(self._waiting)

    @property
    def unwaited(self):
        """Work that was not waited for, whether or not it has run by chance."""
        return self._done + self.pending - self._waited

    def put(self, work):
        self._waiting.append(work)
        if self._dice is not None and self._dice.random() < 0.3:
            self.run(self._dice.randrange(self.pending + 1))

    def call(self, work):
        self.run(self.pending)
        self._done += 1
        return work()

    def record_event(self):
        first, self._recorded = self._recorded, self._done + self.pending
        return SimpleNamespace(synchronize=partial(self.wait, first, self._recorded))

    def run(self, count):
        """Runs the oldest; what it raises is raised where it is waited for."""
        for _ in range(count):
            work = self._waiting.popleft()
            try:
                self._maybe_fail()
                with torch.inference_mode():  # the host's modes are nothing to a device
                    work()
            except Exception as error:
                self._failures[self._done] = error
            self._done += 1

    def wait(self, first, end):
        """Runs works up to `end`; raises what those from `first` on failed with."""
        self.run(max(0, end - self._done))
        self._waited = max(self._waited, end)
        for number in range(first, end):
            if number in self._failures:
                raise self._failures[number]

    def _maybe_fail(self):
        if self.fails_in is None:
            return
        self.fails_in -= 1
        if self.fails_in < 0:
            self.fails_in = None
            raise RuntimeError("the device failed")
