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

TAIL_BYTES = 200_000
_HEADLINES = {"reward": REWARD, "accuracy": ACCURACY, "loss": "sft/loss"}
_HOST = re.compile(rb"pid \d+ on (\S+)")


def stamp_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_size, found.st_mtime_ns


def run_row(path: Path) -> dict[str, Any]:
    """A run in one line, from the ends of its files."""
    row: dict[str, Any] = {
        "state": "unreadable",
        "step": None,
        "total": None,
        "speed": None,
        "rewards": [],
        "problems": 0,
        "written": stamp_of(path / "metrics.jsonl")[1] / 1e9,
        **dict.fromkeys(_HEADLINES),
    }
    try:
        records = read_records(path / "metrics.jsonl", TAIL_BYTES, path)[0]
        events = read_events(path, None, TAIL_BYTES)
        row["total"] = read_object(path / "run.json", path).get("total_steps")
    except UserError as error:
        row["state"] = str(error)[:200]
        return row
    row["state"] = status(events)["word"]
    row["step"] = 0
    for record in records:
        step = record.get("step")
        row["step"] = max(row["step"], step if isinstance(step, int) else 0)
        metrics = record.get("m")
        values = metrics if isinstance(metrics, dict) else {}
        for name, metric in {**_HEADLINES, "speed": "throughput/tokens_per_s"}.items():
            if metric in values:
                row[name] = to_number(values[metric])
        reward = to_number(values.get(REWARD))
        if reward is not None and math.isfinite(reward):
            row["rewards"].append(reward)
    for event in events:
        row["problems"] += event.kind in PROBLEM_KINDS and not event.rolled_back
    return row


def state_of(run_dir: Path, found: dict[str, str]) -> dict[str, str]:
    """The status of a run; of one without an end whether it is running, by the lock of its
    folder."""
    if found["word"] != NO_END["word"]:
        return found
    if (writer := writer_of(run_dir)) is not None:
        return {"word": "running", "detail": f"process {writer} writes to the folder"}
    with suppress(OSError):
        host = _HOST.match(read_file(run_dir / WRITER, run_dir, TAIL_BYTES))
        if host and host[1].decode("utf-8", "replace") == os.uname().nodename:
            return {
                "word": "crashed",
                "detail": "it has no end, and no process of this machine writes to the folder",
            }
    return found
