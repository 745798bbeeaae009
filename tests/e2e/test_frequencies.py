"""Runs that save and validate by epochs and seconds have the numbers of any other, also after a
kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distflow.observe.run_reader import read_metrics
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow
CHEAP = ("trust.check_rewards=false", "actor_rollout_ref.rollout.n=2", "trainer.total_epochs=3")
BY_TIME = (
    "trainer.save_freq_secs=0.001",
    "trainer.test_freq_secs=0.001",
    "trainer.save_freq_epochs=1",
)
TIMES = ("timing_s", "throughput", "memory", "perf")


def metrics(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Of the training steps, without times and sizes."""
    return [
        (
            each.step,
            {name: value for name, value in each.values.items() if not name.startswith(TIMES)},
        )
        for each in read_metrics(folder)
        if each.kind == "train"
    ]


def test_a_killed_run_that_goes_by_the_clock_is_bit_equal_when_it_is_resumed(tmp_path):
    ground = Playground(tmp_path)
    keys = (
        *CHEAP,
        *BY_TIME,
        f"data.val_files={tmp_path}/rows.jsonl",
        "trainer.stop_when=actor/lr < 0.0005",
    )
    command = [sys.executable, "-m", "distflow", "train", "grpo", *ground.overrides("run", *keys)]

    killed = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    while killed.poll() is None and not list(
        (tmp_path / "run").glob("checkpoints/step-00000[2-9]")
    ):
        time.sleep(0.01)

    killed.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = ground.run("grpo", *keys)
    plain = ground.run("grpo", *CHEAP, name="plain")
    assert resumed.outcome.steps == 6 and metrics(resumed.folder) == metrics(plain.folder)[:6]
