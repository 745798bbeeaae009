"""`distflow selftest`: verifies that a tiny run gives the same numbers on each path."""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.quick_start import importing

if TYPE_CHECKING:
    pass


def add_selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""


def run_selftest(arguments: argparse.Namespace) -> int:
    """Returns 1 if a pair differs; then the folders of its runs are kept."""
    started = time.monotonic()
    print(f"distflow {__version__} · selftest", flush=True)
    with importing():
        from distflow.commands.selftest.compared_runs import (
            advice,
            compare_all,
            head,
            left_out,
            line,
        )
        from distflow.commands.selftest.runs import RECORDED, read_recorded

    rows = []
    failed = []
    folder = Path(tempfile.mkdtemp(prefix="distflow-selftest-"))
    try:
        print(head(), flush=True)
        for row in compare_all(read_recorded(RECORDED), folder):
            print(line(row), flush=True)
            rows.append(row)
            failed += [] if row.ok or row.left_out else [row]
    finally:
        if not failed:
            # reward processes of an interrupted run may still be ending
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    for text in (*left_out(rows), *(advice(failed, folder) if failed else ())):
        print(text)
    return 1 if failed else 0
