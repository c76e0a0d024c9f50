"""Where threads run: pinned to cores, and how nicely.

The kernel keeps affinity and niceness for each thread, and a new thread inherits them: what the
engine's thread is given, the threads that compute with it have too. Linux.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator


def pin_thread(cpus: Collection[int], nice: int) -> None:
    """Pins the calling thread to `cpus`, unless that is empty, and sets its niceness.

    nice: 0 to 19; at 10 a thread gets a tenth of the time of one that shares its core at 0, and all
    the time that is left over.
    """
    if cpus:
        os.sched_setaffinity(0, cpus)
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@contextlib.contextmanager
def pinned_to(cpus: Collection[int]) -> Iterator[None]:
    """Within, the calling thread keeps to `cpus`: memory that it touches first lies near them."""
    allowed = os.sched_getaffinity(0)
    pin_thread(cpus, 0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
