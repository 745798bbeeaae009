"""Tables and JSON as commands print them."""

import json
from collections.abc import Iterable, Sequence

from distflow.observe.crash_safe_files import to_json
from distflow.observe.sanitized_output import escape_control


def as_json(value: object) -> str:
    """JSON in ASCII, which no terminal obeys. NaN and infinities are texts, as in a run's files."""
    return json.dumps(to_json(value), indent=1)


def print_escaped(lines: Iterable[str]) -> None:
    for line in lines:
        print(escape_control(line, one_line=True))


def aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """right: the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            width = widths[column]
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())

    return lines


def print_rows(found: Iterable[tuple[str, str]]) -> None:
    """Names, and what each is."""
    rows = list(found)
    width = max((len(name) for name, _ in rows), default=0)
    for name, what in rows:
        print(f"{name:<{width}}  {what}")
