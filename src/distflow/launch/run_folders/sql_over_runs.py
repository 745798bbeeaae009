"""One SQL query over the folders of runs, by DuckDB (the extra `ui`). It only reads files of these
folders.

The views are built from what the query names, then DuckDB loses its access to files, so that no
query can read or write anything else. Samples are the largest: DuckDB reads their files itself,
behind links in an empty folder whose names cannot be patterns. Everything else comes from the
readers that the report uses.
"""

import math
import os
import re
import sys
import tempfile
import threading
import time
import tomllib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from distflow.errors import UserError
from distflow.limited_fork import limit_memory, limited_fork
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import bytes_left_out, read_object, to_number
from distflow.observe.report.doctor import examine, read_charges
from distflow.observe.report.doctor_run_rules import RunRecords
from distflow.observe.report.summary_sentences import PROBLEM_KINDS
from distflow.observe.sample_files import COLUMNS, is_damaged, is_torn, write_sample_file
from distflow.scheduling.ledger import surviving_records

if TYPE_CHECKING:
    import duckdb
    import pyarrow

    from distflow.data.batch import Batch

Row = tuple[object, ...]
T = TypeVar("T")

MAX_ROWS = 10_000
MAX_S = 5.0
_READ_TIMES = 2.0
"""How often the time of a query its files may take to be read."""

_read_until = ContextVar("_read_until", default=math.inf)
_SLOW_FILES = "the files take too long to read: name fewer runs, or allow more time with --seconds"
_MAX_BYTES = 700 * 10**6
_MAX_READ_BYTES = 2 * 10**9
"""Of the query itself, and of what is read for it."""
_MEMORY = f"more than {_MAX_BYTES // 10**6} MB of memory: narrow it"
_MAX_THREADS = 4
_one_at_a_time = threading.Lock()
_GRACE_S = 1.0
"""For an answer that is on its way when the time is over."""

_LONGEST_WAIT_S = 2e6
"""The system counts milliseconds in 31 bits."""
LEDGER = "ledger.jsonl"
_TOKENS_FILE = re.compile(r"(\d{6,18})(?:\.\d+)?\.safetensors")
_TOKEN_COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "versions")

_KINDS = {"text": "VARCHAR", "number": "DOUBLE", "whole": "BIGINT", "json": "JSON"}

_TABLES = tomllib.loads(Path(__file__).with_name("sql_views_and_questions.toml").read_text("utf-8"))
_OF_SAMPLES = ", ".join(f"{name} {_KINDS[kind]}" for name, (kind, _) in COLUMNS.items())
VIEWS: dict[str, str] = {
    name: ", ".join(columns).replace("%samples", _OF_SAMPLES)
    for name, columns in _TABLES["views"].items()
}
"""The views and their columns."""

QUESTIONS = {
    word: (str(question), str(select)) for word, (question, select) in _TABLES["questions"].items()
}
"""What is asked most often, by a word that may stand in place of a SELECT."""

_SAMPLES = """create or replace view samples as select f.run, f.step, f.split, {columns}
    from read_parquet('{folder}/*.parquet', union_by_name={by_name}, filename=true) r
    join files f on f.file = parse_filename(r.filename, true)
    where coalesce(try_cast(r.restart as bigint), 0) >= f.least_restart"""


