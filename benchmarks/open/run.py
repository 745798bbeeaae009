"""The open benchmark: the same work by several systems, each result proven, and the page of all
results.

    python benchmarks/open/run.py [--task grpo-1m sft-1m dpo-1m] [--systems distflow trl plain]
    [--rounds 3]

Each run is a process of its own, and the systems take turns. README.md has the protocol."""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]
from fairness import Beside  # noqa: E402  the folders above
from proofs import Refused, prove, read_work  # noqa: E402
from tasks import TASKS, write_inputs  # noqa: E402

RESULTS = HERE / "results.jsonl"
PAGE = HERE / "RESULTS.md"
SYSTEMS = {
    "distflow": Path(sys.executable),
    "trl": ROOT / ".peers" / "trl" / "bin" / "python",
    "plain": Path(sys.executable),
}
"""The Python of each; `adapters/with_NAME.py` runs it."""
PACKAGES = ("distflow", "trl", "transformers", "torch")
MEMORY_EVERY = 0.2
"""Seconds."""
WARM_UP = 0.1
"""The share of a run's updates that the seconds of an update leave out."""


def measure(name: str, system: str, folder: Path, inputs: str, precision: str) -> dict[str, Any]:
    """One run and its proofs: a line of results.jsonl."""
    out = Path(tempfile.mkdtemp(dir=folder.parent))
    command = [
        str(SYSTEMS[system]),
        str(HERE / f"adapters/with_{system}.py"),
        str(folder),
        str(out),
    ]
    beside = Beside()
    begin = time.time()
    log = out / "log.txt"
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file)
        peak = peak_memory(process)
    wall = time.time() - begin

    result: dict[str, Any] = {
        "task": name,
        "inputs": inputs,
        "system": system,
        "precision": precision,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(SYSTEMS[system]),
        "wall_s": round(wall, 2),
        "peak_rss_mb": round(peak / 2**20),
        "busy_beside": round(beside.cores(), 2),
    }
    if process.returncode:
        return {**result, "refused": f"run: {log.read_text().strip().splitlines()[-1]}"}

    try:
        work = read_work(folder, out)
        found = prove(work, precision)
    except Refused as refused:
        return {**result, "refused": str(refused)}

    lines = [json.loads(line) for line in (out / "updates.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines]
    begun = range(max(1, int(WARM_UP * len(ends))), len(ends))
    counted = [
        ends[number] - ends[number - 1] for number in begun if number % work.task.saved_every
    ]
    result |= {key: round(value, 6) for key, value in found.items()}
    result["update_s"] = round(statistics.mean(counted), 5)
    return result


def peak_memory(process: psutil.Popen) -> int:
    """Bytes that a process and its children had at most, together, until it ended."""
    peak = 0
    while process.poll() is None:
        had = 0
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                had += each.memory_info().rss
        peak = max(peak, had)
        time.sleep(MEMORY_EVERY)
    return peak


def machine() -> str:
    """The processor and its cores."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def versions(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        f"print(json.dumps({{n: found[n] for n in {PACKAGES!r} if n in found}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def page(results: Iterable[dict[str, Any]]) -> str:
    """All results as tables, the newest date of each system and machine."""
    by_task = defaultdict[tuple[str, str], dict[str, list[dict[str, Any]]]](
        lambda: defaultdict(list)
    )
    for result in results:
        rows = by_task[result["task"], result["machine"]][result["system"]]
        if rows and rows[-1]["date"] != result["date"]:
            rows.clear()
        rows.append(result)

    lines = ["# Results of the open benchmark", "", "`run.py` writes this page from results.jsonl."]
    for (task, machine_name), systems in by_task.items():
        lines += ["", f"## {task}, {machine_name}", ""]
        lines.append(
            "| system | s an update | times the fastest | whole run, s | peak memory, MB "
            "| accuracy | distance of the weights | busy beside | date |"
        )
        lines.append("|---|---|---|---|---|---|---|---|---|")
        proven = {
            system: [row for row in rows if "refused" not in row]
            for system, rows in systems.items()
        }
        seconds = {
            system: statistics.median(row["update_s"] for row in rows)
            for system, rows in proven.items()
            if rows
        }
        for system in sorted(seconds, key=lambda each: seconds[each]):
            lines.append(_line(system, proven[system], min(seconds.values())))
        for system, rows in systems.items():
            for row in rows:
                if "refused" in row:
                    lines.append(f"| {system} | refused: {row['refused']} |||||||| ")

    return "\n".join(lines) + "\n"


def _line(system: str, rows: list[dict[str, Any]], fastest: float) -> str:
    each = sorted(row["update_s"] for row in rows)
    median = statistics.median(each)
    versions_of = rows[-1]["versions"]
    cells = [
        f"{system} {versions_of.get(system, '')}".strip(),
        f"{median:.4f} ({each[0]:.4f}-{each[-1]:.4f})",
        f"{median / fastest:.2f}",
        f"{statistics.median(row['wall_s'] for row in rows):.1f}",
        f"{max(row['peak_rss_mb'] for row in rows):,}",
        f"{statistics.median(row['accuracy'] for row in rows):.2f}",
        f"{max(row['distance'] for row in rows):.1e}",
        f"{max(row['busy_beside'] for row in rows):.2f}",
        rows[-1]["date"],
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["grpo-1m", "sft-1m", "dpo-1m"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    missing = [system for system in arguments.systems if not SYSTEMS[system].exists()]
    if missing:
        raise SystemExit(f"{SYSTEMS[missing[0]]} is not there: run `make bench-peers` first")

    for name in arguments.task:
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name) / "inputs"
            inputs = write_inputs(TASKS[name], folder)
            for _ in range(arguments.rounds):
                for system in arguments.systems:
                    result = measure(name, system, folder, inputs, "float32")
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(result) + "\n")
                    told = result.get("refused") or f"{result['update_s']} s an update"
                    print(f"{name}, {system}: {told}", flush=True)

    PAGE.write_text(page(json.loads(line) for line in RESULTS.read_text().splitlines()))
    print(PAGE)


if __name__ == "__main__":
    main()
