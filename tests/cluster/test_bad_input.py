"""What only some processes of a run can use: one message on the driver that names the worker, and
no worker is left."""

import os
import shutil
import subprocess
import sys

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from distflow.cluster import ray_cluster
from distflow.cluster.ray_launcher import launch_ray
from distflow.cluster.remote_calls import WorkerFailed
from distflow.errors import UserError
from distflow.runtime.spec import LaunchOptions
from tests.cluster.test_faults import workers
from tests.cluster.test_supervisor import distance
from tests.e2e.runs import Playground, Run
from tests.patience import wait_until

pytestmark = pytest.mark.slow
TWO = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2")


@pytest.fixture
def ground(tmp_path, on_ray, monkeypatch):
    """The driver's folder is another one than that in which Ray was started."""
    monkeypatch.chdir(tmp_path)
    yield Playground(tmp_path)
    wait_until(lambda: not own_workers(), "no worker is left")


def own_workers() -> list[int]:
    """Those of the Ray that this process has started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines()[1:])
    return [pid for pid in workers() if parents.get(parents.get(pid, 0)) == os.getpid()]


def test_engines_that_cannot_be_built_are_told_with_the_workers_traceback(ground):
    _, spec = ground.spec("grpo", *TWO, "trainer.n_gpus_per_node=1")
    shutil.rmtree(ground.folder / "run" / "data")

    with pytest.raises(WorkerFailed, match="worker 0 of 1 .* started: .*No such file") as told:
        launch_ray(spec)

    assert "encoded_rows_file.py" in str(told.value.__cause__), "where it was"


def test_a_reward_that_only_the_driver_can_import_is_told(ground, monkeypatch):
    ground.write_reward(
        "import os\nKEY = os.environ['DRIVERS_KEY']\ndef compute_score(solution_str):\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("DRIVERS_KEY", "1")
    _, spec = ground.spec("grpo", *TWO)
    with pytest.raises(UserError, match="(?s)reward.py.*DRIVERS_KEY"):
        launch_ray(spec)


def test_a_step_with_fewer_groups_than_workers_and_paths_from_the_drivers_folder(ground):
    few = (
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "trainer.save_freq=2",
    )
    named = ("actor_rollout_ref.model.path=./model", "custom_reward_function.path=reward.py")
    relative = (*named, "data.train_files=rows.jsonl", "trainer.default_local_dir=run")
    config, spec = ground.spec("grpo", *TWO, *few, *relative)
    found = Run(ground.folder / "run", config, launch_ray(spec))
    alone = ground.run("grpo", *few, "trainer.total_training_steps=2", name="alone")
    assert distance(found.weights(2), alone.weights(2)) < 1e-6


def test_room_that_others_hold_is_waited_for_aloud_and_not_for_ever(ground, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PLACED_WITHIN_S", 1.0)
    monkeypatch.setattr(ray_cluster, "_SAYS_AFTER_S", 0.1)
    _, spec = ground.spec("grpo", *TWO)
    held = placement_group([{"CPU": 3}])
    said = list[str]()
    held.wait()

    try:
        with pytest.raises(UserError, match="end other jobs"):
            launch_ray(spec, LaunchOptions(say=said.append))
    finally:
        remove_placement_group(held)

    assert any("waiting up to 1 s for 1 machine(s) with 2 CPU" in line for line in said)


def test_a_cluster_where_nobody_answers_is_told_at_once(tmp_path):
    keys = Playground(tmp_path).overrides("run", *TWO)
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}
    command = [sys.executable, "-m", "distflow", "train", "grpo", *keys]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert (
        "nothing answers at RAY_ADDRESS=127.0.0.1:9" in done.stderr
        and "Traceback" not in done.stderr
    )
