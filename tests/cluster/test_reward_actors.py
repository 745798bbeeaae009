"""Reward functions in Ray actors of their own: the run equals that of one process, also where one
hangs or dies."""

from pathlib import Path

import pytest

from distflow.cluster import reward_actors
from distflow.cluster.ray_launcher import launch_ray
from distflow.errors import UserError
from distflow.observe.run_reader import read_samples
from tests.cluster.test_faults import workers
from tests.cluster.test_supervisor import RAY, check_same, validating
from tests.e2e.runs import Playground, Run
from tests.patience import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.faults]
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2")
TWO = (RAY, "trainer.n_gpus_per_node=2", "reward.num_actors=2", "reward.timeout_s=60")

# The first reward call of the run kills the actor, which is above the keeper that started the
# call's own process. Of several at once one is first, and others of that actor wait for its end.
# Later ones wait until Ray, which notices a death a second or two late, has started another.
KILLS = """
import os, signal, time
from contextlib import suppress
from distflow.processes.descendants import stat_fields

ACTOR = stat_fields(os.getppid())[1].decode()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with suppress(FileExistsError):
        os.symlink(ACTOR, {once!r})
        os.kill(int(ACTOR), signal.SIGKILL)
    killed = os.readlink({once!r})
    while killed == ACTOR:
        time.sleep(0.01)
    while killed != "nobody" and time.time() < os.lstat({once!r}).st_mtime + 6:
        time.sleep(0.05)
    return {{"score": sum(map(ord, solution_str)) % 7 / 6, "judge": ACTOR}}
"""


@pytest.fixture
def ground(tmp_path: Path, on_ray: None) -> Playground:
    return Playground(tmp_path)


def run(ground: Playground, *overrides: str, name: str) -> Run:
    config, spec = ground.spec("grpo", *overrides, name=name)
    outcome = launch_ray(spec)
    wait_until(lambda: not workers(), "no worker is left")
    return Run(ground.folder / name, config, outcome)


def test_a_run_ends_where_one_process_does_also_if_an_actor_dies(ground: Playground) -> None:
    once = ground.folder / "once"
    once.symlink_to("nobody")
    ground.write_reward(KILLS.format(once=str(once)))
    keys = (*STEPS, *validating(ground), "trainer.val_before_train=false")
    alone = ground.run("grpo", *keys, name="alone")
    once.unlink()
    # Known cases are scored at the start as well: the kill is to come in the middle of the run.
    ours = run(ground, *TWO, *keys, "trust.check_rewards=false", name="ours")
    check_same(ours, alone)
    actors = {
        row["extra"]["custom/judge"]
        for step in range(1, 5)
        for row in read_samples(ours.folder, step)
    }
    assert once.readlink().name not in actors, "it was killed before it replied"
    assert len(actors) == 2, "the other, and the one that came in its place"
    assert all(step["reward/errors"] == 0 for step in ours.metrics())
    assert sum(step.get("reward/retried_calls", 0) for step in ours.metrics()) >= 1


def test_a_cluster_without_room_for_them_is_told(
    ground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_actors, "PLACED_WITHIN_S", 3.0)
    with pytest.raises(
        UserError, match=r"no room for 30 reward actors of 2 CPUs.*reward\.num_actors"
    ):
        run(ground, RAY, "reward.num_actors=30", "reward.actor_cpus=2", name="many")
