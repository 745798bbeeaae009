"""Runs on this CPU, as `distflow plan --from RUN` predicts them after one of them was measured.

    python benchmarks/plan_calibration.py [--rounds N] [--folder FOLDER]

The first run calibrates; the others differ in batch, length of responses, model, staleness or
number of workers. Each is GRPO with random weights and one thread a worker, eight steps, without
validation, checkpoints and checks, in a process of its own. The plan gets the keys of the run and
the folder of the first one.

Measured are medians of the steps behind the first quarter: their time (`timing_s/step`), and the
processor time of the busiest thread in them, which is what a step takes if nothing else runs on the
machine. Other work makes the time of steps longer, and differently in each run; so the predicted
steps are compared with both, the second after scaling them by the processor time of the first run
over its time. All runs are repeated in rounds; of each run the round with the least processor time
counts, also for the calibration. Memory is the highest resident memory of a process.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

BUILTIN = (
    Path(__file__).resolve().parents[1] / "src/distflow/models/builtin/tiny-arithmetic/config.json"
)
MODELS = {
    "1.6M": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    | {"num_key_value_heads": 2, "head_dim": 64},
    "4.8M": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    | {"num_key_value_heads": 2, "head_dim": 64},
    "14M": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
    }
    | {"num_key_value_heads": 6, "head_dim": 64},
}


class Run(NamedTuple):
    """prompts: of a step, with eight responses each. limit: tokens of a response."""

    model: str = "4.8M"
    prompts: int = 16
    limit: int = 48
    staleness: int = 0
    workers: int = 1

    def keys(self, folder: Path) -> list[str]:
        model = folder / self.model
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(
            json.dumps({**json.loads(BUILTIN.read_text()), **MODELS[self.model]})
        )

        return [
            *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.init=random"),
            "actor_rollout_ref.model.tokenizer_path=builtin:tiny-arithmetic",
            *(
                f"data.train_batch_size={self.prompts}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            ),
            *(f"data.max_response_length={self.limit}", "actor_rollout_ref.actor.optim.lr=1e-6"),
            *(f"async.max_staleness={self.staleness}", f"trainer.n_gpus_per_node={self.workers}"),
            *("trainer.num_threads=1", "trainer.total_training_steps=8", "trainer.device=cpu"),
            *(("actor_rollout_ref.rollout.num_threads=1",) if self.staleness else ()),
            *(
                "trainer.val_before_train=false",
                "trainer.test_freq=0",
                "trainer.save_freq=0",
                "trust.check_freq=0",
            ),
        ]


FIRST = Run()
OTHERS = {
    "twice the prompts": Run(prompts=32),
    "half of the prompts": Run(prompts=8),
    "twice the length": Run(limit=96),
    "half of the length": Run(limit=24),
    "a smaller model": Run(model="1.6M"),
    "a larger model": Run(model="14M"),
    "staleness 1": Run(staleness=1),
    "2 workers": Run(workers=2),
}


def distflow(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "distflow", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"distflow {' '.join(words)}: {done.stderr[-1000:]}")
    return done.stdout


def train(folder: Path, words: list[str]) -> None:
    """Writes the processor time of the busiest thread in each step to processor.json."""
    metrics = folder / "metrics.jsonl"
    seen = 0
    steps = list[float]()
    command = [sys.executable, "-m", "distflow", "train", "quickstart_grpo", *words]
    run = subprocess.Popen(
        [*command, f"trainer.default_local_dir={folder}"], stdout=subprocess.DEVNULL
    )

    before = spent(run.pid)
    while run.poll() is None:
        if metrics.exists() and (number := metrics.read_bytes().count(b"\n")) > seen:
            seen = number
            now = spent(run.pid)
            steps.append(max(seconds - before.get(thread, 0.0) for thread, seconds in now.items()))
            before = now
        time.sleep(0.02)

    if run.returncode:
        raise SystemExit(f"{' '.join(words)}: status {run.returncode}")
    (folder / "processor.json").write_text(json.dumps(steps))


def spent(root: int) -> dict[tuple[int, int], float]:
    """Processor seconds of each thread of a process and of those that it started."""
    parents = dict[int, int]()
    found = dict[tuple[int, int], float]()

    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])

    ours = {root}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more

    for pid in ours:
        with contextlib.suppress(OSError):
            for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
                words = stat.read_text().rpartition(")")[2].split()
                ticks = int(words[11]) + int(words[12])
                found[pid, int(stat.parent.name)] = ticks / os.sysconf("SC_CLK_TCK")

    return found


class Measured(NamedTuple):
    """Medians of the steps."""

    seconds: float
    processor: float
    peak: float


def measured(folder: Path) -> Measured:
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text("utf-8").split("\n")
        if line
    ]
    steps = [line["m"] for line in lines if line["kind"] == "train"]
    first = max(1, len(steps) // 4)
    processor = json.loads((folder / "processor.json").read_text())[first:]
    peak = max(step["memory/process/peak"] for step in steps)

    return Measured(
        median(step["timing_s/step"] for step in steps[first:]), median(processor), peak
    )


def fastest(folders: list[Path]) -> Path:
    return min(folders, key=lambda folder: measured(folder).processor)


def predicted(run: Run, folder: Path, calibrating: Path) -> tuple[float, float]:
    plan = json.loads(
        distflow("plan", "quickstart_grpo", *run.keys(folder), "--from", str(calibrating), "--json")
    )
    return plan["step"]["seconds"], max(worker["peak_bytes"] for worker in plan["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="keeps the runs, and takes those that are there"
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    runs = {"calibrates": FIRST, **OTHERS}

    folders: dict[str, list[Path]] = {name: [] for name in runs}
    for number in range(arguments.rounds):
        for name, run in runs.items():
            place = folder / f"{name.replace(' ', '-')}-{number}"
            if not (place / "processor.json").exists():
                train(place, run.keys(folder))
            folders[name].append(place)

    first = fastest(folders["calibrates"])
    scale = measured(first).processor / measured(first).seconds
    print(
        "| run | predicted | measured | | predicted processor time | measured | | predicted memory "
        "| measured | |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")

    near = dict.fromkeys(
        ("processor time within 20 %", "time within 20 %", "memory within 15 %"), 0
    )
    for name, run in runs.items():
        (seconds, peak), real = predicted(run, folder, first), measured(fastest(folders[name]))
        misses = (
            scale * seconds / real.processor - 1,
            seconds / real.seconds - 1,
            peak / real.peak - 1,
        )
        print(
            f"| {name} | {seconds:.2f} s | {real.seconds:.2f} s | {misses[1]:+.0%} | "
            f"{scale * seconds:.2f} s "
            f"| {real.processor:.2f} s | {misses[0]:+.0%} | {peak / 1e6:,.0f} MB | "
            f"{real.peak / 1e6:,.0f} MB "
            f"| {misses[2]:+.0%} |",
            flush=True,
        )
        for what, miss, most in zip(near, misses, (0.2, 0.2, 0.15), strict=True):
            near[what] += name != "calibrates" and abs(miss) <= most

    print("\n" + ", ".join(f"{what}: {number} of {len(OTHERS)}" for what, number in near.items()))


if __name__ == "__main__":
    main()
