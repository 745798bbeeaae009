"""A run's folder has one writer from the first second; what two of an older version left is
repaired by a resume."""

import time
from pathlib import Path

import pytest

import distflow
from distflow.errors import UserError
from distflow.observe.writing.run_folder import claimed
from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground
from tests.forks import forks
from tests.observe.writing.test_folder_lock import state_of
from tests.one_winner import KEYS, names_in, one_wins, playground


@pytest.mark.slow
def test_of_many_starts_one_wins_and_the_others_leave_nothing(tmp_path):
    ground = playground(tmp_path)
    runs = []
    for number in range(6):
        runs.append(
            CliRun(tmp_path / f"log-{number}", ["train", "grpo", *ground.overrides("run", *KEYS)])
        )
        # the first two start at the same time, if the machine lets them
        time.sleep(0.1 * (number > 1))

    one_wins(ground, runs, tmp_path / "run")
    alone = CliRun(tmp_path / "log", ["train", "grpo", *ground.overrides("alone", *KEYS)])
    assert alone.status() == 0, alone.said()
    same_run(Left(tmp_path / "alone"), Left(tmp_path / "run"))
    assert names_in(tmp_path / "run") == names_in(tmp_path / "alone")


def _hold(folder: Path, ready: "object", leave: "object") -> None:
    with claimed(folder):
        ready.set()  # type: ignore[attr-defined]
        leave.wait()  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", ["train", "rollouts"])
def test_a_start_from_python_is_refused_and_leaves_nothing(tmp_path, start):
    ground = Playground(tmp_path)
    ready = forks.Event()
    leave = forks.Event()
    other = forks.Process(target=_hold, args=(tmp_path / "run", ready, leave))
    other.start()
    assert ready.wait(60)
    before = state_of(tmp_path / "run")
    keys = [key for key in ground.overrides("run") if not key.startswith("data.train_files")]
    rows = [{"prompt": "1+1=", "answer": "2"}] * 4

    with pytest.raises(UserError, match=rf"\(pid {other.pid} "):
        if start == "train":
            distflow.train("grpo", keys, data=rows)
        else:
            distflow.rollouts("grpo", keys, data=rows).__enter__()

    assert state_of(tmp_path / "run") == before
    leave.set()
    other.join()
