"""`distflow report`: a run's report again, its trace, or DuckDB views of runs."""

import argparse
import shlex
import sys
from pathlib import Path

from distflow.commands.find_run import find_run, not_a_run
from distflow.observe.sanitized_output import escape_control

_LAST = "last"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", metavar="RUN", help="one or several runs' folders")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--trace",
        nargs="?",
        const=_LAST,
        metavar="STEPS",
        help="write RUN/trace.json for ui.perfetto.dev instead: of steps such as 12 or 10-14, or "
        "of the last five",
    )
    form.add_argument(
        "--views",
        type=Path,
        metavar="FILE.sql",
        help="write views for DuckDB over all the runs instead: docs/observe.md#sql",
    )


def run_report(arguments: argparse.Namespace) -> int:
    run_dirs = [Path(run_dir) for run_dir in arguments.run_dirs]
    if arguments.views is not None:
        _write_views([find_run(str(run_dir)) for run_dir in run_dirs], arguments.views)
        return 0

    for run_dir in run_dirs:
        if arguments.trace is not None:
            _write_trace(run_dir, arguments.trace)
        else:
            _write_report(run_dir)

    return 0


def _write_report(run_dir: Path) -> None:
    from distflow.observe.report.build import write_report

    if run_dir.is_dir() and not (run_dir / "events.jsonl").is_file():
        raise not_a_run(run_dir)
    print(f"report: {write_report(run_dir)}")


def _write_trace(run_dir: Path, steps: str) -> None:
    from distflow.observe.report.trace import write_trace

    target = run_dir / "trace.json"
    first, last = write_trace(run_dir, None if steps == _LAST else steps, target)
    print(
        f"steps {first} to {last}: {target}\nopen it at https://ui.perfetto.dev, or in Chrome at "
        "chrome://tracing"
    )


def _write_views(run_dirs: list[Path], file: Path) -> None:
    from distflow.launch.run_folders.sql_views import write_views

    for line in write_views(run_dirs, file):
        print(escape_control(line, one_line=True), file=sys.stderr)
    shown = shlex.quote(escape_control(str(file), one_line=True))
    print(f"views: {shown}\nopen them with: duckdb -init {shown}")
