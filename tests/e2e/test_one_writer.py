"""A run's folder has one writer from the first second; what two of an older version left is
repaired by a resume."""

import json
import time
from pathlib import Path

import pytest

import distflow
from distflow import cli
from distflow.errors import UserError
from distflow.observe.writing.run_folder import claimed
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground, notes
from tests.forks import forks
from tests.ledger_audit import verify
from tests.observe.writing.test_folder_lock import state_of
from tests.one_winner import KEYS, let_end, names_in, one_wins, playground
from tests.sparse_params import BY_HAND


@pytest.mark.slow
def test_of_many_starts_one_wins_and_the_others_leave_nothing(tmp_path: Path) -> None:
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
def test_a_start_from_python_is_refused_and_leaves_nothing(tmp_path: Path, start: str) -> None:
    ground = Playground(tmp_path)
    ready = forks.Event()
    leave = forks.Event()
    other = forks.Process(target=_hold, args=(tmp_path / "run", ready, leave))
    other.start()
    assert ready.wait(60)
    before = state_of(tmp_path / "run")
    keys = [key for key in ground.overrides("run") if not key.startswith("data.train_files")]
    rows = [{"prompt": "1+1=", "answer": "2"}] * 4
    with pytest.raises(UserError, match=rf"another process \(pid {other.pid} on"):
        if start == "train":
            distflow.train("grpo", keys, data=rows)
        else:
            distflow.rollouts("grpo", keys, data=rows).__enter__()
    assert state_of(tmp_path / "run") == before
    leave.set()
    other.join()


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    """With a run of three steps, each saved."""
    ground = playground(tmp_path)
    let_end(ground)
    assert train(ground) == 0
    return ground


def train(ground: Playground, *more: str, name: str = "run") -> int:
    return cli.main(["train", "grpo", *ground.overrides(name, *KEYS, *more)])


def mix_in_another_writer(run: Path, at: int) -> bytes:
    """As two starts wrote in turns from byte `at` on: the second took everything back, and began
    anew. Returns the file."""
    ledger = run / "ledger.jsonl"
    content = ledger.read_bytes() + _line(
        0, "issued", group_id=12, epoch=1, row=0, version=3, attempt=0
    )
    others = [_line(1, "rolled_back", to=0)]
    others += [
        _line(1, "issued", group_id=n, epoch=0, row=n, version=0, attempt=0) for n in range(12)
    ]
    mixed = [content[:at]]
    for line in content[at:].splitlines(keepends=True):
        mixed += [*others[:1], line]
        others = others[1:]
    ledger.write_bytes(b"".join([*mixed, *others]))
    return ledger.read_bytes()


def _line(restart: int, kind: str, **fields: int) -> bytes:
    return json.dumps({"t": 0, "restart": restart, "kind": kind, **fields}).encode() + b"\n"


def place_of(run: Path, step: int) -> int:
    offset: int = (
        CheckpointStore(run / "checkpoints")
        .load(step)
        .load("run")["coordinator"]["ledger"]["offset"]
    )
    return offset


@pytest.mark.slow
@pytest.mark.parametrize("damaged_after", [3, pytest.param(2, marks=BY_HAND)])
def test_a_ledger_of_two_writers_is_repaired_from_the_newest_checkpoint_before(
    ground: Playground, capsys: pytest.CaptureFixture[str], damaged_after: int
) -> None:
    run = ground.folder / "run"
    longer = "trainer.total_training_steps=6"
    damaged = mix_in_another_writer(run, place_of(run, damaged_after))
    capsys.readouterr()
    assert train(ground, longer) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "two runs may have written to it" in out
    assert (
        f"Its records after step-00000{damaged_after} are rolled back, but remain in the file"
        in out
    )
    assert (f"--resume {run}/checkpoints/step-000003" in out) == (damaged_after == 2)
    assert any("two runs may have written" in note for note in notes(run, "warning"))
    assert any(
        note.startswith(f"resumed from step-00000{damaged_after}") for note in notes(run, "info")
    )
    assert (run / "ledger.jsonl").read_bytes().startswith(damaged)
    verify(run / "ledger.jsonl")
    assert train(ground, longer, name="whole") == 0
    same_run(Left(ground.folder / "whole"), Left(run))
    capsys.readouterr()
    assert train(ground, "trainer.total_training_steps=8") == 0
    assert "two runs" not in capsys.readouterr().out, "it is told once"
