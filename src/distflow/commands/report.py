"""`distflow report`: writes report.html of a run again."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir")


def run(arguments: argparse.Namespace) -> int:
    from distflow.errors import UserError
    from distflow.observe.report.build import write_report

    run_dir = Path(arguments.run_dir)
    if run_dir.is_dir() and not (run_dir / "events.jsonl").is_file():
        raise UserError(f"{run_dir} is no run's folder: it holds no file events.jsonl")
    print(f"report: {write_report(run_dir)}")
    return 0
