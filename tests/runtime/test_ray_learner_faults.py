"""Workers that train are killed at chosen points over a real Ray: the run ends by name, and its resume ends where one
does that nothing struck."""

from collections.abc import Callable

import pytest

from distflow.flow import ledger
from distflow.runtime.faults import Fault
from distflow.runtime.ray_blame import WorkerDied, WorkerHangs
from distflow.runtime.ray_entry import launch_ray
from distflow.runtime.weight_files import WEIGHTS
from tests.e2e.runs import Playground, Run
from tests.runtime.test_ray_faults import wait_until, workers
from tests.runtime.test_ray_run import CONSTANT, DISK, SPLIT, distance

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=1", CONSTANT)
TOGETHER = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
APART = ("trainer.launcher=ray", SPLIT)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(ground: Playground) -> Run:
    return ground.run("grpo", *STEPS, name="alone")


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (TOGETHER, Fault("train.update", rank=1, call=3)),
        ((*APART, DISK), Fault("weights.put", rank=1, call=3)),
        (TOGETHER, Fault("checkpoint.manifest", rank=0, call=2)),
        (TOGETHER, Fault("checkpoint.renamed", rank=0, call=2)),
    ],
    ids=lambda value: value.point if isinstance(value, Fault) else "",
)
def test_a_killed_worker_is_named_and_the_resume_ends_where_an_undisturbed_run_does(
    ground: Playground, alone: Run, plan: Callable[..., None], layout: tuple[str, ...], fault: Fault
) -> None:
    plan(fault)
    name = fault.point
    config, spec = ground.spec("grpo", *layout, *STEPS, name=name)
    with pytest.raises(
        WorkerDied, match=rf"worker {fault.rank} of \d, .* has died .* The same command goes on from step-"
    ):
        launch_ray(spec)
    wait_until(lambda: not workers(), "no worker is left")
    config, spec = ground.spec("grpo", *layout, *STEPS, name=name)
    resumed = Run(ground.folder / name, config, launch_ray(spec))
    ledger.verify(resumed.folder / "ledger.jsonl")
    assert resumed.outcome.steps == 4
    assert distance(resumed.weights(4), alone.weights(4)) < 1e-6
    assert not (resumed.folder / WEIGHTS).exists()


def test_a_worker_that_does_not_come_is_named_with_its_step_and_phase(
    ground: Playground, plan: Callable[..., None]
) -> None:
    plan(Fault("train.update", rank=1, call=3, action="sleep"))
    _, spec = ground.spec("grpo", *TOGETHER, *STEPS, "trainer.peers_timeout_s=8", name="hangs")
    with pytest.raises(
        WorkerHangs, match=r"worker 1 is in step 3, phase 'train_step', .* 8 s .* goes on from step-000002"
    ):
        launch_ray(spec)
    assert "_strike" in (ground.folder / "hangs" / "stacks.txt").read_text()
    wait_until(lambda: not workers(), "no worker is left")
