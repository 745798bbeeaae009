"""Seconds of a GRPO step alone and beside busy processes, by how OpenMP threads wait between
operations.

    python benchmarks/waiting.py [--rounds 3 --steps 8 --busy 0 1 3]

Runs `distflow train quickstart_grpo` of random weights, so that each step has the same work: as
shipped, with threads that always spin (libgomp's own default), and with threads that always sleep
(`OMP_WAIT_POLICY=passive`). The three take turns in each round, alone and beside processes that
only compute. The median step of all rounds counts; the first step of a run warms up, and so do the
next two of the shipped setting, which first has to notice the others. A ratio is to the spinning
threads alone. The fair share of N processes beside two cores is (2 + N) / 2, since a step has two
threads. `busy beside`: cores that other processes kept busy in the worst round alone; above 0.1 the
figures do not count.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fairness import Beside

from distflow.observe.run_reader import read_metrics

SETTINGS = {
    "as shipped": {},
    "always spin": {"GOMP_SPINCOUNT": "300000"},
    "always sleep": {"OMP_WAIT_POLICY": "passive"},
}
WARM_UP = 3
ANOTHER = "while True: pass"


def step_s(folder: Path, variables: dict[str, str], steps: int) -> list[float]:
    """Of each step of a run after the warm-up."""
    keys = (
        "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
        "actor_rollout_ref.model.init=random",
    )
    never = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
    command = [sys.executable, "-m", "distflow", "train", "quickstart_grpo", *keys, *never]
    command += [
        f"trainer.total_training_steps={steps + WARM_UP}",
        f"trainer.default_local_dir={folder}",
    ]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    subprocess.run(
        [*command, "--resume", "never"], env={**kept, **variables}, check=True, capture_output=True
    )
    times = [
        record.values["timing_s/step"] for record in read_metrics(folder) if record.kind == "train"
    ]

    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 3])
    arguments = parser.parse_args()

    times = defaultdict[tuple[int, str], list[float]](list)
    beside = 0.0
    for number in range(arguments.rounds):
        for num_busy in arguments.busy:
            others = [subprocess.Popen([sys.executable, "-c", ANOTHER]) for _ in range(num_busy)]
            try:
                for setting, variables in SETTINGS.items():
                    with tempfile.TemporaryDirectory() as folder:
                        around = Beside()
                        times[num_busy, setting] += step_s(
                            Path(folder) / "run", variables, arguments.steps
                        )
                        beside = max(beside, 0.0 if num_busy else around.cores())
            finally:
                for each in others:
                    each.kill()
                    each.wait()

        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)

    alone = statistics.median(times[arguments.busy[0], "always spin"])
    print(f"busy beside: {beside:.2f} cores\n")
    print(
        "| busy processes | " + " | ".join(f"{setting}, s (ratio)" for setting in SETTINGS) + " |"
    )
    print("|---|" + "---|" * len(SETTINGS))

    for num_busy in arguments.busy:
        medians = [statistics.median(times[num_busy, setting]) for setting in SETTINGS]
        print(
            f"| {num_busy} | "
            + " | ".join(f"{median:.3f} ({median / alone:.2f})" for median in medians)
            + " |"
        )


if __name__ == "__main__":
    main()
