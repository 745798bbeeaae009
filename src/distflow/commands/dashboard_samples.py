"""The samples of a run as the dashboard's table asks for them: sorted, filtered and by pages.

A thread reads the sample files, the last steps first, into a table of DuckDB: a row for each group
of responses, as in a report. The texts are in a nameless file, which only a search reads.
"""

import math
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON, encode, parse_object
from distflow.observe.report.samples import SampleGroup, add_pictures, sample_groups
from distflow.observe.run_reader import RIGHT, Timeline, read_samples, read_timeline, sample_files
from distflow.observe.sample_files import SAMPLES
from distflow.observe.sanitized_output import valid_utf8

ROWS_OF_PAGE = 20
MAX_PICTURE_BYTES = 2**24
_MAX_SHOWN = 160
_WHOLE_TEXT = 1_000_000
_MAX_DOMAINS = 200
_FIRST_ANSWER_S = 0.4
_SEARCH_S = 0.25
_WHICH = {
    "all": "true",
    "mixed": "low < high",
    "equal": "low = high and scored > 1",
    "right": "has_right",
    "wrong": "has_wrong",
    "cut": "has_cut",
    "failed": "scored < n",
    "error": "has_error",
    "timeout": "has_timeout",
    "masked": "has_masked",
    "dropped": "has_dropped",
}
"""As `WHICH` of samples.js."""

_SORTS = {name: name for name in ("mean", "step", "split", "domain", "prompt", "response")}
_SORTS |= {"responses": "n", "length": "tokens"}
_KINDS = {
    **dict.fromkeys(("id", "step", "first", "n", "scored"), "BIGINT"),
    **dict.fromkeys(("split", "name", "domain", "prompt", "response", "scores"), "VARCHAR"),
    **dict.fromkeys(("mean", "low", "high", "tokens"), "DOUBLE"),
    **dict.fromkeys(
        (condition for condition in _WHICH.values() if condition.startswith("has_")), "BOOLEAN"
    ),
}


