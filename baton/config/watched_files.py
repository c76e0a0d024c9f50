"""Detects changes of files that are reloaded: certificates, tenants."""

from __future__ import annotations

from pathlib import Path


class WatchedFiles:
    """Files that are watched after they have been read."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, ...] | None] = {}

    def read(self, path: Path) -> bytes:
        """Reads and watches a file. Raises OSError; a missing file is watched, too."""
        self._seen[path] = _stamp(path)
        return path.read_bytes()

    @property
    def changed(self) -> bool:
        """Whether any file was replaced, changed, created or removed."""
        return any(_stamp(path) != seen for path, seen in tuple(self._seen.items()))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Metadata that change with a file's content. Links are followed: Kubernetes replaces them."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
