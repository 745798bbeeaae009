"""`distflow.load_run`: a run's folder as tables, during the run and afterwards. It only reads
files."""

import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from yaml import YAMLError

from distflow.errors import UserError, count_of
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import JSON, read_object
from distflow.observe.findings.summary import accuracies, status
from distflow.observe.metrics import headline_names
from distflow.observe.sample_files import DROPPED
from distflow.untrusted_files import MAX_YAML_BYTES, load_yaml, read_file

if TYPE_CHECKING:
    import pandas

SPLITS = ("train", "val")


class Table(list[dict[str, object]]):
    """A list of dicts. Not every row has every column."""

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in the order of their first occurrence."""
        return list(dict.fromkeys(chain.from_iterable(self)))

    def to_pandas(self) -> "pandas.DataFrame":
        """A `DataFrame`; missing values are NaN or None."""
        import pandas

        return pandas.DataFrame(list(self), columns=self.columns)


class Run:
    """A run, by its folder. Everything is read on access, so a run in progress shows its current
    state."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError if the folder is not a run's."""
        self.folder = Path(folder).expanduser().resolve()
        if not (self.folder / "events.jsonl").is_file():
            where = "is not there"
            if self.folder.is_dir():
                where = "has no file events.jsonl"
            raise UserError(f"{self.folder} is not a run's folder: it {where}")

    @property
    def status(self) -> str:
        """ "finished", "stopped" (by a signal, and saved), "failed", or "no end yet" (running, or
        killed)."""
        return status(run_reader.read_events(self.folder, max_bytes=None))["word"]

    @property
    def config(self) -> dict[str, JSON]:
        """The whole config, defaults included, as nested dicts; `distflow.train` accepts it with
        changed keys."""
        file = self.folder / "config.yaml"
        try:
            return cast(dict[str, JSON], load_yaml(read_file(file, self.folder, MAX_YAML_BYTES)))
        except (OSError, ValueError, RecursionError, YAMLError) as error:
            raise UserError(
                f"'{file}' cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error

    @property
    def facts(self) -> dict[str, JSON]:
        """What the run was started with: versions, model, data, machine."""
        return read_object(self.folder / "run.json", self.folder)

    def metrics(self, kind: str | None = None) -> Table:
        """A row for each step and kind ("train", "val"), with `step`, `kind`, `t` (seconds since
        the epoch) and the metrics by name. kind: selects one. Steps that a resume rolled back are
        omitted. Raises UserError for another kind."""
        _check_one_of("kind", kind)
        return Table(
            {"step": record.step, "kind": record.kind, "t": record.t, **record.values}
            for record in run_reader.read_metrics(self.folder, max_bytes=None)
            if kind is None or record.kind == kind
        )

    def samples(self, step: int | None = None, split: str | None = None) -> Table:
        """A row for each response, with `step`, `split`, `prompt`, `response`, `score` and its
        other fields.

        step: -1 for the last with samples, None for all. split: "train", "val"; None for both;
        "dropped" for responses that no step trained on. Raises UserError for another split, or a
        step that the run has not done.
        """
        if split != DROPPED:
            _check_one_of("split", split)
        if step is not None and not isinstance(step, int):
            raise UserError(f"step={step!r}: pass the number of a step, or -1 for the last")
        if step is not None and not -1 <= step <= self.num_steps:
            raise UserError(
                f"step={step}: the run has {self.num_steps} steps: pass one of them, or -1 for the "
                "last"
            )

        timeline = run_reader.read_timeline(self.folder, max_bytes=None)
        rows = Table()
        for name in run_reader.sample_splits(self.folder) if split is None else [split]:
            steps = run_reader.sample_steps(self.folder, name)
            if step == -1:
                steps = steps[-1:]
            elif step is not None:
                steps = [number for number in steps if number == step]

            for number in steps:
                found = run_reader.read_samples(self.folder, number, name, timeline, max_bytes=None)
                rows += [{"step": number, "split": name, **row} for row in found]

        return rows

    def events(self, kind: str | None = None) -> Table:
        """A row for each event, with `t`, `kind`, `step`, `message`. kind: selects one, e.g.
        "warning"."""
        return Table(
            {
                "t": event.t,
                "kind": event.kind,
                "step": event.step,
                "message": event.message,
                **event.fields,
            }
            for event in run_reader.read_events(self.folder, max_bytes=None)
            if kind is None or event.kind == kind
        )

    def findings(self) -> Table:
        """A row for each problem that the doctor finds, with `rule`, `level`, `first`, `last`,
        `text`, `action`, ..."""
        from distflow.observe.findings.doctor import examine
        from distflow.observe.run_records import RunRecords

        return Table(found._asdict() for found in examine(RunRecords(self.folder)).problems())

    def sql(self, query: str) -> Table:
        """The rows of a query over the views of `distflow report RUN --views`, e.g. "select * from
        spans". Raises UserError for a wrong one, and without DuckDB (`pip install
        'distflow[ui]'`)."""
        from distflow.launch.run_folders.sql_views import VIEWS, write_views

        try:
            import duckdb
        except ImportError as error:
            raise UserError("run.sql needs DuckDB: pip install 'distflow[ui]'") from error

        named = [name for name in VIEWS if name in query.lower()]
        with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
            file = Path(folder) / "views.sql"
            write_views([self.folder], file, named)

            try:
                connection.execute(file.read_text("utf-8"))
                cursor = connection.execute(query)
                columns = [column[0] for column in cursor.description or ()]
                rows = cursor.fetchall()
            except duckdb.Error as error:
                raise UserError(f"the query cannot be answered: {error}") from error

        return Table(dict(zip(columns, row, strict=True)) for row in rows)

    def compare(self, others: "Sequence[Run | str | Path]") -> Table:
        """A row for each headline metric and other run: `metric`, `run`, the means `a` of this run
        and `b` of the other over the last 50 steps at which both have it, `difference` with its
        95 % interval from `low` to `high`, and whether it `differs` by more than noise (None with
        fewer than 12 steps)."""
        from distflow.observe.report.metric_differences import compared_metrics
        from distflow.observe.run_records import RunRecords

        shown = headline_names()
        runs = [other if isinstance(other, Run) else Run(other) for other in others]
        own = RunRecords(self.folder).steps
        table = Table()
        for run in runs:
            for found in compared_metrics(own, RunRecords(run.folder).steps):
                if found["metric"] in shown:
                    table.append({"metric": found["metric"], "run": run.folder.name, **found})

        return table

    def _accuracies(self) -> tuple[float | None, float | None]:
        records = run_reader.read_metrics(self.folder, max_bytes=None)
        return accuracies(records, run_reader.read_events(self.folder))

    @property
    def accuracy_before(self) -> float | None:
        """Accuracy on validation problems before the first step; None if not measured."""
        return self._accuracies()[0]

    @property
    def accuracy_after(self) -> float | None:
        """Accuracy on validation problems at the last validation; None without a validation after a
        step."""
        return self._accuracies()[1]

    @property
    def num_steps(self) -> int:
        """The number of finished training steps."""
        return max(
            (
                record.step
                for record in run_reader.read_metrics(self.folder, max_bytes=None)
                if record.kind == "train"
            ),
            default=0,
        )

    @property
    def report(self) -> Path:
        """The run's page, to open in a browser; it is written now if missing."""
        from distflow.observe.report.build import write_report

        file = self.folder / "report.html"
        if file.is_file():
            return file
        return write_report(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of checkpoints, oldest first; `export` takes the last by default."""
        from distflow.runtime.checkpoint.files import by_age
        from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS

        return by_age(self.folder / CHECKPOINTS)

    def export(self, to: str | Path, checkpoint: Path | None = None) -> Path:
        """Write the policy of a checkpoint, by default the last, as a folder that `transformers`
        loads and `actor_rollout_ref.model.path` accepts. Raises UserError if there is no
        checkpoint, or `to` is not empty."""
        from distflow.launch.run_folders.export_checkpoint import export_checkpoint

        return export_checkpoint(checkpoint or self.folder, Path(to))

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.status}, {count_of(self.num_steps, 'step')}>"


load_run = Run  # the name that users call


def _check_one_of(name: str, value: str | None) -> None:
    if value not in (None, *SPLITS):
        raise UserError(
            f"{name}={value!r}: write one of {', '.join(map(repr, SPLITS))}, or omit it for all"
        )
