"""Tables and JSON as commands print them."""

import json
from collections.abc import Iterable, Sequence

from distflow.observe.crash_safe_files import to_json


def as_json(value: object) -> str:
    """JSON in ASCII, which no terminal obeys. NaN and infinities are texts, as in a run's files."""
    return json.dumps(to_json(value), indent=1)


def aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """right: the columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]


def print_rows(found: Iterable[tuple[str, str]]) -> None:
    """Names, and what each is."""
    rows = list(found)
    width = max((len(name) for name, _ in rows), default=0)
    for name, what in rows:
        print(f"{name:<{width}}  {what}")
