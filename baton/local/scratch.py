"""A temporary folder that goes with its owner, even one that was killed: the next owner removes it.

The owner holds a lock on a file in it. The kernel drops the lock when the owner ends, however that
happens and in whatever pid namespace it lived, so a folder without a lock is nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "owner.lock"


class ScratchFolder:
    """A folder named `prefix` and something random, until `remove`."""

    def __init__(self, prefix: str) -> None:
        """Creates it, and removes those with the same prefix that nobody owns any more."""
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Locked under another name first: an unlocked lock would make it look abandoned.
        new = self.path / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path)
        os.close(self._lock)


def _remove_abandoned(prefix: str) -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # it is owned, another user's, or just gone
            file = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(file)
