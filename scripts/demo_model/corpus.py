"""The training text of the demo model: the Python standard library's own source.

Every CPython carries this text, so the model can be made again without a download. Generated
tables, files with the building machine's settings and deliberately broken test data are left out:
they teach a small model nothing about how Python reads.
"""

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax_", "config-")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Below this share of letters, underscores and white space a file is a table, not a program.
_PROSE_SHARE_MIN = 0.70
# One file in fifty is held out: about 2 % of the text.
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; `path` is relative to the standard library's folder."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the library's test suites."""
        return not _TEST_FOLDERS.isdisjoint(self.path.split("/"))

    @property
    def is_held_out(self) -> bool:
        """Whether the file is kept from training; decided by its path alone."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def read_corpus() -> list[SourceFile]:
    """Returns the running Python's library sources, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_skipped(relative):
            continue
        text = _read_program(path)
        if text is not None:
            files.append(SourceFile(relative.as_posix(), text))
    return sorted(files, key=lambda file: file.path)


def fingerprint(files: list[SourceFile]) -> str:
    """Returns a hex digest of the corpus, which tells whether two machines have the same text."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _is_skipped(relative: Path) -> bool:
    folders_skipped = not _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1])
    return folders_skipped or any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts)


def _read_program(path: Path) -> str | None:
    """Returns the file's text, or None where it is empty, not UTF-8, no valid Python or a table."""
    try:
        text = path.read_bytes().decode()
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    text = text.replace("\r\n", "\n")
    plain = sum(c.isascii() and (c.isalpha() or c.isspace() or c == "_") for c in text)
    return text if text.strip() and plain >= _PROSE_SHARE_MIN * len(text) else None
