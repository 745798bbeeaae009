"""The store of judges' answers and their costs: one SQLite file that all processes and later runs
share."""

import sqlite3
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (only_row INTEGER PRIMARY KEY CHECK (only_row = 0), calls INTEGER, tokens INTEGER);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""  # noqa: E501
_BUSY_S = 30.0


class BudgetSpent(ValueError):
    """The budget of calls or tokens is spent, so there is no score."""


class JudgeCache:
    """Answers by request; calls and tokens of all users of the file."""

    def __init__(self, file: str) -> None:
        """file: created if missing; "" keeps everything in memory. All methods raise ValueError for
        a file that is damaged or not writable."""
        self._file = str(Path(file).expanduser()) if file else ":memory:"
        try:
            if file:
                Path(self._file).parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None)
            self._connection.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None

    def find(self, key: str) -> str | None:
        row = self._do("SELECT content FROM answers WHERE key = ?", key).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, content: str) -> None:
        self._do("INSERT OR REPLACE INTO answers (key, content) VALUES (?, ?)", key, content)

    def spend_call(self, max_calls: int, max_tokens: int) -> None:
        """Count a call that is about to be made; 0 means no limit. Raises BudgetSpent if none is
        left."""
        changed = self._do(
            (
                "UPDATE spent SET calls = calls + 1 WHERE (? = 0 OR calls < ?) AND (? = 0 OR "
                "tokens < ?)"
            ),
            *(max_calls, max_calls, max_tokens, max_tokens),
        ).rowcount
        if not changed:
            calls, tokens = self.spent()
            raise BudgetSpent(
                f"the judge's budget is exhausted: {calls} calls of "
                f"max_calls={max_calls or 'any'}, {tokens} tokens of "
                f"max_tokens={max_tokens or 'any'} ({self._file})"
            )

    def spend_tokens(self, tokens: int) -> None:
        self._do("UPDATE spent SET tokens = tokens + ?", tokens)

    def spent(self) -> tuple[int, int]:
        calls, tokens = self._do("SELECT calls, tokens FROM spent").fetchone()
        return int(calls), int(tokens)

    def close(self) -> None:
        self._connection.close()

    def _do(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> ValueError:
        return ValueError(
            f"the judge's store '{self._file}' cannot be used ({error}): repair it, or set the "
            "option 'store' to "
            "another file, which starts empty and with a new budget"
        )
