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
    from distflow.observe.findings.summary import accuracies, status
    from distflow.observe.run_reader import read_events, read_metrics

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder that contains the runs")
    found = {
        path.parent: path.lstat().st_mtime
        for path in folder.glob("**/events.jsonl")
        if EARLIER not in path.relative_to(folder).parts
    }
    for run, written in sorted(found.items(), key=lambda each: -each[1]):
        try:
            records = read_metrics(run)
            before, after = accuracies(records, read_events(run))
            step = max((record.step for record in records), default=0)
            word = status(read_events(run))["word"]
            first = "" if before is None else f"{before:.2f} → "
            said = f"{word}, step {step}" + (
                f", accuracy {first}{after:.2f}" if after is not None else ""
            )
        except UserError as error:  # of one run, which should not hide the others
            said = escape_control(f"unreadable: {error}", one_line=True)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        yield escape_control(str(run), one_line=True), f"{when}  {said}"
