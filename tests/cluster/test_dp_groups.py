"""Models on workers of their own that train on each other's columns: dp groups exchange them, and
the run ends as
one process does."""

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.cluster.remote_calls import WorkerDied
from distflow.runtime.run_errors import NodeError
from tests.cluster.test_supervisor import check_same, distance
from tests.e2e.runs import Playground, Run

pytestmark = pytest.mark.slow

STEPS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=4",
    "actor_rollout_ref.actor.optim.scheduler=constant",
    "critic.optim.scheduler=constant",
    "critic.optim.lr=1e-3",
    "algorithm.use_kl_in_reward=true",
    "trust.check_freq=0",
)


# Nodes that come through only where a node of the other dp group is under way, and one that does
# not end well.
NODES = """
import os
import signal
import time
from pathlib import Path

from distflow import node
from distflow.graph import Node
from distflow.pipelines.ppo import ppo_pipeline

FOLDER = Path(__file__).parent


@node(writes=())
def meet_critic(response_ids, ctx, *, actor):
    meet("actor", "critic", ctx.step)


@node(writes=())
def meet_actor(response_ids, ctx, *, critic):
    meet("critic", "actor", ctx.step)


def meet(mine, other, step):
    (FOLDER / f"{mine}-{step}").touch()
    end = time.monotonic() + 60
    while not (FOLDER / f"{other}-{step}").exists():
        assert time.monotonic() < end, f"{other} does not come while {mine} waits"
        time.sleep(0.01)


@node(writes="values")
def raises(values, ctx, *, critic):
    if ctx.step == 1:
        raise KeyError("mine")
    return values


@node(writes="values")
def dies(values, ctx, *, critic):
    if ctx.step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return values


def meeting(config):
    graph = ppo_pipeline(config)
    graph.add_node(Node("meet_critic", meet_critic))
    graph.add_node(Node("meet_actor", meet_actor))
    return graph


def raising(config):
    graph = ppo_pipeline(config)
    graph.add_node(Node("raises", raises))
    return graph


def dying(config):
    graph = ppo_pipeline(config)
    graph.add_node(Node("dies", dies))
    return graph
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    ground = Playground(tmp_path_factory.mktemp("dp_groups"))
    ground.write_critic()
    (ground.folder / "of_mine.py").write_text(NODES)
    return ground


def keys(ground: Playground, *more: str) -> tuple[str, ...]:
    return (*STEPS, f"critic.model.path={ground.folder}/critic", *more)


@pytest.fixture(scope="module")
def alone(ground):
    return ground.run("ppo", *keys(ground), name="alone")


def run(ground: Playground, allocation: str, *more: str, name: str) -> Run:
    over = ("trainer.launcher=ray", f"trainer.allocation='{allocation}'")
    config, spec = ground.spec("ppo", *keys(ground, *over, *more), name=name)
    return Run(ground.folder / name, config, launch_ray(spec))


def pipeline(ground: Playground, name: str) -> str:
    return f"dag.pipeline={ground.folder}/of_mine.py:{name}"


def check_as_one_process(found: Run, alone: Run) -> None:
    check_same(found, alone)
    assert distance(found.weights(4, "critic"), alone.weights(4, "critic")) < 1e-6


def test_a_critic_on_a_worker_of_its_own_ends_where_one_process_does(ground, alone):
    """From one rank to two and back; the policy leads, though it has the later ranks."""
    found = run(ground, "embedded:d1+torch[critic]:d1+torch[actor]:d2", name="apart")
    check_as_one_process(found, alone)


def test_what_does_not_wait_for_each_other_runs_at_once(ground, alone):
    """Three dp groups, one of which trains nothing. In turn, none of the two nodes would come to an
    end."""
    allocation = "embedded:d1|torch[actor]:d1+torch[critic]:d2+torch[ref]:d1"
    found = run(ground, allocation, pipeline(ground, "meeting"), name="three-dp-groups")
    check_as_one_process(found, alone)


def test_a_node_that_fails_ends_the_wait_of_the_other_dp_group(ground):
    with pytest.raises(NodeError, match="mine"):
        run(
            ground,
            "embedded:d1|torch[actor]:d1+torch[critic]:d1",
            pipeline(ground, "raising"),
            name="raising",
        )


def test_a_writer_that_dies_ends_the_wait_of_the_other_dp_group_by_name(ground):
    with pytest.raises(WorkerDied, match="worker 1 of 2, which trains, has died"):
        run(
            ground,
            "embedded:d1|torch[actor]:d1+torch[critic]:d1",
            pipeline(ground, "dying"),
            name="dying",
        )
