"""Workers that train are killed at chosen points over a real Ray, or find the disk full: the run
ends by name, and its resume ends where one does that nothing struck, bit for bit."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.cluster.remote_calls import WorkerDied, WorkerHangs
from distflow.observe.run_reader import read_events
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.fault_injection import Fault
from distflow.runtime.spec import LaunchOptions
from distflow.runtime.weight_sync.bucket_files import WEIGHTS
from tests.cluster.test_faults import processes, workers
from tests.cluster.test_supervisor import CONSTANT, DISK, SPLIT, distance
from tests.e2e.runs import Playground, Run, notes
from tests.ledger_audit import verify
from tests.patience import wait_until
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=1", CONSTANT)
TOGETHER = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
APART = ("trainer.launcher=ray", SPLIT)


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    return Playground(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(ground):
    return start(ground, TOGETHER, "whole")


def start(ground: Playground, layout: tuple[str, ...], name: str) -> Run:
    config, spec = ground.spec("grpo", *layout, *STEPS, name=name)
    return Run(ground.folder / name, config, launch_ray(spec))


@pytest.mark.parametrize(
    ("layout", "fault", "says"),
    one_fast_in(
        3,
        [
            ((*APART, DISK), Fault("weights.put", rank=1, call=3), ", in step 2 "),
            (TOGETHER, Fault("train.update", rank=1, call=3), ", in step 3 "),
            (TOGETHER, Fault("checkpoint.manifest", rank=0, call=2), ""),
        ],
        unpack=True,
        others=BY_HAND,
    ),
    ids=lambda value: value.point if isinstance(value, Fault) else "",
)
def test_a_killed_worker_is_named_and_the_resume_ends_where_an_undisturbed_run_does(
    ground, whole, plan, layout, fault, says
):
    plan(fault)
    died = (
        rf"worker {fault.rank} of \d, .* has died while the run was under way.*{says}.* resumes "
        r"from step-"
    )
    with pytest.raises(WorkerDied, match=died):
        start(ground, layout, fault.point)
    wait_until(lambda: not workers(), "no worker is left")
    check_resumed(start(ground, layout, fault.point), whole)


def check_resumed(resumed: Run, whole: Run) -> None:
    verify(resumed.folder / "ledger.jsonl")
    assert resumed.outcome.steps == 4
    assert distance(resumed.weights(4), whole.weights(4)) == 0
    assert not (resumed.folder / WEIGHTS).exists()


def test_a_worker_that_does_not_come_is_named_with_its_step_and_phase(ground, plan):
    plan(Fault("train.update", rank=1, call=3, action="sleep"))
    _, spec = ground.spec("grpo", *TOGETHER, *STEPS, "trainer.peers_timeout_s=8", name="hangs")

    with pytest.raises(
        WorkerHangs,
        match=r"worker 1 .* step 3, phase 'train_step', .* 8 s .* step-000002",
    ):
        launch_ray(spec)

    assert "_strike" in (ground.folder / "hangs" / "stacks.txt").read_text()
    wait_until(lambda: not workers(), "no worker is left")


AGAIN = ("trainer.max_restarts=1", *TOGETHER, *STEPS)
WRITER = """
import sys, pathlib
from distflow.observe.writing.run_folder import writer_of
print(writer_of(pathlib.Path(sys.argv[1])))
"""


def starts(folder: Path) -> list[int]:
    """The restart number of each start."""
    return [event.restart for event in read_events(folder) if event.kind == "start"]


def test_a_lost_training_worker_starts_the_run_again_in_place_and_it_ends_with_the_same_bits(
    ground, whole, plan
):
    """Between two starts the folder is still the driver's, as another process sees it."""
    plan(Fault("train.update", rank=1, call=3))
    folder, said, writers = ground.folder / "in_place", list[str](), list[str]()

    def say(line: str) -> None:
        said.append(line)
        if "Restart 1 of 1" in line:
            writers.append(
                subprocess.check_output(
                    [sys.executable, "-c", WRITER, str(folder)], text=True
                ).strip()
            )

    config, spec = ground.spec("grpo", *AGAIN, name=folder.name)
    check_resumed(Run(folder, config, launch_ray(spec, LaunchOptions(say=say))), whole)
    assert starts(folder) == [0, 1] and writers == [str(os.getpid())]
    told = re.compile(
        r"worker 1 of 2, .* has died .*, in step 3 .* Restart 1 of 1 \(trainer\.max_restarts\)"
    )
    assert any(map(told.fullmatch, said)) and any(map(told.fullmatch, notes(folder, "warning")))
    assert "resumed from step-000002" in notes(folder, "info") and not any(
        "report of the failed" in line for line in said
    )
    assert notes(folder, "end") == ["the run failed", "the run finished"]
    assert (folder / ".writer").read_text().endswith(", restart 1")


def test_a_lost_coordinator_starts_the_run_again_and_a_signal_then_ends_it_as_ever(ground):
    folder, said, asked = ground.folder / "coordinator", list[str](), list[int]()

    def strike(step: int, path: Path) -> None:
        if not said_again() and (found := processes("ray::CoordinatorActor")):
            os.kill(found[-1], signal.SIGKILL)

    def ask(step: int, metrics: dict[str, float]) -> None:
        if said_again() and not asked:
            asked.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    def said_again() -> bool:
        return any("the coordinator" in line and "Restart 1 of 1" in line for line in said)

    _, spec = ground.spec("grpo", *AGAIN, "trainer.total_training_steps=5000", name=folder.name)
    outcome = launch_ray(
        spec, LaunchOptions(say=said.append, callbacks=Callbacks(on_save=strike, on_step=ask))
    )
    assert outcome is not None and outcome.signal == signal.SIGTERM and outcome.stopped
    assert starts(folder) == [0, 1] and notes(folder, "end") == [
        "the run failed",
        "the run stopped",
    ]
    verify(folder / "ledger.jsonl")
