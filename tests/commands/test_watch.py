"""`distflow watch` beside another process that writes a run, is killed, and goes on from an earlier
step."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.observe.writing.run_folder import RunFolder
from tests.observe.writing.test_terminal_view import Terminal, screen

WRITER = """
import sys
from pathlib import Path
from distflow.observe.writing.run_folder import RunFolder

folder, restart, resumed_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with RunFolder(folder, restart, resumed_at) as run:
    run.write_json("run.json", {"experiment": "watched", "total_steps": 9})
    print("ready", flush=True)
    sys.stdin.readline()
    run.event("end", "the run finished", status="finished")
"""


@contextmanager
def writer(folder: Path, restart: int, resumed_at: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until a line comes, and then ends the run."""
    command = [sys.executable, "-c", WRITER, str(folder), str(restart), str(resumed_at)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def add_step(folder: Path, restart: int, step: int, t: float, reward: float) -> None:
    record = {
        "step": step,
        "t": t,
        "restart": restart,
        "kind": "train",
        "m": {"reward": {"mean_score": reward}},
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.mark.slow
def test_a_killed_run_is_said_to_be_and_its_restart_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with writer(folder, 0, -1) as first:
        for step in (1, 2, 3):
            add_step(folder, 0, step, 1000.0 + 10 * step, step / 10)
        command = [sys.executable, "-m", "distflow", "watch", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            lines = [watch.stdout.readline() for _ in range(3)]
            assert [(line[:8], line.split()[3]) for line in lines] == [
                (f"step {i}/9", f"0.{i}00") for i in (1, 2, 3)
            ]
            first.send_signal(signal.SIGKILL)
            first.wait()
            assert watch.stdout.readline().startswith(
                "warning: no process on this machine writes to the run: it was"
            )
            with writer(folder, 1, 1) as second:
                add_step(folder, 1, 2, 4e9, 0.7)
                add_step(folder, 1, 3, 4e9 + 10, 0.8)
                assert watch.stdout.readline() == "restart 1, from step 1\n"
                assert watch.stdout.readline().split()[:4] == ["step", "2/9", "reward", "0.700"]
                assert watch.stdout.readline().split()[:4] == ["step", "3/9", "reward", "0.800"]
                assert second.communicate("\n") == ("", None)
            assert watch.stdout.read() == "" and watch.wait() == 0


def test_the_view_of_a_resumed_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "run"
    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"experiment": "watched", "total_steps": 9})
        for step in (1, 2, 3, 4, 5):
            run.metrics(step, "train", {"reward/mean_score": step / 10})
    with RunFolder(folder, 1, resumed_at=2) as run:
        run.metrics(3, "train", {"reward/mean_score": 0.25})
    terminal = Terminal(80, 24)
    monkeypatch.setattr(sys, "stdout", terminal.file)
    assert main(["watch", str(folder), "--once"]) == 0
    monkeypatch.undo()
    left = "\n".join(screen(terminal.seen()))
    assert (
        "step 3/9" in left
        and re.search(r"reward +0\.250", left)
        and "restart 1, from step 2" in left
    )


def test_a_clock_that_steps_back_changes_no_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(tmp_path, 0) as run:
        run.write_json("run.json", {"total_steps": 9})
    for step, t in ((1, 5000.0), (2, 5010.0), (3, 1000.0), (4, 1010.0), (5, 5020.0)):
        add_step(tmp_path, 0, step, t, step / 10)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    steps = [line[:8] for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert steps == ["step 1/9", "step 2/9", "step 5/9"]
