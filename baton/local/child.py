"""Child processes that cannot outlive their parent. Linux.

Our own processes call `die_with_parent` themselves. A foreign program is started through `tied`,
which runs this file in between. `preexec_fn` is no way to do it: it forks with gRPC's threads
running, and gRPC's fork handlers may abort the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends.

    The parent may have ended before: compare `os.getppid()` with its id afterwards. Start children
    from a thread that lives as long as they should, such as the main one.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def tied(command: Sequence[str]) -> list[str]:
    """The command that runs `command` (a path and its arguments), same pid, and dies with us."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent ended first")
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