@dataclass(frozen=True)
class Answer:
    """The rows of a query. is_cut: whether there are more. damage: what is missing of the files."""

    columns: list[str]
    rows: list[Row]
    is_cut: bool
    damage: tuple[str, ...] = ()

    def records(self) -> list[dict[str, object]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def query_runs(
    run_dirs: Sequence[Path], query: str, max_rows: int = MAX_ROWS, max_s: float = MAX_S
) -> Answer:
    """The rows of one SELECT over the views of `VIEWS`, or of one of `QUESTIONS` by its word; each
    view has a column `run`. max_s: of the query itself; reading the files may take twice as long. A
    fork asks it, with as much memory as `_MAX_BYTES`.

    Raises UserError without DuckDB, for another statement, a wrong one, or one that takes too much
    time or memory.
    """
    _, query = QUESTIONS.get(query.strip(), ("", plain(query)))
    _import_readers(query)
    with (
        _one_at_a_time,
        tempfile.TemporaryDirectory(prefix="distflow-sql-") as folder,
        limited_fork(
            partial(_serve, run_dirs, query, max_rows, max_s, Path(folder)), "query"
        ) as answering,
    ):
        limit_s = _READ_TIMES * max_s
        why = _SLOW_FILES
        while True:
            if not answering.poll(min(max(limit_s, 0.0) + _GRACE_S, _LONGEST_WAIT_S)):
                raise UserError(why)
            try:
                # Pickled by our own fork, whose end of the connection nobody else has.
                kind, value = answering.recv()
            except EOFError:
                raise UserError(
                    f"the query cannot be answered: its process ended, perhaps for {_MEMORY}"
                ) from None
            if kind == "answer":
                return cast(Answer, value)
            if kind == "error":
                raise UserError(value)
            limit_s = value
            why = _slow_query(max_s)


def _import_readers(query: str) -> None:
    """Import once what each fork would import by itself. Raises UserError."""
    try:
        for name in ("duckdb", "pyarrow.parquet"):
            import_module(name)
    except ImportError as error:
        raise UserError("`distflow sql` needs DuckDB: pip install 'distflow[ui]'") from error
    with suppress(ImportError):
        import_module("pandas")  # DuckDB looks whether a table is one of pandas
    if "tokens" in query.lower():
        import_module("distflow.runtime.run_recorder")


def _slow_query(max_s: float) -> str:
    return f"the query took more than {max_s:g} s: narrow it, or allow more with --seconds"


def _serve(
    run_dirs: Sequence[Path],
    query: str,
    max_rows: int,
    max_s: float,
    folder: Path,
    channel: Connection,
) -> None:
    """In the fork: send the answer or an error, and before that how long each part of the query may
    take."""
    limit_memory(_MAX_READ_BYTES)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a fork has no other threads, and would wait for them
    _read_until.set(time.monotonic() + _READ_TIMES * max_s)
    try:
        sent = ForkingPickler.dumps(
            ("answer", _answer(run_dirs, query, max_rows, max_s, folder, channel))
        )
    except UserError as error:
        sent = ForkingPickler.dumps(("error", str(error)))
    except MemoryError:
        sent = ForkingPickler.dumps(("error", f"the query needs {_MEMORY}"))
    channel.send_bytes(sent)


def _answer(
    run_dirs: Sequence[Path],
    query: str,
    max_rows: int,
    max_s: float,
    folder: Path,
    channel: Connection,
) -> Answer:
    import duckdb

    with duckdb.connect(
        ":memory:", config={"threads": min(os.cpu_count() or 1, _MAX_THREADS)}
    ) as connection:
        try:
            _check_statement(connection, query)
            connection.execute(f"set memory_limit='{_MAX_BYTES}B'")
            named = _views_of(query)
            damage = [
                s for name in named for s in _add_view(connection, name, _named(run_dirs), folder)
            ]
            _allow(connection, folder)
            for setting in ("temp_directory=''", "enable_external_access=false"):
                connection.execute(f"set {setting}")
            connection.execute("set lock_configuration=true")
            limit_memory(_MAX_BYTES)
            mistakes = (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException)
            try:
                channel.send(("asks", max_s))
                found = _ask(connection, query, max_rows, max_s)
            except duckdb.Error as error:
                is_known = isinstance(
                    error, (*mistakes, duckdb.InterruptException, duckdb.OutOfMemoryException)
                )
                if "samples" not in named or is_known:
                    raise
                channel.send(("asks", 3 * max_s))
                damage += _remove_damaged(folder, max_s)
                with _limited(connection, max_s):
                    connection.execute(_view_of_samples(folder, by_name=True))
                found = _ask(connection, query, max_rows, max_s)
            return replace(found, damage=tuple(damage))
        except duckdb.InterruptException as error:
            raise UserError(_slow_query(max_s)) from error
        except duckdb.OutOfMemoryException as error:
            raise UserError(f"the query needs {_MEMORY}") from error
        except duckdb.Error as error:
            raise UserError(f"the query cannot be answered: {error}") from error


def _views_of(query: str) -> list[str]:
    """The views that it reads."""
    import duckdb

    with duckdb.connect(":memory:", config={"enable_external_access": "false"}) as connection:
        for name, columns in VIEWS.items():
            connection.execute(f"create table {name} ({columns})")
        try:
            named = {name.lower() for name in connection.get_table_names(query)}
        except duckdb.InvalidInputException:  # a PIVOT is several statements
            named = {*re.findall(r"\w+", query.lower())}
    return [name for name in VIEWS if name in named]


def _check_statement(connection: "duckdb.DuckDBPyConnection", query: str) -> None:
    from duckdb import StatementType

    kinds = [statement.type for statement in connection.extract_statements(query)]
    if kinds != [StatementType.SELECT]:
        found = ", ".join(str(kind).rpartition(".")[2] for kind in kinds) or "nothing"
        raise UserError(f"write one SELECT statement: this is {found}; nothing was run")


@contextmanager
def _limited(connection: "duckdb.DuckDBPyConnection", max_s: float) -> Iterator[None]:
    timer = threading.Timer(max_s, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask(
    connection: "duckdb.DuckDBPyConnection", query: str, max_rows: int, max_s: float
) -> Answer:
    with _limited(connection, max_s):
        cursor = connection.execute(query)
        rows = cursor.fetchmany(max_rows + 1)
    return Answer(
        [column[0] for column in cursor.description or ()], rows[:max_rows], len(rows) > max_rows
    )


def _allow(connection: "duckdb.DuckDBPyConnection", folder: Path) -> None:
    """The files of samples, which DuckDB knows by the paths that the links lead to."""
    quoted = ["'" + str(file.resolve()).replace("'", "''") + "'" for file in folder.iterdir()]
    connection.execute(f"set allowed_directories=['{folder}']")
    connection.execute(f"set allowed_paths=[{', '.join(quoted)}]")


def _named(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """The runs by the names of their folders, or by their paths if two have one name."""
    names = [path.resolve().name for path in run_dirs]
    return {
        name if names.count(name) == 1 else str(path): path
        for name, path in zip(names, run_dirs, strict=True)
    }


def _add_view(
    connection: "duckdb.DuckDBPyConnection", name: str, runs: Mapping[str, Path], folder: Path
) -> list[str]:
    """Returns a sentence for each file that is damaged or too long."""
    if name == "samples":
        return _add_samples(connection, runs, folder)
    if name == "metrics":
        _add_metrics(connection, runs)
        return []
    columns = VIEWS[name].split(", ")
    _fill(connection, name, columns, ())
    for run, path in runs.items():  # one after another, since rows in Python are large
        _fill(connection, name, columns, [(run, *row) for row in _in_time(_ROWS[name](path))])
    return [said for path in runs.values() for said in _cut_spans(path)] if name == "spans" else []


def _in_time(items: Iterable[T], each: int = 1000) -> Iterator[T]:
    """The items. Raises UserError, at every `each`, if reading the files takes too long."""
    for number, item in enumerate(items):
        if not number % each and time.monotonic() > _read_until.get():
            raise UserError(_SLOW_FILES)
        yield item


def _cut_spans(run_dir: Path) -> Iterator[str]:
    paths, each = run_reader.span_files(run_dir, run_reader.MAX_BYTES)
    for path in paths:
        if number := bytes_left_out(path, each):
            yield f"{path} is too long: its first {number:,} bytes are missing here"


def _fill(
    connection: "duckdb.DuckDBPyConnection", name: str, columns: Sequence[str], rows: Sequence[Row]
) -> None:
    connection.register("arriving", _table(columns, rows))
    connection.execute(f"create table if not exists {name} as select * from arriving limit 0")
    connection.execute(f"insert into {name} select * from arriving")
    connection.unregister("arriving")


def _table(columns: Sequence[str], rows: Sequence[Row]) -> "pyarrow.Table":
    import pyarrow

    kinds = {"VARCHAR": pyarrow.string(), "BIGINT": pyarrow.int64(), "DOUBLE": pyarrow.float64()}
    schema = [
        (column.split()[0], kinds.get(column.split()[1], pyarrow.bool_())) for column in columns
    ]
    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    texts = pyarrow.string()
    arrays = [
        pyarrow.array(map(plain, column) if kind == texts else column, kind)
        for column, (_, kind) in zip(values, schema, strict=True)
    ]
    return pyarrow.table(arrays, schema=pyarrow.schema(schema))


def plain(value: object) -> Any:
    """A text that UTF-8 can hold."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _add_metrics(connection: "duckdb.DuckDBPyConnection", runs: Mapping[str, Path]) -> None:
    """By column: a row for each value of a long run would take most of the time."""
    import pyarrow

    numbers = dict[str, int]()
    keys = array("i")
    values = array("d")
    sizes = array("q")
    records: list[Row] = []
    for run, path in _in_time(runs.items(), 1):
        for record in run_reader.read_metrics(path, max_bytes=None):
            keys.extend(numbers.setdefault(name, len(numbers)) for name in record.values)
            values.extend(record.values.values())
            sizes.append(len(record.values))
            records.append((run, record.step, record.kind, record.t, record.restart))
    names = pyarrow.array(map(plain, numbers), pyarrow.string())
    key = pyarrow.DictionaryArray.from_arrays(np.array(keys, np.int32), names)
    table = _table(
        ["run VARCHAR", "step BIGINT", "kind VARCHAR", "t DOUBLE", "restart BIGINT"], records
    )
    table = table.take(np.repeat(np.arange(len(sizes)), sizes))
    table = table.append_column("key", key).append_column("value", pyarrow.array(np.array(values)))
    connection.register("arriving", table)
    connection.execute(f"create table metrics ({VIEWS['metrics']})")
    connection.execute(
        "insert into metrics select run, step, kind, key, value, t, restart from arriving"
    )
    connection.unregister("arriving")


def _add_samples(
    connection: "duckdb.DuckDBPyConnection", runs: Mapping[str, Path], folder: Path
) -> list[str]:
    """Returns a sentence for each damaged file, which is left out."""
    files: list[Row] = []
    damage = []
    write_sample_file(folder / "-.parquet", (), 0, "")  # the first, so that all columns are there
    for run, path in _in_time(runs.items(), 1):
        timeline = run_reader.read_timeline(path, None)
        for file, split, step in run_reader.sample_files(path):
            with suppress(UserError):  # it cannot be read, or leads out of the run's folder
                if is_torn(file, path):
                    damage.append(f"{file} is damaged: its samples are missing here")
                    continue
                (folder / f"{len(files)}.parquet").symlink_to(file.resolve())
                least = max(
                    (later for later, k in timeline.kept_until.items() if step > k), default=0
                )
                files.append((str(len(files)), run, step, split, least))
    columns = [
        "file VARCHAR",
        "run VARCHAR",
        "step BIGINT",
        "split VARCHAR",
        "least_restart BIGINT",
    ]
    _fill(connection, "files", columns, files)
    connection.execute(_view_of_samples(folder, by_name=False))
    return damage


def _view_of_samples(folder: Path, by_name: bool) -> str:
    """by_name: files may have other columns than the first, which takes long to find out."""
    listed = [
        f"try_cast(r.{name} as {_KINDS[kind]}) as {name}" for name, (kind, _) in COLUMNS.items()
    ]
    return _SAMPLES.format(
        folder=folder, columns=", ".join(listed[2:]), by_name=str(by_name).lower()
    )


def _remove_damaged(folder: Path, max_s: float) -> Iterator[str]:
    """Remove the links to damaged files of samples, as far as the time allows. A sentence for
    each."""
    deadline = time.monotonic() + max_s
    for link, file in ((link, link.resolve()) for link in folder.iterdir() if link.is_symlink()):
        if time.monotonic() < deadline and is_damaged(file, file.parent):
            link.unlink()
            yield f"{file} is damaged: its samples are missing here"


def _tokens(run_dir: Path) -> Iterator[Row]:
    from distflow.runtime.run_recorder import TOKENS

    found = (_TOKENS_FILE.fullmatch(file.name) for file in (run_dir / TOKENS).glob("*.safetensors"))
    texts = token_texts(run_dir)
    for step in sorted({int(match[1]) for match in found if match}):
        yield from saved_tokens(run_dir, step, texts)


def token_texts(run_dir: Path) -> list[str]:
    """Of the vocabulary; empty if no step was saved."""
    from distflow.runtime.run_recorder import TOKEN_TEXTS, TOKENS

    texts = read_object(run_dir / TOKENS / TOKEN_TEXTS, run_dir).get("texts")
    return [str(text) for text in texts] if isinstance(texts, list) else []


def saved_tokens(run_dir: Path, step: int, texts: Sequence[str] = ()) -> Iterator[Row]:
    """The tokens of a step that `trainer.save_groups` saved, as `VIEWS` describes them, without the
    run. Nothing if there is no file, or it is torn. texts: see `token_texts`."""
    from safetensors import SafetensorError

    from distflow.runtime.run_recorder import load_groups

    with suppress(OSError, ValueError, KeyError, SafetensorError):
        yield from _tokens_of(load_groups(run_dir, step), step, texts)


def _tokens_of(batch: "Batch", step: int, texts: Sequence[str]) -> Iterator[Row]:
    axis = batch.field("response_ids").axis
    lengths = batch.lengths("response").tolist()
    uids = [
        str(uid) for uid, length in zip(batch["uid"], lengths, strict=True) for _ in range(length)
    ]
    positions = [position for length in lengths for position in range(length)]
    masks, *others = (
        batch.flat(name).tolist()
        if name in batch and batch.field(name).axis == axis
        else [None] * len(uids)
        for name in ("response_mask", *_TOKEN_COLUMNS)
    )
    ids: list[int] = batch.flat("response_ids").tolist()
    trained = [None if mask is None else mask > 0 for mask in masks]
    read = [texts[token] if 0 <= token < len(texts) else None for token in ids]
    owners = _owners(batch) if "owners" in batch else [None] * len(uids)
    yield from zip(
        [step] * len(uids), uids, positions, ids, trained, *others, read, owners, strict=True
    )


def _owners(batch: "Batch") -> list[str]:
    """Of each token of the responses; behind the name of its conversation, or of its agent, if it
    has one."""
    found = []
    said = batch["conversation"] if "conversation" in batch else [()] * len(batch)
    for agent, forks, parts, turns in zip(
        batch["agent"], batch["forks"], batch["owners"], said, strict=True
    ):
        own = [owner for owner, number in parts for _ in range(number)]
        agents = [
            turn["agent"] for turn in turns if "agent" in turn and turn["agent"] not in dict(forks)
        ]
        first = agents[0] if agents else "" if agent == "policy" else agent
        starts = [(0, first), *((start, name) for name, start in forks), (len(own), "")]
        for (start, name), (end, _) in pairwise(starts):
            found += [f"{name}: {owner}" if name else owner for owner in own[start:end]]
    return found


def _spans(run_dir: Path) -> Iterator[Row]:
    timeline = run_reader.read_timeline(run_dir, None)
    for actor, spans in run_reader.read_spans(run_dir, run_reader.MAX_BYTES).items():
        for s in (s for s in spans if timeline.survives(s.restart, s.step or 0)):
            yield (
                actor,
                s.start,
                s.end,
                s.kind,
                s.what,
                s.step,
                s.group_id,
                s.version,
                s.on,
                s.restart,
            )


def _groups(run_dir: Path) -> Iterator[Row]:
    for group in run_reader.groups_of(_in_time(surviving_records(run_dir / LEDGER))).values():
        yield group.values()


def _versions(run_dir: Path) -> Iterator[Row]:
    for record in _in_time(surviving_records(run_dir / LEDGER)):
        if record["kind"] == "version":
            step, weights, restart = map(
                run_reader.whole, map(record.get, ("step", "weights", "restart"))
            )
            yield step, weights, to_number(record.get("t")), restart


def _findings(run_dir: Path) -> Iterator[Row]:
    """Of the doctor, then those that the run recorded."""
    for found in examine(RunRecords(run_dir)).problems():
        yield (
            found.rule,
            found.level,
            found.first,
            found.last,
            f"{found.text} {found.advice}",
            found.action,
        )
    for event in run_reader.read_events(run_dir, max_bytes=None):
        if event.kind in PROBLEM_KINDS and not event.rolled_back:
            level = "error" if event.kind == "error" else "warning"
            yield event.kind, level, event.step, event.step, event.message, ""


def _config(run_dir: Path) -> Iterator[Row]:
    sources = run_reader.config_sources(read_object(run_dir / "run.json", run_dir))
    for key, value in run_reader.flat_config(run_dir).items():
        yield key, value, sources.get(key, run_reader.PRESET)


_ROWS: Mapping[str, Callable[[Path], Iterable[Row]]] = {
    "tokens": _tokens,
    "spans": _spans,
    "invoice": read_charges,
    "groups": _groups,
    "versions": _versions,
    "findings": _findings,
    "config": _config,
}
