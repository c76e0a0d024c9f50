"""What an engine's thread takes for itself, and that it is for that thread and its own alone."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.engine.backends import cpu

ALL = os.sched_getaffinity(0)


def place():
    """The calling thread's cores and niceness."""
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(*work):
    """The results of calls on one new thread."""
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(call).result() for call in work]


def test_a_thread_and_those_it_starts_are_pinned_and_stand_back():
    before = place()
    last = {max(ALL)}
    nice = before[1] + 3

    def child():
        return in_a_thread(place)[0]

    _, here, below = in_a_thread(lambda: cpu.pin_thread(last, nice), place, child)
    assert here == below == (last, nice)
    assert place() == before
    _, here = in_a_thread(lambda: cpu.pin_thread((), 0), place)
    assert here == before


def test_confined_gives_the_cores_back_whatever_happens():
    def fail():
        with cpu.pinned_to({min(ALL)}):
            assert os.sched_getaffinity(0) == {min(ALL)}
            raise ValueError("seen")

    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(ValueError, match="seen"):
            thread.submit(fail).result()
        assert thread.submit(place).result()[0] == ALL
