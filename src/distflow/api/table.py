"""Rows of a run as a list of dicts, which a notebook shows as a table."""

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

from distflow.observe.text import visible

if TYPE_CHECKING:
    import pandas

_SHOWN_ROWS, _SHOWN_COLUMNS, _SHOWN_CHARACTERS = 20, 12, 200


class Table(list[dict[str, object]]):
    """A list of dicts. Not every row has every column."""

    @property
    def columns(self) -> list[str]:
        """Of all rows, in the order in which they first come."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_pandas(self) -> "pandas.DataFrame":
        """A `DataFrame`; what a row does not have is NaN or None."""
        import pandas

        return pandas.DataFrame(list(self), columns=self.columns)

    def _repr_html_(self) -> str:
        columns = self.columns[:_SHOWN_COLUMNS]
        shown = [*self[: _SHOWN_ROWS // 2], None, *self[-_SHOWN_ROWS // 2 :]] if len(self) > _SHOWN_ROWS else list(self)
        head = "".join(f"<th>{_text(name)}</th>" for name in columns)
        body = "".join(f"<tr>{_cells(row, columns)}</tr>" for row in shown)
        size = f"{len(self):,} rows × {len(self.columns)} columns"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{size}</p>"


def _cells(row: Mapping[str, object] | None, columns: list[str]) -> str:
    """None stands for the rows that are left out."""
    if row is None:
        return f'<td colspan="{len(columns)}">⋮</td>'
    return "".join(f"<td>{_value(row[name]) if name in row else ''}</td>" for name in columns)


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _text(str(value))


def _text(text: str) -> str:
    return html.escape(visible(text[:_SHOWN_CHARACTERS], one_line=True))
