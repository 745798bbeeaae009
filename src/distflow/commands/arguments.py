"""Arguments that commands share: of those that read a config, and of those that find a run's folder."""

import argparse
from pathlib import Path

from distflow.errors import UserError

RUNS = Path("runs")
LEDGER = "ledger.jsonl"


def add_config_arguments(
    parser: argparse.ArgumentParser, default: str | None = None, what: str = "a preset's name, or a YAML file"
) -> None:
    """default: the preset that stands for one that is left out; without it there must be one. what: may be named."""
    nargs = "?" if default else None
    parser.add_argument("preset", nargs=nargs, default=default, help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra's override syntax")


def add_trust_argument(parser: argparse.ArgumentParser, which: str) -> None:
    """Without it a command that reads files runs no Python code that they name."""
    parser.add_argument("--trust-code", action="store_true", help=f"run Python code that {which}")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", dest="run_dir", metavar="DIR", help="the run's folder; without it the newest of runs/*/*"
    )


def find_run(given: str | None) -> Path:
    """Raises UserError where the folder that was given, or any run below runs/, is not there."""
    run_dir = Path(given).expanduser() if given is not None else newest_run()
    if run_dir is None:
        raise UserError(f"there is no run below {RUNS.absolute()}: name the run's folder with --run DIR")
    if not run_dir.is_dir():
        raise UserError(f"there is no folder {run_dir}: name the run's folder with --run DIR")
    return run_dir


def newest_run() -> Path | None:
    """The run of the current folder's runs/ whose ledger was written last."""
    ledgers = sorted(RUNS.glob(f"*/*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    return ledgers[-1].parent if ledgers else None
