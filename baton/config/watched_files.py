"""Files that are read again when they change: certificates, tenants and their keys."""

from __future__ import annotations

from pathlib import Path


class WatchedFiles:
    """Tells whether the files that were read through it are others by now."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, ...] | None] = {}

    def read(self, path: Path) -> bytes:
        """Its content. Raises OSError; such a file is watched, too, and changes when it comes."""
        self._seen[path] = _stamp(path)
        return path.read_bytes()

    @property
    def changed(self) -> bool:
        """Whether any of them was replaced or written to, has come or has gone."""
        return any(_stamp(path) != seen for path, seen in tuple(self._seen.items()))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's content. Links are followed: Kubernetes replaces those."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
