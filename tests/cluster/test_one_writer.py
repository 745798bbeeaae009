"""Over a Ray of its own a run's folder has one writer too, from the first second, while Ray is
still starting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.leftovers import Held
from tests.e2e.cli_runs import DEADLINE_S, Left, same_run
from tests.e2e.runs import Playground, notes
from tests.ledger_audit import verify
from tests.one_winner import KEYS, let_end, playground
from tests.patience import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.faults]

TWO = (*KEYS, "trainer.launcher=ray", "trainer.n_gpus_per_node=2")


class Command:
    """One start of `distflow train` in a process of its own, with a Ray of its own; what it says
    goes to a file."""

    def __init__(self, ground: Playground, log: str, *more: str, name: str = "run") -> None:
        arguments = [
            sys.executable,
            "-m",
            "distflow",
            "train",
            "grpo",
            *ground.overrides(name, *TWO, *more),
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        }
        self._log = ground.folder / log
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                arguments, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self.pid = self.process.pid

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def status(self) -> int:
        return self.process.wait(2 * DEADLINE_S)

    def said(self) -> str:
        return self._log.read_text()


@pytest.mark.by_hand
def test_a_start_right_after_a_kill_waits_for_what_is_left_and_ends_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    ground = playground(tmp_path)
    run = tmp_path / "run"
    let_end(ground)
    saved = run / "checkpoints" / "step-000004" / "manifest.json"
    with Command(ground, "killed", "trainer.total_training_steps=5000") as killed:
        wait_until(lambda: saved.exists() or not killed.running, "a checkpoint", DEADLINE_S)
        assert killed.running, killed.said()
        held = Held.below(killed.pid)
        killed.process.kill()
        newest = max(int(path.name[5:11]) for path in (run / "checkpoints").glob("step-*"))
        steps = f"trainer.total_training_steps={newest + 3}"
        with Command(ground, "next", steps) as following:
            assert following.status() == 0, following.said()
    assert not held.left()
    assert notes(run, "end") == ["the run finished"]
    assert any("resumed from step-" in note for note in notes(run, "info"))
    verify(run / "ledger.jsonl")
    with Command(ground, "log", steps, name="alone") as alone:
        assert alone.status() == 0, alone.said()
    same_run(Left(tmp_path / "alone"), Left(run))
