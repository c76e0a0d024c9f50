"""A server for fair-queueing tests: one rate, earliest due first, chunk by chunk. No real clock."""

import heapq
import itertools
from dataclasses import dataclass

from baton.v1 import common_pb2
from router.admission.fair_queue import FairQueue, Flow

NORMAL = common_pb2.PRIORITY_NORMAL
CHUNK_S = 0.05


@dataclass(eq=False)
class Job:
    at: float
    seconds: float
    flow: Flow
    priority: int = NORMAL
    due: float = 0.0
    left: float = 0.0
    done: float = 0.0
    began: float = 0.0  # where the clock of fair_queue stood when it came, at the latest
    refused: bool = False

    @property
    def took(self):
        return self.done - self.at


class Server:
    """Runs jobs by their dues; `admit(server, job)` may refuse them as they come."""

    def __init__(self, admit=None):
        self.now = 0.0
        self.fair_queue = FairQueue(lambda: self.now)
        self.waiting = []
        self._order = itertools.count()
        self._admit = admit

    @property
    def flows(self):
        return [job.flow for _, _, job, _ in self.waiting]

    def run(self, jobs):
        coming = sorted(jobs, key=lambda job: job.at)
        coming.reverse()
        while coming or self.waiting:
            if not self.waiting:
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._take(coming.pop())
            if self.waiting:
                self._step()
        return jobs

    def _take(self, job):
        job.began = min([self.now, *(due for due, *_ in self.waiting)])
        turn = self.fair_queue.add(job.flow, job.seconds, job.priority)
        job.virtual_finish, job.left = turn.virtual_finish, job.seconds
        if self._admit and not self._admit(self, job):
            job.refused = True
            self.fair_queue.remove(turn)
            return
        heapq.heappush(self.waiting, (job.virtual_finish, next(self._order), job, turn))

    def _step(self):
        _, _, job, turn = self.waiting[0]
        chunk = min(job.left, CHUNK_S)
        self.now += chunk
        job.left -= chunk
        if job.left <= 1e-9:
            heapq.heappop(self.waiting)
            job.done = self.now
            self.fair_queue.remove(turn)
