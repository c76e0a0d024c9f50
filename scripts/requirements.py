"""Prints what the package and the named extras need, one requirement a line, for `pip install -r`.

The image installs libraries before our own code is there, so that a change of the code does not
install them again. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """The project's own and the extras' requirements; extras that name the project are followed."""
    own = re.compile(re.escape(project["name"]) + r"\[([^\]]+)\]")
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            if match := own.fullmatch(requirement):
                waiting += [extra.strip() for extra in match[1].split(",")]
            else:
                found[requirement] = None
    return sorted(found)


def main(extras: Sequence[str]) -> int:
    """Prints them; 0."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    print("\n".join(requirements(project, extras)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
