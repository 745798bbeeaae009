"""`distflow runs`: the runs of a folder."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from distflow.commands.find_run import RUNS
from distflow.commands.printing import print_rows
from distflow.errors import UserError
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import EARLIER


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default=RUNS, type=Path, metavar="DIR", help="folder of the runs"
    )


def run_runs(arguments: argparse.Namespace) -> int:
    print_rows(_runs(arguments.folder))
    return 0


def _runs(folder: Path) -> Iterator[tuple[str, str]]:
    """The runs, most recently written first. Raises UserError if there is no such folder."""
    from distflow.commands.run_row import run_row

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder that contains the runs")

    written_at = {}
    for path in folder.glob("**/events.jsonl"):
        if EARLIER not in path.relative_to(folder).parts:
            written_at[path.parent] = path.lstat().st_mtime

    for run, written in sorted(written_at.items(), key=lambda each: -each[1]):
        row = run_row(run)
        summary = f"{row['state']}, step {row['step']}"
        for name in ("reward", "accuracy", "loss"):
            if row[name] is not None:
                summary += f", {name} {row[name]:.2f}"

        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        summary = escape_control(summary, one_line=True)
        yield escape_control(str(run), one_line=True), f"{when}  {summary}"
