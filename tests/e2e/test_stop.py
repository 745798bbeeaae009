"""Ctrl-C, SIGTERM, SIGKILL: a run leaves as it was asked to, and leaves no process behind."""

import json
import signal
import time
from pathlib import Path

import pytest

from distflow.observe.run_reader import read_events
from distflow.runtime.stop_signals import SIGNALS
from tests.e2e.cli_runs import CliRun, Left, children_of, is_alive, same_run
from tests.e2e.runs import Playground
from tests.sparse_params import BY_HAND, one_fast_in

# Slow verdicts, so that a signal finds the run waiting for them; told when one is under way. While
# the file `hold` is there, none is given.
SLOW_REWARD = """
import time, pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pathlib.Path({folder!r}, "judging").touch()
    while pathlib.Path({folder!r}, "hold").exists():
        time.sleep(0.01)
    time.sleep({seconds})
    return sum(map(ord, solution_str)) % 7 / 6
"""


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=8)


def start(ground: Playground, name: str, *overrides: str, seconds: float = 0.02) -> CliRun:
    ground.write_reward(SLOW_REWARD.format(folder=str(ground.folder), seconds=seconds))
    (ground.folder / "judging").unlink(missing_ok=True)
    more = ("trainer.save_freq=10", "trust.check_rewards=false", "trainer.total_epochs=3")
    return CliRun(
        ground.folder / f"{name}.log", ["train", "grpo", *ground.overrides(name, *more, *overrides)]
    )


def wait_for_verdicts(ground: Playground, run: CliRun) -> list[int]:
    """Until a reward function runs; the processes that the run has then."""
    run.wait_for((ground.folder / "judging").exists)
    children = children_of(run.pid)
    assert children, "a verifier process is up"
    return children


def end_event(folder: Path) -> str:
    return [event for event in read_events(folder) if event.kind == "end"][-1].fields["status"]


@pytest.mark.slow
@pytest.mark.parametrize("number", one_fast_in(3, SIGNALS, others=BY_HAND))
def test_once_finishes_the_step_saves_leaves_and_resumes_with_the_same_bits(ground, number):
    (ground.folder / "hold").touch()
    run = start(ground, "stopped", "reward.timeout_s=120")
    children = wait_for_verdicts(ground, run)
    run.send(number)
    run.wait_for(lambda: "a second signal exits at once" in run.said())
    (ground.folder / "hold").unlink()
    assert run.status() == 128 + number, run.said()
    assert f"{number.name}: finishing this step, saving, then exiting" in run.said()
    assert (
        f"stopped by {number.name} after" in run.said()
        and "the same command resumes from step " in run.said()
    )
    assert end_event(ground.folder / "stopped") == "stopped"
    assert not any(is_alive(pid) for pid in children)
    stopped = Left(ground.folder / "stopped")
    assert 1 <= stopped.checkpoint.step < 6

    for name in ("stopped", "whole"):
        assert start(ground, name, "reward.timeout_s=120").status() == 0
    assert end_event(ground.folder / "stopped") == "finished"
    same_run(Left(ground.folder / "stopped"), Left(ground.folder / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_twice_leaves_at_once_and_leaves_nothing_behind(ground, number):
    run = start(ground, "twice", seconds=300)
    children = wait_for_verdicts(ground, run)
    run.send(number)
    run.wait_for(lambda: "a second signal exits at once" in run.said())
    run.send(number)
    assert run.status() == 128 + number
    assert_gone(children)


def test_killed_takes_all_its_processes_with_it(ground):
    run = start(ground, "killed", "reward.num_workers=2", seconds=300)
    children = wait_for_verdicts(ground, run)
    assert run.kill()
    assert_gone(children)
    resumed = start(ground, "killed", seconds=0.0)
    assert resumed.status() == 0, resumed.said()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_evaluation_ends_and_leaves_no_folder_behind(ground, number):
    ground.write_reward(SLOW_REWARD.format(folder=str(ground.folder), seconds=300))
    (ground.folder / "tmp").mkdir()
    data = (f"data.val_files={ground.folder}/rows.jsonl", "trust.check_rewards=false")
    environment = {"TMPDIR": str(ground.folder / "tmp")}
    run = CliRun(
        ground.folder / "eval.log", ["eval", "grpo", *ground.overrides("eval", *data)], environment
    )
    children = wait_for_verdicts(ground, run)
    run.send(number)
    assert run.status() == 128 + number, run.said()
    assert "Traceback" not in run.said()
    assert list((ground.folder / "tmp").iterdir()) == []
    assert_gone(children)


@pytest.mark.slow
def test_what_a_hard_kill_left_half_written_is_swept_by_the_next_start(ground):
    assert start(ground, "run", "trainer.save_freq=1", "trainer.total_epochs=1").status() == 0
    partial = ground.folder / "run" / "checkpoints" / "step-000009.partial"
    partial.mkdir()
    left = (
        partial / ".tmpQnv85k",
        ground.folder / "run" / "samples" / "000001.parquet.abcd_123.distflow-partial",
    )
    for path in left:
        path.write_text("half")
    assert start(ground, "run", "trainer.save_freq=1", "trainer.total_epochs=1").status() == 0
    assert not any(path.exists() for path in (*left, partial))


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, json.dumps([pid for pid in pids if is_alive(pid)])
        time.sleep(0.05)
