"""What becomes of a run over a real Ray whose processes are killed, stopped or asked to end:
signals, no pretence."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow.cluster import remote_calls
from distflow.cluster.ray_launcher import launch_ray
from distflow.cluster.remote_calls import WorkerDied
from distflow.runtime.fault_injection import Fault
from distflow.scheduling import ledger
from tests.cluster import leftovers
from tests.cluster.leftovers import Held
from tests.cluster.listeners import Listener, family, listeners
from tests.cluster.test_supervisor import CONSTANT
from tests.e2e.runs import Playground, notes
from tests.patience import wait_until

pytestmark = pytest.mark.faults

TWO = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.save_freq=2", CONSTANT)
ENDLESS = (*TWO, "trainer.total_training_steps=5000")
WITHIN_S = 120


@pytest.fixture
def ground(tmp_path, on_ray):
    return Playground(tmp_path)


def processes(named: str) -> list[int]:
    """That this one has started, by what they call themselves, oldest first."""
    return leftovers.named(named, os.getpid())


def workers() -> list[int]:
    return processes("ray::WorkerActor")


@contextmanager
def struck(folder: Path, strike: Callable[[], None]) -> Iterator[list[float]]:
    """Once the second checkpoint is whole, on a thread of its own; when that was."""
    when: list[float] = []

    def wait() -> None:
        wait_until(
            lambda: (folder / "checkpoints" / "step-000004" / "manifest.json").exists(),
            "a checkpoint",
        )
        strike()
        when.append(time.monotonic())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield when
    thread.join(WITHIN_S)
    assert when, "the fault did not fire"


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named_within_the_deadline_and_others_leave_their_stacks(
    ground, plan, monkeypatch
):
    """It stops itself: which process a rank has is Ray's choice."""
    monkeypatch.setattr(remote_calls, "REPLIES_WITHIN_S", 10.0)
    plan(Fault("train.update", rank=1, call=3, action="SIGSTOP"))
    _, spec = ground.spec("grpo", *ENDLESS)
    with pytest.raises(WorkerDied, match="worker 1 .* 10 s"):
        launch_ray(spec)
    assert "training_loop" in (ground.folder / "run" / "stacks.txt").read_text()
    wait_until(lambda: not workers(), "no process is left, a stopped one neither")


@contextmanager
def command(ground: Playground, *overrides: str) -> Iterator["subprocess.Popen[str]"]:
    """`distflow train` in a process of its own, with a Ray of its own."""
    arguments = [
        sys.executable,
        "-m",
        "distflow",
        "train",
        "grpo",
        *ground.overrides("run", *overrides),
    ]

    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,  # a group of its own, as a shell gives it
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_a_driver_that_is_killed_takes_all_its_processes_with_it(tmp_path):
    ground = Playground(tmp_path)
    held = list[Held]()
    with command(ground, *ENDLESS) as driver:

        def kill() -> None:
            held.append(Held.below(driver.pid))
            driver.kill()

        with struck(ground.folder / "run", kill):
            driver.wait(10 * WITHIN_S)

    assert len(held[0].pids) > 4 and held[0].listening
    wait_until(lambda: not held[0].left(), f"nothing of its Ray is left: {held[0].left()}")


@pytest.mark.slow
def test_a_signal_saves_the_step_under_way_and_ends_with_its_status(tmp_path):
    """It goes to the whole process group, as `timeout` sends it. Before, no process of the run
    listens beyond loopback."""
    ground = Playground(tmp_path)
    held = list[Held]()
    found = list[Listener]()
    with command(ground, *ENDLESS) as driver:

        def ask() -> None:
            held.append(Held.below(driver.pid))
            found.extend(listeners(family(driver.pid)))
            os.killpg(driver.pid, signal.SIGTERM)

        with struck(ground.folder / "run", ask):
            out, _ = driver.communicate(timeout=10 * WITHIN_S)

    assert driver.returncode == 128 + signal.SIGTERM, out
    assert held[0] and not held[0].left()
    names = {one.process.partition(".")[0] for one in found}
    assert names >= {"gcs_server", "raylet", "ray::WorkerActor", "ray::CoordinatorActor"}
    assert {one.where for one in found} == {"loopback"}

    folder = ground.folder / "run"
    assert notes(folder, "end") == ["the run stopped"]
    consumed = [
        record["step"]
        for _, record in ledger.timeline(folder / "ledger.jsonl")
        if record["kind"] == "consumed"
    ]
    assert (folder / "checkpoints" / f"step-{consumed[-1]:06d}" / "manifest.json").exists()
