"""Judges' replies and their costs, in one SQLite file that all processes and later runs share."""

import sqlite3
from contextlib import suppress
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (only_row INTEGER PRIMARY KEY CHECK (only_row = 0), calls INTEGER, tokens INTEGER);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""
_ABOUT = """
ALTER TABLE answers ADD COLUMN about TEXT NOT NULL DEFAULT '';
CREATE INDEX answers_about ON answers (about);
"""
_BUSY_S = 30.0


class BudgetSpent(ValueError):
    """The budget of calls or tokens is spent, so there is no score."""


class JudgeCache:
    """Answers by request; calls and tokens of all users of the file."""

    def __init__(self, file: str) -> None:
        """file: created if missing; "" keeps everything in memory. All methods raise ValueError for a file that is
        damaged or not writable."""
        if file:
            Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        self._file = str(Path(file).expanduser()) if file else ":memory:"
        try:
            self._connection = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None)
            self._connection.executescript(_TABLES)
            if not any(column[1] == "about" for column in self._connection.execute("PRAGMA table_info(answers)")):
                with suppress(sqlite3.OperationalError):  # another process has just added it
                    self._connection.executescript(_ABOUT)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def find(self, key: str) -> str | None:
        """The answer to the request with that key."""
        row = self._do("SELECT content FROM answers WHERE key = ?", key).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, content: str, about: str = "") -> None:
        """about: a hash of the answer's subject, by which an audit finds it, whatever its key."""
        self._do("INSERT OR REPLACE INTO answers (key, content, about) VALUES (?, ?, ?)", key, content, about)

    def name_older(self, key: str, about: str) -> None:
        """Add the hash to an answer from a version that stored none."""
        self._do("UPDATE answers SET about = ? WHERE key = ? AND about = ''", about, key)

    def spend_call(self, max_calls: int, max_tokens: int) -> None:
        """Count a call that is about to be made; 0 means no limit. Raises BudgetSpent if none is left."""
        changed = self._do(
            "UPDATE spent SET calls = calls + 1 WHERE (? = 0 OR calls < ?) AND (? = 0 OR tokens < ?)",
            *(max_calls, max_calls, max_tokens, max_tokens),
        ).rowcount
        if not changed:
            calls, tokens = self.spent()
            raise BudgetSpent(
                f"the judge's budget is exhausted: {calls} calls of max_calls={max_calls or 'any'}, {tokens} tokens of "
                f"max_tokens={max_tokens or 'any'} ({self._file})"
            )

    def spend_tokens(self, tokens: int) -> None:
        self._do("UPDATE spent SET tokens = tokens + ?", tokens)

    def spent(self) -> tuple[int, int]:
        """Calls and tokens so far."""
        calls, tokens = self._do("SELECT calls, tokens FROM spent").fetchone()
        return int(calls), int(tokens)

    def close(self) -> None:
        self._connection.close()

    def _do(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.Error) -> ValueError:
        return ValueError(
            f"the judge's store '{self._file}' cannot be used ({error}): repair it, or set the option 'store' to "
            "another file, which starts empty and with a new budget"
        )
