"""`distflow selftest`: verifies that a tiny run gives the same numbers on each path."""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from distflow import __version__
from distflow.commands.quick_start import importing


def add_selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""


def run_selftest(arguments: argparse.Namespace) -> int:
    """Returns 1 if a pair differs; then the folders of its runs are kept."""
    started = time.monotonic()
    print(f"distflow {__version__} · selftest, each run against a synchronous one", flush=True)
    with importing():
        from distflow.commands.selftest.pairs import FAILED, LEFT_OUT, compare_all

    outcomes = list[str]()
    folder = Path(tempfile.mkdtemp(prefix="distflow-selftest-"))
    try:
        for found in compare_all(folder):
            print(f"{found.name:<42} {found.outcome:<9} {found.text}", flush=True)
            outcomes.append(found.outcome)
    finally:
        if FAILED not in outcomes:
            # reward processes of an interrupted run may still be ending
            shutil.rmtree(folder, ignore_errors=True)

    print(f"{time.monotonic() - started:.0f} s")
    if LEFT_OUT in outcomes:
        print(f"{outcomes.count(LEFT_OUT)} of {len(outcomes)} pairs are not verified")
    if FAILED not in outcomes:
        return 0

    print(
        f"the runs are kept: {folder}/PIPELINE/RUN, with report.html in each, and "
        "PIPELINE/runs.log and killed.log\n"
        "Do not trust results of this machine before this is explained: run `distflow doctor`, "
        "reinstall distflow and the torch that it requires, and if the failure persists, report it "
        "with these lines and that folder"
    )
    return 1
