"""Server-sent events out of a byte stream, however it is cut into chunks.

Source: WHATWG HTML Living Standard, section 9.2 (only `data` fields matter to completions).
"""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """Takes bytes as they come, gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that end in this chunk."""
        *lines, self._rest = _lines(self._rest + chunk)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


def _lines(text: bytes) -> list[bytes]:
    """Lines ended by LF, CR LF or CR; the last one has no end yet."""
    if b"\r" not in text:
        return text.split(b"\n")
    held = b""
    if text.endswith(b"\r"):  # an LF may follow
        text, held = text[:-1], b"\r"
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    lines[-1] += held
    return lines
