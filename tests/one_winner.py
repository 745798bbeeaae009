"""Starts of the same run one after another, of which one wins, and what the others leave:
nothing."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.cli_runs import Left
from tests.e2e.runs import Playground

WAITS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while not os.path.exists({go!r}):
        time.sleep(0.05)
    return sum(map(ord, solution_str)) % 7 / 6
"""
KEYS = (
    "trust.check_rewards=false",
    "reward.timeout_s=600",
    "trainer.save_freq=1",
    "trainer.keep_last=9",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.scheduler=constant",  # whatever the number of steps
)
DEADLINE_S = 300.0


class Started(Protocol):
    """A process that runs `distflow train`."""

    @property
    def pid(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def status(self) -> int: ...

    def said(self) -> str: ...


def playground(folder: Path) -> Playground:
    """One whose runs end only after `let_end`."""
    ground = Playground(folder)
    ground.write_reward(WAITS.format(go=str(folder / "go")))
    return ground


def let_end(ground: Playground) -> None:
    (ground.folder / "go").touch()


def one_wins(ground: Playground, runs: Sequence[Started], folder: Path) -> None:
    """All but one end by themselves and name it; it runs to the end, and the folder is as if it had
    been alone."""
    deadline = time.monotonic() + DEADLINE_S
    while sum(run.running for run in runs) > 1:
        assert time.monotonic() < deadline, [run.said()[-500:] for run in runs if run.running]
        time.sleep(0.1)

    let_end(ground)
    winners = [run for run in runs if run.status() == 0]
    assert len(winners) == 1, [run.said()[-500:] for run in runs]

    for run in runs:
        if run is winners[0]:
            continue

        assert run.status() == 2, run.said()

        # who has just taken the lock has not written its name yet
        named = (
            rf"another process \((pid {winners[0].pid} on \S+ since .*|unknown)\) is writing to "
            r"the run's folder"
        )
        assert re.search(named, " ".join(run.said().split())) and "report" not in run.said(), (
            run.said()
        )

    assert [
        event.kind for event in read_events(folder) if event.kind in ("start", "error", "end")
    ] == ["start", "end"]
    assert [event.message for event in read_events(folder) if event.kind == "end"] == [
        "the run finished"
    ]
    assert [record.step for record in read_metrics(folder) if record.kind == "train"] == [1, 2, 3]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert Left(folder).group_counts() == {"issued": 12, "consumed": 12, "dropped": {}}


def names_in(folder: Path) -> set[str]:
    """Every file and folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
