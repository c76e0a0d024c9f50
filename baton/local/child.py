"""Child processes that cannot outlive their parent. Linux.

Baton's processes call `die_with_parent` themselves. Other programs are started through `tied`,
which executes this file first. `preexec_fn` is not an option: it forks while gRPC's threads run,
and gRPC's fork handlers may abort the child.
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
    """Makes the kernel kill this process when the thread that started it ends.

    The parent may have ended before: compare `os.getppid()` with its id afterwards. Start children
    from a thread that lives as long as they should, such as the main one.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def tied(command: Sequence[str]) -> list[str]:
    """Wraps `command` (a path and its arguments) so that it dies with this process; same pid."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent ended first")
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
