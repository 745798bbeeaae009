"""A run in one row, from the ends of its files: for `distflow runs` and the dashboard."""

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.observe.crash_safe_files import read_object, read_records, to_number
from distflow.observe.findings.finding import ACCURACY, REWARD
from distflow.observe.findings.summary import NO_END, PROBLEM_KINDS, status
from distflow.observe.run_reader import read_events
from distflow.observe.writing.run_folder import WRITER, writer_of
from distflow.untrusted_files import read_file

_TAIL_BYTES = 200_000
_HEADLINES = {
    "reward": REWARD,
    "accuracy": ACCURACY,
    "loss": "sft/loss",
    "speed": "throughput/tokens_per_s",
}
_HOST = re.compile(rb"pid \d+ on (\S+)")


def stamp_of(path: Path) -> tuple[int, int]:
    """A file's size and time in ns; zeros if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_size, found.st_mtime_ns


def run_row(run_dir: Path) -> dict[str, Any]:
    """rewards: of its last steps. written: in seconds since the epoch. None: not known."""
    row: dict[str, Any] = {
        "step": None,
        "total": None,
        "rewards": [],
        "problems": 0,
        "written": stamp_of(run_dir / "metrics.jsonl")[1] / 1e9,
        **dict.fromkeys(_HEADLINES),
    }
    try:
        records = read_records(run_dir / "metrics.jsonl", _TAIL_BYTES, run_dir)[0]
        events = read_events(run_dir, None, _TAIL_BYTES)
        row["total"] = read_object(run_dir / "run.json", run_dir).get("total_steps")
    except UserError as error:
        return {**row, "state": str(error)[:200]}

    row["state"] = state_of(run_dir, status(events))["word"]
    steps = [record.get("step") for record in records]
    row["step"] = max((step for step in steps if isinstance(step, int)), default=0)

    for record in records:
        metrics = record.get("m")
        if not isinstance(metrics, dict):
            continue

        for name, metric in _HEADLINES.items():
            if metric in metrics:
                row[name] = to_number(metrics[metric])

        reward = to_number(metrics.get(REWARD))
        if reward is not None and math.isfinite(reward):
            row["rewards"].append(reward)

    for event in events:
        row["problems"] += event.kind in PROBLEM_KINDS and not event.rolled_back
    return row


def run_status(run_dir: Path) -> dict[str, str]:
    """The status of a run, from the end of its events."""
    return state_of(run_dir, status(read_events(run_dir, None, _TAIL_BYTES)))


def state_of(run_dir: Path, found: dict[str, str]) -> dict[str, str]:
    """Of a run without an end whether it is running, by the lock of its folder."""
    if found != NO_END:
        return found
    if (writer := writer_of(run_dir)) is not None:
        return {"word": "running", "detail": f"process {writer} writes to the folder"}

    with suppress(OSError):
        host = _HOST.match(read_file(run_dir / WRITER, run_dir, _TAIL_BYTES))
        if host and host[1].decode("utf-8", "replace") == os.uname().nodename:
            detail = "it has no end, and no process of this machine writes to the folder"
            return {"word": "crashed", "detail": detail}

    return found
