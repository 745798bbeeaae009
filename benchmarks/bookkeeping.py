"""What a step spends on handing its rows over: rows of fine-tuning, and prompt groups of
reinforcement learning.

    python benchmarks/bookkeeping.py [--steps 20]

Fine-tuning: `distflow train quickstart_sft` as it ships, of 64 and of 1,024 rows a step, in one
process and in two. The time is that of the phase `data` (from the request for a step's rows to the
rows) by the clock, so that other programs disturb it; the share is that of each step's time.

Reinforcement learning: `quickstart_grpo` with groups of 2 short responses, 128 groups a step. The
time is that of the processor on the threads that call them, since engine and rewards run meanwhile,
of: handing groups out, their columns, their spans, their records for the checks, the sample queue
with scheduler and ledger, and the release of a step. Divided by the number of groups. Generation,
reward functions and their processes are not in it.

All figures are medians over the steps after the first few. `busy beside`: cores that other
processes kept busy meanwhile; above 0.1 the times by the clock do not count.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from fairness import Beside

from distflow.observe.run_reader import read_metrics

WARM_UP = 5
CALLS = "calls of "
PUT = f"{CALLS}SharedSampleQueue.put"
RANDOM = (
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
)
SMALL_GROUPS = (
    *("actor_rollout_ref.rollout.n=2", "data.max_response_length=8", "data.train_batch_size=128"),
    *(
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ),
)


def overrides(folder: Path, steps: int) -> list[str]:
    own = [f"trainer.total_training_steps={steps + WARM_UP}", f"trainer.default_local_dir={folder}"]
    return [*own, "trainer.save_freq=-1"]


def fine_tuning(num_rows: int, num_processes: int, steps: int) -> None:
    command = [sys.executable, "-m", "distflow", "train", "quickstart_sft"]
    command += [f"data.train_batch_size={num_rows}", "trainer.device=cpu"]
    command += [f"trainer.n_gpus_per_node={num_processes}", "trainer.launcher=local"]

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        around = Beside()
        subprocess.run([*command, *overrides(run, steps)], check=True, capture_output=True)
        beside = around.cores()
        records = [record.values for record in read_metrics(run) if record.kind == "train"]

    data = [values["timing_s/data"] for values in records[WARM_UP:]]
    step = [values["timing_s/step"] for values in records[WARM_UP:]]
    share = median(own / whole for own, whole in zip(data, step, strict=True))
    print(
        f"fine-tuning, {num_rows} rows a step, processes: {num_processes}: "
        f"{1e3 * median(data):.2f} of {1e3 * median(step):.1f} ms, {share:.1%} "
        f"(busy beside: {beside:.2f} cores)",
        flush=True,
    )


def timed(
    function: Callable[..., Any], spent: Counter[str], inside: list[str]
) -> Callable[..., Any]:
    """The function, whose processor time is counted unless it is called inside another one of
    these."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if inside:
            return function(*arguments, **named)

        inside.append(function.__qualname__)
        began = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            spent[function.__qualname__] += int(1e9 * (time.thread_time() - began))
            spent[CALLS + function.__qualname__] += 1
            inside.pop()

    return call


def groups(folder: Path, steps: int) -> None:
    """Run in a process of its own; prints the nanoseconds of each function in each step as JSON."""
    from distflow.checks.group_records import GroupRecords
    from distflow.cli import main as run_command
    from distflow.runtime.rollout_loop.group import Group
    from distflow.runtime.rollout_loop.group_tasks import RolloutLoop
    from distflow.runtime.sample_queue.queue_base import SharedSampleQueue

    spent = Counter[str]()
    of_steps = list[Counter[str]]()
    on_loop = list[str]()
    on_trainer = list[str]()

    names = {
        Group: ("batch", "write", "set_samples"),
        RolloutLoop: ("_end",),
        GroupRecords: ("begin", "keep", "take"),
    }
    for owner, own in {**names, SharedSampleQueue: ("groups_for", "put")}.items():
        for name in own:
            setattr(owner, name, timed(getattr(owner, name), spent, on_loop))

    for name in ("_ready", "_divided", "release"):
        setattr(SharedSampleQueue, name, timed(getattr(SharedSampleQueue, name), spent, on_trainer))
    release = SharedSampleQueue.release

    def release_and_note(*arguments: Any, **named: Any) -> Any:
        released = release(*arguments, **named)
        of_steps.append(Counter(spent))
        spent.clear()
        return released

    SharedSampleQueue.release = release_and_note  # type: ignore[method-assign]
    run_command(["train", "quickstart_grpo", *RANDOM, *SMALL_GROUPS, *overrides(folder, steps)])
    print(json.dumps(of_steps[WARM_UP:]))


def reinforcement_learning(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--steps", str(steps), "--groups", f"{folder}/run"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    of_steps = json.loads(printed.splitlines()[-1])
    names = sorted({name for spent in of_steps for name in spent if not name.startswith(CALLS)})
    each = dict[str, float]()
    for name in names:
        each[name] = median(spent.get(name, 0) / spent[PUT] for spent in of_steps) / 1e6
    whole = median(sum(spent.get(name, 0) for name in names) / spent[PUT] for spent in of_steps)
    print(f"reinforcement learning: {whole / 1e6:.3f} ms a group")
    for name, ms in sorted(each.items(), key=lambda item: -item[1]):
        print(f"  {name}: {ms:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.groups is not None:
        groups(arguments.groups, arguments.steps)
        return

    for num_processes in (1, 2):
        for num_rows in (64, 1024):
            fine_tuning(num_rows, num_processes, arguments.steps)

    reinforcement_learning(arguments.steps // 2)


if __name__ == "__main__":
    main()
