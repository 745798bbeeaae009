"""Rows of a data set before tokenisation: which columns mean what, which rows are bad, and what they are told."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal

from distflow.config.errors import UserError, nearest
from distflow.observe.jsonlines import JSON, is_deep

DEFAULT_DOMAIN = "default"
_DEFAULT_DOMAIN_KEY = "data_source"
_MAX_SHOWN = 5
_USUAL_NAMES = {
    "data.prompt_key": ("question", "problem", "instruction", "query", "messages", "input", "text"),
    "data.answer_key": ("ground_truth", "reward_model.ground_truth", "solution", "label", "target", "final_answer"),
    "data.response_key": ("completion", "output", "answer", "target", "chosen"),
}
"""What data sets call these columns."""

Messages = list[dict[str, JSON]]


@dataclass(frozen=True)
class Columns:
    """Names of the columns. A dotted name reaches into nested values: `reward_model.ground_truth`.

    answer_required: a row without an answer is then bad. domain: may be missing where it has its default name.
    response: the column to learn from (SFT), or None.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    domain: str = _DEFAULT_DOMAIN_KEY
    response: str | None = None
    answer_required: bool = True


@dataclass(frozen=True)
class Record:
    """One row as it was found. `bad` says why it cannot be read; `values` is then empty."""

    origin: str
    values: Mapping[str, object] = field(default_factory=dict)
    bad: str | None = None


@dataclass(frozen=True)
class RawRow:
    """A good row. `origin` is its file and line."""

    origin: str
    prompt: str | Messages
    answer: JSON
    domain: str
    response: str | None
    extra_info: dict[str, JSON]


@dataclass
class BadRows:
    """What to do at a bad row: collect it and go on to report all of them together, or count it and skip it.

    policy: "error" or "skip" (data.bad_rows).
    """

    policy: str = "error"
    reasons: list[str] = field(default_factory=list)

    def add(self, origin: str, reason: str) -> None:
        self.reasons.append(f"{origin}: {reason}")

    def check(self) -> None:
        """Raises UserError naming the first bad rows, unless they are to be skipped."""
        if not self.reasons or self.policy == "skip":
            return
        shown = "".join(f"\n  {reason}" for reason in self.reasons[:_MAX_SHOWN])
        more = f"\n  and {len(self.reasons) - _MAX_SHOWN} more" if len(self.reasons) > _MAX_SHOWN else ""
        raise UserError(
            f"{len(self.reasons)} bad row{'s' if len(self.reasons) > 1 else ''}:{shown}{more}\n"
            "repair the data, or leave such rows out with data.bad_rows=skip"
        )


def read_rows(records: Iterator[Record], columns: Columns, bad_rows: BadRows, source: str) -> Iterator[RawRow]:
    """The good rows of one source; the bad ones go to `bad_rows`.

    Raises UserError where no row has a column that is required: the prompt's, and others as `columns` says.
    """
    seen: set[str] = set()
    missing = _required(columns)
    num_read = 0
    for record in records:
        fault = record.bad or ("nested too deeply" if is_deep(dict(record.values)) else None)
        if fault is not None:
            bad_rows.add(record.origin, fault)
            continue
        num_read += 1
        seen.update(record.values)
        missing = {key: name for key, name in missing.items() if find(record.values, name) is None}
        row = _raw_row(record, columns)
        if isinstance(row, str):
            bad_rows.add(record.origin, row)
        else:
            yield row
    if num_read and missing:
        key, name = next(iter(missing.items()))
        raise UserError(_no_column(key, name, source, seen))


def find(values: Mapping[str, object], name: str) -> object:
    """The value of a column, or None; a name that is no column is tried as a dotted path."""
    if name in values:
        return values[name]
    value: object = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _required(columns: Columns) -> dict[str, str]:
    required = {"data.prompt_key": columns.prompt}
    if columns.answer_required:
        required["data.answer_key"] = columns.answer
    if columns.response is not None:
        required["data.response_key"] = columns.response
    if columns.domain != _DEFAULT_DOMAIN_KEY:
        required["data.domain_key"] = columns.domain
    return required


