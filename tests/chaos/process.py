"""`python -m tests.chaos.process router|worker …`: baton for chaos.

The real command with two additions: KV transfers may fail (`tests.chaos.kv_faults`), and on SIGUSR2
it writes what it holds (tasks, threads, file descriptors, memory) to BATON_CHAOS_HELD/<pid>.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil

HELD_VARIABLE = "BATON_CHAOS_HELD"
_NUMBER = re.compile(r"[-_][0-9a-f_]+$")


def _write_held(directory: Path) -> None:
    """What this process holds now, counted by kind and name."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks())
    held = {
        "tasks": Counter(getattr(one, "__qualname__", type(one).__name__) for one in coroutines),
        "threads": Counter(_NUMBER.sub("", thread.name) for thread in threading.enumerate()),
        "files": {"descriptors": psutil.Process().num_fds()},
        "memory": {"MiB of its own": _own_memory_bytes() >> 20},
    }
    path = directory / f"{os.getpid()}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(held))
    draft.rename(path)  # a reader never sees half of it


def _own_memory_bytes() -> int:
    """Without files and KV pools, of which more and more is used."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _main() -> int:
    if directory := os.environ.get(HELD_VARIABLE):
        signal.signal(signal.SIGUSR2, lambda *_: _write_held(Path(directory)))
    if (path := os.environ.get("BATON_CHAOS_KV")) and sys.argv[1].endswith("worker"):
        # Imports torch, which a router does without.
        from tests.chaos import kv_faults  # noqa: PLC0415

        kv_faults.install(Path(path))
    from baton.cli.main import main  # noqa: PLC0415 - after what it runs has been changed

    return main()


if __name__ == "__main__":
    sys.exit(_main())
