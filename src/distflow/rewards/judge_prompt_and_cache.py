"""For judges behind an endpoint and judges that the run loads: the question about a response, the
parsing of the answer, and the store of answers and their costs, one SQLite file that all processes
and later runs share."""

import functools
import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distflow.errors import UserError
from distflow.rewards.reward_results import shortened

_TEMPLATE = Path(__file__).with_name("judge_template.md")
RESPONSE_CHARACTERS = 32_000
"""Longer responses are cut to both ends."""

_NAMES = ["reason", "score"]
SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": _NAMES,
    "additionalProperties": False,
}
# the start of a tag, also in other widths, or struck through
_OPENING = re.compile("[<\uff1c\ufe64\u226e]")
_DECODER = json.JSONDecoder()
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_SHOWN = 200

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (only_row INTEGER PRIMARY KEY CHECK (only_row = 0), calls INTEGER, tokens INTEGER);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""  # noqa: E501
_BUSY_S = 30.0


def fill_template(template: str, values: Mapping[str, object], most_characters: int) -> str:
    """Fill in one pass, so that a value is never taken for a placeholder; the response without
    tags.

    The nonce is the same in every run. A response that contains it would have to contain a hash of
    itself.
    """
    response = str(values["response"])
    sample = [str(values[name]) for name in ("prompt", "ground_truth")]
    nonce = hashlib.sha256(json.dumps([*sample, response]).encode()).hexdigest()[:16]
    response = shortened(_OPENING.sub("&lt;", response), max(most_characters, 2))
    values = {**values, "response": response, "nonce": nonce}
    if unknown := ", ".join(sorted(set(_PLACEHOLDER.findall(template)) - set(values))):
        raise ValueError(f"the judge's template names {unknown}, which is not a column of the row")
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


@functools.cache
def judge_template(template: str) -> str:
    """The template's text: from a file, unless it has a line break or placeholder; "" is the
    built-in one. Raises UserError for an unreadable template, or one without the response."""
    text = template or _TEMPLATE.read_text("utf-8").removesuffix("\n")
    if "\n" not in text and not _PLACEHOLDER.search(text):
        try:
            text = Path(text).expanduser().read_text("utf-8")
        except OSError as error:
            raise UserError(
                f"the judge's template '{template}' cannot be read: {error.strerror or error}"
            ) from error
    if "response" not in _PLACEHOLDER.findall(text):
        raise UserError("the judge's template has no {response}")
    return text


def read_score(content: object) -> dict[str, object]:
    """Score and reason, exactly as in the schema. Raises ValueError."""
    if not isinstance(content, str):
        raise ValueError(f"the judge's reply is not text: {beginning(json.dumps(content))}")
    try:
        found = json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ValueError(f"the judge's reply is not JSON: {beginning(content)}") from None
    if not isinstance(found, dict) or set(found) != set(_NAMES):
        raise ValueError(f"the judge's reply is not {{reason, score}}: {beginning(content)}")
    score = found["score"]
    reason = found["reason"]
    if not isinstance(reason, str) or isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"the judge's reply is not a score with a reason: {beginning(content)}")
    if not 0 <= score <= 1:  # also false for NaN
        raise ValueError(f"the judge's score is not between 0 and 1: {beginning(content)}")
    return {"score": float(score), "reason": reason}


def score_at_end(answer: str) -> dict[str, object]:
    """The score and reason at the end of a text: a model may think before, and fence it. Raises
    ValueError, also if another score precedes: either may be one that the response told the judge
    to write."""
    answer = answer.rpartition("</think>")[2].strip().removesuffix("```").strip()
    scores = set[object]()
    last = 0
    end = 0
    for place in (match.start() for match in re.finditer(r"\{", answer)):
        with suppress(ValueError, RecursionError):
            if place >= end:
                last = place
                end = _DECODER.raw_decode(answer, place)[1]
                scores.add(read_score(answer[place:end])["score"])
    if len(scores) > 1:
        raise ValueError(f"the judge's reply has several scores: {beginning(answer)}")
    return read_score(answer[last:])


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def beginning(text: str) -> str:
    return repr(text[:_SHOWN])


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
