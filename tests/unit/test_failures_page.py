"""Every row of the tables in docs/failures.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
HEADS = ("| what happens", "| seen")


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(HEADS)])
def test_a_row_names_tests_that_exist(row: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rstrip("| ").rpartition("|")[2])
    assert named, row
    for file, name in named:
        module = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        defined = {
            node.name
            for node in ast.walk(module)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert name in defined, f"{file} has no {name}"


def test_there_are_tables() -> None:
    assert sum(row.startswith(HEADS[0]) for row in ROWS) == 3
    assert sum(row.startswith(HEADS[1]) for row in ROWS) == 1
    assert len(ROWS) > 50
