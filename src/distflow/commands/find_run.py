"""Finds a run's folder."""

from pathlib import Path

from distflow.errors import UserError

RUNS = Path("runs")
LEDGER = "ledger.jsonl"


def find_run(run_dir: str | None) -> Path:
    """The named folder, or the newest run below runs/. Raises UserError if it does not exist."""
    found = Path(run_dir).expanduser() if run_dir is not None else newest_run()
    if found is None:
        raise UserError(f"there is no run below {RUNS.absolute()}: name the run's folder")
    if not found.is_dir():
        raise UserError(f"there is no folder {found}: name the run's folder")
    if not any(
        (found / name).exists() for name in ("events.jsonl", "run.json", "metrics.jsonl", LEDGER)
    ):
        raise not_a_run(found)

    return found


def not_a_run(folder: Path) -> UserError:
    """The error for a folder without a run's files; if runs are right below it, their folder was
    probably meant."""
    if below := sorted(file.parent.name for file in folder.glob("*/events.jsonl")):
        return UserError(
            f"{folder} is not a run's folder, but contains runs: name {folder / below[-1]}, for "
            "example"
        )

    return UserError(
        f"{folder} is not a run's folder: it has no file events.jsonl; if a run is starting, try "
        "later"
    )


def newest_run() -> Path | None:
    """The run in the current folder's runs/ whose ledger was written last."""
    ledgers = sorted(RUNS.glob(f"*/*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    return ledgers[-1].parent if ledgers else None
