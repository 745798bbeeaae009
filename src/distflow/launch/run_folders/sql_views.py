"""A file of DuckDB views over the folders of runs.

DuckDB reads the samples from the runs' own files. Everything else is written as Parquet tables
beside the file of views, by the readers that the report uses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import UserError
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import (
    replacing,
)
from distflow.observe.ledger_groups import groups_of
from distflow.observe.sample_files import COLUMNS, is_torn, write_sample_file
from distflow.observe.sanitized_output import valid_utf8
from distflow.scheduling.ledger import surviving_records

if TYPE_CHECKING:
    import pyarrow

Row = tuple[object, ...]

LEDGER = "ledger.jsonl"
_ROWS_AT_ONCE = 100_000
_KINDS = {"text": "VARCHAR", "number": "DOUBLE", "whole": "BIGINT", "json": "JSON"}

VIEWS = {
    "metrics": "step BIGINT, kind VARCHAR, key VARCHAR, value DOUBLE, t DOUBLE, restart BIGINT",
    "samples": ", ".join(f"{name} {_KINDS[column.kind]}" for name, column in COLUMNS.items()),
    "spans": (
        "actor VARCHAR, t0 DOUBLE, t1 DOUBLE, kind VARCHAR, what VARCHAR, step BIGINT, group_id "
        "BIGINT, version BIGINT, waits_for VARCHAR, restart BIGINT"
    ),
    "groups": (
        "group_id BIGINT, state VARCHAR, step BIGINT, epoch BIGINT, data_row BIGINT, domain "
        "VARCHAR, version BIGINT, tokens BIGINT, attempts BIGINT, worker VARCHAR, started DOUBLE, "
        "completed DOUBLE, ended DOUBLE, reason VARCHAR"
    ),
}
"""The columns of each view, behind its first, `run VARCHAR`."""


def write_views(
    run_dirs: Sequence[Path], file: Path, names: Iterable[str] = tuple(VIEWS)
) -> list[str]:
    """Write the views of these names, and their tables into the folder `FILE.tables`. Returns a
    sentence for whatever of the runs is missing. Raises UserError if the files cannot be written.
    """
    if file.is_dir():
        raise UserError(f"the views cannot be written: {file} is a folder, name a file")

    runs = _named(run_dirs)
    tables = file.absolute().with_name(f"{file.name}.tables")
    statements: list[str] = []

    missing: list[str] = []
    try:
        tables.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            table = tables / f"{name}.parquet"
            if name == "samples":
                write_sample_file(table, (), 0, "")
                select = _select_samples(runs, table, missing)
            else:
                _write_table(table, name, runs, missing)
                select = f"select * from read_parquet({_pattern(table)})"

            statements.append(f"create or replace view {name} as {select};\n")

        with replacing(file) as aside:
            aside.write_text("".join(statements), "utf-8")
    except OSError as error:
        raise UserError(f"the views {file} cannot be written: {error.strerror}") from error

    return missing


def _named(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """The runs by the names of their folders, or by their paths if two have one name."""
    names = [path.resolve().name for path in run_dirs]
    runs = {}
    for name, path in zip(names, run_dirs, strict=True):
        runs[name if names.count(name) == 1 else str(path)] = path
    return runs


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _pattern(file: Path) -> str:
    """A literal that DuckDB, which reads paths as patterns, takes for this file alone."""
    escaped = [f"[{sign}]" if sign in "*?[" else sign for sign in str(file)]
    return _literal("".join(escaped))


def _select_samples(runs: Mapping[str, Path], empty: Path, missing: list[str]) -> str:
    """empty: a file without rows, from which all columns come."""
    columns = [
        f"try_cast({name} as {_KINDS[kind]}) as {name}" for name, (kind, _) in COLUMNS.items()
    ]

    selects = []
    for run, run_dir in runs.items():
        files = [empty, *_whole_files(run_dir, missing)]
        select = (
            f"select {_literal(run)} as run, {', '.join(columns)} from "
            f"read_parquet([{', '.join(map(_pattern, files))}], union_by_name = true)"
        )
        kept_until = run_reader.read_timeline(run_dir, None).kept_until
        survives = [
            f"(coalesce(restart, 0) >= {restart} or step <= {step})"
            for restart, step in kept_until.items()
        ]
        selects.append(f"{select} where {' and '.join(survives)}" if survives else select)

    return "\nunion all ".join(selects)


def _whole_files(run_dir: Path, missing: list[str]) -> Iterator[Path]:
    for file, _, _ in run_reader.sample_files(run_dir):
        with suppress(UserError):  # it cannot be read, or leads out of the run's folder
            if is_torn(file, run_dir):
                missing.append(f"{file} is damaged: its samples are missing here")
            else:
                yield file.absolute()


def _write_table(path: Path, name: str, runs: Mapping[str, Path], missing: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    types = {
        "VARCHAR": pyarrow.string(),
        "BIGINT": pyarrow.int64(),
        "DOUBLE": pyarrow.float64(),
        "BOOLEAN": pyarrow.bool_(),
    }
    columns = [column.split() for column in f"run VARCHAR, {VIEWS[name]}".split(", ")]
    schema = pyarrow.schema([(column, types[kind]) for column, kind in columns])
    rows = _rows_of(name, runs, missing)

    with replacing(path) as aside, pyarrow.parquet.ParquetWriter(aside, schema) as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(_table(schema, batch))


def _rows_of(name: str, runs: Mapping[str, Path], missing: list[str]) -> Iterator[Row]:
    for run, run_dir in runs.items():
        try:
            for row in _ROWS[name](run_dir):
                yield run, *row
        except UserError as error:
            missing.append(f"the view {name} lacks rows of {run}: {error}")


def _table(schema: "pyarrow.Schema", rows: Sequence[Row]) -> "pyarrow.Table":
    import pyarrow

    arrays = []
    for kind, values in zip(schema.types, zip(*rows, strict=True), strict=True):
        is_text = kind == pyarrow.string()
        arrays.append(pyarrow.array(map(valid_utf8, values) if is_text else values, kind))

    return pyarrow.table(arrays, schema=schema)


def _metrics(run_dir: Path) -> Iterator[Row]:
    for record in run_reader.read_metrics(run_dir, max_bytes=None):
        for key, value in record.values.items():
            yield record.step, record.kind, key, value, record.t, record.restart


def _spans(run_dir: Path) -> Iterator[Row]:
    timeline = run_reader.read_timeline(run_dir, None)
    for actor, spans in run_reader.read_spans(run_dir, run_reader.MAX_BYTES).items():
        for s in spans:
            if timeline.survives(s.restart, s.step or 0):
                times = (s.start, s.end)
                about = (s.kind, s.what, s.step, s.group_id, s.version, s.on, s.restart)
                yield actor, *times, *about


def _groups(run_dir: Path) -> Iterator[Row]:
    for group in groups_of(surviving_records(run_dir / LEDGER)).values():
        yield group.values()


_ROWS: Mapping[str, Callable[[Path], Iterable[Row]]] = {
    "metrics": _metrics,
    "spans": _spans,
    "groups": _groups,
}
