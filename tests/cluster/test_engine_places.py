"""Only what computes is pinned, and only prompts stand back for others."""

import os
from pathlib import Path

from baton.config import ClusterConfig

NICE = ClusterConfig.prefill_nice
ALL = os.sched_getaffinity(0)
_NICE = 16  # of the fields behind the command's name in /proc/PID/stat


def threads(pid: int) -> list[tuple[frozenset[int], int]]:
    """Cores and niceness of every thread of a process."""
    return [
        (frozenset(os.sched_getaffinity(int(task.name))), nice_of(task))
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]


def nice_of(task: Path) -> int:
    return int((task / "stat").read_text().rpartition(")")[2].split()[_NICE])


async def test_engine_threads_are_where_they_were_put(cluster_factory) -> None:
    cluster = await cluster_factory()
    niceness = {name: [nice for _, nice in threads(p.pid)] for name, p in processes(cluster)}
    assert NICE in niceness["prefill-0"]
    assert set(niceness["decode-0"]) == set(niceness["router"]) == {os.nice(0)}
    assert niceness["prefill-0"].count(NICE) <= 1 + len(ALL)  # and those that compute with it
    for name in ("prefill-0", "decode-0"):
        pid = cluster.processes[name].pid
        assert os.sched_getaffinity(pid) == ALL, "the event loop may run where there is room"
        pinned = {cpus for cpus, _ in threads(pid)} - {frozenset(ALL)}
        assert len(pinned) == (len(ALL) >= 2), "the engine alone has cores of its own"


def processes(cluster):
    return cluster.processes.items()
