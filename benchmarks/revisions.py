"""Speed of a whole `distflow train grpo` against that of an earlier revision, on the same work.

    python benchmarks/revisions.py REVISION [--work fixed-1m long-1m --rounds 3 --steps 8]

The earlier sources are checked out into a temporary folder and run with the same libraries, by
their own `benchmarks/workload.py`. Each run is a process of its own, and the two take turns; the
first two steps of a run warm up. Ratios are of tokens a second of rollout, update and whole step:
above 1 the sources of this folder are faster. `busy beside`: cores that other processes kept busy
in the worst round; above 0.3 the figures say little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairness import Beside
from workload import WORKS, write_work

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "update", "seconds")
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from workload import WORKS, train
folder, name, work, steps, done = sys.argv[1:]
found = train(Path(folder), name, WORKS[work], int(steps))[1:]
Path(done).write_text(json.dumps([asdict(step) for step in found]))
"""


@contextmanager
def sources_of(revision: str, folder: Path) -> Iterator[Path]:
    tree = folder / "sources"
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True
    )

    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def seconds_a_token(tree: Path, folder: Path, name: str, work: str, steps: int) -> dict[str, float]:
    """Of each phase, over the steps of one run."""
    done = folder / "done.json"
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}"}
    command = [sys.executable, "-c", RUN, folder, name, work, str(steps), done]
    subprocess.run(command, cwd=tree / "benchmarks", env=environment, check=True)
    found = json.loads(done.read_text())
    tokens = sum(step["tokens"] for step in found)
    return {phase: sum(step[phase] for step in found) / tokens for phase in PHASES}


def compare(earlier: Path, folder: Path, work: str, rounds: int, steps: int) -> None:
    write_work(folder, WORKS[work].shape)
    ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
    busiest = 0.0
    for index in range(rounds):
        others = Beside()
        before = seconds_a_token(earlier, folder, f"{work}-before{index}", work, steps)
        now = seconds_a_token(ROOT, folder, f"{work}-now{index}", work, steps)
        busiest = max(busiest, others.cores())
        for phase in PHASES:
            ratios[phase].append(before[phase] / now[phase])

    cells = [
        f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        for found in ratios.values()
    ]
    print(f"| {work} | {' | '.join(cells)} | {busiest:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="a commit, tag or branch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=8, help="of a run; the first two are not counted"
    )
    parser.add_argument("--work", nargs="+", default=["fixed-1m", "long-1m"], choices=WORKS)

    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        sources_of(arguments.revision, Path(name)) as earlier,
    ):
        print(
            f"speed, of that of {arguments.revision}: median of {arguments.rounds} rounds (least "
            "to most)\n"
        )
        print("| work | rollout | update | step | busy beside |\n|---|---|---|---|---|", flush=True)
        for work in arguments.work:
            compare(earlier, Path(name), work, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