def _no_column(key: str, name: str, source: str, seen: set[str]) -> str:
    if name in seen:
        return f"the column '{name}' ({key}) of {source} is empty in every row"
    if len(seen) == 1 and (found := re.search(r"[;\t|]", next(iter(seen)))):
        return f"{source} has one column, {next(iter(seen))!r}: separate columns by commas, not by {found[0]!r}"
    usual = next((other for other in _USUAL_NAMES.get(key, ()) if other.partition(".")[0] in seen), "")
    near = nearest(name, seen)
    meant = f"; did you mean '{near}'? Set {key}={near}" if near else f"; set {key}={usual}" if usual else ""
    said = f"no row of {source} has the column '{name}' ({key}){meant}; columns: {', '.join(sorted(seen)) or 'none'}"
    if key == "data.answer_key" and not meant:
        said += "; without answers, judge by a function of your own: custom_reward_function.path=my_reward.py"
    return said


def _raw_row(record: Record, columns: Columns) -> RawRow | str:
    """The row, or what is wrong with it."""
    values = record.values
    prompt = find(values, columns.prompt)
    wrong = _prompt_fault(prompt, columns.prompt)
    if wrong is not None:
        return wrong
    answer = plain(find(values, columns.answer))
    if columns.answer_required and answer in (None, "", []):
        return f"no answer in the column '{columns.answer}'"
    response: str | None = None
    if columns.response is not None:
        found = find(values, columns.response)
        if not isinstance(found, str) or not found:
            return f"the response (column '{columns.response}') is {_kind(found)}, not a text"
        if not _is_unicode(found):
            return f"the response (column '{columns.response}') holds half a surrogate pair"
        response = found
    domain = find(values, columns.domain)
    return RawRow(
        origin=record.origin,
        prompt=prompt if isinstance(prompt, str) else _messages(prompt),
        answer=answer,
        domain=DEFAULT_DOMAIN if domain in (None, "") else str(domain),
        response=response,
        extra_info=_extra_info(values, columns),
    )


def _extra_info(values: Mapping[str, object], columns: Columns) -> dict[str, JSON]:
    """The rest of the row; a column `extra_info` that is a mapping is spread, as reward functions expect it."""
    used = {columns.prompt, columns.answer, columns.domain, columns.response}
    rest = {name: plain(value) for name, value in values.items() if name not in used and value is not None}
    spread = rest.pop("extra_info", {})
    return {**rest, **spread} if isinstance(spread, dict) else {**rest, "extra_info": spread}


def _prompt_fault(prompt: object, name: str) -> str | None:
    if isinstance(prompt, str):
        if not prompt:
            return f"the prompt (column '{name}') is empty"
        return None if _is_unicode(prompt) else f"the prompt (column '{name}') holds half a surrogate pair"
    if not isinstance(prompt, list):
        return f"the prompt (column '{name}') is {_kind(prompt)}, neither a text nor a list of chat messages"
    if not prompt:
        return f"the prompt (column '{name}') is an empty list of chat messages"
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            return f"message {number} of the prompt (column '{name}') needs the texts 'role' and 'content'"
        if not _is_unicode(message["content"]):
            return f"message {number} of the prompt (column '{name}') holds half a surrogate pair"
    return None


def _messages(prompt: object) -> Messages:
    assert isinstance(prompt, list), "found to be one"
    return [{str(key): plain(entry) for key, entry in message.items()} for message in prompt]


def _kind(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__} {value!r:.40}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(value: object) -> JSON:
    """What JSON can hold of a value: verifiers, ledgers and saved batches carry it. Dates become ISO texts."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return plain(tolist())  # numpy scalars and arrays
    return repr(value)[:1000]
