"""Parts that fail, each in its way. They need only what a part's process has imported."""

import os
import threading
import time

from benchmarks.gpu.part import Part
from tests.waiting import WAIT_S


def crash(part: Part) -> None:
    part.row("table", "a row", {"GB/s": 1.5, "text": "x", "none": None})
    part.attempt(
        "decode", "batch 8", lambda: (os.system("echo out of luck >&2") and None) or os.abort()
    )


def fail(part: Part) -> None:
    part.measure("t", [("bad", lambda: {"x": 1 // 0}), ("good", lambda: {"x": 1})])
    raise RuntimeError("no\nmore")


def stay(part: Part) -> None:
    threading.Thread(target=time.sleep, args=(8 * WAIT_S,)).start()
