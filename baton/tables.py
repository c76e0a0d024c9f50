"""Text tables with aligned columns, for every command and benchmark that prints one."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

GAP = 2  # spaces between two columns


def align(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Lines in which each column is as wide as its longest cell.

    `left`: numbers of the columns that are aligned to the left; others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cells(row: Sequence[str]) -> Sequence[str]:
        padded = zip(row, widths, strict=True)
        return [
            text.ljust(width) if number in left else text.rjust(width)
            for number, (text, width) in enumerate(padded)
        ]

    return [(" " * GAP).join(cells(row)).rstrip() for row in rows]


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A header and a line for each row; empty without rows. Numbers are aligned to the right.

    `columns`: title by key of the rows. A value of None is shown as "-".
    """
    if not rows:
        return []
    cells = [[str(row[key] if row[key] is not None else "-") for key in columns] for row in rows]
    left = {i for i, key in enumerate(columns) if not isinstance(rows[0][key], int | float)}
    return align([list(columns.values()), *cells], left)