class SamplesIndex:
    """Raises UserError without DuckDB."""

    def __init__(self, run_dir: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise UserError("the page Samples needs DuckDB: pip install 'distflow[ui]'") from error
        self._run_dir = run_dir
        self._texts = Texts()
        self._connection = duckdb.connect(":memory:", config={"memory_limit": "1GB"})
        self._connection.execute(
            f"create table groups ({', '.join(f'{n} {kind}' for n, kind in _KINDS.items())})"
        )
        # up to date, and in the tables
        self._read = set[tuple[str, int]]()
        self._known = set[tuple[str, int]]()
        self._seen: object = None
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
        self._texts.close()

    def refresh(self) -> str:
        """Begin to read what is new, and wait a little for it. Returns what changes when more was
        read."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                folder = self._run_dir / SAMPLES
                timeline = read_timeline(self._run_dir)
                seen = (timeline, folder.stat().st_mtime_ns if folder.is_dir() else 0)
                if seen != self._seen:
                    # a resume took steps back
                    if isinstance(self._seen, tuple) and self._seen[0] != timeline:
                        self._read.clear()
                    self._seen = seen
                    self._thread = threading.Thread(
                        target=self._fill, args=(timeline,), name="samples", daemon=True
                    )
                    self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(_FIRST_ANSWER_S)
        return f"{len(self._read)}.{len(self._texts)}"

    def _files(self) -> list[tuple[str, int]]:
        """The splits and steps that have sample files, the last steps first."""
        found = {(split, step) for _, split, step in sample_files(self._run_dir)}
        return sorted(found, key=lambda each: (-each[1], each[0]))

    def _fill(self, timeline: Timeline) -> None:
        files = self._files()
        connection = self._connection.cursor()
        newest = dict(sorted(files, key=lambda each: each[1]))
        for split, step in files:
            if self._is_closed.is_set():
                return
            if (split, step) in self._read and step < newest[split]:
                continue
            try:
                rows = read_samples(self._run_dir, step, split, timeline)
            except UserError:  # the overview names files that cannot be read
                rows = []
            self._put(connection, split, step, sample_groups(rows, step, split, _WHOLE_TEXT))
            self._read.add((split, step))

    def _put(self, connection: Any, split: str, step: int, groups: Sequence[SampleGroup]) -> None:
        """Replace the groups of a file."""
        import pyarrow

        rows = [
            _row(group, self._texts.append(_text_of(group)), place)
            for place, group in enumerate(groups)
        ]
        connection.execute("begin")
        if (split, step) in self._known:
            connection.execute("delete from groups where split = ? and step = ?", [split, step])
        self._known.add((split, step))
        if rows:
            connection.register(
                "arriving", pyarrow.table({name: [row[name] for row in rows] for name in _KINDS})
            )
            connection.execute("insert into groups select * from arriving")
        connection.execute("commit")

    def summary(self) -> dict[str, Any]:
        """What there is to choose from."""
        self.refresh()
        counts = ", ".join(f"count(*) filter (where {condition})" for condition in _WHICH.values())
        numbers = (
            "count(*), sum(n), sum(scored), min(low), max(high), bool_or(has_error or has_timeout)"
        )
        # at most what is counted
        cursor = self._connection.cursor()
        files = self._files()
        num_files = len(self._read)
        number, responses, scored, lowest, highest, fails, *which = cursor.execute(
            f"select {numbers}, {counts} from groups"
        ).fetchall()[0]
        domains = cursor.execute(
            f"select distinct domain from groups order by 1 limit {_MAX_DOMAINS}"
        ).fetchall()
        return {
            "num_shown": number,
            "num_groups": number,
            "num_responses": responses or 0,
            "num_files": num_files,
            "all_files": len(files),
            "is_scored": bool(scored or fails),
            "domains": [domain for (domain,) in domains],
            "places": [f"{split} {step}" for split, step in files],
            "which": dict(zip(_WHICH, which, strict=True)),
            "lowest": lowest,
            "highest": highest,
        }

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the groups that fit. is_most: `total` is an upper bound, since a text was not
        sought in all of them. Raises UserError for a wrong number."""
        conditions, values = _conditions(query)
        order = (
            f"{_SORTS.get(query.get('sort', ''), 'step')} "
            f"{'asc' if query.get('down') == '0' else 'desc'} nulls last"
        )
        chosen = f"from groups where {' and '.join(conditions)}"
        cursor = self._connection.cursor()
        order = f"order by {order}, step desc, first"
        start = ROWS_OF_PAGE * whole(query.get("page", "0"))
        names = (
            "step",
            "split",
            "first",
            "name",
            "domain",
            "prompt",
            "response",
            "scores",
            "tokens",
        )
        is_most = False
        if text := query.get("text", ""):
            ids = cursor.execute(f"select id {chosen} {order}", values).fetchall()
            numbers = [number for (number,) in ids]
            found, left = self._texts.search(_lowered(text), numbers, start + ROWS_OF_PAGE)
            total = len(found) + left
            is_most = left > 0
            chosen = "from groups where id in (select unnest(?::bigint[]))"
            values = [found[start:][:ROWS_OF_PAGE]]
            start = 0
        else:
            ((total,),) = cursor.execute(f"select count(*) {chosen}", values).fetchall()
        limits = f"{order} limit {ROWS_OF_PAGE} offset {start}"
        rows = cursor.execute(f"select {', '.join(names)} {chosen} {limits}", values).fetchall()
        groups = [_group(dict(zip(names, row, strict=True))) for row in rows]
        return {"total": total, "is_most": is_most, "groups": groups}

    def group(self, query: Mapping[str, str]) -> dict[str, Any]:
        """One group with all that is shown of it. Raises UserError if it is not there."""
        step = whole(query.get("step", ""))
        split = query.get("split", "")
        place = whole(query.get("first", ""))
        rows = read_samples(self._run_dir, step, split)
        found = sample_groups(rows, step, split)
        if place >= len(found):
            raise UserError(
                f"the samples of step {step} are not there any more: a resume may have taken it "
                "back"
            )
        group = found[place]
        group["pictures"] = add_pictures(self._run_dir, [group], MAX_PICTURE_BYTES)
        uids = [
            str(row.get("uid"))
            for row in rows
            if str(row.get("uid")).rpartition("-")[0] == group["name"]
        ]
        if group["name"] and len(uids) == len(group["responses"]):
            for uid, response in zip(uids, group["responses"], strict=True):
                response |= {"uid": uid, "step": step, "split": split}
        return group


def _conditions(query: Mapping[str, str]) -> tuple[list[str], list[object]]:
    """What groups must fulfil, and the values in it."""
    split, _, step = query.get("step", "").rpartition(" ")
    domain = query.get("domain", "all")
    asked: list[tuple[str, Any]] = [
        ("split = ?", split or None),
        ("step = ?", _number(step) if step else None),
        ("domain = ?", domain[1:] if domain.startswith("=") else None),
        ("mean >= ?", _number(query["low"]) if query.get("low") else None),
        ("mean <= ?", _number(query["high"]) if query.get("high") else None),
    ]
    given = [(condition, valid_utf8(value)) for condition, value in asked if value is not None]
    which = _WHICH.get(query.get("which", ""), "true")
    return [which, *(condition for condition, _ in given)], [value for _, value in given]


def whole(text: str) -> int:
    """Raises UserError for anything but a whole number of 0 or more."""
    if not text.isdecimal() or len(text) > 15:
        raise UserError(f"'{text[:50]}' is not a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"'{text[:50]}' is not a number")
    return value


def _row(group: SampleGroup, number: int, place: int) -> dict[str, Any]:
    responses: list[dict[str, Any]] = group["responses"]
    scores = [response.get("score") for response in responses]
    known = [float(score) for score in scores if _is_number(score)]
    lengths = [n for response in responses if _is_number(n := response.get("response_length"))]
    failures = [response.get("failure") for response in responses]
    right = [_is_right(response) for response in responses]
    row = {
        **{
            "id": number,
            "step": group["step"],
            "first": place,
            "n": len(scores),
            "scored": len(known),
        },
        **{"split": group["split"], "name": group["name"], "domain": str(group["domain"] or "")},
        "prompt": str(group["prompt"] or "")[:_MAX_SHOWN],
        "response": str(responses[0].get("response", ""))[:_MAX_SHOWN],
        "scores": encode({"of": scores}).decode(),
        "mean": sum(known) / len(known) if known else None,
        "low": min(known, default=None),
        "high": max(known, default=None),
        "tokens": sum(lengths) / len(lengths) if lengths else None,
        "has_right": True in right,
        "has_wrong": False in right,
        "has_cut": any(
            response.get("finish_reason") in ("length", "context") for response in responses
        ),
        "has_error": "error" in failures,
        "has_timeout": "timeout" in failures,
        "has_masked": any(
            _is_number(m := response.get("masked")) and m > 0 for response in responses
        ),
        "has_dropped": any(response.get("dropped") for response in responses),
    }
    return {name: valid_utf8(value) for name, value in row.items()}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_right(response: Mapping[str, Any]) -> bool | None:
    value = None if "failure" in response else response.get("acc", response.get("score"))
    return value >= RIGHT if _is_number(value) else None


def _text_of(group: SampleGroup) -> bytes:
    """All that a search looks through."""
    parts = [group["prompt"], group["truth"]]
    parts += [
        response.get(name)
        for response in group["responses"]
        for name in ("response", "errors", "remarks")
    ]
    return _lowered("\n".join(str(part) for part in parts if part is not None))


def _lowered(text: str) -> bytes:
    return text.lower().encode("utf-8", "backslashreplace")


class Texts:
    """Texts by number, in a nameless file. One thread appends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by close
        self._ends = [0]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def close(self) -> None:
        self._file.close()

    def append(self, text: bytes) -> int:
        """Its number."""
        self._file.write(text)
        self._ends.append(self._ends[-1] + len(text))
        return len(self) - 1

    def search(self, text: bytes, numbers: Sequence[int], wanted: int) -> tuple[list[int], int]:
        """Those of the numbers whose text has this one, and how many more there may be: beyond the
        first `wanted`, it looks for more only for a short time."""
        chosen = [number for number in numbers if number < len(self)]
        found = list[int]()
        deadline = time.thread_time() + _SEARCH_S
        for place, number in enumerate(chosen):
            if len(found) >= wanted and time.thread_time() > deadline:
                return found, len(chosen) - place
            start = self._ends[number]
            size = self._ends[number + 1] - start
            if text in os.pread(self._file.fileno(), size, start):
                found.append(number)
        return found, 0


def _group(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table of a report has it: the scores of all responses, and the first one's
    beginning."""
    scores = (parse_object(row.pop("scores").encode()) or {}).get("of")
    responses: list[dict[str, JSON]] = (
        [{"score": score} for score in scores] if isinstance(scores, list) else []
    )
    responses[0] |= {"response": row.pop("response"), "response_length": row.pop("tokens")}
    return {**row, "responses": responses}
