"""The documentation as tests read it: pages, their fenced blocks, the commands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "baton/demo_model/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.M | re.S)
_SPAN = re.compile(r"`([^`\n]+)`")


def blocks(page: Path) -> list[str]:
    """The texts of a page's fenced blocks."""
    return _FENCE.findall(page.read_text(encoding="utf-8"))


def code(page: Path) -> list[str]:
    """Everything that a page shows as code: fenced blocks, spans, indented commands."""
    text = page.read_text(encoding="utf-8")
    rest = _FENCE.sub("", text)
    indented = [line for line in rest.splitlines() if line.startswith("    ")]
    return [*_FENCE.findall(text), *_SPAN.findall(rest), *indented]


def commands(page: Path, program: str) -> list[str]:
    """Command lines of `program` in a page's blocks, without comments and explanations."""
    found = []
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith(program + " "):
                plain = re.sub(r"\s+#.*", "", line.strip())
                found.append(re.sub(r"(?<=\S)\s{3,}(?=[^\s-]).*", "", plain))
    return found
