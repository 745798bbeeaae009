"""`distflow selftest`: proves on this machine that a tiny run gives the same numbers on each path."""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from distflow import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    """1 where a pair differs: the folders of its runs are then kept."""
    from distflow.commands.prestart import importing

    started = time.monotonic()
    print(f"distflow {__version__} · selftest", flush=True)
    with importing():
        from distflow.selftest.comparisons import advice, compare_all, head, left_out, line
        from distflow.selftest.reference_record import RECORDED, read_recorded

    rows, failed, folder = [], [], Path(tempfile.mkdtemp(prefix="distflow-selftest-"))
    try:
        print(head(), flush=True)
        for row in compare_all(read_recorded(RECORDED), folder):
            print(line(row), flush=True)
            rows.append(row)
            failed += [] if row.ok or row.left_out else [row]
    finally:
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)  # reward processes of an interrupted run may still be ending
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    for text in (*left_out(rows), *(advice(failed, folder) if failed else ())):
        print(text)
    return 1 if failed else 0
